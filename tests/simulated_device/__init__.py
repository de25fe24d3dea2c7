"""An accelerator that torch takes for one, without any: the devices `sim:0` and `sim:1`.

torch lets a backend be written in Python, with its own tensors (memory.py), operations (operations.py) and a module
that `torch.accelerator` asks which devices there are. What torch does not pass on to Python are streams and accounts
of memory: in C++ its guard for such backends has one stream and no memory. So in place of these functions of `torch._C`
there are those of this package while the devices are open (streams.py); `torch.accelerator` itself is torch's own.

Whoever imports this has the operations; until they are opened the devices are as GPUs that are not plugged in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.simulated_device.memory import clone_storage, memory
from tests.simulated_device.operations import register
from tests.simulated_device.streams import (
    Event,
    Stream,
    current_device,
    current_stream,
    set_device,
    set_stream,
    streams_of,
)

__all__ = [
    "FIRST",
    "MIB",
    "NUM_DEVICES",
    "SECOND",
    "open_devices",
    "seeds",
    "simulated_devices",
    "used_bytes",
]

NUM_DEVICES = 2
MIB = 1024**2
NAME = "sim"


class _Module:
    """What `torch.get_device_module` gives: is asked by `torch.accelerator`."""

    Stream = Stream
    Event = Event

    def __init__(self) -> None:
        self.is_open = False
        self.seeds: dict[int, int] = {}  # that were given last, by device

    def is_available(self) -> bool:
        return self.is_open

    def is_initialized(self) -> bool:
        return False  # in a process that is forked it is what it was

    def device_count(self) -> int:
        return NUM_DEVICES if self.is_open else 0

    def current_device(self) -> int:
        return current_device()

    def set_device(self, index: int) -> None:
        set_device(index)

    def get_device_name(self, device: Any = None) -> str:
        return "simulated device"

    def manual_seed(self, seed: int) -> None:
        """Of the current device alone, as with CUDA; random numbers are the CPU's."""
        self.seeds[current_device()] = seed

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers are the CPU's."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        """There is nothing to begin."""


_module = _Module()
_setup_privateuseone_for_python_backend(NAME, backend_module=_module)
register()

FIRST, SECOND = torch.device(NAME, 0), torch.device(NAME, 1)


def seeds() -> dict[int, int]:
    """What the random numbers of each device began with last; none where nobody has said."""
    return _module.seeds


def used_bytes(index: int) -> int:
    """Bytes that tensors on a device take."""
    return memory.used_bytes(index)


def open_devices(total_bytes: int = 256 * MIB) -> None:
    """Have the devices in this process from now on, each with so much memory.

    As long as they have less than 512 MiB a worker does not measure how fast they are, which takes a GPU a moment.
    """
    memory.total_bytes = total_bytes
    _module.is_open = True
    for owner, name, ours in _in_place_of():
        setattr(owner, name, ours)


@contextmanager
def simulated_devices(total_bytes: int = 256 * MIB) -> Iterator[None]:
    """The same until the block is left."""
    own = [(owner, name, getattr(owner, name)) for owner, name, _ in _in_place_of()]
    open_devices(total_bytes)
    try:
        yield
    finally:
        _module.is_open = False
        for owner, name, its in own:
            setattr(owner, name, its)


_clone_storage = torch.UntypedStorage.clone


def _in_place_of() -> list[tuple[Any, str, Any]]:
    """What is replaced: owner, name, and by what."""

    def synchronize(index: int) -> None:
        for stream in streams_of(index):
            stream.synchronize()

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        # In C++ there is no allocator for such a device: torch would call it all the same.
        if storage.device.type != NAME:
            return _clone_storage(storage)
        current_stream(storage.device.index).run()
        return clone_storage(storage)

    functions = {
        "_accelerator_getDeviceIndex": current_device,
        "_accelerator_setDeviceIndex": set_device,
        "_accelerator_exchangeDevice": set_device,
        "_accelerator_maybeExchangeDevice": set_device,
        "_accelerator_getStream": current_stream,
        "_accelerator_setStream": set_stream,
        "_accelerator_synchronizeDevice": synchronize,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_accelerator_getMemoryInfo": lambda index: (
            memory.total_bytes - memory.used_bytes(index),
            memory.total_bytes,
        ),
        "_accelerator_getDeviceStats": lambda index: {
            "allocated_bytes": {"all": {"current": memory.used_bytes(index)}}
        },
    }
    return [
        *((torch._C, name, function) for name, function in functions.items()),
        (torch.UntypedStorage, "clone", clone),
        (torch, "Stream", Stream),
        (torch, "Event", Event),
    ]
