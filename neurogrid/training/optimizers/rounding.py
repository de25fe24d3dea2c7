"""One operation, rounded once: target + alpha x other, with the same bits on every machine.

`torch.add` with a factor is one operation where the processor has instructions for it (x86 with AVX2), and two where it
has none, which shows in the last bit of every fourth element. Members that apply the same update must not end with
other weights because of that. Where torch rounds once, which is tried, its own operation is used; elsewhere the same
result is computed in float64, which takes ten times as long.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["add_scaled_"]

# More than four vectors of 16 elements, and a rest: each loop of torch's operation has its turn.
NUM_PROBED = 67


def add_scaled_(target: Tensor, other: Tensor, alpha: float) -> Tensor:
    """Adds `alpha` x `other` to `target` in place, each element rounded once.

    Args:
        target: float32 of any shape.
        other: float32 of the same shape.
        alpha: rounded to float32 first, as torch does it.
    """
    if _is_fused(target.device):
        return target.add_(other, alpha=alpha)
    return target.copy_(_fused(target, other, alpha))


@cache
def _is_fused(device: torch.device) -> bool:
    """Whether torch's sum with a factor is rounded once on `device`."""
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24, whose last term is lost where the product is rounded by itself.
    factor = 1 + 2.0**-12
    probe = torch.full((NUM_PROBED,), -(1 + 2.0**-11), device=device)
    probe.add_(torch.full_like(probe, factor), alpha=factor)
    return bool((probe == 2.0**-24).all())


def _fused(target: Tensor, other: Tensor, alpha: float) -> Tensor:
    """The sum in float32, rounded once."""
    # A product of two float32 is exact in float64. The sum is rounded to odd: where it is not exact, the last bit of
    # the neighbour that is taken is 1, so that the second rounding, to float32, sees on which side of a tie it lies
    # (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    factor = torch.tensor(alpha, dtype=torch.float32, device=target.device).double()
    first, second = target.double(), other.double() * factor
    total = first + second
    back = total - first
    error = (first - (total - back)) + (second - back)
    bits = total.view(torch.int64)
    is_even_and_inexact = (error.abs() > 0) & (bits & 1 == 0)
    # The order of float64 is that of their bits, away from zero.
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(is_even_and_inexact, bits + step, bits).view(torch.float64).float()
