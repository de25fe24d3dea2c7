"""Memory that a computation takes, measured: of the process on the CPU, of the device elsewhere."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from mmap import PAGESIZE
from pathlib import Path
from typing import Final

import torch

from neurogrid.errors import ConfigurationError
from neurogrid.model.stages.device import device_memory

__all__ = [
    "Memory",
    "free_memory",
    "is_out_of_memory",
    "keep_freed",
    "lift_limit",
    "limit_memory",
    "memory_of",
]

_SELF = Path("/proc/self")
# Of glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
# What torch says, what oneDNN says that gets nothing for what it needs itself, and what others make of it.
_NO_MEMORY = (
    "can't allocate memory",
    "Cannot allocate memory",
    "out of memory",
    "bad_alloc",
    "could not create a primitive",
    "could not execute a primitive",
    "could not create a memory object",
)


class Memory(ABC):
    """The memory of a device.

    Attributes:
        limit: bytes that may be in use, those that are in use already among them.
    """

    limit: int

    @abstractmethod
    def used(self) -> float:
        """Bytes that are in use."""

    @abstractmethod
    def begin(self) -> None:
        """Watch the peak from here on."""

    @abstractmethod
    def peak(self) -> float:
        """The most bytes that were in use since `begin`."""

    @abstractmethod
    def most(self) -> int:
        """The most bytes that were ever in use."""

    @abstractmethod
    def let_go(self) -> None:
        """Give back what is kept for later."""


class _OfProcess(Memory):
    """Memory of this process, as Linux counts it: all that is resident, what is shared among it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit or _status("VmRSS") + free_memory()
        # Not what getrusage says: that begins with the memory of the process that started this one.
        self._most_before = 0

    def used(self) -> float:
        return _status("VmRSS")

    def begin(self) -> None:
        self._most_before = self.most()
        (_SELF / "clear_refs").write_text("5")

    def peak(self) -> float:
        return _status("VmHWM")

    def most(self) -> int:
        return max(self._most_before, _status("VmHWM"))

    def let_go(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)


class _OfAccelerator(Memory):
    def __init__(self, device: torch.device, limit: int) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        here = device_memory(device).free_bytes + self._module.memory_reserved(device)
        self.limit = min(limit, here) if limit else here
        self._most_before = 0

    def used(self) -> float:
        return float(self._module.memory_allocated(self._device))

    def begin(self) -> None:
        self._most_before = self.most()
        self._module.reset_peak_memory_stats(self._device)

    def peak(self) -> float:
        return float(self._module.max_memory_allocated(self._device))

    def most(self) -> int:
        return max(self._most_before, int(self.peak()))

    def let_go(self) -> None:
        self._module.empty_cache()


def memory_of(device: torch.device, limit: int) -> Memory:
    """The memory of `device`.

    Args:
        limit: bytes; 0 for what is free.

    Raises:
        ConfigurationError: nobody says on this system, or of this device, how much memory is in use.
    """
    if device.type != "cpu":
        if not hasattr(torch.get_device_module(device), "max_memory_allocated"):
            raise ConfigurationError(
                f"nobody says how much memory a step takes on {device}, so it cannot train: let another machine"
            )
        return _OfAccelerator(device, limit)
    if not (_SELF / "clear_refs").exists():
        raise ConfigurationError(
            "training on a CPU takes Linux: here nobody says how much memory a step takes"
        )
    return _OfProcess(limit)


def is_out_of_memory(exc: BaseException) -> bool:
    """Whether that is what torch says."""
    is_known = isinstance(exc, MemoryError | torch.OutOfMemoryError)
    return is_known or any(words in str(exc) for words in _NO_MEMORY)


def _status(key: str) -> int:
    """Bytes of a line of this process's status."""
    lines = (_SELF / "status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def free_memory() -> int:
    """Bytes of this machine's memory that are free, or of what this process may have of it."""
    return device_memory(torch.device("cpu")).free_bytes


def limit_memory(num_bytes: int) -> None:
    """Have allocations fail that would bring this process above `num_bytes` of resident memory; on Linux.

    What is resident and nobody allocated, as code and shared memory, counts as it is now.
    """
    # Here, not above: it exists on Unix alone.
    from resource import RLIM_INFINITY, RLIMIT_DATA, getrlimit, setrlimit

    anonymous = _status("RssAnon")
    # Address space that is set aside and not used yet does not count for us, and does for the kernel.
    bound = num_bytes - (_status("VmRSS") - anonymous) + max(_status("VmData") - anonymous, 0)
    _, hard = getrlimit(RLIMIT_DATA)
    # Not 0: below a hard limit that is higher, Linux takes that for no bound.
    bound = max(bound if hard == RLIM_INFINITY else min(bound, hard), PAGESIZE)
    setrlimit(RLIMIT_DATA, (bound, hard))


def lift_limit() -> None:
    """Take back what `limit_memory` did."""
    # Here, not above: it exists on Unix alone.
    from resource import RLIMIT_DATA, getrlimit, setrlimit

    _, hard = getrlimit(RLIMIT_DATA)
    setrlimit(RLIMIT_DATA, (hard, hard))


def keep_freed() -> None:
    """Have memory that is freed kept for what is made next, but for what is very large; where the C library is glibc.

    What a step makes and frees, the next one makes again. The system would give each page anew, with zeros in it.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        # Glibc itself comes to this when something so large has been freed, and takes no more.
        mallopt(_M_MMAP_THRESHOLD, 32 * 1024**2)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
