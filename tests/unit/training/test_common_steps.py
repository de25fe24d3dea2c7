"""Steps that all members make alike: the same as one process makes with the mean gradient."""

from __future__ import annotations

import pytest
import torch

from neurogrid.training.averaging.groups import Outcome
from neurogrid.training.averaging.parts import Layout
from neurogrid.training.runs.common_steps import CommonSteps
from neurogrid.training.runs.run_file import InnerSection

LAYOUT = Layout(("a", "b"), ((3, 4), (5,)))
STEPS = 6


def outcome(number: int, values: torch.Tensor, *, contributed: bool = True) -> Outcome:
    return Outcome(number, values, ("a",), (1.0,), contributed)


@pytest.mark.parametrize(
    "inner",
    [
        InnerSection(lr=0.1, schedule="linear", warmup=2, clip=0.5),
        InnerSection(
            optimizer="sgd", lr=0.1, momentum=0.9, schedule="constant", warmup=0, clip=0.0
        ),
        InnerSection(optimizer="sgd", lr=0.1, weight_decay=0.0, schedule="constant", warmup=0),
    ],
)
def test_steps_are_those_of_torch_over_all_parameters(inner: InnerSection) -> None:
    torch.manual_seed(0)
    start = torch.randn(LAYOUT.num_elements)
    steps = CommonSteps(LAYOUT, start.clone(), inner, total_steps=STEPS)
    parameters = [torch.nn.Parameter(view.clone()) for view in LAYOUT.views(start).values()]
    made: torch.optim.Optimizer
    if inner.optimizer == "sgd":
        made = torch.optim.SGD(
            parameters, lr=inner.lr, momentum=inner.momentum, weight_decay=inner.weight_decay
        )
    else:
        made = torch.optim.AdamW(
            parameters, lr=inner.lr, betas=inner.betas, eps=inner.eps, weight_decay=0.1
        )
    factors = {"linear": [0, 0.5, 1, 0.75, 0.5, 0.25], "constant": [1] * STEPS}[inner.schedule]
    for number in range(STEPS):
        gradient = torch.randn(LAYOUT.num_elements)
        for parameter, view in zip(parameters, LAYOUT.views(gradient).values(), strict=True):
            parameter.grad = view.clone()
        if inner.clip:
            torch.nn.utils.clip_grad_norm_(parameters, inner.clip)
        made.param_groups[0]["lr"] = inner.lr * factors[number]
        made.step()
        if number == 3:  # a newcomer goes on from here
            again = CommonSteps(LAYOUT, torch.zeros_like(start), inner, total_steps=STEPS)
            again.load(steps.state())
            steps = again
        steps.apply(outcome(number + 1, gradient))
        wanted = torch.cat([parameter.detach().flatten() for parameter in parameters])
        torch.testing.assert_close(steps.weights, wanted, rtol=1e-6, atol=1e-7)


def test_what_is_in_no_round_counts_in_the_next() -> None:
    inner = InnerSection(schedule="constant", warmup=0)
    steps = CommonSteps(LAYOUT, torch.zeros(17), inner, total_steps=STEPS)
    steps.add(torch.full((17,), 2.0), 1.0)
    steps.apply(outcome(1, torch.ones(17), contributed=False))
    steps.add(torch.full((17,), 5.0), 2.0)
    assert torch.allclose(steps.contribution(), torch.full((17,), 4.0))
    steps.apply(outcome(2, torch.ones(17)))
    assert torch.equal(steps.contribution(), torch.zeros(17))


def test_a_round_is_not_left_out() -> None:
    steps = CommonSteps(LAYOUT, torch.zeros(17), InnerSection(warmup=0), total_steps=STEPS)
    with pytest.raises(Exception, match="round 2 cannot be applied"):
        steps.apply(outcome(2, torch.ones(17)))


def test_a_late_gradient_counts_less_beside_a_newer_one() -> None:
    inner = InnerSection(optimizer="sgd", lr=0.1, schedule="constant", warmup=0)
    steps = CommonSteps(LAYOUT, torch.zeros(17), inner, total_steps=STEPS, freshness=0.25)
    ones = torch.ones(LAYOUT.num_elements)
    steps.add(4 * ones, 8.0)
    steps.apply(outcome(1, torch.zeros(17), contributed=False))
    torch.testing.assert_close(steps.contribution(), 4 * ones)
    steps.add(ones, 8.0)
    torch.testing.assert_close(steps.contribution(), (0.25 * 4 + 1) / 1.25 * ones)
    steps.apply(outcome(2, steps.contribution()))
    assert not steps.contribution().any()
