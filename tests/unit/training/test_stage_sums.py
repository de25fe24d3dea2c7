"""What members of a stage have in common: sums of gradients, at a low rank too, and means of weights in turn."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from neurogrid.training.stages.stage_sums import NUM_PARTITIONS, Means, StageSums

SHAPES = {"a": (96, 64), "b": (64,), "c": (48, 80), "d": (3, 5)}


def member(seed: int, rank: int = 0) -> tuple[dict[str, nn.Parameter], StageSums]:
    """Parameters of a member, and its sums; the gradient of "d" is missing at some."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in SHAPES.items()
    }
    for name, parameter in parameters.items():
        if name != "d" or seed:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    return parameters, StageSums(parameters, rank=rank, seed=7)


def together(means: Sequence[Means]) -> list[int]:
    """Give all members the mean of what they give, until the end; the elements of each vector."""
    vectors: list[Tensor] = [next(each) for each in means]
    lengths = []
    while vectors:
        lengths.append(len(vectors[0]))
        mean = torch.stack(vectors).mean(0)
        vectors = []
        for each in means:
            with suppress(StopIteration):
                vectors.append(each.send(mean))
    return lengths


@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_gradients_are_the_sums_of_all_members(num: int) -> None:
    members = [member(seed) for seed in range(num)]
    wanted = {
        name: sum(
            (torch.zeros(SHAPES[name]) if p[name].grad is None else p[name].grad.clone())
            for p, _ in members
        )
        for name in SHAPES
    }
    lengths = together([sums.gradients(num, 1) for _, sums in members])
    assert lengths == [sums.num_elements for _, sums in members[:1]]
    for parameters, _ in members:
        for name, parameter in parameters.items():
            assert torch.allclose(parameter.grad, wanted[name], atol=1e-5)
            assert torch.equal(parameter.grad, members[0][0][name].grad)


@pytest.mark.parametrize("rank", [4, 8, 16, 32, 64])
def test_a_rank_sends_less_and_all_have_the_same(rank: int) -> None:
    members = [member(seed, rank) for seed in range(3)]
    exact = {name: sum(p[name].grad for p, _ in members) for name in ("a", "b", "c")}
    lengths = together([sums.gradients(3, 1) for _, sums in members])
    num_elements = members[0][1].num_elements
    assert all(length <= num_elements for length in lengths)
    assert (sum(lengths) < num_elements / 2) == (rank <= 8)
    for parameters, _ in members:
        for name, parameter in parameters.items():
            assert torch.equal(parameter.grad, members[0][0][name].grad)
    # What is not compressed is exact.
    assert torch.allclose(members[0][0]["b"].grad, exact["b"], atol=1e-5)
    apart = (members[0][0]["a"].grad - exact["a"]).norm() / exact["a"].norm()
    assert apart < 1
    if rank >= 64:  # no half is saved, so it goes as it is
        assert apart < 1e-6


def test_what_a_rank_has_not_sent_is_made_good() -> None:
    """The same gradients again and again: what was applied comes to their sum, step by step."""
    members = [member(seed, 4) for seed in range(2)]
    gradients = [
        {n: p.grad.clone() for n, p in ps.items() if p.grad is not None} for ps, _ in members
    ]
    exact = sum(each["a"] for each in gradients)
    applied, distances = torch.zeros_like(exact), []
    for step in range(1, 41):
        for (parameters, _), own in zip(members, gradients, strict=True):
            for name, parameter in parameters.items():
                parameter.grad = own[name].clone() if name in own else None
        together([sums.gradients(2, 1) for _, sums in members])
        applied += members[0][0]["a"].grad
        distances.append(float((applied - step * exact).norm() / (step * exact.norm())))
        for _, sums in members:
            sums.commit()
    assert distances[-1] < distances[0] / 3


def test_a_step_that_is_not_applied_leaves_nothing() -> None:
    kept, dropped = [[member(seed, 4) for seed in range(2)] for _ in range(2)]
    together([sums.gradients(2, 1) for _, sums in dropped])
    for _, sums in dropped:
        sums.drop()
    again = [member(seed, 4)[0] for seed in range(2)]
    for (parameters, _), fresh in zip(dropped, again, strict=True):
        for name, parameter in parameters.items():
            parameter.grad = fresh[name].grad
    for group in (kept, dropped):
        together([sums.gradients(2, 1) for _, sums in group])
    for name in SHAPES:
        assert torch.equal(kept[0][0][name].grad, dropped[0][0][name].grad)


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_twenty_turns_take_the_mean_of_each_weight_once(first: int) -> None:
    members = [member(seed) for seed in range(2)]
    before = [{n: p.detach().clone() for n, p in ps.items()} for ps, _ in members]
    units = -(-members[0][1].num_elements // 1024)
    num = min(NUM_PARTITIONS, units)
    touched = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for turn in range(first, first + num):
        was = {n: p.detach().clone() for n, p in members[0][0].items()}
        together([sums.weights(turn) for _, sums in members])
        for name, parameter in members[0][0].items():
            touched[name] += parameter.detach() != was[name]
    for name in SHAPES:
        mean = (before[0][name] + before[1][name]) / 2
        assert (touched[name] == 1).all()
        for parameters, _ in members:
            assert torch.allclose(parameters[name], mean, atol=1e-6)


def test_a_gradient_that_is_not_finite_is_seen() -> None:
    parameters, sums = member(1)
    assert sums.has_finite_gradients()
    parameters["c"].grad[3, 4] = float("nan")
    assert not sums.has_finite_gradients()
