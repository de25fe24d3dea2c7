"""What is it worth to go by how fast workers are in fact, when one becomes slower, and when it is quick again?

    python benchmarks/drift.py --rounds 3

One worker of two stages is given a fifth of the time, as beside other processes, and after a while all of it again.
"Watched" is what a coordinator does; "as they said" is the same one that never looks at speeds. Both in each round, in
turn. With a spare, whose memory takes a quarter of the layers, the slow one is left out and found quick by a trial.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import math
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median

import torch
import trio
from decode import SIZES, make_model
from recovery import FORKSERVER, free_port, run_worker_with
from report import spread, table, write_report

from neurogrid import Coordinator, CoordinatorSettings, open_coordinator
from neurogrid.fleet.speeds import speed_watch, trials
from neurogrid.p2p.hosts.identity import Identity

NUM_STAGES = 2
PROMPT_TOKENS, SESSION_TOKENS = 16, 48
# A fifth of the time, in turns as short as those of a scheduler between processes. Seconds.
RUNS, STOPS = 0.004, 0.016
PHASES = ("before", "slowed", "quick again")
# Without and with a spare: the memory of each worker, nothing for all that it needs.
SETUPS = {"two workers": ("", ""), "and a small spare": ("", "", "small")}


@dataclass(frozen=True)
class Run:
    """One coordinator's tokens a second at the end of each phase, and the layers of the slow worker then."""

    rates: tuple[float, ...]
    layers: tuple[int, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="512x8")
    parser.add_argument("--interval", type=float, default=3.0, help="seconds between looks (15)")
    parser.add_argument("--trial", type=float, default=5.0, help="seconds until a trial (60)")
    parser.add_argument("--settle", type=float, default=40.0, help="seconds of a phase, unmeasured")
    parser.add_argument("--measured", type=float, default=10.0, help="seconds at a phase's end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    FORKSERVER.set_forkserver_preload(["neurogrid.assembly.worker"])
    trials.FIRST_DELAY = trials.MAX_DELAY = options.trial  # type: ignore[misc]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(SIZES[options.size], Path(directory))
        layer_bytes = 4 * sum(p.numel() for p in model.model.layers[0].parameters())
        small = f"{layer_bytes * SIZES[options.size]['num_hidden_layers'] // 3 >> 20}MiB"
        del model
        for setup, memory in SETUPS.items():
            limits = [small if limit else "" for limit in memory]
            watched, believed = [], []
            for number in range(options.rounds):
                for runs, interval in ((watched, options.interval), (believed, math.inf)):
                    speed_watch.DRIFT_INTERVAL = interval  # type: ignore[misc]
                    with started(Path(directory), limits) as workers:
                        runs.append(trio.run(measure, Path(directory), workers, options))
                    print(setup, number, runs[-1], flush=True)
            for phase, name in enumerate(PHASES):
                rows.append([setup, name, *_row(phase, watched, believed)])
    write_report(
        "drift",
        f"One worker of {NUM_STAGES} stages gets a fifth of the time, and all of it again. Llama {options.size}, one "
        "torch thread a process, one session after the other, all on one machine; tokens/s at the end of each phase, "
        f"median (minimum to maximum) of {options.rounds} rounds; looks each {options.interval:g} s instead of 15, "
        f"trials after {options.trial:g} s instead of 60.",
        table(
            ["workers", "phase", "watched", "its layers", "as they said", "its layers", "ratio"],
            rows,
        ),
    )


def _row(phase: int, watched: Sequence[Run], believed: Sequence[Run]) -> list[str]:
    ratios = [w.rates[phase] / b.rates[phase] for w, b in zip(watched, believed, strict=True)]
    cells = []
    for runs in (watched, believed):
        cells.append(spread([run.rates[phase] for run in runs]).show())
        cells.append(f"{median(run.layers[phase] for run in runs):g}")
    return [*cells, spread(ratios).show(2)]


@contextmanager
def started(directory: Path, limits: Sequence[str]) -> Iterator[dict[str, BaseProcess]]:
    """Workers with these limits of memory, empty for none, by the address that each listens on."""
    workers: dict[str, BaseProcess] = {}
    try:
        for number, limit in enumerate(limits):
            key, place = directory / f"{number}.key", f"/ip4/127.0.0.1/tcp/{free_port()}"
            arguments = ["--listen", place, "--identity", str(key)]
            if limit:
                arguments += ["--memory-limit", limit]
            address = f"{place}/p2p/{Identity.load(key).peer_id}"
            workers[address] = FORKSERVER.Process(target=run_worker_with, args=(arguments,))
            workers[address].start()
        yield workers
    finally:
        for process in workers.values():
            process.kill()
            process.join()


async def measure(
    model: Path, workers: Mapping[str, BaseProcess], options: argparse.Namespace
) -> Run:
    """Go through the phases with a coordinator of one session after the other."""
    settings = CoordinatorSettings(
        model=model,
        peers=tuple(workers),
        dtype="float32",
        stages=NUM_STAGES,
        min_peers=len(workers),
        max_seq_len=256,
        prefix_reuse=False,
        wait=120.0,
    )
    rates, layers = [], []
    async with open_coordinator(settings) as coordinator, trio.open_nursery() as nursery:
        slow = coordinator.stages[-1].peer_id
        process = next(p for address, p in workers.items() if address.endswith(slow))
        came: list[float] = []
        nursery.start_soon(write, coordinator, came)
        for phase in PHASES:
            with trio.CancelScope() as throttled:
                async with trio.open_nursery() as throttling:
                    if phase == "slowed":
                        throttling.start_soon(throttle, process.pid)
                    await trio.sleep(options.settle)
                    came.clear()
                    await trio.sleep(options.measured)
                    throttled.cancel()
            rates.append(len(came) / options.measured)
            stages = [stage for stage in coordinator.stages if stage.peer_id == slow]
            layers.append(sum(stage.stop - stage.start for stage in stages))
        nursery.cancel_scope.cancel()
    return Run(tuple(rates), tuple(layers))


async def write(coordinator: Coordinator, came: list[float]) -> None:
    """Generate one session after the other; notes when each token came."""
    prompt = list(range(2, 2 + PROMPT_TOKENS))
    while True:
        async for _ in coordinator.generate(prompt, max_tokens=SESSION_TOKENS):
            came.append(time.perf_counter())


async def throttle(pid: int) -> None:
    """Give a process a fifth of the time until cancelled."""
    try:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await trio.sleep(STOPS)
            os.kill(pid, signal.SIGCONT)
            await trio.sleep(RUNS)
    finally:
        os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    main()
