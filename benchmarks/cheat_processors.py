"""Distances of the gradients of kinds of processors, and the band that follows: for `cheats.py`.

As a program it is one of these processors: one whose libraries were told to use no vector instructions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cheat_fleet import LLAMA, SETTINGS, Fleet
from safetensors.torch import load_file, save_file
from torch import Tensor

from neurogrid.training.checks import Apart, Band, apart, measured_band, sums_of

FLOOR = 1e-7
PROCESSORS: dict[str, dict[str, Any]] = {
    "alike": {},
    "products in bfloat16": {"in_bfloat16": True},
    "micro-batches of 1": {"at_once": 1},
    "2 threads": {"threads": 2},
}


def measure_band(states: Sequence[Fleet]) -> tuple[Band, list[list[str]]]:
    """Pairs of processors on the same rows: one table row each, and the band of those that compute in float32."""
    found: dict[str, list[Apart]] = defaultdict(list)
    equal: Counter[str] = Counter()
    seats = range(4)
    elsewhere = in_another_process(states)
    for number, fleet in enumerate(states):
        plain = [fleet.own(seat) for seat in seats]
        others = {
            name: [fleet.own(seat, **how) for seat in seats] for name, how in PROCESSORS.items()
        }
        others["no vector instructions"] = elsewhere[4 * number : 4 * number + 4]
        for name, gradients in others.items():
            for one, other in zip(plain, gradients, strict=True):
                equal[name] += torch.equal(one, other)
                found[name].append(apart(sums_of(one, other, SETTINGS), FLOOR))
    rows = [
        [
            name,
            f"{equal[name]} of {len(pairs)}",
            *(
                f"{max(getattr(pair, what) for pair in pairs):.1e}"
                for what in ("angle", "log_ratio", "tensor_angle", "tensor_log_ratio")
            ),
        ]
        for name, pairs in found.items()
    ]
    in_float32 = [
        pair for name, pairs in found.items() if name != "products in bfloat16" for pair in pairs
    ]
    return measured_band(in_float32, floor=FLOOR), rows


def band_for(processor: str, band: Band) -> Band:
    """The one measured between kinds of float32, or the default."""
    return Band() if processor == "products in bfloat16" else band


def in_another_process(states: Sequence[Fleet]) -> list[Tensor]:
    """The gradients of the first four seats in each state, by a process that is to use no vector instructions."""
    given = {}
    for number, fleet in enumerate(states):
        for seat in range(4):
            given[f"weights{4 * number + seat}"] = fleet.weights.clone()
            given[f"rows{4 * number + seat}"] = fleet.rows(seat)
    with tempfile.TemporaryDirectory() as directory:
        save_file(given, Path(directory) / "in")
        subprocess.run(
            [sys.executable, __file__, directory],
            check=True,
            env={
                **os.environ,
                "ATEN_CPU_CAPABILITY": "default",
                "MKL_CBWR": "COMPATIBLE",
                "ONEDNN_MAX_CPU_ISA": "SSE41",
            },
        )
        found = load_file(Path(directory) / "out")
    return [found[f"gradient{number}"] for number in range(4 * len(states))]


def child(directory: Path) -> None:
    given = load_file(directory / "in")
    found = {
        f"gradient{number}": LLAMA.gradient(given[f"weights{number}"], given[f"rows{number}"])
        for number in range(len(given) // 2)
    }
    save_file(found, directory / "out")


if __name__ == "__main__":
    torch.set_num_threads(1)
    child(Path(sys.argv[1]))
