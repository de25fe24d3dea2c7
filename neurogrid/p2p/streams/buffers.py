"""Buffers that may be sent as a tensor: bytes, anything with the buffer protocol (NumPy), CPU tensors of torch.

Neither NumPy nor torch is imported: an array is known by its buffer, a torch tensor by its methods. Nothing is
copied; the buffer that is returned keeps its owner alive.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from neurogrid.errors import LocalProtocolError
from neurogrid.p2p.wire import DTYPES, Data

__all__ = ["Tensor", "TensorBuffer", "tensor_buffer"]

# Codes of PEP 3118, by the name that safetensors has for the same elements. `l` depends on the platform.
_FORMATS: Final = {
    "?": "BOOL",
    "B": "U8",
    "c": "U8",
    "b": "I8",
    "H": "U16",
    "h": "I16",
    "I": "U32",
    "i": "I32",
    "L": "U64" if ctypes.sizeof(ctypes.c_ulong) == 8 else "U32",
    "l": "I64" if ctypes.sizeof(ctypes.c_long) == 8 else "I32",
    "Q": "U64",
    "q": "I64",
    "e": "F16",
    "f": "F32",
    "d": "F64",
}
_TORCH: Final = {
    "torch.bool": "BOOL",
    "torch.uint8": "U8",
    "torch.int8": "I8",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.uint16": "U16",
    "torch.int16": "I16",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.uint32": "U32",
    "torch.int32": "I32",
    "torch.float32": "F32",
    "torch.uint64": "U64",
    "torch.int64": "I64",
    "torch.float64": "F64",
}


@runtime_checkable
class _TorchTensor(Protocol):
    """The part of `torch.Tensor` that is used here."""

    dtype: Any
    shape: Any
    device: Any

    def data_ptr(self) -> int: ...
    def is_contiguous(self) -> bool: ...


Tensor: TypeAlias = Any
"""bytes, bytearray, memoryview, a NumPy array, a torch tensor on the CPU; C-contiguous, little-endian."""


class TensorBuffer:
    """A tensor as it goes onto the wire.

    Attributes:
        dtype: a name from `DTYPES`; plain bytes are "U8".
        shape: its dimensions.
        data: the elements, in C order; a view.
    """

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: Data) -> None:
        self.dtype = dtype
        self.shape = shape
        self.data = data


def tensor_buffer(tensor: Tensor) -> TensorBuffer:
    """The dtype, shape and bytes of a tensor, uncopied.

    Raises:
        LocalProtocolError: not contiguous, not on the CPU, big-endian, or of a dtype that the protocol
            does not have.
    """
    if isinstance(tensor, bytes | bytearray):
        return TensorBuffer("U8", (len(tensor),), tensor)
    # A view is asked first: what makes a tensor of torch is seen by its attributes, which takes longer.
    if not isinstance(tensor, memoryview) and isinstance(tensor, _TorchTensor):
        return _of_torch(tensor)
    try:
        view = memoryview(tensor)
    # NumPy raises ValueError for elements that the buffer protocol has no code for.
    except (TypeError, ValueError, BufferError) as exc:
        raise LocalProtocolError(f"{type(tensor).__name__} cannot be sent: {exc}") from exc
    if not view.c_contiguous:
        raise LocalProtocolError("only C-contiguous tensors can be sent; make a contiguous copy")
    code = view.format
    if sys.byteorder == "little" and code[:1] in ("<", "=", "@"):
        code = code[1:]
    if code not in _FORMATS or (sys.byteorder == "big" and view.itemsize > 1):
        raise LocalProtocolError(
            f"elements of format {view.format!r} cannot be sent: little-endian and one of "
            f"{', '.join(DTYPES)}"
        )
    shape = tuple(view.shape or ())
    # A view without elements cannot be cast.
    data = view.cast("B") if view.nbytes else memoryview(b"")
    return TensorBuffer(_FORMATS[code], shape, data)


def _of_torch(tensor: _TorchTensor) -> TensorBuffer:
    dtype = _TORCH.get(str(tensor.dtype))
    if dtype is None or sys.byteorder == "big":
        raise LocalProtocolError(f"tensors of {tensor.dtype} cannot be sent")
    if str(tensor.device) != "cpu":
        raise LocalProtocolError(f"a tensor on {tensor.device} cannot be sent: move it to the CPU")
    if not tensor.is_contiguous():
        raise LocalProtocolError("only contiguous tensors can be sent: call .contiguous()")
    shape = tuple(int(size) for size in tensor.shape)
    num_bytes = math.prod(shape) * DTYPES[dtype]
    if not num_bytes:
        return TensorBuffer(dtype, shape, b"")
    # torch has no buffer protocol, and its way through NumPy lacks bfloat16.
    memory: Any = (ctypes.c_ubyte * num_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # an attribute of our own: as long as the bytes are seen, they are there
    return TensorBuffer(dtype, shape, memoryview(memory).cast("B"))
