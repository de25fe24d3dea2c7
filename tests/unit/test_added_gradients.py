"""Gradients that are added where they are: the bits that torch gives, whatever a model does with its layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from neurogrid.model.stages import added_gradients
from neurogrid.model.stages.added_gradients import add_gradients_in_place

ROWS, WIDTH = 24, 48


class Model(nn.Module):
    """One layer that is used once, one that is used twice, and one that is its embedding, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, WIDTH)
        self.once = nn.Linear(WIDTH, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH, bias=False)
        self.fixed = nn.Linear(WIDTH, WIDTH)
        self.fixed.requires_grad_(False)
        self.head = nn.Linear(WIDTH, 64, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.once(self.embedding(ids)).tanh()
        hidden = self.twice(self.twice(hidden).tanh())
        logits: Tensor = self.head(self.fixed(hidden))
        return logits


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the gradients that were added in place."""
    found: list[tuple[int, ...]] = []
    gradient = added_gradients._Adding.gradient

    def spy(adding: added_gradients._Adding[Any]) -> Tensor | None:
        if (result := gradient(adding)) is not None:
            found.append(tuple(result.shape))
        return result

    monkeypatch.setattr(added_gradients._Adding, "gradient", spy)
    return found


def learn(model: nn.Module, num: int) -> None:
    """Micro-batches whose forward passes all come before their backward passes, as in a pipeline."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(64, (num, 2, ROWS // 2), generator=generator)
    for loss in [model(each).square().mean() for each in ids]:
        loss.backward()


def same_gradients(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(
        (one.grad is None and two.grad is None)
        or (one.grad is not None and two.grad is not None and torch.equal(one.grad, two.grad))
        for one, two in pairs
    )


def test_it_gives_the_bits_of_torch(added: list[tuple[int, ...]]) -> None:
    torch.manual_seed(1)
    plain = Model()
    model = copy.deepcopy(plain)
    add_gradients_in_place(model)
    for num in (1, 3, 1, 2):  # steps, of so many micro-batches
        for each in (plain, model):
            each.zero_grad(set_to_none=True)
            learn(each, num)
        assert same_gradients(plain, model)
    # Those of the layer that is used once, and of no other: torch adds up the others before.
    assert added == [(WIDTH, WIDTH)] * 3
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_what_is_no_float32_is_left_to_torch(added: list[tuple[int, ...]]) -> None:
    torch.manual_seed(2)
    plain = Model()
    model = copy.deepcopy(plain)
    add_gradients_in_place(model)
    for each in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            learn(each, 2)
        each.double()
        each.zero_grad(set_to_none=True)
        learn(each, 2)
    assert same_gradients(plain, model)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(1, 3).long()), plain(torch.ones(1, 3).long()))
    assert added == []


def test_a_shape_whose_product_is_made_in_pieces_is_left_to_torch(
    added: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    added_gradients._has_same_bits.cache_clear()
    monkeypatch.setattr(torch, "addmm", lambda there, rows, given: there + rows @ given + 1e-3)
    torch.manual_seed(3)
    plain = Model()
    model = copy.deepcopy(plain)
    add_gradients_in_place(model)
    for each in (plain, model):
        learn(each, 3)
    added_gradients._has_same_bits.cache_clear()
    assert same_gradients(plain, model)
    assert added == []


def test_a_layer_that_is_left_to_torch_once_is_left_to_it(
    added: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few rows and with many in one pass: torch adds up both before it adds them to what is there."""
    monkeypatch.setattr(added_gradients, "_has_same_bits", lambda rows, *shape: rows < ROWS)
    torch.manual_seed(4)
    plain = nn.Linear(WIDTH, WIDTH)
    layer = copy.deepcopy(plain)
    add_gradients_in_place(layer)
    given = torch.randn(3, ROWS, WIDTH)
    for each in (plain, layer):
        for rows in given:
            (each(rows).square().mean() + each(rows[:2]).tanh().sum()).backward()
    assert same_gradients(plain, layer)
    assert added == []


def test_what_is_computed_again_goes_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(added_gradients, "_has_same_bits", lambda rows, *shape: rows < ROWS)
    torch.manual_seed(5)
    plain = nn.Linear(WIDTH, WIDTH)
    layer = copy.deepcopy(plain)
    add_gradients_in_place(layer)
    for each in (plain, layer):
        given = [torch.ones(num, WIDTH, requires_grad=True) for num in (2, ROWS, 3)]
        for result in [checkpoint(each, one, use_reentrant=False) for one in given]:
            result.square().sum().backward()
    assert same_gradients(plain, layer)


@pytest.mark.parametrize("padding", [None, 3])
def test_of_an_embedding_the_rows_of_own_ids_change(
    padding: int | None, added: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(6)
    plain = nn.Sequential(nn.Embedding(64, WIDTH, padding_idx=padding), nn.Tanh())
    model = copy.deepcopy(plain)
    add_gradients_in_place(model)
    ids = torch.randint(8, (3, 2, ROWS))  # each id many times
    for each in (plain, model):
        for batch in ids:
            (each(batch) * torch.linspace(-1, 1, ROWS)[:, None]).square().sum().backward()
    assert same_gradients(plain, model)
    assert added == [(64, WIDTH)] * 2


@pytest.mark.parametrize("kinds", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_an_embedding_of_another_kind_is_left_to_torch(
    kinds: dict[str, Any], added: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(7)
    plain = nn.Embedding(64, WIDTH, **kinds)
    model = copy.deepcopy(plain)
    add_gradients_in_place(model)
    for each in (plain, model):
        for batch in torch.arange(ROWS).view(2, -1):
            each(batch % 5).tanh().sum().backward()
    assert same_gradients(plain, model)
    assert added == []


def test_a_micro_batch_of_padding_alone_changes_nothing(added: list[tuple[int, ...]]) -> None:
    torch.manual_seed(8)
    plain = nn.Embedding(64, WIDTH, padding_idx=0)
    model = copy.deepcopy(plain)
    add_gradients_in_place(model)
    for each in (plain, model):
        for ids in (torch.arange(ROWS), torch.zeros(ROWS, dtype=torch.int64)):
            (each(ids) + 1).square().sum().backward()
    assert same_gradients(plain, model)
    assert added == [(64, WIDTH)]
