"""PowerSGD: which matrices, the two averages written out, errors that are kept at the commit, newcomers."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neurogrid.errors import NotFiniteError
from neurogrid.training.optimizers import PowerSgd, drive

SHAPES = [(24, 20), (7,), (6, 2, 5), (3, 3), ()]
INFINITE = float("inf")


def gradients_of(seed: int, shapes: list[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def exchange(members: list[PowerSgd], gradients: list[list[Tensor]]) -> list[list[Tensor]]:
    """The means that each member has in the end; every average is the mean in the order of the members."""
    runs = [m.exchange(g) for m, g in zip(members, gradients, strict=True)]
    vectors = [next(run) for run in runs]
    vectors = [run.send(torch.stack(vectors).mean(0)) for run in runs]
    mean = torch.stack(vectors).mean(0)
    return [finish(run, mean) for run in runs]


def finish(run: Generator[Tensor, Tensor, list[Tensor]], mean: Tensor) -> list[Tensor]:
    with pytest.raises(StopIteration) as end:
        run.send(mean)
    value: list[Tensor] = end.value.value
    return value


@given(rows=st.integers(1, 200), columns=st.integers(1, 200), rank=st.integers(1, 64))
def test_a_matrix_is_compressed_where_it_saves_half(rows: int, columns: int, rank: int) -> None:
    own = min(rank, rows, columns)
    wanted = 2 * own * (rows + columns) <= rows * columns
    assert (PowerSgd([(rows, columns)], rank=rank).compressed == (0,)) == wanted


def test_only_what_has_two_dimensions_is_compressed() -> None:
    shapes = [(1000,), (40, 50), (40, 5, 10), ()]
    assert PowerSgd(shapes, rank=2).compressed == (1, 2)


def test_the_exchange_is_the_two_averages_written_out() -> None:
    members = [PowerSgd(SHAPES, rank=2) for _ in range(3)]
    assert members[0].compressed == (0,)
    errors = [torch.zeros(24, 20, dtype=torch.float64) for _ in members]
    q = members[0].state_vectors()[0].view(20, 2).double()
    for step in range(4):
        gradients = [gradients_of(10 * step + member) for member in range(3)]
        found = exchange(members, gradients)
        whole = [g[0].double() + error for g, error in zip(gradients, errors, strict=True)]
        p = torch.stack([m @ q for m in whole]).mean(0)
        basis = torch.linalg.qr(p).Q
        own = [m.T @ basis for m in whole]
        q = torch.stack(own).mean(0)
        errors = [m - basis @ mine.T for m, mine in zip(whole, own, strict=True)]
        for member, means in zip(members, found, strict=True):
            torch.testing.assert_close(means[0], (basis @ q.T).float(), rtol=0, atol=1e-4)
            for number in range(1, len(SHAPES)):
                wanted = torch.stack([g[number] for g in gradients]).mean(0)
                assert torch.equal(means[number], wanted)
            member.commit()
        for mine, others in zip(found[0], found[1], strict=True):
            assert torch.equal(mine, others)
        for member, error in zip(members, errors, strict=True):
            (own_error,) = member.own_vectors()
            torch.testing.assert_close(own_error.view(24, 20), error.float(), rtol=0, atol=1e-4)
        # What is applied and what is left are all that there was.
        total = torch.stack(whole).mean(0) - torch.stack(errors).mean(0)
        torch.testing.assert_close(found[0][0], total.float(), rtol=0, atol=1e-4)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    more=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_a_rank_of_the_smaller_side_gives_the_exact_mean(
    rows: int, columns: int, more: int, seed: int
) -> None:
    members = [
        PowerSgd([(rows, columns)], rank=min(rows, columns) + more, least_saving=-INFINITE)
        for _ in range(3)
    ]
    # After gradients of zero or of rank one, too: Q has too few directions then.
    for step in range(4):
        gradients = [
            gradients_of(seed + 7 * step + member, [(rows, columns)]) for member in range(3)
        ]
        for own in gradients:
            own[0] = own[0] * (step != 1)
            if step == 2:
                own[0] = own[0][:, :1].expand(rows, columns).contiguous()
        found = exchange(members, gradients)
        wanted = torch.stack([own[0] for own in gradients]).mean(0)
        torch.testing.assert_close(found[0][0], wanted, rtol=0, atol=1e-5)
        for member in members:
            member.commit()


def test_a_low_rank_is_learnt_in_two_rounds() -> None:
    """Gradients of rank two that stay as they are: the second exchange has all of them."""
    left, right = gradients_of(1, [(24, 2), (2, 20)])
    member = PowerSgd([(24, 20)], rank=2)
    drive(member.exchange([left @ right]), lambda vector: vector)
    member.commit()
    (found,) = drive(member.exchange([left @ right]), lambda vector: vector)
    torch.testing.assert_close(found, left @ right, rtol=0, atol=1e-4)


def test_nothing_is_kept_of_an_exchange_that_fails() -> None:
    member, twin = PowerSgd(SHAPES, rank=2), PowerSgd(SHAPES, rank=2)
    given = gradients_of(1)

    def fails(_: Tensor) -> Tensor:
        raise TimeoutError("no mean")

    with pytest.raises(TimeoutError):
        drive(member.exchange(given), fails)
    drive(member.exchange(given), lambda vector: vector)
    member.roll_back()
    ours = drive(member.exchange(given), lambda vector: vector)
    theirs = drive(twin.exchange(given), lambda vector: vector)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="committed or rolled back"):
        drive(member.exchange(given), lambda vector: vector)
    member.commit()
    with pytest.raises(ValueError, match="nothing is under way"):
        member.commit()
    assert all(torch.equal(a, b) for a, b in zip(given, gradients_of(1), strict=True))


def test_a_newcomer_gets_q() -> None:
    members = [PowerSgd(SHAPES, rank=2) for _ in range(2)]
    exchange(members, [gradients_of(1), gradients_of(2)])
    for member in members:
        member.commit()
    newcomer = PowerSgd(SHAPES, rank=2, seed=99)
    newcomer.load([vector.clone() for vector in members[0].state_vectors()])
    assert not newcomer.own_vectors()[0].any()
    everybody = [*members, newcomer]
    found = exchange(everybody, [gradients_of(seed) for seed in range(3)])
    for means in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(means, found[0], strict=True))
    for member in everybody:
        member.commit()
    for member in members:
        assert torch.equal(member.state_vectors()[0], newcomer.state_vectors()[0])
    resumed = PowerSgd(SHAPES, rank=2)
    resumed.load(newcomer.state_vectors())
    resumed.load_own(newcomer.own_vectors())
    assert torch.equal(resumed.own_vectors()[0], newcomer.own_vectors()[0])


def test_what_does_not_fit_is_refused() -> None:
    member = PowerSgd(SHAPES, rank=2)
    with pytest.raises(ValueError, match="rank"):
        PowerSgd(SHAPES, rank=0)
    with pytest.raises(ValueError, match="other shapes"):
        next(member.exchange(gradients_of(1)[:-1]))
    with pytest.raises(ValueError, match="gradient 1"):
        next(member.exchange([g.double() if i == 1 else g for i, g in enumerate(gradients_of(1))]))
    bad = gradients_of(1)
    bad[2][0] = torch.nan
    with pytest.raises(NotFiniteError, match="gradient 2"):
        next(member.exchange(bad))
    for answer, error in (
        (torch.zeros(3), ValueError),
        (torch.full((48,), torch.inf), NotFiniteError),
    ):
        run = member.exchange(gradients_of(1))
        next(run)
        with pytest.raises(error, match="the mean"):
            run.send(answer)
