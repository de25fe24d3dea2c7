"""How long does an all_reduce take over the backend `neurogrid`, and how long over gloo?

All ranks are processes of this machine, on loopback, with one thread of torch each. Gloo sends in the clear, NeuroGrid
encrypts and authenticates. Both are measured in turn within each round, in processes of their own; a round counts the
fastest of its calls, since a machine that others use too adds to times and never takes away.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from report import spread, table, write_report

BACKENDS = ("gloo", "neurogrid")
MIB = 1024 * 1024
TIMEOUT = 200.0


def rank_main(backend: str, rank: int, size: int, store: str, sizes: list[int], calls: int) -> None:
    """Time the calls of one rank; rank 0 prints seconds by MiB."""
    torch.set_num_threads(1)
    if backend == "neurogrid":
        import neurogrid.training.distributed  # noqa: F401 - registers it
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size)
    fastest = {}
    for mib in sizes:
        tensor = torch.randn(mib * MIB // 4)
        taken = []
        for _ in range(calls):
            dist.barrier()
            started = time.perf_counter()
            dist.all_reduce(tensor)
            taken.append(time.perf_counter() - started)
            tensor.mul_(0.5)
        fastest[mib] = min(taken)
    if rank == 0:
        print(json.dumps(fastest))
    dist.destroy_process_group()


def measure(backend: str, size: int, sizes: list[int], calls: int) -> dict[int, float]:
    """Seconds of the fastest call, by MiB."""
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{directory}/store"
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--calls", str(calls), "--mib", *map(str, sizes)]
                + ["--rank", backend, str(rank), str(size), store],
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(size)
        ]
        told = [rank.communicate(timeout=TIMEOUT)[0] for rank in ranks]
        assert not any(rank.returncode for rank in ranks)
    return {int(mib): seconds for mib, seconds in json.loads(told[0]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=7, help="in each round")
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        backend, rank, size, store = options.rank
        rank_main(backend, int(rank), int(size), store, options.mib, options.calls)
        return
    rows = []
    for size in options.ranks:
        rounds = [
            {backend: measure(backend, size, options.mib, options.calls) for backend in BACKENDS}
            for _ in range(options.rounds)
        ]
        for mib in options.mib:
            gloo, ours = ([1000 * of[backend][mib] for of in rounds] for backend in BACKENDS)
            ratios = [mine / theirs for mine, theirs in zip(ours, gloo, strict=True)]
            rows.append(
                [str(size), str(mib)] + [spread(figure).show() for figure in (gloo, ours, ratios)]
            )
    header = ["ranks", "MiB", "gloo, ms", "neurogrid, ms", "neurogrid / gloo"]
    question = " ".join((__doc__ or "").split())
    notes = f"Median (minimum to maximum) of {options.rounds} rounds; float32, SUM."
    write_report(Path(__file__).stem, question, f"{table(header, rows)}\n\n{notes}")


if __name__ == "__main__":
    main()
