"""The outer step: torch's SGD to the bit, the golden numbers, parts, and state that a newcomer takes over."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from neurogrid.errors import NotFiniteError
from neurogrid.training.averaging.parts import Layout, RandomPartitions
from neurogrid.training.optimizers import OuterOptimizer, add_scaled_
from neurogrid.training.optimizers.rounding import _fused, _is_fused

torch_fuses = pytest.mark.skipif(
    not _is_fused(torch.device("cpu")), reason="torch's own SGD rounds twice on this processor"
)


def random(num: int, seed: int) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def bits(vector: Tensor) -> Tensor:
    return vector.view(torch.int32)


def digest(vectors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in vectors)).hexdigest()


def five_steps() -> OuterOptimizer:
    def exact(seed: int) -> Tensor:
        # torch.randn has other last bits on other processors.
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-(2**23), 2**23, (5_000,), generator=generator) / 2**23

    outer = OuterOptimizer(exact(0))
    for seed in range(1, 6):
        outer.step(exact(seed))
    return outer


@torch_fuses
@settings(deadline=None, max_examples=60)
@given(
    num=st.integers(1, 300),
    lr=st.sampled_from([0.7, 1.0, 0.1, 0.05]),
    momentum=st.sampled_from([0.0, 0.5, 0.7, 0.9]),
    seed=st.integers(0, 2**32),
)
def test_the_step_is_that_of_torch_to_the_bit(
    num: int, lr: float, momentum: float, seed: int
) -> None:
    theta0 = random(num, seed)
    theta0[::5] = -0.0
    weights = torch.nn.Parameter(theta0.clone())
    theirs = torch.optim.SGD([weights], lr, momentum, nesterov=momentum > 0)
    ours = OuterOptimizer(theta0, lr=lr, momentum=momentum)
    for step in range(5):
        mean = random(num, seed + step + 1)
        mean[::3] = 0.0
        weights.grad = -mean
        theirs.step()
        ours.step(mean)
        assert torch.equal(bits(ours.theta0), bits(weights.detach()))


@torch_fuses
def test_the_step_is_that_of_torch_to_the_bit_over_many_pieces() -> None:
    num = (1 << 19) + 12_345
    theta0 = random(num, 0)
    weights = torch.nn.Parameter(theta0.clone())
    theirs = torch.optim.SGD([weights], 0.7, 0.9, nesterov=True)
    ours = OuterOptimizer(theta0)
    for step in range(3):
        weights.grad = -random(num, step)
        theirs.step()
        ours.step(-weights.grad)
    assert torch.equal(bits(ours.theta0), bits(weights.detach()))


def test_the_bits_are_the_same_on_a_processor_that_rounds_products() -> None:
    """The same steps in a process whose torch does without AVX2: its own sum with a factor has other bits there."""
    program = (
        "import torch, test_outer_optimizer as t\n"
        "assert torch.backends.cpu.get_cpu_capability() == 'DEFAULT'\n"
        "print(t.digest(t.five_steps().state_vectors()))"
    )
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.environ.get("PYTHONPATH", ""), os.getcwd()])
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == digest(five_steps().state_vectors())


singles = st.floats(width=32, min_value=-(2.0**60), max_value=2.0**60)


# Products that are halfway between two float32, and a little beside that: float64 alone would round them twice.
@example(first=2.0**-80, second=1 + 2.0**-12, alpha=1 + 2.0**-12)
@example(first=-(2.0**-80), second=1 + 2.0**-12, alpha=1 + 3 * 2.0**-12)
@example(first=-(2.0**-80), second=-1 - 2.0**-12, alpha=1 + 2.0**-12)
@example(first=2.0**-80, second=-1 - 2.0**-12, alpha=1 + 3 * 2.0**-12)
@given(first=singles, second=singles, alpha=singles)
def test_a_sum_with_a_factor_is_rounded_once(first: float, second: float, alpha: float) -> None:
    found = _fused(torch.tensor([first]), torch.tensor([second]), alpha)
    exact = Fraction(first) + Fraction(second) * Fraction(alpha)
    error = abs(Fraction(found.item()) - exact)
    for direction in (-torch.inf, torch.inf):
        neighbour = torch.nextafter(found, torch.tensor([direction])).item()
        distance = abs(Fraction(neighbour) - exact)
        assert error < distance or (error == distance and not bits(found).item() & 1)
    target = torch.tensor([first])
    assert torch.equal(
        bits(add_scaled_(target, torch.tensor([second]), alpha) + 0.0), bits(found + 0.0)
    )


def test_the_first_step_moves_by_1_33_of_the_mean_difference() -> None:
    outer = OuterOptimizer(torch.zeros(3))
    norm = outer.step(torch.ones(3))
    torch.testing.assert_close(outer.theta0, torch.full((3,), 1.33))
    assert norm == pytest.approx(1.33 * 3**0.5)
    before = outer.theta0.clone()
    norm = outer.step(random(2, 1), [(1, 3)])
    assert norm == pytest.approx(float((outer.theta0 - before).norm()))


def test_golden_numbers_of_a_parameter_server() -> None:
    outer = OuterOptimizer(torch.zeros(5), lr=0.1, momentum=0.7)
    outer.step(torch.full((5,), 0.5))
    torch.testing.assert_close(outer.theta0, torch.full((5,), 0.085))
    before = outer.theta0.clone()
    outer.step(torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]))
    torch.testing.assert_close(
        outer.theta0 - before, torch.tensor([0.0415, 0.0585, 0.0755, 0.0925, 0.1095])
    )


def test_lr_1_without_momentum_is_the_mean_of_the_weights() -> None:
    members = [random(100, seed) for seed in range(4)]
    outer = OuterOptimizer(random(100, 9), lr=1.0, momentum=0.0)
    outer.step(torch.stack([outer.difference(theta) for theta in members]).mean(0))
    torch.testing.assert_close(outer.theta0, torch.stack(members).mean(0))
    assert len(outer.state_vectors()) == 1


def test_one_step_of_sgd_a_round_is_data_parallel_sgd() -> None:
    """To the bit, in the same order, where a difference holds a step exactly: on a grid of 2^-12."""

    def on_grid(vector: Tensor) -> Tensor:
        return (vector * 16).round() / 16

    eta = 2.0**-4
    parallel = on_grid(random(1_000, 0))
    outer = OuterOptimizer(parallel, lr=1.0, momentum=0.0)
    for step in range(4):
        gradients = [on_grid(random(1_000, 10 * step + member)) for member in range(1, 5)]
        total, differences = torch.zeros(1_000), torch.zeros(1_000)
        for gradient in gradients:
            total += gradient
            differences += outer.difference(outer.theta0 - eta * gradient)
        parallel = parallel - eta * (total / 4)
        outer.step(differences / 4)
        assert torch.equal(outer.theta0, parallel)


def test_one_step_of_sgd_a_round_is_data_parallel_sgd_within_rounding() -> None:
    parallel = random(1_000, 0)
    outer = OuterOptimizer(parallel, lr=1.0, momentum=0.0)
    for step in range(4):
        gradients = [random(1_000, 10 * step + member) for member in range(1, 5)]
        differences = [outer.difference(outer.theta0 - 0.1 * gradient) for gradient in gradients]
        parallel = parallel - 0.1 * torch.stack(gradients).mean(0)
        outer.step(torch.stack(differences).mean(0))
    torch.testing.assert_close(outer.theta0, parallel, rtol=0, atol=2e-6)


@given(
    edges=st.lists(st.integers(0, 400), min_size=2, max_size=8, unique=True).map(sorted),
    seed=st.integers(0, 99),
)
def test_a_step_over_a_part_is_the_whole_step_there_and_nothing_elsewhere(
    edges: list[int], seed: int
) -> None:
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    indices = torch.cat([torch.arange(start, stop) for start, stop in spans])
    whole, ours = OuterOptimizer(random(400, seed)), OuterOptimizer(random(400, seed))
    expected = [vector.clone() for vector in whole.state_vectors()]
    for step in range(2):
        theta = random(400, seed + step + 1)
        difference = whole.difference(theta)
        own = ours.difference(theta, part=spans)
        # Weights of the whole have moved as those of the part have.
        assert torch.equal(own, difference[indices])
        whole.step(difference)
        ours.step(own, spans)
    for before, after in zip(expected, whole.state_vectors(), strict=True):
        before[indices] = after[indices]
    for found, wanted in zip(ours.state_vectors(), expected, strict=True):
        assert torch.equal(bits(found), bits(wanted))


def test_random_partitions_touch_each_element_once() -> None:
    layout = Layout(("weights",), ((50_003,),))
    turns = RandomPartitions(layout, 20, seed=b"run")
    outer = OuterOptimizer(torch.zeros(50_003), lr=1.0, momentum=0.0)
    for number in range(20):
        outer.step(torch.ones(turns.num_elements(number)), turns.spans(number))
    assert torch.equal(outer.theta0, torch.ones(50_003))


def test_a_newcomer_goes_on_with_the_same_bits() -> None:
    outer, newcomer = five_steps(), OuterOptimizer(torch.zeros(5_000))
    newcomer.load([vector.clone() for vector in outer.state_vectors()])
    resumed = OuterOptimizer(torch.zeros(5_000))
    resumed.load_state_dict(outer.state_dict())
    for one in (outer, newcomer, resumed):
        one.step(random(5_000, 77))
    assert (
        digest(newcomer.state_vectors())
        == digest(outer.state_vectors())
        == digest(resumed.state_vectors())
    )


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_nothing_is_applied_of_a_mean_that_is_not_finite(poison: float) -> None:
    outer = five_steps()
    before = digest(outer.state_vectors())
    mean = torch.zeros(5_000)
    mean[4_321] = poison
    with pytest.raises(NotFiniteError, match="mean difference"):
        outer.step(mean)
    with pytest.raises(NotFiniteError, match="vector 1"):
        outer.load([torch.zeros(5_000), mean])
    assert digest(outer.state_vectors()) == before


def test_what_does_not_fit_is_refused() -> None:
    outer = five_steps()
    before = digest(outer.state_vectors())
    with pytest.raises(ValueError, match=r"float32 \[5000\]"):
        outer.step(torch.zeros(4_999))
    with pytest.raises(ValueError, match="float64"):
        outer.step(torch.zeros(5_000, dtype=torch.float64))
    with pytest.raises(ValueError, match="from 0 to 5000"):
        outer.step(torch.zeros(1), [(5_000, 5_001)])
    with pytest.raises(ValueError, match="2 vectors"):
        outer.load([torch.zeros(5_000)])
    with pytest.raises(ValueError, match="momentum"):
        outer.load_state_dict({"theta0": torch.zeros(5_000)})
    with pytest.raises(ValueError, match="theta must be"):
        outer.difference(torch.zeros(1))
    assert digest(outer.state_vectors()) == before
    with pytest.raises(ValueError, match="outer lr"):
        OuterOptimizer(torch.zeros(1), lr=0.0)
    with pytest.raises(ValueError, match="momentum"):
        OuterOptimizer(torch.zeros(1), momentum=1.0)


@pytest.mark.parametrize("spans", [[(-1, 2)], [(3, 2)], [(0, 5), (4, 6)], [(4, 6), (0, 2)]])
def test_spans_ascend(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        five_steps().difference(torch.zeros(5_000), part=spans)
