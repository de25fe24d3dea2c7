"""Bands: the distance that two honest computations of the same hidden states may have.

Of each token's row the difference is taken as a part of the row: the norm of one by the norm of the other. Two honest
workers differ by rounding: processors, kernels, and how many rows a product has decide in which order sums are made.
What is wrong by less than the band is not found.

T = tokens, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

__all__ = ["band", "differing_rows", "row_differences"]

_BANDS: Final[Mapping[torch.dtype, float]] = {
    torch.float64: 1e-3,
    torch.float32: 1e-3,
    torch.float16: 0.03,
    torch.bfloat16: 0.1,
}
# Activations that travel in another type than is computed in are rounded at each stage. That is repeated where they are
# computed again; what is left are those that rounding takes to the other side. By names of the wire.
_WIRE_BANDS: Final[Mapping[str, float]] = {"F32": 0.0, "F16": 0.01, "BF16": 0.05, "I8": 0.05}
# In half precision a token may go to another expert of a mixture where two are about as likely.
_MIXTURE_FACTOR: Final = 4.0
# Where layers are codes, products round activations to 8 bits, or do not: as the kernels have it.
_CODES_BAND: Final = 0.2
# Where keys and values are kept as codes, rounding takes some to the other side.
_CACHES_BAND: Final = 0.05


def band(
    dtype: torch.dtype,
    wire: str,
    *,
    is_quantized: bool,
    is_mixture: bool,
    has_coded_caches: bool = False,
) -> float:
    """The greatest difference of a row between two honest computations, as a part of the row.

    Args:
        dtype: that layers are computed in.
        wire: in what activations travel; empty for `dtype`.
        is_quantized: whether layers are codes.
        is_mixture: whether a token goes through some of several experts.
        has_coded_caches: whether keys and values are kept as codes.
    """
    own = _BANDS[dtype] + (_CODES_BAND if is_quantized else 0.0)
    own += _CACHES_BAND if has_coded_caches else 0.0
    is_rounded = dtype.itemsize < 4 or is_quantized or has_coded_caches
    factor = _MIXTURE_FACTOR if is_mixture and is_rounded else 1.0
    return factor * own + (_WIRE_BANDS[wire] if wire else 0.0)


def row_differences(seen_BTD: torch.Tensor, right_BTD: torch.Tensor) -> torch.Tensor:
    """Distance of each row of [1, T, D] from that of another, as a part of the latter; [T], float64."""
    right_TD = right_BTD[0].double()
    distance_T = (seen_BTD[0].double() - right_TD).norm(dim=-1)
    length_T = right_TD.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    difference_T: torch.Tensor = distance_T / length_T
    return difference_T


def differing_rows(
    seen_BTD: torch.Tensor, right_BTD: torch.Tensor, *, greatest: float
) -> frozenset[int]:
    """The tokens, from 0, whose rows are further apart than `greatest`, or no numbers."""
    is_right_T = row_differences(seen_BTD, right_BTD) <= greatest  # not so of NaN
    return frozenset((~is_right_T).nonzero().flatten().tolist())
