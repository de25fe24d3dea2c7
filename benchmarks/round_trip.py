"""Where does the time of a 16 KiB round trip through `Protocol` go?

    python benchmarks/round_trip.py

Both ends in one process, so that nothing but work is measured: raw trio TCP, a bare stream of ours, and `Protocol`
with a sync and an async handler, in turn within each round. Then a sampling profile of the last two, by part. At last
both ends in processes of their own, raw and `Protocol` in turn, on cores that fall idle between the messages, and on
cores that a process of lowest priority keeps awake: the difference is what it costs here to wake a core.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from statistics import median
from types import FrameType
from typing import Any

import transport
import trio
from report import spread, table, write_report
from transport_libp2p import protocol_client
from transport_load import KIB, Client
from transport_sockets import TrioClient

from neurogrid.p2p import Protocol, Stream, TensorMessage, open_host

NUM_BYTES = 16 * KIB
ROUNDS = 7
ROUND_TRIPS = 1500
PROFILED = 20_000
TIMEOUT = 60.0
PROTOCOL_ID = "/neurogrid/benchmark/2"
DATA = os.urandom(NUM_BYTES)
# What a file's name begins with, the first that fits, and how that part is called.
PARTS = (
    ("neurogrid/p2p/link/pipe", "system calls (send, recv) and their calls"),
    ("neurogrid/p2p/link/noise", "cipher"),
    ("neurogrid/p2p/link", "Yamux, streams"),
    ("neurogrid/p2p/wire", "headers, envelope"),
    ("neurogrid", "messages: order, credit, bounds, handlers, waiters"),
    ("trio", "trio: tasks, epoll, deadlines"),
    ("outcome", "trio: tasks, epoll, deadlines"),
    ("msgpack", "headers, envelope"),
)
OTHERS = "others (contextlib, generated initialisers, this program)"

Trip = Callable[[], Awaitable[object]]


def main() -> None:
    results, shares = trio.run(_in_one_process)
    rows = [
        (name, spread([1e6 * value for value in values]).show(0))
        for name, values in results.items()
    ]
    body = "Both ends in one process, p50 of a round trip (least to most of the rounds):\n\n"
    body += table(("", "us"), rows)
    parts = sorted({part for counts in shares.values() for part in counts}, key=_share_of(shares))
    body += f"\n\nSamples of {PROFILED} round trips, by where the interpreter was:\n\n"
    body += table(
        ("", *shares),
        [
            (part, *(f"{100 * counts[part] / counts.total():.0f} %" for counts in shares.values()))
            for part in parts
        ],
    )
    idle, awake = _two_processes(), _two_processes(keep_awake=True)
    body += "\n\n" + table(
        (
            "two processes",
            "raw trio TCP, p50 us",
            "Protocol, sync handler",
            "x raw in the same round",
        ),
        [
            (what, spread(raw).show(0), spread(ours).show(0), spread(ratios).show(2))
            for what, raw, ours, ratios in (
                ("cores fall idle", *idle),
                ("cores are kept awake", *awake),
            )
        ],
    )
    write_report("round_trip", (__doc__ or "").partition("\n")[0], body)


def _share_of(shares: dict[str, Counter[str]]) -> Callable[[str], float]:
    return lambda part: -sum(counts[part] for counts in shares.values())


# One process


async def _in_one_process() -> tuple[dict[str, list[float]], dict[str, Counter[str]]]:
    async with _raw() as raw, _bare() as bare, _protocol(False) as sync, _protocol(True) as later:
        trips: dict[str, Trip] = {
            "raw trio TCP": raw,
            "ours, bare stream": bare,
            "Protocol, sync handler": sync,
            "Protocol, async handler": later,
        }
        results: dict[str, list[float]] = {name: [] for name in trips}
        for _ in range(ROUNDS):
            for name, trip in trips.items():
                results[name].append(await _p50(trip))
        shares = {}
        for name in list(trips)[2:]:
            with _samples() as counts:
                for _ in range(PROFILED):
                    await trips[name]()
            shares[name] = counts
    return results, shares


async def _p50(trip: Trip) -> float:
    times = []
    for _ in range(ROUND_TRIPS):
        started = time.perf_counter()
        await trip()
        times.append(time.perf_counter() - started)
    return median(times)


@contextmanager
def _samples() -> Iterator[Counter[str]]:
    """Count in which part the interpreter is, a thousand times a processor second."""
    counts: Counter[str] = Counter()

    def sample(signum: int, frame: FrameType | None) -> None:
        name = frame.f_code.co_filename if frame is not None else ""
        short = name.rpartition("site-packages/")[2].rpartition("/neurogrid/")
        path = f"neurogrid/{short[2]}" if short[1] else short[2]
        counts[next((part for start, part in PARTS if path.startswith(start)), OTHERS)] += 1

    before = signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    try:
        yield counts
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


@asynccontextmanager
async def _raw() -> AsyncIterator[Trip]:
    async def echo(stream: trio.SocketStream) -> None:
        while await _receive(stream.receive_some):
            await stream.send_all(DATA)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, echo, listeners)
        stream = await trio.open_tcp_stream("127.0.0.1", listeners[0].socket.getsockname()[1])

        async def trip() -> None:
            await stream.send_all(DATA)
            await _receive(stream.receive_some)

        yield trip
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _bare() -> AsyncIterator[Trip]:
    async def echo(stream: Stream) -> None:
        while await _receive(stream.receive_some):
            await stream.send_all(DATA)

    async with open_host() as one, open_host() as other:
        other.set_stream_handler(PROTOCOL_ID, echo)
        stream = await one.open_stream(await one.connect(other.addresses[0]), [PROTOCOL_ID])

        async def trip() -> None:
            await stream.send_all(DATA)
            await _receive(stream.receive_some)

        yield trip
        await stream.aclose()


async def _receive(receive_some: Callable[[int], Awaitable[bytes]]) -> int:
    left = NUM_BYTES
    while left:
        data = await receive_some(left)
        if not data:
            return 0
        left -= len(data)
    return NUM_BYTES


@asynccontextmanager
async def _protocol(is_async: bool) -> AsyncIterator[Trip]:
    async def later(message: TensorMessage) -> Any:
        return message.data

    async with open_host() as one, open_host() as other:
        client, server = Protocol(one), Protocol(other)
        server.on_activation_received(later if is_async else lambda message: message.data)
        peer_id = await one.connect(other.addresses[0])

        async def trip() -> None:
            await client.request_activation(peer_id, 0, 0, DATA, timeout=TIMEOUT)

        await trip()
        yield trip


# Two processes


Rounds = tuple[list[float], list[float], list[float]]


def _two_processes(*, keep_awake: bool = False) -> Rounds:
    with (
        transport._children(["--serve", transport.RAW]) as (raw_address, _),
        transport._children(["--serve", transport.OURS]) as (address, _),
        _spinners(keep_awake),
    ):
        return trio.run(_round_trips, raw_address, address)


async def _round_trips(raw_address: str, address: str) -> Rounds:
    """Medians in us of raw trio TCP and of `Protocol`, and their ratio, of each round."""
    raw: Client = TrioClient(raw_address)
    async with protocol_client(address) as ours:
        results: dict[Client, list[float]] = {raw: [], ours: []}
        for number in range(2 * ROUNDS + 1):
            for client, medians in results.items():
                middle = 1e6 * median(await client.round_trips(NUM_BYTES, ROUND_TRIPS))
                if number:  # the first warms up
                    medians.append(middle)
    ratios = [mine / its for its, mine in zip(results[raw], results[ours], strict=True)]
    return results[raw], results[ours], ratios


@contextmanager
def _spinners(wanted: bool) -> Iterator[None]:
    """A process for each core that runs only where nobody else wants to."""
    code = (
        "import os, time\n"
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\n"
        f"end = time.monotonic() + {TIMEOUT}\n"
        "while time.monotonic() < end: pass"
    )
    count = (os.cpu_count() or 1) if wanted else 0
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
