"""The loads of `transport.py`, over anything that looks like a stream of bytes, and what they cost.

A client opens a stream, says in 17 bytes what it will do, and does it: it sends so many messages and waits for one
byte (a sink), or sends messages one by one and waits for each to come back (an echo). The serving side is the same
for all rows. Every load is bounded in time.
"""

from __future__ import annotations

import os
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Client", "Duplex", "StreamClient", "Usage", "measure", "serve_stream"]

KIB, MIB, GIB = 1024, 1024 * 1024, 1024**3
SIZES = (64 * KIB, MIB, 4 * MIB)
ROUND_TRIP_BYTES = 16 * KIB
# Bounds of one load: seconds, and how much it does at least and at most.
SECONDS = 1.2
MIN_BYTES, MAX_BYTES = 16 * MIB, 4 * GIB
MAX_ROUND_TRIPS = 4000
NUM_STREAMS = 150
NUM_CONNECTS = 15

SINK, ECHO = b"S", b"E"
_TASK = struct.Struct(">cQQ")  # what, bytes a message, messages


class Duplex(ABC):
    """A stream of bytes. Rows that block do so in these methods: nothing else runs in their process."""

    @abstractmethod
    async def send(self, data: bytes | bytearray) -> None: ...

    @abstractmethod
    async def receive(self, max_bytes: int) -> Any:
        """Receive between 1 and `max_bytes` bytes, or none at the end."""

    @abstractmethod
    async def close(self) -> None: ...

    async def drain(self, num_bytes: int) -> None:
        """Receive and forget; as cheaply as the row can."""
        while num_bytes:
            num_bytes -= len(await self.receive(min(num_bytes, MIB)))

    async def receive_exactly(self, num_bytes: int) -> bytes:
        data = await self.receive(num_bytes)
        if len(data) == num_bytes:
            return bytes(data)
        parts = bytearray(data)
        while len(parts) < num_bytes:
            data = await self.receive(num_bytes - len(parts))
            if not data:
                raise EOFError(f"the stream ended after {len(parts)} of {num_bytes} B")
            parts += data
        return bytes(parts)


async def serve_stream(stream: Duplex) -> None:
    """Do what the client asks for, until it closes."""
    while True:
        first = await stream.receive(_TASK.size)
        if not first:
            await stream.close()
            return
        rest = b""
        if len(first) < _TASK.size:
            rest = await stream.receive_exactly(_TASK.size - len(first))
        what, size, count = _TASK.unpack(bytes(first) + rest)
        if what == SINK:
            await stream.drain(size * count)
            await stream.send(b"x")
        else:
            for _ in range(count):
                await stream.send(await stream.receive_exactly(size))


class Client(ABC):
    """One row's client, connected. What a row cannot do raises `NotImplementedError`."""

    @abstractmethod
    async def throughput(self, size: int, count: int) -> float:
        """Send `count` messages of `size` bytes; seconds until the other side has them all."""

    @abstractmethod
    async def round_trips(self, size: int, count: int) -> list[float]: ...

    async def new_stream(self, size: int) -> float:
        """Open a stream, echo one message over it; seconds."""
        raise NotImplementedError

    async def connect(self) -> float:
        """Open another connection of its own; seconds."""
        raise NotImplementedError


class StreamClient(Client):
    """Client for rows with streams of bytes: `open` is all that they add, and `connect`."""

    @abstractmethod
    async def open(self) -> Duplex: ...

    async def throughput(self, size: int, count: int) -> float:
        stream = await self.open()
        data = bytearray(os.urandom(size))
        started = time.perf_counter()
        await stream.send(_TASK.pack(SINK, size, count))
        for _ in range(count):
            await stream.send(data)
        await stream.receive_exactly(1)
        seconds = time.perf_counter() - started
        await stream.close()
        return seconds

    async def round_trips(self, size: int, count: int) -> list[float]:
        stream = await self.open()
        await stream.send(_TASK.pack(ECHO, size, count))
        data = os.urandom(size)
        times = []
        for _ in range(count):
            started = time.perf_counter()
            await stream.send(data)
            await stream.receive_exactly(size)
            times.append(time.perf_counter() - started)
        await stream.close()
        return times

    async def new_stream(self, size: int) -> float:
        data = os.urandom(size)
        started = time.perf_counter()
        stream = await self.open()
        await stream.send(_TASK.pack(ECHO, size, 1) + data)
        await stream.receive_exactly(size)
        seconds = time.perf_counter() - started
        await stream.close()
        return seconds


class Usage:
    """CPU seconds and peak memory of some processes and all their children."""

    def __init__(self, roots: Sequence[int]) -> None:
        self._roots = roots

    def _pids(self) -> list[int]:
        found, todo = [], list(self._roots)
        while todo:
            pid = todo.pop()
            found.append(pid)
            for task in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
                    todo += map(int, task.read_text().split())
        return found

    def cpu_seconds(self) -> float:
        ticks = 0
        for pid in self._pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def peak_mib(self) -> float:
        """The largest of the processes."""
        return max(_status_kib(pid, "VmHWM") for pid in self._pids()) / 1024


def _status_kib(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    return 0


async def measure(client: Client, usage: Usage) -> dict[str, float]:
    """All figures of one row: bytes a second by message size, seconds for the rest."""
    figures: dict[str, float] = {}
    rate = 0.0
    for size in SIZES:
        if not rate:
            count = max(1, MIN_BYTES // size)
            rate = count * size / await client.throughput(size, count)
        count = max(1, int(min(max(rate * SECONDS, MIN_BYTES), MAX_BYTES)) // size)
        before = usage.cpu_seconds()
        seconds = await client.throughput(size, count)
        figures[f"rate {size}"] = count * size / seconds
        if size == MIB:
            figures["cpu"] = (usage.cpu_seconds() - before) / (count * size / 1e9)
    times = await client.round_trips(ROUND_TRIP_BYTES, 100)
    count = max(100, min(MAX_ROUND_TRIPS, int(SECONDS / (sum(times) / len(times)))))
    times = sorted(await client.round_trips(ROUND_TRIP_BYTES, count))
    figures["p50"], figures["p99"] = times[len(times) // 2], times[int(len(times) * 0.99)]
    for name, call, count in (
        ("stream", lambda: client.new_stream(ROUND_TRIP_BYTES), NUM_STREAMS),
        ("connect", client.connect, NUM_CONNECTS),
    ):
        try:
            values = sorted([await call() for _ in range(count)])
        except NotImplementedError:
            continue
        figures[name] = values[len(values) // 2]
    figures["memory"] = usage.peak_mib()
    return figures
