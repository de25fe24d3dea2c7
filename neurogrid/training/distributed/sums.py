"""The reduction of rows, one from each rank, in the order of ranks: so that all ranks get the same bits.

Each operation rounds in the dtype of the tensors, as gloo does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import torch
from torch.distributed import ReduceOp

from neurogrid.errors import ConfigurationError

__all__ = ["Reduction", "reduction_of"]

# Elements that torch adds in the caller's thread: with more it takes threads of its own, beside the program's.
# A sum of so many float32 stays in the processor's cache.
BLOCK: Final = 32 * 1024

Fold = Callable[[torch.Tensor, torch.Tensor], object]


def _add(total: torch.Tensor, row: torch.Tensor) -> None:
    total.add_(row)


def _multiply(total: torch.Tensor, row: torch.Tensor) -> None:
    total.mul_(row)


def _least(total: torch.Tensor, row: torch.Tensor) -> None:
    torch.minimum(total, row, out=total)


def _greatest(total: torch.Tensor, row: torch.Tensor) -> None:
    torch.maximum(total, row, out=total)


# By the names that torch gives them.
_FOLDS: Final[dict[str, Fold]] = {
    "SUM": _add,
    "AVG": _add,
    "PRODUCT": _multiply,
    "MIN": _least,
    "MAX": _greatest,
    "BAND": torch.Tensor.bitwise_and_,
    "BOR": torch.Tensor.bitwise_or_,
    "BXOR": torch.Tensor.bitwise_xor_,
}
_BITWISE: Final = frozenset({"BAND", "BOR", "BXOR"})


class Reduction:
    """Reduction of the rows of a tensor to one: a fold, and a divisor of its result."""

    def __init__(self, fold: Fold, divisor: int) -> None:
        self._fold = fold
        self._divisor = divisor

    def reduce(self, rows: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Fold the rows into `out`, which may be one of them. All are flat, of one length and dtype."""
        # Tensors of inference mode may be written to in it alone, and it is their caller's thread's.
        with torch.inference_mode():
            for start in range(0, out.numel(), BLOCK):
                stop = start + BLOCK
                total = rows[0][start:stop].clone()
                for row in rows[1:]:
                    self._fold(total, row[start:stop])
                if self._divisor > 1:
                    total.div_(self._divisor)
                out[start:stop].copy_(total)


def reduction_of(op: object, dtype: torch.dtype, num_ranks: int) -> Reduction:
    """The reduction that an operation of `torch.distributed` names.

    Raises:
        ConfigurationError: there is none for this dtype.
    """
    name = next((name for name in _FOLDS if op == getattr(ReduceOp, name)), None)
    if name is None:
        raise ConfigurationError("the backend neurogrid has no PREMUL_SUM: take SUM, and scale")
    if not _is_defined(name, dtype):
        raise ConfigurationError(f"the backend neurogrid has no {name} of {dtype}")
    return Reduction(_FOLDS[name], num_ranks if name == "AVG" else 1)


@cache
def _is_defined(name: str, dtype: torch.dtype) -> bool:
    is_inexact = dtype.is_floating_point or dtype.is_complex
    if (
        (name in _BITWISE and is_inexact)
        or (name == "AVG" and not is_inexact)
        or (name in ("MIN", "MAX") and dtype.is_complex)
    ):
        return False
    one = torch.ones(1, device="cpu").to(dtype)
    try:
        # Torch has tensors of some dtypes, and no arithmetic for them.
        Reduction(_FOLDS[name], 2 if name == "AVG" else 1).reduce([one, one], one)
    except RuntimeError:
        return False
    return True
