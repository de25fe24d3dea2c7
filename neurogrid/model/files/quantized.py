"""Hidden states in 8 bits: blocks of 64 elements of a row, each block with a scale of its own.

A row of D elements becomes D int8 and then a float32 scale for each of its ceil(D / 64) blocks, little-endian, as
bytes: so a row stands for itself, and rows of several sessions can be put together. An element is off by at most half
a step of its block, max|x| / 254; measured on normally distributed values, 0.6 % of their standard deviation.
What is not finite makes the scale of its block so, and its block NaN or infinite again.

Source: protocol_spec/sessions.md, "Element types". The scheme is that of LLM.int8() without outliers
(Dettmers and others, 2022) and of GGUF's Q8_0, which has blocks of 32.

B = batch rows, T = tokens, D = hidden size, N = blocks of a row, W = D + 4 N.
"""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["BLOCK", "dequantize_rows", "quantize_rows", "quantized_width"]

BLOCK: Final = 64
"""Elements that share a scale: scales take a sixteenth of what they scale."""

_LARGEST: Final = 127


def quantized_width(hidden_size: int) -> int:
    """W: bytes of a row of `hidden_size` elements."""
    return hidden_size + 4 * -(-hidden_size // BLOCK)


def quantize_rows(hidden_BTD: torch.Tensor) -> torch.Tensor:
    """Rows of any float dtype as int8 [B, T, W], on the CPU."""
    hidden_BTD = hidden_BTD.detach().to("cpu", torch.float32)
    size = hidden_BTD.shape[-1]
    padded = torch.nn.functional.pad(hidden_BTD, (0, -size % BLOCK))
    blocks_BTNK = padded.reshape(*padded.shape[:-1], -1, BLOCK)
    scales_BTN = blocks_BTNK.abs().amax(-1) / _LARGEST
    # A block of zeros has the scale 0, and stays one.
    steps_BTN1 = torch.where(scales_BTN == 0, 1.0, scales_BTN).unsqueeze(-1)
    elements_BTD = (blocks_BTNK / steps_BTN1).round().flatten(-2)[..., :size].nan_to_num(0, 0, 0)
    return torch.cat([elements_BTD.to(torch.int8), scales_BTN.view(torch.int8)], dim=-1)


def dequantize_rows(rows_BTW: torch.Tensor, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, T, D] in `dtype`, from what `quantize_rows` gave."""
    scales_BTN = rows_BTW[..., hidden_size:].clone(memory_format=torch.contiguous_format)
    elements_BTD = rows_BTW[..., :hidden_size].to(torch.float32)
    elements_BTD *= scales_BTN.view(torch.float32).repeat_interleave(BLOCK, dim=-1)[
        ..., :hidden_size
    ]
    return elements_BTD.to(dtype)
