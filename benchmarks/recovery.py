"""How long does a generation pause when a worker is killed, and is what it writes the same?

    python benchmarks/recovery.py --trials 100 --half-precision-trials 20 --spare-trials 30

In each trial a random worker of the plan gets SIGKILL at a random token. Then another worker is started, so that the
next trial finds what this one found: replicas of every stage, or spare workers without layers. The pause is the longest
gap between two tokens after the kill.

    python benchmarks/recovery.py --trials 0 --half-precision-trials 0 --spare-trials 0 --stops 50

ends both workers of a coordinator at once, within 5 ms of the end of an answer and of each other, by SIGTERM or by
SIGSTOP and SIGKILL, and starts them again where they were: the same coordinator has to serve, with the same answer.
Peers are admitted by lists, so that some are stopped while they are asked who they are.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import multiprocessing
import random
import runpy
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

import torch
import trio
from decode import SIZES, make_model
from report import table, write_report

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.trust import COORDINATOR, WORKER, AllowList
from neurogrid.p2p.wire import MessageType

PROMPT_TOKENS = 32
NUM_STAGES = 2
READY_TIMEOUT = 120.0  # seconds
# Processes that have torch imported already: a worker is there in a second, not in ten.
FORKSERVER = multiprocessing.get_context("forkserver")


@dataclass
class Scenario:
    """Scenario: what is killed how often, and what came of it."""

    name: str
    dtype: str
    quantize: str | None
    num_workers: int
    with_replicas: bool
    trials: int
    pauses: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    num_equal: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--half-precision-trials", type=int, default=5)
    parser.add_argument("--spare-trials", type=int, default=10)
    parser.add_argument(
        "--stops", type=int, default=0, help="times that both workers are ended at once"
    )
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=SIZES, default="512x8")
    options = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(options.seed)
    FORKSERVER.set_forkserver_preload(["neurogrid.assembly.worker"])
    scenarios = [
        Scenario("replicas", "float32", None, 2 * NUM_STAGES, True, options.trials),
        *(
            Scenario(
                "replicas",
                "bfloat16",
                quantize,
                2 * NUM_STAGES,
                True,
                options.half_precision_trials,
            )
            for quantize in (None, "int8")
        ),
        Scenario(
            "a spare, weights sent", "float32", None, NUM_STAGES + 1, False, options.spare_trials
        ),
    ]
    with tempfile.TemporaryDirectory() as directory:
        make_model(SIZES[options.size], Path(directory))
        for scenario in scenarios:
            if scenario.trials:
                trio.run(run, scenario, Path(directory), options.tokens)
        if options.stops:
            trio.run(run_stops, options.stops, Path(directory), options.tokens)
    done = [scenario for scenario in scenarios if scenario.trials]
    if not done:
        return
    write_report(
        "recovery",
        f"A random worker of {NUM_STAGES} stages is killed at a random one of {options.tokens} tokens, Llama "
        f"{options.size}, one torch thread a process, greedy, all on one machine.",
        table(
            [
                "way out",
                "dtype",
                "trials",
                "tokens equal",
                "pause ms, median",
                "p90",
                "max",
                "MB sent",
            ],
            [_row(scenario) for scenario in done],
        )
        + "\n\nPause: the longest gap between two tokens after the kill. MB sent: weights in a trial, median.",
    )


def _row(scenario: Scenario) -> list[str]:
    pauses = sorted(pause * 1000 for pause in scenario.pauses)
    return [
        scenario.name,
        scenario.dtype if scenario.quantize is None else f"{scenario.dtype}, {scenario.quantize}",
        str(scenario.trials),
        str(scenario.num_equal),
        f"{median(pauses):.0f}",
        f"{pauses[int(0.9 * (len(pauses) - 1))]:.0f}",
        f"{pauses[-1]:.0f}",
        f"{median(scenario.sent) / 1e6:.1f}",
    ]


async def run(scenario: Scenario, model: Path, num_tokens: int) -> None:
    workers: dict[str, BaseProcess] = {}
    settings = CoordinatorSettings(
        model=model,
        dtype=scenario.dtype,
        quantize=scenario.quantize,
        stages=NUM_STAGES,
        min_peers=scenario.num_workers,
        max_seq_len=256,
        with_replicas=scenario.with_replicas,
        prefix_reuse=False,
        identity_file=model / f"{scenario.dtype}-{scenario.quantize}-{scenario.num_workers}.key",
        # Known before the workers start, which dial it.
        listen=(f"/ip4/127.0.0.1/tcp/{free_port()}",),
    )
    address = f"{settings.listen[0]}/p2p/{_peer_id(settings)}"
    try:
        for _ in range(scenario.num_workers):
            start_worker(workers, address)
        async with open_coordinator(settings) as coordinator:
            generator = torch.Generator().manual_seed(1)
            prompt = torch.randint(2, 32_000, (PROMPT_TOKENS,), generator=generator).tolist()
            await _until_complete(coordinator, scenario)
            expected = [t async for t in coordinator.generate(prompt, max_tokens=num_tokens)]
            for number in range(scenario.trials):
                await _trial(scenario, coordinator, workers, prompt, num_tokens, expected)
                start_worker(workers, address)
                await _until_complete(coordinator, scenario)
                print(
                    f"{scenario.name}, {scenario.dtype}: {number + 1}, pause "
                    f"{scenario.pauses[-1] * 1000:.0f} ms, {scenario.num_equal} equal",
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        for process in workers.values():
            process.kill()
            process.join()


async def _trial(
    scenario: Scenario,
    coordinator: Coordinator,
    workers: dict[str, BaseProcess],
    prompt: Sequence[int],
    num_tokens: int,
    expected: Sequence[int],
) -> None:
    victim = random.choice(coordinator.stages).peer_id
    moment = random.randrange(1, num_tokens - 1)
    sent_before = coordinator.counters.total(Direction.SENT, msg_type=MessageType.WEIGHTS).num_bytes
    tokens: list[int] = []
    times: list[float] = []
    async for token in coordinator.generate(prompt, max_tokens=num_tokens):
        tokens.append(token)
        times.append(time.perf_counter())
        if len(tokens) == moment:
            workers.pop(_process_name(victim, workers)).kill()
            times[-1] = time.perf_counter()
    gaps = [after - before for before, after in pairwise(times)]
    scenario.pauses.append(max(gaps[moment - 1 :]))
    scenario.num_equal += tokens == list(expected)
    sent = coordinator.counters.total(Direction.SENT, msg_type=MessageType.WEIGHTS).num_bytes
    scenario.sent.append(sent - sent_before)


async def run_stops(num_stops: int, model: Path, num_tokens: int) -> None:
    """End both workers at once and start them again, so many times, under one coordinator; print how long each took.

    Raises:
        AssertionError: an answer is another than the first.
        TooSlowError: it did not serve again in time.
    """
    keys = [model / f"stopped-{number}.key" for number in range(NUM_STAGES)]
    own_key = model / "stops.key"
    own_id, peer_ids = Identity.load(own_key).peer_id, [Identity.load(key).peer_id for key in keys]
    places = [f"/ip4/127.0.0.1/tcp/{free_port()}" for _ in keys]
    admission = ["--allow", f"{own_id}={COORDINATOR}"]
    admission += [part for peer in peer_ids for part in ("--allow", f"{peer}={WORKER}")]

    def start() -> list[BaseProcess]:
        started = []
        for key, place in zip(keys, places, strict=True):
            arguments = ["--listen", place, "--identity", str(key), *admission]
            started.append(FORKSERVER.Process(target=run_worker_with, args=(arguments,)))
            started[-1].start()
        return started

    settings = CoordinatorSettings(
        model=model,
        dtype="float32",
        stages=NUM_STAGES,
        max_seq_len=256,
        identity_file=own_key,
        peers=tuple(f"{place}/p2p/{peer}" for place, peer in zip(places, peer_ids, strict=True)),
        admission=AllowList(dict.fromkeys(peer_ids, WORKER)),
        wait=READY_TIMEOUT,
    )
    prompt = list(range(2, 2 + PROMPT_TOKENS))
    seconds: list[float] = []
    processes = start()
    try:
        async with open_coordinator(settings) as coordinator:
            expected = [t async for t in coordinator.generate(prompt, max_tokens=num_tokens)]
            for number in range(num_stops):
                is_gentle = number % 2 == 0
                await trio.sleep(random.uniform(0, 0.005))
                for process in random.sample(processes, len(processes)):
                    os.kill(process.pid or 0, signal.SIGTERM if is_gentle else signal.SIGSTOP)
                    await trio.sleep(random.uniform(0, 0.005))
                if not is_gentle:
                    for process in processes:
                        process.kill()
                for process in processes:
                    await trio.to_thread.run_sync(process.join)
                processes = start()
                started = time.perf_counter()
                with trio.fail_after(2 * READY_TIMEOUT):
                    while coordinator.why_not_ready is not None:
                        await trio.sleep(0.05)
                    tokens = [t async for t in coordinator.generate(prompt, max_tokens=num_tokens)]
                assert tokens == expected, number
                seconds.append(time.perf_counter() - started)
                how = "SIGTERM" if is_gentle else "SIGSTOP, SIGKILL"
                print(
                    f"stop {number + 1}, {how}: served again after {seconds[-1]:.1f} s", flush=True
                )
    finally:
        for process in processes:
            process.kill()
            process.join()
    print(
        f"{len(seconds)} of {num_stops} times both workers were ended at once and the same coordinator served again, "
        f"with the same answer: after {median(seconds):.1f} s (median), {max(seconds):.1f} s at most"
    )


async def _until_complete(coordinator: Coordinator, scenario: Scenario) -> None:
    """Wait until as many workers are there, and hold as much, as at the beginning."""
    num_holders = scenario.num_workers if scenario.with_replicas else NUM_STAGES
    with trio.fail_after(READY_TIMEOUT):
        while (
            len(coordinator.fleet.holdings) < num_holders
            or coordinator.fleet.num_ready < scenario.num_workers
        ):
            await trio.sleep(0.05)


def start_worker(workers: dict[str, BaseProcess], coordinator: str) -> None:
    directory = tempfile.mkdtemp(prefix="neurogrid-recovery-")
    identity = Path(directory) / "identity.key"
    process = FORKSERVER.Process(target=_run_worker, args=(str(identity), coordinator))
    process.start()
    workers[str(identity)] = process


def _run_worker(identity: str, coordinator: str) -> None:
    run_worker_with(["--port", "0", "--identity", identity, "--bootstrap", coordinator])


def run_worker_with(arguments: Sequence[str]) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    sys.argv = ["neurogrid-worker", "--no-cache", "--log-level", "error", *arguments]
    runpy.run_module("neurogrid.cli.commands.worker", run_name="__main__")


def _process_name(peer_id: str, workers: dict[str, BaseProcess]) -> str:
    return next(name for name in workers if Identity.load(Path(name)).peer_id == peer_id)


def _peer_id(settings: CoordinatorSettings) -> str:
    assert settings.identity_file is not None
    return Identity.load(settings.identity_file).peer_id


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
