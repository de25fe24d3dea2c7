"""What does `import neurogrid.p2p` cost beside `import libp2p`, and what does it pull in?

Every import in a fresh process, the variants in turn within each round, so that a machine that drifts drifts
for all. Ends with an error when a heavy module was pulled in that the transport library must do without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass

from report import spread, table, write_report

# What the transport library must not import: gigabytes, seconds, and nothing that it needs.
HEAVY = ("torch", "transformers", "numpy", "safetensors", "tokenizers")
VARIANTS = {
    "nothing": ("", ""),
    "libp2p": ("", "import libp2p"),
    "neurogrid.p2p": ("", "import neurogrid.p2p"),
    "all names of neurogrid.p2p": ("", "from neurogrid.p2p import *"),
    "all names, after libp2p": ("import libp2p", "from neurogrid.p2p import *"),
}
TIMEOUT = 120.0  # seconds; an import that takes longer is no import

CHILD = """
import json, resource, sys, time
{before}
modules, started = len(sys.modules), time.perf_counter()
{measured}
seconds = time.perf_counter() - started
print(json.dumps({{
    "milliseconds": seconds * 1000,
    "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    "modules": len(sys.modules) - modules,
    "heavy": [name for name in {heavy!r} if name in sys.modules],
}}))
"""


@dataclass(frozen=True)
class Cost:
    """One import in one process."""

    milliseconds: float
    peak_kib: int
    modules: int
    heavy: list[str]


def measure(variant: str) -> Cost:
    """Import in a process of its own."""
    before, measured = VARIANTS[variant]
    code = CHILD.format(before=before, measured=measured, heavy=HEAVY)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIMEOUT
    )
    return Cost(**json.loads(result.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    for variant in VARIANTS:
        measure(variant)  # files into the page cache, bytecode onto the disk
    costs: dict[str, list[Cost]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.rounds):
        for variant, taken in costs.items():
            taken.append(measure(variant))
    if heavy := {name for cost in costs["all names of neurogrid.p2p"] for name in cost.heavy}:
        raise SystemExit(f"import neurogrid.p2p pulls in {', '.join(sorted(heavy))}")
    rows = []
    for variant, taken in costs.items():
        ratios = [
            cost.milliseconds / base.milliseconds
            for cost, base in zip(taken, costs["libp2p"], strict=True)
        ]
        rows.append(
            [
                variant,
                spread([cost.milliseconds for cost in taken]).show(0),
                spread(ratios).show(2),
                spread([cost.peak_kib / 1024 for cost in taken]).show(1),
                str(taken[0].modules),
            ]
        )
    write_report(
        "import_time",
        f"The cost of an import, each in a fresh process: median (minimum to maximum) of {options.rounds} rounds "
        "after one that warms the page cache; ratios are of one round each.",
        table(["import", "ms", "x libp2p", "peak memory, MiB", "modules"], rows)
        + f"\n\nNot pulled in by neurogrid.p2p, checked in each of these processes: {', '.join(HEAVY)}.",
    )


if __name__ == "__main__":
    main()
