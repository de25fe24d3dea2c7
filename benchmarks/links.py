"""How long does a generation pause when a worker's link goes down, against a worker that is killed?

    python benchmarks/links.py --rounds 7               as root, for namespaces

A coordinator and four workers, each in a network namespace of its own, on one switch: two stages, and two workers that
stand by with replicas. In the middle of an answer of the embedded model the worker of one stage has its cable pulled
out of the switch, or gets SIGKILL. A kill is told by the kernel, at once; of a cable nobody is told anything.
In each round, with new processes, both cables are pulled and put back one after the other, then both
workers are killed. The pause is the longest gap between two tokens from then on; noticed is what of it had
passed when the first step was given up.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import ctypes
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import trio
from recovery import run_worker_with
from report import spread, table, write_report

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator
from neurogrid.errors import NoRouteError
from neurogrid.inference.board.progress import Progress
from neurogrid.p2p.hosts.identity import Identity

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the namespaces of the tests

from tests.e2e.namespaces.netns import Lan, Machine, network

NUM_STAGES, NUM_WORKERS = 2, 4
PROMPT = "A function definition"
NUM_TOKENS, MIDDLE = 40, 12
PORT = 4001
READY_TIMEOUT, RUN_TIMEOUT = 120.0, 240.0  # seconds
CLONE_NEWNET = 0x40000000
# Processes that have torch imported already: a worker is there in a second, not in ten.
FORKSERVER = multiprocessing.get_context("forkserver")


@dataclass
class Case:
    """One way to lose one worker, and what came of it. Seconds."""

    dtype: str | None
    stage: int
    is_pulled: bool
    pauses: list[float] = field(default_factory=list)
    noticed: list[float] = field(default_factory=list)
    num_equal: int = 0


class Notices(Progress):
    """Times at which steps were given up."""

    def __init__(self) -> None:
        self.failed_at: list[float] = []

    def step_failed(self, number: int, error: NoRouteError) -> None:
        self.failed_at.append(time.perf_counter())


@dataclass
class Place:
    """A machine with one worker."""

    machine: Machine
    process: BaseProcess
    address: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5, help="of every case, with new processes")
    parser.add_argument("--log", type=Path, help="file for what the coordinator says in detail")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.log:
        form = "%(asctime)s.%(msecs)03d %(name)s %(message)s"
        logging.basicConfig(filename=options.log, format=form, datefmt="%H:%M:%S")
        logging.getLogger("neurogrid").setLevel(logging.DEBUG)
    FORKSERVER.set_forkserver_preload(["neurogrid.assembly.worker"])
    cases: list[Case] = []
    for dtype in ("float32", None):
        with network() as net, TemporaryDirectory() as directory:
            lan = net.lan(1 + NUM_WORKERS)
            done = [
                Case(dtype, stage, is_pulled)
                for is_pulled in (True, False)
                for stage in range(NUM_STAGES)
            ]
            for _ in range(options.rounds):
                trio.run(run, done, lan, Path(directory))
            cases += done
    write_report(
        "links",
        f"The worker of one of {NUM_STAGES} stages is lost after {MIDDLE} of {NUM_TOKENS} tokens, by SIGKILL or by a "
        "pulled cable; the embedded model, two more workers stand by with the layers; one torch thread a "
        "process, greedy, network namespaces of one machine, which other work shared meanwhile: hence rounds "
        "of all cases, and medians.",
        table(
            ["dtype", "stage", "lost by", "trials", "tokens equal", "noticed ms", "pause ms"],
            [_row(case) for case in cases],
        )
        + "\n\nMedian (minimum to maximum). Noticed: until the first step was given up. Pause: the longest gap between "
        "two tokens.\n\n" + "\n".join(_ratio(kill, pull) for kill, pull in _pairs(cases)),
    )


def _row(case: Case) -> list[str]:
    return [
        _dtype(case),
        str(case.stage),
        "cable" if case.is_pulled else "SIGKILL",
        str(len(case.pauses)),
        str(case.num_equal),
        spread([1000 * seconds for seconds in case.noticed]).show(0),
        spread([1000 * seconds for seconds in case.pauses]).show(0),
    ]


def _pairs(cases: list[Case]) -> list[tuple[Case, Case]]:
    """A kill and the pulled cable of the same stage."""
    return [
        (kill, pull)
        for pull in cases
        for kill in cases
        if pull.is_pulled
        and not kill.is_pulled
        and (kill.dtype, kill.stage) == (pull.dtype, pull.stage)
    ]


def _dtype(case: Case) -> str:
    return case.dtype or "the model's own"


def _ratio(kill: Case, pull: Case) -> str:
    ratio = median(pull.pauses) / median(kill.pauses)
    more = median(pull.pauses) - median(kill.pauses)
    return (
        f"- {_dtype(kill)}, stage {kill.stage}: the cable takes {ratio:.2f} times as long as "
        f"SIGKILL, {1000 * more:.0f} ms more."
    )


async def run(cases: list[Case], lan: Lan, directory: Path) -> None:
    """Every case once, with new processes and peers: cables first, since they can be put back."""
    here, *machines = lan.machines
    notices = Notices()
    places = [start_worker(machine, directory) for machine in machines]
    settings = CoordinatorSettings(
        dtype=cases[0].dtype,
        stages=NUM_STAGES,
        min_peers=NUM_WORKERS,
        max_seq_len=256,
        prefix_reuse=False,
        listen=(f"/ip4/{here.address}/tcp/0",),
        peers=tuple(place.address for place in places),
        wait=READY_TIMEOUT,
    )
    try:
        with in_namespace(here.name), trio.fail_after(RUN_TIMEOUT):
            async with open_coordinator(settings, progress=notices) as coordinator:
                while len(coordinator.fleet.holdings) < NUM_WORKERS:
                    await trio.sleep(0.05)
                for case in cases:
                    await disturb(case, coordinator, notices, lan, places)
    finally:
        for place in places:
            place.process.kill()
            place.process.join()
            lan.plug_cable(place.machine)


async def disturb(
    case: Case, coordinator: Coordinator, notices: Notices, lan: Lan, places: list[Place]
) -> None:
    prompt = coordinator.model.tokenizer.encode(PROMPT)
    expected = [t async for t in coordinator.generate(prompt, max_tokens=NUM_TOKENS)]
    with await coordinator.selector.select(timeout=READY_TIMEOUT) as selection:
        peer_id = selection.stages[case.stage].peer_id
    victim = next(place for place in places if place.address.endswith(peer_id))
    tokens: list[int] = []
    times: list[float] = []
    notices.failed_at.clear()
    async for token in coordinator.generate(prompt, max_tokens=NUM_TOKENS):
        tokens.append(token)
        times.append(time.perf_counter())
        if len(tokens) == MIDDLE:
            if case.is_pulled:
                lan.unplug_cable(victim.machine)
            else:
                victim.process.kill()
            times[-1] = time.perf_counter()
    case.pauses.append(max(after - before for before, after in pairwise(times[MIDDLE - 1 :])))
    case.noticed.append(notices.failed_at[0] - times[MIDDLE - 1])
    case.num_equal += tokens == expected
    how = "cable" if case.is_pulled else "SIGKILL"
    print(
        f"{case.dtype}, stage {case.stage}, {how}: noticed {1000 * case.noticed[-1]:.0f} ms, "
        f"pause {1000 * case.pauses[-1]:.0f} ms, {case.num_equal} of {len(case.pauses)} equal",
        file=sys.stderr,
        flush=True,
    )
    if case.is_pulled:
        lan.plug_cable(victim.machine)
        while any(member.times.is_slow for member in coordinator.fleet.members):
            await trio.sleep(0.05)


def start_worker(machine: Machine, directory: Path) -> Place:
    identity = directory / f"{machine.name}-{time.monotonic_ns()}.key"
    listen = f"/ip4/{machine.address}/tcp/{PORT}"
    arguments = ["--listen", listen, "--insecure", "--disable-mdns", "--identity", str(identity)]
    peer_id = Identity.load(identity).peer_id
    process = FORKSERVER.Process(target=run_worker_in, args=(machine.name, arguments))
    process.start()
    return Place(machine, process, f"{listen}/p2p/{peer_id}")


def run_worker_in(namespace: str, arguments: list[str]) -> None:
    with in_namespace(namespace):
        run_worker_with(arguments)


@contextmanager
def in_namespace(name: str) -> Iterator[None]:
    """Have this thread, and those that it starts, use the network of a namespace until the block is left."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    other = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        _set_namespace(other)
        yield
    finally:
        _set_namespace(own)
        os.close(other)
        os.close(own)


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    main()
