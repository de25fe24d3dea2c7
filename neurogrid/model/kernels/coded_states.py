"""Keys and values as codes of 8 bits: what a cache holds of a token takes 8.5 bits a number.

Of each token and head by itself: a scale for each 32 numbers, and so the codes are the same whatever the token came
with, in a prompt of one piece or of many. Codes and scales of a head lie together, so that what moves tokens about need
not know of them: E codes, and behind them the scales in bfloat16, [..., E + 2 ceil(E / 32)] bytes.

The largest of 32 numbers over 127, rounded to bfloat16, is their scale; a code is a number over that, rounded to the
nearest integer, halves to even. Compiled layers make and read the same (layer.c).

Source: protocol_spec/sessions.md, "Coded caches". Shape legend: E head size, G groups of 32.
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

__all__ = ["CODED_DTYPE", "coded_size", "decode_states", "encode_states"]

CODED_DTYPE: Final = torch.int8
_GROUP: Final = 32
_SCALE_BYTES: Final = 2
_MOST: Final = 127


def coded_size(head_size: int) -> int:
    """Bytes of a key or value of so many numbers."""
    return head_size + _SCALE_BYTES * -(-head_size // _GROUP)


def encode_states(states: torch.Tensor) -> torch.Tensor:
    """Codes and scales, [..., `coded_size(E)`] in `CODED_DTYPE`, of keys or values [..., E] of a floating dtype.

    What is not finite is none again when it is decoded.
    """
    size = states.shape[-1]
    padded = functional.pad(states.float(), (0, -size % _GROUP))
    grouped = padded.unflatten(-1, (-1, _GROUP))
    scales = (grouped.abs().amax(-1) / _MOST).to(torch.bfloat16)
    wide = scales.float().unsqueeze(-1)
    codes = torch.where(wide > 0, grouped / wide, 0).round().clamp(-_MOST, _MOST)
    codes = codes.to(CODED_DTYPE).flatten(-2)[..., :size]
    return torch.cat([codes, scales.view(CODED_DTYPE)], dim=-1)


def decode_states(coded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values [..., E] in `dtype`, of what `encode_states` gave."""
    num_groups = -(-coded.shape[-1] // (_GROUP + _SCALE_BYTES))
    size = coded.shape[-1] - _SCALE_BYTES * num_groups
    codes = coded[..., :size]
    # Where they lie they may be aligned to nothing.
    scales = coded[..., size:].clone(memory_format=torch.contiguous_format)
    # Of float16 a small scale would be less than itself.
    scales = scales.view(torch.bfloat16).to(torch.float32 if dtype is torch.float16 else dtype)
    states: torch.Tensor
    if size % _GROUP == 0:
        states = (codes.unflatten(-1, (num_groups, _GROUP)) * scales.unsqueeze(-1)).flatten(-2)
    else:
        states = codes * scales.repeat_interleave(_GROUP, dim=-1)[..., :size]
    return states.to(dtype)
