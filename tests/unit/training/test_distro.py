"""DisTrO: the transform, the steps written out, members that agree, and what a peer could send."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neurogrid.errors import NotFiniteError
from neurogrid.training.optimizers import ChunkedDct, Coefficients, Distro

SHAPES = [(8, 12), (10,), (2, 3, 4), ()]
NUM = 96 + 10 + 24 + 1


def random(seed: int, num: int = NUM) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def make(**options: object) -> Distro:
    return Distro(random(0), SHAPES, **{"top_k": 3, "max_side": 4, **options})  # type: ignore[arg-type]


def test_what_remains_is_what_the_commit_leaves() -> None:
    for one_bit in (True, False):
        member = make(one_bit=one_bit)
        for step in range(3):
            sent = member.encode(random(step + 1), 0.1)
            remaining = member.remaining()
            member.commit(member.mean([sent]))
            assert torch.equal(member.own_vectors()[0], remaining)
    with pytest.raises(ValueError, match="under way"):
        member.remaining()


@given(
    shape=st.lists(st.integers(1, 12), max_size=3).map(tuple),
    max_side=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_the_transform_is_orthonormal(shape: tuple[int, ...], max_side: int, seed: int) -> None:
    transform = ChunkedDct(shape, max_side)
    tensor = random(seed, math.prod(shape)).view(shape)
    coefficients = transform.encode(tensor)
    assert coefficients.shape == (transform.num_chunks, transform.chunk_size)
    torch.testing.assert_close(coefficients.norm(), tensor.norm())
    torch.testing.assert_close(transform.decode(coefficients), tensor, rtol=0, atol=1e-5)


def test_the_transform_is_the_formula() -> None:
    matrix = random(1, 24).view(4, 6).double()
    (found,) = ChunkedDct((4, 6), 8).encode(matrix)
    for u in range(4):
        for v in range(6):
            total = sum(
                matrix[i, j].item()
                * math.cos(math.pi * (2 * i + 1) * u / 8)
                * math.cos(math.pi * (2 * j + 1) * v / 12)
                for i in range(4)
                for j in range(6)
            )
            scale = math.sqrt((1 if u == 0 else 2) / 4) * math.sqrt((1 if v == 0 else 2) / 6)
            assert found[6 * u + v].item() == pytest.approx(scale * total, abs=1e-12)


def test_chunks_are_the_greatest_divisors() -> None:
    transform = ChunkedDct((96, 100), 64)
    assert (transform.num_chunks, transform.chunk_size) == (2 * 2, 48 * 50)


def direction(tensor: Tensor) -> Tensor:
    # Signs that cancel are zero, and not what rounding makes of them.
    return tensor.round(decimals=9).sign()


def written_out(steps: int, one_bit: bool) -> list[Tensor]:
    """Members' weights in one tensor each, [8, 4] in two chunks, with the lookahead undone in place."""
    generator = torch.Generator().manual_seed(3)
    weights = [torch.zeros(8, 4, dtype=torch.float64) for _ in range(3)]
    momenta = [torch.zeros(8, 4, dtype=torch.float64) for _ in range(3)]
    sent: list[Tensor] = []
    transform = ChunkedDct((8, 4), 4)
    previous_lr, mean = 0.0, torch.zeros(8, 4)
    for step in range(steps):
        lr = 0.1 / (step + 1)
        gradients = [torch.randn(8, 4, generator=generator).double() for _ in range(3)]
        for member in range(3):
            if sent:
                weights[member] += previous_lr * direction(sent[member])
                weights[member] -= previous_lr * direction(mean)
        sent = []
        for member in range(3):
            momenta[member] = 0.999 * momenta[member] + lr * gradients[member]
            coefficients = transform.encode(momenta[member])
            kept = torch.zeros_like(coefficients)
            for chunk in range(2):
                for place in coefficients[chunk].abs().argsort(descending=True)[:5]:
                    kept[chunk, place] = coefficients[chunk, place]
            momenta[member] -= transform.decode(kept)
            sent.append(transform.decode(kept.sign() if one_bit else kept))
        mean = sum(sent) / 3  # type: ignore[assignment]
        previous_lr = lr
        for member in range(3):
            weights[member] -= lr * direction(sent[member])
    return weights


