"""Matrices by columns: the same values and names, results equal up to rounding, and the memory of the blob let go."""

from __future__ import annotations

import mmap
import weakref

import torch
from torch import nn

from neurogrid.model.weight_layout import store_by_columns


def layer() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64, bias=False))


def test_values_stay_and_results_are_equal_up_to_rounding() -> None:
    plain, fast = layer(), layer()
    fast.load_state_dict(plain.state_dict())
    assert store_by_columns(fast, is_whole=True)
    for name, value in plain.state_dict().items():
        assert torch.equal(fast.state_dict()[name], value)
    assert fast[1].weight.stride() == (1, 256)
    with torch.inference_mode():
        for rows in (1, 2, 5, 64):
            x = torch.randn(rows, 1, 64)
            assert torch.allclose(fast(x), plain(x), atol=1e-5)


def test_a_tied_embedding_stays_tied() -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
            self.head.weight = self.embedding.weight

    ends = Ends()
    expected = ends.embedding(torch.tensor([3, 7])).clone()
    assert store_by_columns(ends)
    assert ends.head.weight is ends.embedding.weight
    assert torch.equal(ends.embedding(torch.tensor([3, 7])), expected)


def test_half_precision_is_left_alone() -> None:
    half = layer().bfloat16()
    assert not store_by_columns(half, is_whole=True)
    assert half[1].weight.is_contiguous()


def test_what_is_mostly_something_else_stays_where_it_is() -> None:
    experts = nn.Module()
    experts.router = nn.Linear(16, 4)
    experts.weights = nn.Parameter(torch.zeros(4, 64, 16))
    where = experts.router.weight.data_ptr()
    assert not store_by_columns(experts, is_whole=True)
    assert experts.router.weight.data_ptr() == where


def test_the_memory_that_a_layer_came_in_is_let_go() -> None:
    pages = mmap.mmap(-1, 4096 + 4 * (2 * 64 + 64 * 256 + 256 + 256 * 64))
    is_alive = weakref.ref(pages)
    loaded, offset = layer(), 0
    for parameter in loaded.parameters():
        view = torch.frombuffer(pages, dtype=torch.float32, count=parameter.numel(), offset=offset)
        parameter.data = view.view(parameter.shape)
        offset += parameter.nbytes
    del parameter, view, pages
    assert is_alive() is not None
    assert store_by_columns(loaded, is_whole=True)
    assert is_alive() is None
