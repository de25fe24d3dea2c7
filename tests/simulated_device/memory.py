"""Memory of simulated devices: addresses that no program can read, each with bytes of the host's elsewhere.

A tensor on the device is one of torch's own, with such an address, made by way of DLPack: so it has a storage that
views share, and that says when it is let go. Who follows its address on the CPU has a segmentation fault.
An address is given out once, so that what is read after it was let go is found out, too.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["clone_storage", "contiguous", "fresh", "host_view", "memory", "on_device"]

# Address space alone; nothing is behind it.
_RESERVED = 1 << 40
_ALIGNMENT = 512
# What was written to memory that nobody has written to: in float32 a number that no test expects.
_FILL = 0xA5
# As DLPack numbers them; what is missing has no tensors here.
_EXTENSION_DEVICE = 12
_CODES = {
    torch.bool: 6,
    torch.uint8: 1,
    torch.int8: 0,
    torch.int16: 0,
    torch.int32: 0,
    torch.int64: 0,
    torch.float16: 2,
    torch.float32: 2,
    torch.float64: 2,
    torch.bfloat16: 4,
    torch.complex64: 5,
}


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int), ("index", ctypes.c_int))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("num_dimensions", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


@dataclass
class _Block:
    """Bytes that a storage of the device stands for."""

    device: int
    num_bytes: int
    host: torch.UntypedStorage


@_Deleter
def _let_go(managed: Any) -> None:
    address = managed.contents.tensor.data
    with memory.lock:
        memory.blocks.pop(address)
        memory.shown.pop(ctypes.addressof(managed.contents))


class _Memory:
    """Memory of all devices, each of which has `total_bytes`."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.lock = threading.RLock()
        self.blocks: dict[int, _Block] = {}
        # What torch points to as long as a tensor lives.
        self.shown: dict[int, tuple[object, ...]] = {}
        region = mmap.mmap(-1, _RESERVED, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=0)
        self._region = region
        self._next = self._first = _address(region)

    def used_bytes(self, device: int) -> int:
        """Bytes that tensors on the device take."""
        with self.lock:
            return sum(block.num_bytes for block in self.blocks.values() if block.device == device)

    def take(self, host: torch.UntypedStorage, device: int) -> int:
        """An address of the device that stands for these bytes.

        Raises:
            torch.OutOfMemoryError: the device has no room for them.
        """
        with self.lock:
            free = self.total_bytes - self.used_bytes(device)
            if host.nbytes() > free:
                raise torch.OutOfMemoryError(
                    f"sim:{device} is out of memory: {host.nbytes()} bytes asked for, {free} free"
                )
            address = self._next
            self._next += -(-max(host.nbytes(), 1) // _ALIGNMENT) * _ALIGNMENT
            assert self._next < self._first + _RESERVED
            self.blocks[address] = _Block(device, host.nbytes(), host)
            return address


def _address(region: mmap.mmap) -> int:
    """Where a mapping begins that cannot be read: ctypes would want to write to it."""

    class Buffer(ctypes.Structure):
        _fields_ = (
            ("buf", ctypes.c_void_p),
            ("obj", ctypes.py_object),
            ("rest", ctypes.c_byte * 96),
        )

    view = Buffer()
    get = ctypes.pythonapi.PyObject_GetBuffer
    get.argtypes = [ctypes.py_object, ctypes.POINTER(Buffer), ctypes.c_int]
    assert get(region, ctypes.byref(view), 0) == 0
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
    address = view.buf
    assert address is not None
    return address


memory = _Memory()


def on_device(host: torch.Tensor, device: int) -> torch.Tensor:
    """A tensor on the device that has the bytes of `host`, which nobody else writes to any more."""
    storage = host.untyped_storage()
    address = memory.take(storage, device)
    managed, shape = _Managed(), (ctypes.c_int64 * max(host.dim(), 1))(*host.shape)
    strides = (ctypes.c_int64 * max(host.dim(), 1))(*host.stride())
    offset = host.storage_offset() * host.itemsize
    managed.tensor = _Tensor(
        address,
        _Device(_EXTENSION_DEVICE, device),
        host.dim(),
        _DataType(_CODES[host.dtype], host.itemsize * 8, 1),
        shape,
        strides,
        0,
    )
    assert offset == 0, "a result of its own begins where its storage does"
    managed.deleter = _let_go
    with memory.lock:
        memory.shown[ctypes.addressof(managed)] = managed, shape, strides
    result: torch.Tensor = torch._C._from_dlpack(
        _new_capsule(ctypes.addressof(managed), b"dltensor", None)
    )
    return result


def host_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes that a tensor on a device stands for, as a tensor on the CPU."""
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    base = tensor.data_ptr() - tensor.storage_offset() * tensor.itemsize
    view = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return view.set_(
        memory.blocks[base].host, tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy on the same device."""
    host = torch.empty(0, dtype=torch.uint8, device="cpu")
    host.set_(memory.blocks[storage.data_ptr()].host.clone())
    return on_device(host, storage.device.index).untyped_storage()


def fresh(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory that nobody has written to."""
    last = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else -1
    num_bytes = (last + 1) * dtype.itemsize
    filled = torch.full((num_bytes,), _FILL, dtype=torch.uint8, device="cpu")
    return torch.empty(0, dtype=dtype, device="cpu").set_(
        filled.untyped_storage(), 0, tuple(size), tuple(stride)
    )


def contiguous(size: Sequence[int]) -> list[int]:
    """Strides of a tensor of this shape whose elements lie in a row."""
    return [math.prod(max(n, 1) for n in size[i + 1 :]) for i in range(len(size))]
