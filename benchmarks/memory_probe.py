"""Probe of the memory of a process that is in use, and a worker that tells of it when it is asked.

`python memory_probe.py FD ...` runs `neurogrid-worker ...`, which writes a line of JSON to that descriptor on each
SIGUSR1. Nothing of it is in the product. glibc only.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import signal
import sys
from pathlib import Path

from neurogrid.model.caches.rows import RowPool

__all__ = ["Memory", "memory"]

_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h: of all arenas together."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS.split()]


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one process.

    Attributes:
        own: in RAM, and no other process's (`RssAnon`).
        in_use: what the C library has given out, and the storage of sessions that decode together. Python's small
            objects are not in it.
        free: what the C library keeps for the next that asks.
    """

    own: int
    in_use: int
    free: int


def memory() -> Memory:
    """Memory of this process."""
    libc = ctypes.CDLL(None)
    try:
        libc.mallinfo2.restype = _MallInfo
    except AttributeError:
        raise SystemExit("this C library does not tell what of its memory is in use") from None
    heap = libc.mallinfo2()
    storage = sum(each.num_bytes for each in gc.get_objects() if type(each) is RowPool)
    return Memory(_own(), heap.uordblks + heap.hblkhd + storage, heap.fordblks)


def _own() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not tell what memory a process has for itself")


def main() -> None:
    from neurogrid.cli.commands.worker import main as worker

    fd = int(sys.argv.pop(1))

    def tell(*_: object) -> None:
        os.write(fd, json.dumps(dataclasses.asdict(memory())).encode() + b"\n")

    signal.signal(signal.SIGUSR1, tell)
    raise SystemExit(worker())


if __name__ == "__main__":
    main()
