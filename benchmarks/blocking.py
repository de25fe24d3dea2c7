"""What does the thread beneath the blocking face cost, against the async API?

A request of 16 KiB to a peer in another process that sends it back, over libp2p on loopback. The client and the
peer's handler are on trio or blocking, in all four combinations, in turn within each round.

A machine that others use too adds to times and never takes away: so of single requests the tenth percentile counts,
of rates the best round, and the processor's time stands beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median, quantiles

import trio
from report import table, write_report

from neurogrid.p2p import Protocol, blocking, open_host

NUM_BYTES = 16 * 1024
PAYLOAD = bytes(NUM_BYTES)
TIMEOUT = 60.0
AT_ONCE = 8
FACES = ("trio", "blocking")


@dataclass
class Round:
    """Measurements of one client against one peer.

    Attributes:
        seconds: each request alone.
        cpu: processor seconds of the client's process for each of these, on average.
        rate: requests a second with `AT_ONCE` under way.
    """

    seconds: list[float]
    cpu: float
    rate: float


@dataclass
class Figures:
    """Figures over all rounds: milliseconds of a request, processor milliseconds of it, the best rate."""

    alone: float
    cpu: float
    rate: float

    @classmethod
    def of(cls, rounds: list[Round]) -> Figures:
        return cls(
            alone=1000 * quantiles([s for taken in rounds for s in taken.seconds], n=10)[0],
            cpu=1000 * median(taken.cpu for taken in rounds),
            rate=max(taken.rate for taken in rounds),
        )


# The peer


async def echo_under_trio() -> None:
    async with open_host() as host:
        protocol = Protocol(host)
        protocol.on_activation_received(lambda message: message.data)
        print(host.addresses[0], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)


def echo_blocking() -> None:
    with blocking.open_host() as host:
        protocol = blocking.Protocol(host)
        protocol.on_activation_received(lambda message: message.data)
        print(host.addresses[0], flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def echo_peer(face: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", face],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:  # closes its input, and waits
        assert process.stdout is not None
        yield process.stdout.readline().strip()


# The client


async def time_trio(address: str, num_requests: int) -> Round:
    async with open_host() as host:
        protocol = Protocol(host)
        peer_id = await host.connect(address)

        async def ask() -> None:
            await protocol.request_activation(peer_id, 0, 0, PAYLOAD, timeout=TIMEOUT)

        async def ask_many(times: int) -> None:
            for _ in range(times):
                await ask()

        await ask_many(num_requests // 10)
        seconds = []
        cpu = time.process_time()
        for _ in range(num_requests):
            started = time.perf_counter()
            await ask()
            seconds.append(time.perf_counter() - started)
        cpu = (time.process_time() - cpu) / num_requests
        started = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(ask_many, num_requests // AT_ONCE)
        rate = num_requests // AT_ONCE * AT_ONCE / (time.perf_counter() - started)
        return Round(seconds, cpu, rate)


def time_blocking(address: str, num_requests: int) -> Round:
    with blocking.open_host() as host, ThreadPoolExecutor(AT_ONCE) as pool:
        protocol = blocking.Protocol(host)
        peer_id = host.connect(address)

        def ask() -> None:
            protocol.request_activation(peer_id, 0, 0, PAYLOAD, timeout=TIMEOUT)

        def ask_many(times: int) -> None:
            for _ in range(times):
                ask()

        ask_many(num_requests // 10)
        seconds = []
        cpu = time.process_time()
        for _ in range(num_requests):
            started = time.perf_counter()
            ask()
            seconds.append(time.perf_counter() - started)
        cpu = (time.process_time() - cpu) / num_requests
        started = time.perf_counter()
        list(pool.map(ask_many, [num_requests // AT_ONCE] * AT_ONCE))
        rate = num_requests // AT_ONCE * AT_ONCE / (time.perf_counter() - started)
        return Round(seconds, cpu, rate)


CLIENTS: dict[str, Callable[[str, int], Round]] = {
    "trio": lambda address, num_requests: trio.run(time_trio, address, num_requests),
    "blocking": time_blocking,
}


def measure(num_rounds: int, num_requests: int) -> dict[tuple[str, str], Figures]:
    rounds: dict[tuple[str, str], list[Round]] = {
        (client, peer): [] for client in FACES for peer in FACES
    }
    with contextlib.ExitStack() as stack:
        addresses = {face: stack.enter_context(echo_peer(face)) for face in FACES}
        for _ in range(num_rounds):
            for (client, peer), taken in rounds.items():
                taken.append(CLIENTS[client](addresses[peer], num_requests))
    return {pair: Figures.of(taken) for pair, taken in rounds.items()}


def rows_of(figures: dict[tuple[str, str], Figures]) -> list[list[str]]:
    base = figures["trio", "trio"]
    return [
        [
            client,
            peer,
            f"{each.alone:.2f}",
            f"{each.alone / base.alone:.2f}",
            f"{each.cpu:.2f}",
            f"{each.cpu / base.cpu:.2f}",
            f"{each.rate:.0f}",
            f"{each.rate / base.rate:.2f}",
        ]
        for (client, peer), each in figures.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--serve", choices=FACES, help="be the peer")
    options = parser.parse_args()
    if options.serve == "trio":
        trio.run(echo_under_trio)
    elif options.serve == "blocking":
        echo_blocking()
    else:
        figures = measure(options.rounds, options.requests)
        header = ["client", "handler", "one request, ms", "x trio", "client's CPU, ms", "x trio"]
        header += [f"requests/s, {AT_ONCE} at once", "x trio"]
        write_report(
            "blocking",
            f"`request_activation` of {NUM_BYTES // 1024} KiB and its answer of as much, 1.1.0 over libp2p on "
            "loopback between two processes: the async API against the blocking face, of the client and of the "
            f"peer's handler. {options.rounds} rounds of {options.requests} requests, the four in turn in each. "
            "The tenth percentile of single requests, the median over the rounds of the client's processor time "
            "for one, the best round's rate: the machine is shared, and others only add to times.",
            table(header, rows_of(figures)),
        )


if __name__ == "__main__":
    main()
