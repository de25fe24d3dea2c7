"""A bound on the memory that one piece of work may take, kept by the kernel.

A config that a stranger sent is built before anybody can say what it costs: families make tables of
positions and frequencies, of sizes that their own keys name. With this guard such an allocation fails and can
be refused; without it the kernel would kill the process. Linux only; elsewhere it bounds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["bounded_memory"]

_STATUS = Path("/proc/self/status")


@contextmanager
def bounded_memory(num_bytes: int) -> Iterator[None]:
    """Let the process's private memory grow by no more than `num_bytes` while the block runs.

    Beyond that, allocations fail with MemoryError, and torch's with RuntimeError. The bound is the whole
    process's (RLIMIT_DATA): one such block at a time. Shared mappings do not count.
    """
    used = _private_bytes()
    if used is None:
        yield
        return
    # Here, not above: the module exists on Unix alone, and only Linux counts what we want counted.
    from resource import RLIM_INFINITY, RLIMIT_DATA, getrlimit, setrlimit

    soft, hard = getrlimit(RLIMIT_DATA)
    bounds = [used + num_bytes, *(bound for bound in (soft, hard) if bound != RLIM_INFINITY)]
    setrlimit(RLIMIT_DATA, (min(bounds), hard))
    try:
        yield
    finally:
        setrlimit(RLIMIT_DATA, (soft, hard))


def _private_bytes() -> int | None:
    """Writable private memory of this process as RLIMIT_DATA counts it; None where nobody says."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key == "VmData":
            return int(value.split()[0]) * 1024
    return None
