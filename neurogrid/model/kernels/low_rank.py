"""Products of an adapter that are added to the result of one linear layer: scaling * B A x, for some rows alone.

Shape legend: r rank, I inputs, O outputs, R rows.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from typing import Final

import torch
from torch.nn import functional

from neurogrid.model.kernels.compiled import ELEMENT_TYPES
from neurogrid.p2p.wire.limits import MAX_ADAPTER_RANK

__all__ = ["LowRank"]


# Bytes that are asked of the system at once, and in which all that is taken has a multiple of so many.
_SLAB_BYTES: Final = 8 * 1024**2
_LINE_BYTES: Final = 64
# Outputs that compiled code makes together.
_BLOCK: Final = 16


class _Slabs:
    """Memory in large pages for matrices that are small: a pass goes through thousands of them.

    With pages of 4 KiB the processor looks up where one lies for each 64 lines that it reads. A slab is given back when
    nothing that was taken of it is in use.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Take memory, uint8 [num_bytes], which begins with a line."""
        size = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        if size > _SLAB_BYTES // 4:
            return _large(size)[:num_bytes]
        with self._lock:
            if len(self._left) < size:
                self._left = _large(_SLAB_BYTES)
            taken, self._left = self._left[:num_bytes], self._left[size:]
        return taken


def _large(size: int) -> torch.Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        raise MemoryError(f"no room for {size} B of an adapter: {exc}") from exc
    with contextlib.suppress(OSError):  # a system that has none gives small ones
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


_SLABS = _Slabs()


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
        MemoryError: there is no room for them.
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
        # Memory of its own: what it was read from may be a transfer's. On the CPU B lies right behind A, and in blocks
        # of outputs: one stream.
        keeps = a.dtype == b.dtype and a.dtype in ELEMENT_TYPES and device.type == "cpu"
        dtype = a.dtype if keeps else torch.float32
        num_blocks = -(-self.num_outputs // _BLOCK) if device.type == "cpu" else 1
        block = _BLOCK if device.type == "cpu" else self.num_outputs
        num_elements = a.numel() + num_blocks * self.rank * block
        if device.type == "cpu":
            both = _SLABS.take(num_elements * dtype.itemsize).view(dtype)
        else:
            both = torch.empty(num_elements, dtype=dtype, device=device)
        self._a = both[: a.numel()].view(a.shape)
        self._b = both[a.numel() :].view(num_blocks, self.rank, block)
        self._a.copy_(a)
        padded = functional.pad(b, (0, 0, 0, num_blocks * block - self.num_outputs))
        self._b.copy_(padded.view(num_blocks, block, self.rank).transpose(1, 2))
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
        columns = self._b.transpose(0, 1).reshape(self.rank, -1)[:, : self.num_outputs]
        return (result + (low @ columns.float()) * self._scaling).to(result.dtype)
