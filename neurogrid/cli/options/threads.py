"""Number of threads that torch computes with, and what they do while they wait: set before torch is loaded.

OpenMP, with which torch computes on CPUs, reads its environment when it is loaded and never again. Its threads wait
for the next kernel in a loop, for milliseconds. Where several processes share the cores, threads with nothing to do
take them from threads that have work: a worker is several times slower beside another program then. So they sleep here,
unless whoever starts the command says otherwise.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import MutableMapping

__all__ = ["prepare_threads"]

# The first two are libgomp's, which torch brings on Linux; the others those of LLVM and Intel.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


def prepare_threads(
    options: argparse.Namespace, environment: MutableMapping[str, str] = os.environ
) -> None:
    """Say in the environment what `--threads` says, and that waiting threads sleep; before torch is imported.

    How threads wait stays as it is where one of `WAITING` is set.
    """
    if (num_threads := getattr(options, "threads", None)) is not None:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    if not any(name in environment for name in WAITING):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
