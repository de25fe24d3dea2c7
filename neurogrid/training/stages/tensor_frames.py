"""Tensors as they go through a pipe between a stage's two processes: bytes, a shape, and a dtype by its name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

__all__ = ["DTYPES", "as_frame", "of_frame"]

DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "I32": torch.int32}
"""Dtypes by the names that messages have."""

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def as_frame(tensor: Tensor) -> dict[str, Any]:
    """A tensor of one of these dtypes, on any device, as a part of a frame."""
    here = tensor.detach().cpu().contiguous()
    data = here.view(torch.uint8).reshape(-1).numpy().data if here.numel() else b""
    return {"dtype": _NAMES[here.dtype], "shape": list(here.shape), "data": data}


def of_frame(told: Mapping[str, Any]) -> Tensor:
    """Read what `as_frame` gave as a tensor on the CPU, in the memory of a long one's bytes.

    Whole numbers become int64, as torch wants ids and labels.

    Raises:
        ValueError: it has no elements, or other bytes than its shape and dtype have.
    """
    dtype, shape, data = DTYPES[told["dtype"]], told["shape"], told["data"]
    if not isinstance(data, bytearray):  # a short one; torch wants memory that may be written to
        data = bytearray(data)
    if not data or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data):,} bytes are no tensor of {told['dtype']} {list(shape)}")
    tensor = torch.frombuffer(data, dtype=dtype).view(*shape)
    return tensor if tensor.is_floating_point() else tensor.long()
