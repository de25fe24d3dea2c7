"""Two rows of `transport.py` that no other transport is asked for.

4 GiB through one stream: by how much does the memory of either side grow? And an activation's round trip while
weights stream on the same connection: how long does it wait for them?
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import trio
from transport_libp2p import ProtocolClient, our_client, protocol_client
from transport_load import GIB, MIB, _status_kib

__all__ = ["run"]

Children = Callable[[list[str]], AbstractContextManager[tuple[str, int]]]

TOTAL = 4 * GIB
WRITE = 4 * MIB
ROUND_TRIPS = 400
PAUSE = 0.005  # seconds between activations, as of a model that computes meanwhile
CHUNK = 4 * MIB  # of the weights


def run(children: Children) -> str:
    """Measure both in this process against servers of their own; the text for the report."""
    lines = []
    with children(["--serve", "ours, bare stream"]) as (address, pid):
        lines.append(trio.run(_long_stream, address, pid))
    with children(["--serve", "ours, Protocol 1.1.0"]) as (address, _pid):
        lines.append(trio.run(_activations_beside_weights, address))
    return "\n".join(lines)


async def _long_stream(address: str, pid: int) -> str:
    async with our_client(address) as client:
        size = 64 * MIB
        await client.throughput(WRITE, size // WRITE)  # windows are open and buffers made
        before = [_status_kib(p, "VmRSS") for p in (os.getpid(), pid)]
        for p in (os.getpid(), pid):
            with open(f"/proc/{p}/clear_refs", "w") as file:
                file.write("5")  # the peak is counted from here
        seconds = await client.throughput(WRITE, TOTAL // WRITE)
        after = [_status_kib(p, "VmHWM") for p in (os.getpid(), pid)]
        grown = [(a - b) / 1024 for a, b in zip(after, before, strict=True)]
    return (
        f"- 4 GiB through one stream: {TOTAL / seconds / 1e6:.0f} MB/s; peak memory grew by {grown[0]:.1f} MiB at the "
        f"sender and {grown[1]:.1f} MiB at the receiver (target: at most 64)"
    )


async def _activations_beside_weights(address: str) -> str:
    async with protocol_client(address) as client:
        assert isinstance(client, ProtocolClient)
        alone = sorted(await client.round_trips(16 * 1024, ROUND_TRIPS))
        sent = 0

        async def stream_weights() -> None:
            nonlocal sent
            data = bytearray(os.urandom(CHUNK))
            while True:
                await client.protocol.send_weights(client.peer_id, 1, data)
                sent += CHUNK

        times: list[float] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream_weights)
            await trio.sleep(0.2)
            started, begun = time.perf_counter(), sent
            for _ in range(ROUND_TRIPS):
                times += await client.round_trips(16 * 1024, 1)
                await trio.sleep(PAUSE)
            rate = (sent - begun) / (time.perf_counter() - started)
            nursery.cancel_scope.cancel()
    times.sort()

    def show(values: list[float]) -> str:
        p50, p99 = values[len(values) // 2], values[int(len(values) * 0.99)]
        return f"p50 {p50 * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms"

    return (
        f"- activation of 16 KiB, round trip while weights stream at {rate / 1e6:.0f} MB/s on the same connection: "
        f"{show(times)} (target: p99 at most 10 ms); without weights: {show(alone)}"
    )
