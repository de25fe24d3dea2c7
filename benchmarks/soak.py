"""Does memory stay where it is while many gigabytes pass, and do they arrive as they were sent?

    python benchmarks/soak.py                    64 GiB over TCP, and an eighth of that over QUIC
    python benchmarks/soak.py --gib 8

Two processes over loopback, one connection, one stream. The receiver takes the CRC-32 of all that comes, the sender
of all that it sends. Resident memory of both is read after each eighth.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trio
from report import table, write_report
from transport_load import GIB, MIB, _status_kib

from neurogrid.p2p import Protocol, Stream, open_host

PROTOCOL_ID = "/neurogrid/soak/1"
TCP, QUIC = "/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1"
NUM_STEPS = 8
BLOCK = MIB
TIMEOUT = 120.0
# What is sent: a few different blocks in turn, so that one that is lost, doubled or moved is seen.
BLOCKS = [os.urandom(BLOCK) for _ in range(7)]
# Through, its address, and which part of the bytes it gets: QUIC takes ten times as long for each.
WAYS = (
    ("a stream over TCP", TCP, 1),
    ("Protocol, weights, over TCP", TCP, 1),
    ("a stream over QUIC", QUIC, 8),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gib", type=int, default=64, help="through each way over TCP")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        trio.run(_serve, args.serve)
        return
    rows = []
    for way, address, part in WAYS:
        num_blocks = max(NUM_STEPS, args.gib * GIB // BLOCK // part)
        with _server(address) as (server, pid):
            rows.append(trio.run(_soak, way, server, pid, num_blocks))
        print(f"{way}: done", file=sys.stderr, flush=True)
    header = ("", "GiB", "MB/s", "CRC-32", "sender MiB", "receiver MiB", "grown MiB")
    legend = (
        "Resident memory after each eighth, the first of them for the windows to open and the buffers to be made; "
        "grown: from the first to the largest of the others, sender and receiver."
    )
    write_report("soak", (__doc__ or "").partition("\n")[0], table(header, rows) + "\n\n" + legend)


@contextmanager
def _server(listen: str) -> Iterator[tuple[str, int]]:
    """A receiver in a process of its own; its address and pid."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", listen], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline()), process.pid
    finally:
        process.kill()
        process.communicate()


async def _serve(listen: str) -> None:
    """Take the CRC of what comes on each stream, and of all weights; answer with it."""
    async with open_host(listen=[listen]) as host:
        protocol = Protocol(host)
        weights = 0
        num_blocks = 0
        came = trio.Event()

        async def on_stream(stream: Stream) -> None:
            checksum, left = 0, int.from_bytes(await stream.receive_some(8), "big")
            memory = memoryview(bytearray(BLOCK))
            while left:
                taken = await stream.receive_into(memory[: min(BLOCK, left)])
                checksum = zlib.crc32(memory[:taken], checksum)
                left -= taken
            await stream.send_all(checksum.to_bytes(4, "big"))
            await stream.aclose()

        def on_weights(layer_id: int, chunk_index: int, total_chunks: int, data: Any) -> None:
            nonlocal weights, num_blocks, came
            weights = zlib.crc32(data, weights)
            num_blocks += 1
            came.set()
            came = trio.Event()

        async def on_activation(message: Any) -> bytes:
            """Its position says after how many blocks it wants to know."""
            while num_blocks < message.seq_id:
                await came.wait()
            return weights.to_bytes(4, "big")

        host.set_stream_handler(PROTOCOL_ID, on_stream)
        protocol.on_weights_received(on_weights)
        protocol.on_activation_received(on_activation)
        print(json.dumps(host.addresses[0]), flush=True)
        await trio.sleep_forever()


async def _soak(way: str, address: str, server_pid: int, num_blocks: int) -> tuple[str, ...]:
    pids = (os.getpid(), server_pid)
    resident: list[tuple[float, ...]] = []
    checksum = 0
    per_step = num_blocks // NUM_STEPS
    async with open_host() as host:
        peer_id = await host.connect(address)
        started = time.perf_counter()
        async with _sender(way, host, peer_id, per_step * NUM_STEPS) as (send, ask):
            for step in range(NUM_STEPS):
                for number in range(step * per_step, (step + 1) * per_step):
                    block = BLOCKS[number % len(BLOCKS)]
                    checksum = zlib.crc32(block, checksum)
                    await send(block)
                resident.append(tuple(_status_kib(pid, "VmRSS") / 1024 for pid in pids))
            received = await ask()
        seconds = time.perf_counter() - started
    num_bytes = per_step * NUM_STEPS * BLOCK
    grown = [max(row[side] for row in resident[1:]) - resident[0][side] for side in range(2)]
    return (
        way,
        f"{num_bytes / GIB:.0f}",
        f"{num_bytes / seconds / 1e6:.0f}",
        "equal" if received == checksum else "DIFFERENT",
        *(" ".join(f"{row[side]:.0f}" for row in resident) for side in range(2)),
        f"{grown[0]:.1f} / {grown[1]:.1f}",
    )


@asynccontextmanager
async def _sender(way: str, host: Any, peer_id: str, num_blocks: int) -> AsyncIterator[Any]:
    """Functions that send a block, and that ask for the checksum of all."""
    if way.startswith("Protocol"):
        protocol = Protocol(host)

        async def send(block: bytes) -> None:
            await protocol.send_weights(peer_id, 0, block)

        async def ask() -> int:
            answer = await protocol.request_activation(peer_id, 0, num_blocks, b"", timeout=TIMEOUT)
            return int.from_bytes(answer.data, "big")

        yield send, ask
        return
    stream = await host.open_stream(peer_id, [PROTOCOL_ID])
    await stream.send_all((num_blocks * BLOCK).to_bytes(8, "big"))

    async def ask_stream() -> int:
        with trio.fail_after(TIMEOUT):
            return int.from_bytes(await stream.receive_some(4), "big")

    yield stream.send_all, ask_stream
    await stream.aclose()


if __name__ == "__main__":
    main()
