"""Products of an adapter that are added to the result of one linear layer: scaling * B A x, for some rows alone.

Shape legend: r rank, I inputs, O outputs, R rows.
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from neurogrid.model.kernels.compiled import ELEMENT_TYPES
from neurogrid.p2p.wire.limits import MAX_ADAPTER_RANK

__all__ = ["LowRank"]


class _LowRankFields(ctypes.Structure):
    """`struct low_rank` of layer.h."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("scaling", ctypes.c_float),
        ("type", ctypes.c_int32),
    )


class LowRank:
    """Two matrices of an adapter beside one linear layer.

    A row that has an adapter of its own reads all of it: on the CPU it is kept in as few bytes as it comes in.

    Args:
        a: [r, I], of any floating dtype; kept in float32 where it is none of `ELEMENT_TYPES`, or on another device.
        b: [O, r], likewise.
        scaling: a factor of what they give.
        device: where the linear layer computes.

    Attributes:
        num_inputs, num_outputs, rank: I, O, r.
        num_bytes: of memory.
        address: of what describes it to compiled code, as long as this lives; 0 elsewhere than in the CPU's memory.

    Raises:
        ValueError: their shapes do not fit each other, or the rank is not 1 to `MAX_ADAPTER_RANK`.
    """

    def __init__(
        self, a: torch.Tensor, b: torch.Tensor, scaling: float, *, device: torch.device
    ) -> None:
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            raise ValueError(f"{list(a.shape)} and {list(b.shape)} are no two matrices of one rank")
        if not 1 <= a.shape[0] <= MAX_ADAPTER_RANK:
            raise ValueError(f"rank {a.shape[0]} is none of 1 to {MAX_ADAPTER_RANK}")
        self.rank, self.num_inputs = a.shape
        self.num_outputs = b.shape[0]
        self._scaling = scaling
        # Memory of its own: what it was read from may be a transfer's. B by its columns, right behind A: one stream.
        keeps = a.dtype == b.dtype and a.dtype in ELEMENT_TYPES and device.type == "cpu"
        dtype = a.dtype if keeps else torch.float32
        both = torch.empty(a.numel() + b.numel(), dtype=dtype, device=device)
        self._a = both[: a.numel()].view(a.shape)
        self._b = both[a.numel() :].view(b.shape[1], b.shape[0])
        self._a.copy_(a)
        self._b.copy_(b.t())
        self.num_bytes = self._a.nbytes + self._b.nbytes
        self._fields = _LowRankFields(
            self._a.data_ptr(),
            self._b.data_ptr(),
            self.rank,
            float(scaling),
            ELEMENT_TYPES[dtype],
        )
        self.address = ctypes.addressof(self._fields) if self._a.is_cpu else 0

    def added(self, given: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        """[..., O] of the linear layer with what this adds, in the same dtype; sums are in float32.

        Args:
            given: [..., I], what went into the linear layer.
        """
        low = functional.linear(given.float(), self._a.float())
        return (result + (low @ self._b.float()) * self._scaling).to(result.dtype)