@pytest.mark.parametrize("one_bit", [False, True])
def test_steps_are_those_written_out(one_bit: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    members = [
        Distro(torch.zeros(32), [(8, 4)], top_k=5, max_side=4, one_bit=one_bit) for _ in range(3)
    ]
    looks = [torch.empty(32) for _ in members]
    for step in range(6):
        gradients = [torch.randn(8, 4, generator=generator) for _ in range(3)]
        sent = [
            member.encode(gradient.flatten(), 0.1 / (step + 1))
            for member, gradient in zip(members, gradients, strict=True)
        ]
        for member, look in zip(members, looks, strict=True):
            member.look_ahead(look)
        mean = members[0].mean(sent)
        for member in members:
            member.commit(mean)
            assert torch.equal(member.theta, members[0].theta)
    for look, expected in zip(looks, written_out(6, one_bit), strict=True):
        torch.testing.assert_close(look, expected.flatten().float(), rtol=0, atol=1e-6)


def test_what_is_not_sent_stays_in_the_momentum() -> None:
    member = make()
    gradient = random(1)
    sent = member.encode(gradient, 0.5)
    member.commit(member.mean([sent]))
    (momentum,) = member.own_vectors()
    # Of orthonormal coefficients, those that are left: their squares are what is missing.
    kept = (0.5 * gradient).square().sum() - sent.values.square().sum()
    torch.testing.assert_close(momentum.square().sum(), kept)
    assert sent.values.numel() == 3 * 6 + 2 * 5 + 3 * 2 + 1


def test_with_all_coefficients_the_step_is_the_sign_of_the_mean_gradient() -> None:
    members = [make(top_k=16) for _ in range(4)]
    gradients = [random(seed) for seed in range(10, 14)]
    sent = [m.encode(g, 0.25) for m, g in zip(members, gradients, strict=True)]
    members[0].commit(members[0].mean(sent))
    wanted = random(0) - 0.25 * torch.stack(gradients).mean(0).sign()
    assert torch.equal(members[0].theta, wanted)
    assert float(members[0].own_vectors()[0].abs().max()) < 1e-6


def test_directions_that_cancel_are_no_step() -> None:
    """In one bit, signs often cancel exactly; the rounding of a machine must not be taken for a direction."""
    member = Distro(torch.zeros(4), [(4,)], top_k=2, max_side=4, one_bit=True)
    member.encode(torch.ones(4), 1.0)
    member.commit(torch.tensor([1.0, 0.0, -1.0, 0.0]))
    # The frequencies 0 and 2 of 4 elements, one less the other: (0, 1, 1, 0) but for rounding.
    assert member.theta.tolist() == [0.0, -1.0, -1.0, 0.0]


@pytest.mark.parametrize("one_bit", [False, True])
def test_weights_that_nobody_has_a_gradient_of_stay(one_bit: bool) -> None:
    """Rows of an embedding whose tokens nobody saw: signs have no zero, so nothing is sent of them."""
    member = Distro(torch.ones(32), [(8, 4)], top_k=5, max_side=4, one_bit=one_bit)
    gradient = torch.zeros(8, 4)
    gradient[:4] = torch.linspace(-1, 1, 16).reshape(4, 4)
    sent = member.encode(gradient.flatten(), 0.5)
    assert sent.positions[5:].tolist() == [16, 17, 18, 19, 20]
    assert not sent.values[5:].any()
    member.commit(member.mean([sent]))
    assert torch.equal(member.theta[16:], torch.ones(16))
    assert (member.theta[:16] != 1).any()


def test_a_failed_exchange_loses_nothing() -> None:
    member = make()
    member.encode(random(1), 0.5)
    member.roll_back()
    (momentum,) = member.own_vectors()
    assert torch.equal(momentum, 0.5 * random(1))
    member.encode(random(2), 0.25)
    member.roll_back()
    wanted = 0.999 * 0.5 * random(1) + 0.25 * random(2)
    torch.testing.assert_close(momentum, wanted, rtol=0, atol=1e-6)
    assert torch.equal(member.theta, random(0))
    with pytest.raises(ValueError, match="nothing is under way"):
        member.commit(torch.zeros(NUM))


def test_a_newcomer_has_the_weights_and_a_momentum_of_its_own() -> None:
    member, newcomer = make(), Distro(torch.zeros(NUM), SHAPES, top_k=3, max_side=4)
    member.commit(member.mean([member.encode(random(1), 0.5)]))
    newcomer.load([vector.clone() for vector in member.state_vectors()])
    assert torch.equal(newcomer.theta, member.theta)
    assert not newcomer.own_vectors()[0].any()
    sent = [one.encode(random(2), 0.1) for one in (member, newcomer)]
    for one in (member, newcomer):
        one.commit(one.mean(sent))
    assert torch.equal(newcomer.theta, member.theta)


@settings(max_examples=50)
@given(
    data=st.data(),
    place=st.integers(0, 34),
    one_bit=st.booleans(),
    fault=st.sampled_from(["outside", "twice", "nan", "inf", "short", "dtype", "two"]),
)
def test_what_nobody_encodes_is_refused(
    data: st.DataObject, place: int, one_bit: bool, fault: str
) -> None:
    member = make(one_bit=one_bit)
    good = member.encode(random(1), 0.5)
    member.check(good)
    positions, values = good.positions.clone(), good.values.clone()
    if fault == "outside":
        positions[place] = data.draw(st.integers(-(2**40), -1) | st.integers(NUM, 2**40))
    elif fault == "twice":  # the first chunks have three each
        positions[place % 6 * 3 + 1] = positions[place % 6 * 3]
    elif fault == "nan":
        values[place] = torch.nan
    elif fault == "inf":
        values[place] = torch.inf
    elif fault == "short":
        positions, values = positions[:-1], values[:-1]
    elif fault == "dtype":
        positions = positions.int()
    else:
        values[place] = 2.0
    bad = Coefficients(positions, values)
    if fault == "two" and not one_bit:
        member.check(bad)
        return
    with pytest.raises((ValueError, NotFiniteError)):
        member.mean([good, bad])


def test_a_mean_of_finite_values_is_finite() -> None:
    """Two members that agree on more than float32 has would end it for all."""
    member, most = make(one_bit=False), torch.finfo(torch.float32).max
    good = member.encode(random(1), 0.5)
    member.roll_back()
    huge = Coefficients(good.positions, torch.full_like(good.values, most))
    less = Coefficients(good.positions, torch.full_like(good.values, -most))
    for sent, value in (([huge, huge], most), ([huge, huge, less], most / 3), ([huge] * 3, most)):
        mean = member.mean(sent)
        assert torch.allclose(mean[good.positions], torch.full_like(good.values, value))
        member.apply(mean, 0.1)
    member.take_back([huge, less, huge], [huge, huge], 0.1)
    assert bool(torch.isfinite(member.theta).all())


def test_steps_out_of_order_are_refused() -> None:
    member = make()
    with pytest.raises(ValueError, match="nothing is under way"):
        member.look_ahead(torch.empty(NUM))
    member.encode(random(1), 0.5)
    with pytest.raises(ValueError, match="committed or rolled back"):
        member.encode(random(1), 0.5)
    with pytest.raises(ValueError, match="nobody"):
        member.mean([])
    before = member.theta.clone()
    with pytest.raises(NotFiniteError):
        member.commit(torch.full((NUM,), torch.nan))
    assert torch.equal(member.theta, before)
    member.roll_back()
    with pytest.raises(NotFiniteError):
        member.encode(torch.full((NUM,), torch.inf), 0.5)
    with pytest.raises(ValueError, match="learning rate"):
        member.encode(random(1), 0.0)
    with pytest.raises(ValueError, match="top_k"):
        make(top_k=0)
    with pytest.raises(ValueError, match="decay"):
        make(decay=1.1)


@pytest.mark.parametrize("one_bit", [False, True])
def test_what_one_gave_leaves_as_if_it_had_never_been(one_bit: bool) -> None:
    """In weights and rates that are exact in binary; the others' results are what they were."""
    start = (8 * random(0)).round()
    both, alone = Distro(start, SHAPES, top_k=3, max_side=4, one_bit=one_bit), make(one_bit=one_bit)
    alone.load([start])
    cheat, given = make(one_bit=one_bit), []
    for number, lr in enumerate((0.5, 0.25, 0.125)):
        honest = alone.encode(random(10 + number), lr)
        alone.commit(alone.mean([honest]))
        false = cheat.encode(random(20 + number), lr)
        cheat.roll_back()
        both.apply(both.mean([false, honest]), lr)
        given.append(([false, honest], [honest], lr))
    assert not torch.equal(both.theta, alone.theta)
    for applied, left, lr in given:
        both.take_back(applied, left, lr)
    assert torch.equal(both.theta, alone.theta)
    for _, left, lr in given:
        both.take_back(left, [], lr)
    assert torch.equal(both.theta, start)


def test_one_that_sent_nothing_has_the_same_weights() -> None:
    one, other = make(one_bit=True), make(one_bit=True)
    (before,) = (vector.clone() for vector in other.own_vectors())
    mean = one.mean([one.encode(random(1), 0.01)])
    one.commit(mean)
    other.apply(mean, 0.01)
    assert torch.equal(one.theta, other.theta)
    assert torch.equal(other.own_vectors()[0], before)


def test_a_mean_is_applied_beside_no_step_under_way() -> None:
    one = make()
    mean = one.mean([one.encode(random(1), 0.01)])
    with pytest.raises(ValueError, match="committed or rolled back first"):
        one.apply(mean, 0.01)
    one.roll_back()
    theta = one.theta.clone()
    for lr in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="the learning rate"):
            one.apply(mean, lr)
    with pytest.raises(ValueError, match="the mean"):
        one.apply(mean[:-1], 0.01)
    with pytest.raises(NotFiniteError):
        one.apply(torch.full_like(mean, float("inf")), 0.01)
    assert torch.equal(one.theta, theta)


def test_chunks_say_how_much_is_sent() -> None:
    one = make()
    assert len(one.chunks) == len(SHAPES)
    assert sum(number * size for number, size, _ in one.chunks) == NUM
    sent = one.encode(random(1), 0.01)
    assert sum(number * k for number, _, k in one.chunks) == len(sent.positions)
