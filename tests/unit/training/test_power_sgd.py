"""PowerSGD: which matrices, the two sums written out, ranks, errors that are kept at the commit, newcomers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neurogrid.errors import NotFiniteError
from neurogrid.training.optimizers import PowerSgd

SHAPES = [(24, 20), (7,), (6, 2, 5), (3, 3), ()]
INFINITE = float("inf")


def gradients_of(seed: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def sum_of(vectors: list[Tensor]) -> Tensor:
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total


def firsts(members: list[PowerSgd], gradients: list[list[Tensor]]) -> Tensor:
    vectors = [torch.empty(member.first_elements) for member in members]
    for member, own, vector in zip(members, gradients, vectors, strict=True):
        member.first(own, vector)
    return sum_of(vectors)


def seconds(members: list[PowerSgd], summed: Tensor) -> Tensor:
    vectors = [torch.empty(member.second_elements) for member in members]
    for member, vector in zip(members, vectors, strict=True):
        member.second(summed, vector)
    return sum_of(vectors)


def exchange(members: list[PowerSgd], gradients: list[list[Tensor]]) -> list[list[Tensor]]:
    """What each member applies; every sum is one in the order of the members."""
    summed = seconds(members, firsts(members, gradients))
    return [member.finish(summed) for member in members]


def step(members: list[PowerSgd], gradients: list[list[Tensor]]) -> list[Tensor]:
    """What all of them apply, with the same bits; committed."""
    found = exchange(members, gradients)
    for member in members:
        member.commit()
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    return found[0]


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@given(rows=st.integers(1, 200), columns=st.integers(1, 200), rank=st.integers(1, 64))
def test_a_matrix_is_compressed_where_it_saves_half(rows: int, columns: int, rank: int) -> None:
    wanted = 2 * rank * (rows + columns) <= rows * columns
    assert (PowerSgd([(rows, columns)], rank).compressed == (0,)) == wanted


def test_only_what_has_two_dimensions_is_compressed() -> None:
    shapes = [(1000,), (40, 50), (40, 5, 10), (), (40, 0)]
    member = PowerSgd(shapes, 2)
    assert member.compressed == (1, 2)
    assert member.first_elements == 2 * 40 * 2
    assert member.second_elements == 2 * 50 * 2 + 1000 + 1


def test_a_step_is_the_two_sums_written_out() -> None:
    members = [PowerSgd(SHAPES, 2) for _ in range(3)]
    assert members[0].compressed == (0,)
    errors = [torch.zeros(24, 20, dtype=torch.float64) for _ in members]
    q = members[0].state_vectors()[0].view(20, 2).double()
    for number in range(4):
        gradients = [gradients_of(10 * number + member) for member in range(3)]
        found = step(members, gradients)
        whole = [g[0].double() + error for g, error in zip(gradients, errors, strict=True)]
        basis = torch.linalg.qr(torch.stack([m @ q for m in whole]).sum(0)).Q
        own = [m.T @ basis for m in whole]
        q = torch.stack(own).sum(0)
        errors = [m - basis @ mine.T for m, mine in zip(whole, own, strict=True)]
        torch.testing.assert_close(found[0], (basis @ q.T).float(), rtol=0, atol=1e-4)
        for other in range(1, len(SHAPES)):
            assert torch.equal(found[other], sum_of([g[other] for g in gradients]))
        for member, error in zip(members, errors, strict=True):
            (own_error,) = member.own_vectors()
            torch.testing.assert_close(own_error.view(24, 20), error.float(), rtol=0, atol=1e-4)


RANKS = (4, 8, 16, 32, 64)


def falling_gradients(seed: int, shape: tuple[int, int]) -> Tensor:
    """A matrix whose singular values fall as 1 / k, as those of gradients about do."""
    left, right = gradients_of(seed, [(shape[0], shape[0]), (shape[1], shape[1])])
    side = min(shape)
    values = 1 / torch.arange(1.0, side + 1)
    return (torch.linalg.qr(left).Q[:, :side] * values) @ torch.linalg.qr(right).Q[:, :side].T


def test_the_greater_the_rank_the_nearer_the_exact_sum() -> None:
    shape = (288, 320)
    gradients = [[falling_gradients(member, shape)] for member in range(3)]
    wanted = sum_of([own[0] for own in gradients])
    errors = []
    for rank in RANKS:
        members = [PowerSgd([shape], rank) for _ in range(3)]
        assert members[0].compressed == (0,)
        (found,) = step(members, gradients)
        errors.append(off(found, wanted))
    assert errors == sorted(errors, reverse=True)
    # The best of rank 64 that there is lacks a share of 0.17 of one of these, and of a sum of three more.
    assert errors[0] > 0.5
    assert errors[-1] < 0.35


@pytest.mark.parametrize("rank", RANKS)
def test_a_sum_of_that_rank_is_exact(rank: int) -> None:
    shape = (288, 320)
    left = gradients_of(0, [(288, rank)])[0]
    gradients = [[left @ gradients_of(1 + member, [(rank, 320)])[0]] for member in range(3)]
    members = [PowerSgd([shape], rank) for _ in range(3)]
    (found,) = step(members, gradients)
    assert off(found, sum_of([own[0] for own in gradients])) < 1e-5
    for member in members:
        assert float(member.own_vectors()[0].norm() / gradients[0][0].norm()) < 1e-5


@pytest.mark.parametrize("rank", RANKS)
def test_what_was_applied_tends_to_the_exact_sum(rank: int) -> None:
    """Gradients that are others in each step: what is missing in the end is the errors, which stop growing."""
    shape, num_steps = (72, 80), 80
    members = [PowerSgd([shape], rank, least_saving=-INFINITE) for _ in range(3)]
    assert members[0].compressed == (0,)
    applied, wanted = torch.zeros(shape), torch.zeros(shape)
    missing, norms = [], []
    for number in range(num_steps):
        common = falling_gradients(7, shape)
        gradients = [
            [common + 0.1 * falling_gradients(100 * number + member, shape)] for member in range(3)
        ]
        applied += step(members, gradients)[0]
        wanted += sum_of([own[0] for own in gradients])
        missing.append(off(applied, wanted))
        left = sum_of([member.own_vectors()[0].view(shape) for member in members])
        torch.testing.assert_close(applied + left, wanted, rtol=0, atol=1e-4)
        norms.append(float(left.norm()))
    assert missing[-1] < missing[0] / 4
    # Of what came in 80 steps as little is left as of 40.
    assert max(norms[num_steps // 2 :]) < 1.3 * max(norms[: num_steps // 2])


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    more=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_a_rank_of_the_smaller_side_gives_the_exact_sum(
    rows: int, columns: int, more: int, seed: int
) -> None:
    members = [
        PowerSgd([(rows, columns)], min(rows, columns) + more, least_saving=-INFINITE)
        for _ in range(3)
    ]
    for number in range(2):
        gradients = [gradients_of(seed + 7 * number + m, [(rows, columns)]) for m in range(3)]
        (found,) = step(members, gradients)
        assert torch.equal(found, sum_of([own[0] for own in gradients]))


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=5),
    rank=st.integers(1, 6),
    least_saving=st.sampled_from([0.5, -INFINITE]),
    kind=st.sampled_from(["random", "zero", "one column", "one row", "cancel"]),
    seed=st.integers(0, 99),
)
def test_nothing_is_lost_whatever_the_shapes(
    shapes: list[tuple[int, ...]], rank: int, least_saving: float, kind: str, seed: int
) -> None:
    members = [PowerSgd(shapes, rank, least_saving=least_saving) for _ in range(2)]
    applied = [torch.zeros(shape) for shape in shapes]
    wanted = [torch.zeros(shape) for shape in shapes]
    for number in range(3):
        gradients = [gradients_of(seed + 2 * number + member, shapes) for member in range(2)]
        for tensor, other in zip(*gradients, strict=True):
            if kind == "zero" and number:
                tensor.zero_()
            elif kind == "cancel" and number == 1:
                tensor.copy_(-other)
            elif kind == "one row" and tensor.ndim:
                tensor[1:] = 0
            elif kind == "one column" and tensor.ndim:
                tensor[..., 1:] = 0
        found = step(members, gradients)
        for total, exact, each, one, other in zip(applied, wanted, found, *gradients, strict=True):
            assert each.shape == one.shape
            total += each
            exact += one + other
    compressed = members[0].compressed
    left = dict(zip(compressed, zip(*(m.own_vectors() for m in members), strict=True), strict=True))
    for number, (total, exact) in enumerate(zip(applied, wanted, strict=True)):
        if number in left:
            total = total + sum_of(list(left[number])).view(total.shape)
        torch.testing.assert_close(total, exact, rtol=0, atol=1e-4)


def test_a_direction_that_is_rounding_alone_is_left_out() -> None:
    """A sum of rank one at rank four: the other three directions would be others with another library."""
    left, right = gradients_of(3, [(64, 1), (1, 48)])
    member = PowerSgd([(64, 48)], 4, least_saving=0)
    one, two = torch.empty(member.first_elements), torch.empty(member.second_elements)
    member.first([torch.zeros(64, 48)], one)
    member.second(torch.zeros_like(one), two)
    assert not two.any()
    member.first([left @ right], one)
    p = one.view(64, 4)
    p[:, 1:] = p[:, :1] * torch.tensor([2.0, -0.5, 4.0])
    member.second(one, two)
    q = two.view(48, 4)
    assert q[:, 0].any()
    assert not q[:, 1:].any()
    (found,) = member.finish(two)
    assert off(found, left @ right) < 1e-5
    member.commit()
    # The columns that were left out are taken by others then.
    wide = gradients_of(4, [(64, 4), (4, 48)])
    for _ in range(2):
        (found,) = step([member], [[wide[0] @ wide[1]]])
    assert off(found, wide[0] @ wide[1]) < 1e-4


def test_a_low_rank_is_learnt_in_two_steps() -> None:
    """A gradient of rank six that stays as it is: the second step is nearer to its greatest two."""
    left, right = gradients_of(1, [(48, 6), (6, 40)])
    gradient = left @ torch.diag(torch.tensor([9.0, 5.0, 0.5, 0.4, 0.3, 0.2])) @ right
    best = torch.linalg.svd(gradient).S[2:].norm() / gradient.norm()
    member = PowerSgd([(48, 40)], 2)
    step([member], [[gradient]])
    member.load_own([torch.zeros(48 * 40)])
    (found,) = step([member], [[gradient]])
    assert off(found, gradient) < 1.05 * float(best)


def test_a_regression_is_learnt() -> None:
    """Three members, a matrix whose rank is 10: at rank 4 as far as with the exact sums, in as many steps."""
    wanted = gradients_of(5, [(48, 10)])[0] @ gradients_of(6, [(10, 40)])[0]
    data = [gradients_of(20 + member, [(48, 400)])[0] for member in range(3)]

    def learn(powers: list[PowerSgd] | None) -> float:
        weight = torch.zeros(48, 40)
        for _ in range(150):
            gradients = [[x @ (x.T @ (weight - wanted)) / 1200] for x in data]
            found = step(powers, gradients)[0] if powers else sum_of([g[0] for g in gradients])
            weight = weight - 0.1 * found
        return off(weight, wanted)

    exact = learn(None)
    assert exact < 1e-3
    powers = [PowerSgd([(48, 40)], 4, least_saving=0) for _ in range(3)]
    assert learn(powers) < 2 * exact + 1e-3


def test_nothing_is_kept_of_a_step_that_is_dropped() -> None:
    member, twin = PowerSgd(SHAPES, 2), PowerSgd(SHAPES, 2)
    step([member], [gradients_of(8)])
    step([twin], [gradients_of(8)])
    given = gradients_of(1)
    firsts([member], [given])
    member.drop()
    seconds([member], firsts([member], [given]))
    member.drop()
    exchange([member], [given])
    member.drop()
    with pytest.raises(ValueError, match="nothing is under way"):
        member.commit()
    assert all(torch.equal(a, b) for a, b in zip(given, gradients_of(1), strict=True))
    ours, theirs = step([member], [given]), step([twin], [given])
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for one, other in zip(member.own_vectors(), twin.own_vectors(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(member.state_vectors()[0], twin.state_vectors()[0])


def test_an_exchange_is_all_of_a_step() -> None:
    member, twin = PowerSgd(SHAPES, 2), PowerSgd(SHAPES, 2)
    run = member.exchange(gradients_of(1))
    first = next(run)
    assert len(first) == member.first_elements
    second = run.send(first)
    assert len(second) == member.second_elements
    assert not member.is_pending
    with pytest.raises(StopIteration) as end:
        run.send(second)
    assert member.is_pending
    assert all(
        torch.equal(a, b)
        for a, b in zip(end.value.value, step([twin], [gradients_of(1)]), strict=True)
    )
    member.drop()
    assert not member.is_pending
    # Nothing is compressed: there is one vector.
    plain = PowerSgd([(3,)], 2)
    assert torch.equal(next(plain.exchange([torch.ones(3)])), torch.ones(3))


def test_sums_are_made_again_without_a_member_that_is_lost() -> None:
    members, twins = ([PowerSgd(SHAPES, 2) for _ in range(number)] for number in (3, 2))
    gradients = [gradients_of(number) for number in range(3)]
    exchange(members, gradients)
    # What `first` gave of the others is still theirs.
    members.pop()
    summed = firsts(twins, gradients[:2])
    total = seconds(members, summed)
    assert torch.equal(total, seconds(twins, summed))
    for member, twin in zip(members, twins, strict=True):
        ours, theirs = member.finish(total), twin.finish(total)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        member.commit()
        twin.commit()
        assert torch.equal(member.own_vectors()[0], twin.own_vectors()[0])


def test_all_restart_with_the_same_q_and_their_own_errors() -> None:
    members = [PowerSgd(SHAPES, 2) for _ in range(2)]
    step(members, [gradients_of(1), gradients_of(2)])
    exchange(members, [gradients_of(3), gradients_of(4)])
    kept = [member.own_vectors()[0].clone() for member in members]
    everybody = [*members, PowerSgd(SHAPES, 2, seed=99)]
    for member in everybody:
        member.restart(5)
    (fresh,) = PowerSgd(SHAPES, 2, seed=5).state_vectors()
    assert all(torch.equal(member.state_vectors()[0], fresh) for member in everybody)
    assert not torch.equal(fresh, PowerSgd(SHAPES, 2, seed=6).state_vectors()[0])
    for member, errors in zip(members, kept, strict=True):
        assert torch.equal(member.own_vectors()[0], errors)
    with pytest.raises(ValueError, match="no step was begun"):
        members[0].second(torch.zeros(48), torch.zeros(members[0].second_elements))
    step(everybody, [gradients_of(seed) for seed in range(3)])


def test_a_newcomer_gets_q() -> None:
    members = [PowerSgd(SHAPES, 2) for _ in range(2)]
    step(members, [gradients_of(1), gradients_of(2)])
    newcomer = PowerSgd(SHAPES, 2, seed=99)
    newcomer.load([vector.clone() for vector in members[0].state_vectors()])
    assert not newcomer.own_vectors()[0].any()
    everybody = [*members, newcomer]
    step(everybody, [gradients_of(seed) for seed in range(3)])
    for member in members:
        assert torch.equal(member.state_vectors()[0], newcomer.state_vectors()[0])
    resumed = PowerSgd(SHAPES, 2)
    resumed.load(newcomer.state_vectors())
    resumed.load_own(newcomer.own_vectors())
    assert torch.equal(resumed.own_vectors()[0], newcomer.own_vectors()[0])


def test_the_product_is_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [PowerSgd([(50, 30)], 3) for _ in range(2)]
    summed = seconds(members, firsts(members, [gradients_of(m, [(50, 30)]) for m in range(2)]))
    (whole,) = members[0].finish(summed)
    monkeypatch.setattr("neurogrid.training.optimizers.power_sgd.MAX_PRODUCT", 100)
    (pieces,) = members[1].finish(summed)
    assert torch.equal(whole, pieces)


def test_what_does_not_fit_is_refused() -> None:
    member = PowerSgd(SHAPES, 2)
    one, two = torch.empty(member.first_elements), torch.empty(member.second_elements)
    with pytest.raises(ValueError, match="rank"):
        PowerSgd(SHAPES, 0)
    with pytest.raises(ValueError, match="other shapes"):
        member.first(gradients_of(1)[:-1], one)
    with pytest.raises(ValueError, match="gradient 1"):
        member.first([g.double() if i == 1 else g for i, g in enumerate(gradients_of(1))], one)
    with pytest.raises(ValueError, match="P is written to"):
        member.first(gradients_of(1), two)
    bad = gradients_of(1)
    bad[2][0] = torch.nan
    with pytest.raises(NotFiniteError, match="gradient 2"):
        member.first(bad, one)
    with pytest.raises(ValueError, match="no step was begun"):
        member.second(one, two)
    member.first(gradients_of(1), one)
    with pytest.raises(ValueError, match="no second vector"):
        member.finish(two)
    with pytest.raises(ValueError, match="Q is written to"):
        member.second(one, one)
    for summed, error in (
        (torch.zeros(3), ValueError),
        (torch.full((48,), math.inf), NotFiniteError),
    ):
        with pytest.raises(error, match="the sum"):
            member.second(summed, two)
    member.second(one, two)
    with pytest.raises(NotFiniteError, match="the sum"):
        member.finish(torch.full_like(two, math.nan))
    member.finish(two)
    member.commit()
