"""Conversion between torch tensors and the raw little-endian bytes that travel.

The dtype names are those of the wire registry (and of safetensors). No copy is made where the tensor is
contiguous and on the CPU, or where the bytes may be viewed as they came.

B = batch rows, T = tokens, D = hidden size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from math import prod

import torch

__all__ = ["TORCH_DTYPES", "dtype_name", "is_finite", "tensor_from_bytes", "tensor_to_bytes"]

if sys.byteorder != "little":
    raise ImportError("NeuroGrid moves tensors as little-endian bytes: big-endian is not supported")

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name of a torch dtype.

    Raises:
        ValueError: the dtype does not travel.
    """
    if dtype not in _NAMES:
        raise ValueError(f"{dtype} has no name on the wire")
    return _NAMES[dtype]


def tensor_to_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's elements in row-major order; a view where it is contiguous and on the CPU."""
    # Every call counts: this is on the way of every token, and finds the caches swept by weights.
    there = tensor if tensor.is_cpu else tensor.cpu()
    return there.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def tensor_from_bytes(
    data: bytes | bytearray | memoryview, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """View `data` as a tensor of `shape`; the tensor keeps `data` alive.

    Read-only bytes are copied: torch cannot promise not to write to them.

    Raises:
        ValueError: `data` is not the size that dtype and shape need.
    """
    view = memoryview(data).cast("B")
    needed = prod(shape) * dtype.itemsize
    if len(view) != needed:
        raise ValueError(f"{len(view)} B are no {list(shape)} of {dtype}: that takes {needed} B")
    if not needed:
        return torch.empty(tuple(shape), dtype=dtype)
    source = bytearray(view) if view.readonly else view
    return torch.frombuffer(source, dtype=dtype).view(tuple(shape))


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element of a floating-point tensor is NaN or infinite; an empty one is finite.

    By its extremes, which NaN spreads to: an order of magnitude cheaper than to look at each element.
    """
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)
    return math.isfinite(low.item()) and math.isfinite(high.item())
