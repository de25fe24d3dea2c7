"""What is finite, told by the extremes."""

from __future__ import annotations

import pytest
import torch

from neurogrid.model.files.tensors import is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_element_is_enough(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    tensor = torch.full((1, 3, 65), largest, dtype=dtype)
    tensor[0, 1] = -largest
    assert is_finite(tensor)
    for value in (torch.nan, torch.inf, -torch.inf):
        for at in (0, 64):
            spoilt = tensor.clone()
            spoilt[0, 2, at] = value
            assert not is_finite(spoilt)


def test_nothing_is_finite() -> None:
    assert is_finite(torch.empty(1, 0, 8))
