"""The reduction of rows: in the order of ranks, in blocks, and only where it means something."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from neurogrid.errors import ConfigurationError
from neurogrid.training.distributed.sums import BLOCK, reduction_of

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8)


@given(
    st.sampled_from(DTYPES),
    st.integers(1, 6),
    st.sampled_from([0, 1, 7, BLOCK, 2 * BLOCK + 3]),
    st.integers(0, 2**32),
    st.integers(0, 5),
)
def test_rows_are_added_in_their_order(
    dtype: torch.dtype, num_rows: int, num_items: int, seed: int, own: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = [(torch.randn(num_items, generator=generator) * 50).to(dtype) for _ in range(num_rows)]
    wanted = rows[0].clone()
    for row in rows[1:]:
        wanted += row
    out = rows[own % num_rows]  # the place of the sum is one of them
    reduction_of(ReduceOp.SUM, dtype, num_rows).reduce(rows, out)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        (ReduceOp.AVG, [2.0, -1.0]),
        (ReduceOp.PRODUCT, [3.0, -15.0]),
        (ReduceOp.MIN, [1.0, -5.0]),
        (ReduceOp.MAX, [3.0, 3.0]),
    ],
)
def test_each_operation(op: ReduceOp, wanted: list[float]) -> None:
    rows = [torch.tensor([1.0, 3.0]), torch.tensor([3.0, -5.0])]
    out = torch.empty(2)
    reduction_of(op, torch.float32, 2).reduce(rows, out)
    assert out.tolist() == wanted


@pytest.mark.parametrize(
    ("op", "wanted"), [(ReduceOp.BAND, 8), (ReduceOp.BOR, 14), (ReduceOp.BXOR, 6)]
)
def test_bits(op: ReduceOp, wanted: int) -> None:
    out = torch.empty(1, dtype=torch.int64)
    reduction_of(op, torch.int64, 2).reduce([torch.tensor([12]), torch.tensor([10])], out)
    assert out.item() == wanted


@pytest.mark.parametrize(
    ("op", "dtype", "said"),
    [
        (ReduceOp.BAND, torch.float32, "no BAND of torch.float32"),
        (ReduceOp.AVG, torch.int64, "no AVG of torch.int64"),
        (ReduceOp.MAX, torch.complex64, "no MAX of torch.complex64"),
        (ReduceOp.PREMUL_SUM, torch.float32, "no PREMUL_SUM"),
        (ReduceOp.SUM, torch.float8_e4m3fn, "no SUM of torch.float8_e4m3fn"),
        (ReduceOp.SUM, torch.uint16, "no SUM of torch.uint16"),
    ],
)
def test_what_means_nothing_is_refused(op: ReduceOp, dtype: torch.dtype, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        reduction_of(op, dtype, 2)
