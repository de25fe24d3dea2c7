"""Hidden states in 8 bits: the bytes, the bound of the error, and what is not finite."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.model.files.quantized import BLOCK, dequantize_rows, quantize_rows, quantized_width
from neurogrid.model.files.tensors import is_finite

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def test_the_bytes_of_a_row() -> None:
    row = torch.zeros(1, 1, BLOCK + 2)
    row[0, 0, 0], row[0, 0, 1], row[0, 0, BLOCK] = 127.0, -63.4, 0.5
    data = quantize_rows(row)[0, 0].numpy().tobytes()
    elements = [127, -63, *[0] * (BLOCK - 2), 127, 0]
    assert data == struct.pack(f"<{BLOCK + 2}b2f", *elements, 1.0, 0.5 / 127)
    assert len(data) == quantized_width(BLOCK + 2)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 4), st.floats(1e-30, 1e30), st.integers(0, 2**32 - 1))
def test_no_element_is_off_by_more_than_half_a_step(
    size: int, num_tokens: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = scale * torch.randn(1, num_tokens, size, generator=generator)
    rows = quantize_rows(hidden)
    assert rows.shape == (1, num_tokens, quantized_width(size))
    back = dequantize_rows(rows, size, torch.float32)
    for start in range(0, size, BLOCK):
        block, got = hidden[..., start : start + BLOCK], back[..., start : start + BLOCK]
        half_step = block.abs().amax(-1, keepdim=True) / 254
        assert ((block - got).abs() <= half_step * (1 + 1e-4)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_normal_values_are_within_a_hundredth_of_their_deviation(dtype: torch.dtype) -> None:
    hidden = torch.randn(1, 64, 512, generator=torch.Generator().manual_seed(1)).to(dtype)
    back = dequantize_rows(quantize_rows(hidden), 512, dtype)
    assert back.dtype is dtype
    error = (back.float() - hidden.float()).square().mean().sqrt()
    assert 0.001 < error < 0.01


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(value: float) -> None:
    hidden = torch.ones(1, 2, 100)
    hidden[0, 1, 70] = value
    back = dequantize_rows(quantize_rows(hidden), 100, torch.float32)
    assert not is_finite(back)
    assert is_finite(back[:, :1])
    assert is_finite(dequantize_rows(quantize_rows(torch.zeros(1, 1, 7)), 7, torch.float32))
