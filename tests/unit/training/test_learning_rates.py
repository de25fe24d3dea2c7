"""Factors of the learning rate by name, and gradients that weigh right."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from neurogrid.training.optimizers import (
    SCHEDULES,
    clipping_factor,
    schedule_of,
    square_of_norm,
    token_weighted_loss,
)


def test_constant() -> None:
    factor = schedule_of("constant", num_steps=10, num_warmup_steps=4)
    assert [factor(step) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear() -> None:
    factor = schedule_of("linear", num_steps=12, num_warmup_steps=2)
    assert [factor(step) for step in (0, 1, 2, 7, 12)] == [0.0, 0.5, 1.0, 0.5, 0.0]


def test_cosine() -> None:
    factor = schedule_of("cosine", num_steps=12, num_warmup_steps=2, least=0.1)
    for step in range(2, 13):
        wanted = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 2) / 10))
        assert factor(step) == pytest.approx(wanted)
    assert factor(1) == 0.5


def test_warmup_stable_decay() -> None:
    factor = schedule_of(
        "warmup_stable_decay", num_steps=20, num_warmup_steps=4, num_decay_steps=8, least=0.2
    )
    assert [factor(step) for step in (4, 7, 11, 12)] == [1.0] * 4
    for step in range(12, 20):
        wanted = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * (step - 12) / 8))
        assert factor(step) == pytest.approx(wanted)
    assert factor(25) == pytest.approx(0.2)


@given(name=st.sampled_from(list(SCHEDULES)), num_steps=st.integers(2, 99), data=st.data())
def test_factors_stay_between_zero_and_one(name: str, num_steps: int, data: st.DataObject) -> None:
    decay = data.draw(st.integers(1, num_steps)) if name == "warmup_stable_decay" else 0
    warmup = data.draw(st.integers(0, num_steps - decay))
    factor = schedule_of(name, num_steps=num_steps, num_warmup_steps=warmup, num_decay_steps=decay)
    assert all(0 <= factor(step) <= 1 for step in range(num_steps + 5))
    assert warmup == num_steps or factor(warmup) == 1


def test_an_optimiser_of_torch_follows_a_schedule() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = LambdaLR(optimizer, schedule_of("linear", num_steps=4))
    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == [0.5, 0.375, 0.25, 0.125]


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("sine", {}),
        ("cosine", {"num_steps": 0}),
        ("cosine", {"num_warmup_steps": 11}),
        ("cosine", {"num_decay_steps": 2}),
        ("cosine", {"least": 1.5}),
        ("linear", {"least": 0.1}),
        ("warmup_stable_decay", {}),
        ("warmup_stable_decay", {"num_warmup_steps": 8, "num_decay_steps": 3}),
    ],
)
def test_settings_that_do_not_fit(name: str, numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        schedule_of(name, **{"num_steps": 10, **numbers})


def test_uneven_micro_batches_weigh_as_the_whole_batch() -> None:
    torch.manual_seed(0)
    weights = torch.randn(5, 11, requires_grad=True)
    inputs, labels = torch.randn(12, 5), torch.randint(0, 11, (12,))
    labels[torch.tensor([0, 3, 8])] = -100
    wanted = functional.cross_entropy(inputs @ weights, labels)
    (expected,) = torch.autograd.grad(wanted, weights)
    total, gradient = 0.0, torch.zeros(5, 11)
    for start, stop in ((0, 2), (2, 9), (9, 12)):
        loss = token_weighted_loss(inputs[start:stop] @ weights, labels[start:stop], 9)
        total += loss.item()
        gradient += torch.autograd.grad(loss, weights)[0]
    assert total == pytest.approx(wanted.item(), rel=1e-6)
    torch.testing.assert_close(gradient, expected)
    with pytest.raises(ValueError, match="label tokens"):
        token_weighted_loss(inputs @ weights, labels, 0)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_over_stages_is_that_of_torch_over_all(max_norm: float) -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(3, 4)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.randn(3, 4)
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    squares = [square_of_norm(gradients[:1]), square_of_norm(gradients[1:])]
    factor = clipping_factor(squares, max_norm)
    torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(factor * gradient, parameter.grad)
    with pytest.raises(ValueError, match="greatest norm"):
        clipping_factor(squares, 0.0)


def test_a_norm_is_had_where_there_is_no_float64() -> None:
    """As on Apple's GPUs."""
    here = torch.tensor([3.0, 4.0])

    class There:
        """Such a tensor there."""

        device = SimpleNamespace(type="mps")

        def detach(self) -> There:
            return self

        def cpu(self) -> torch.Tensor:
            return here

    there: Any = There()
    assert square_of_norm([there, here]) == 50.0
