"""What several files of the suite do with streams."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p import Host, Stream
from neurogrid.p2p.streams.intake import Intake, Piece
from tests.conformance.networks import until

ECHO = "/test/echo/1"


async def echo(stream: Stream) -> None:
    """Send back what comes, then end."""
    while data := await stream.receive_some():
        await stream.send_all(data)
    await stream.aclose()


def serve_echo(host: Host) -> None:
    host.set_stream_handler(ECHO, echo)


async def check_echo(one: Host, other: Host, num_bytes: int = 1000) -> None:
    """Assert that a stream from `one` to `other` carries bytes both ways."""
    stream = await one.open_stream(other.peer_id, [ECHO])
    data = secrets.token_bytes(num_bytes)
    with unwrap_errors():
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def send() -> None:
                await stream.send_all(data)
                await stream.send_eof()

            assert digest(await receive_all(stream)) == digest(data)
    await stream.aclose()


@asynccontextmanager
async def stream_pair(one: Host, other: Host) -> AsyncIterator[tuple[Stream, Stream]]:
    """Both ends of a new stream that `one` opened; they are closed at the end."""
    protocol_id = f"/test/pair/{secrets.token_hex(4)}"
    accepted: list[Stream] = []

    async def accept(stream: Stream) -> None:
        accepted.append(stream)

    other.set_stream_handler(protocol_id, accept)
    near = await one.open_stream(other.peer_id, [protocol_id])
    await until(lambda: bool(accepted))
    yield near, accepted[0]
    await near.aclose()
    await accepted[0].aclose()


async def check_both_ways(streams: tuple[Stream, Stream], num_bytes: int) -> None:
    """Assert that both ends of a stream can send at once."""
    data = [secrets.token_bytes(num_bytes) for _ in streams]
    received: dict[int, bytes] = {}

    async def send(side: int) -> None:
        await streams[side].send_all(data[side])
        await streams[side].send_eof()

    async def receive(side: int) -> None:
        received[side] = await receive_all(streams[side])

    async with trio.open_nursery() as nursery:
        for side in range(2):
            nursery.start_soon(send, side)
            nursery.start_soon(receive, side)
    assert digest(received[1]) == digest(data[0])
    assert digest(received[0]) == digest(data[1])


async def receive_all(stream: Stream) -> bytes:
    received = bytearray()
    await receive_into(received, stream)
    return bytes(received)


async def receive_into(received: bytearray, stream: Stream) -> None:
    """Receive all, and keep what came before an error."""
    while data := await stream.receive_some():
        received += data


def digest(data: bytes) -> tuple[int, str]:
    """Length and hash: what differs says so in one line."""
    return len(data), hashlib.sha256(data).hexdigest()


class Taking(Intake):
    """An intake without memory of its own: calls `take` with each piece."""

    def __init__(self, take: Callable[[Piece], bool]) -> None:
        self._take = take

    def take(self, data: Piece) -> bool:
        return self._take(data)

    def memory(self) -> None:
        return None

    def filled(self, num_bytes: int) -> bool:
        raise AssertionError("it has lent no memory")


class Filling(Intake):
    """An intake that takes `num_bytes` bytes, all but the first piece in memory of its own."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = memoryview(bytearray(num_bytes))
        self._num_bytes = 0

    @property
    def received(self) -> bytes:
        return bytes(self._memory[: self._num_bytes])

    def take(self, data: Piece) -> bool:
        if not self._num_bytes:
            data = data[: len(self._memory)]
            self._memory[: len(data)] = data
            return self.filled(len(data))
        raise AssertionError("there was memory for it")

    def memory(self) -> memoryview | None:
        return self._memory[self._num_bytes :] if self._num_bytes else None

    def filled(self, num_bytes: int) -> bool:
        self._num_bytes += num_bytes
        return self._num_bytes < len(self._memory)
