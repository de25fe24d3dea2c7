"""What is odd beside others: thresholds, and a watch over rounds that accuses nobody."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.checks import Figures, Thresholds, Watch, Worth, figures_of, refusal

PLAIN = Figures(0.9, 1.0, 1.0)


@pytest.mark.parametrize(
    ("figures", "what"),
    [
        (Figures(0.3, 10.0, 100.0), ""),
        (Figures(0.3, 0.1, 1.0), ""),
        (Figures(0.29, 1.0, 1.0), "cosine"),
        (Figures(math.nan, 1.0, 1.0), "cosine"),
        (Figures(0.9, 10.1, 1.0), "norm"),
        (Figures(0.9, 0.09, 1.0), "norm"),
        (Figures(0.9, math.inf, 1.0), "norm"),
        (Figures(0.9, 1.0, 100.1), "variance"),
    ],
)
def test_thresholds(figures: Figures, what: str) -> None:
    found = refusal(figures, Thresholds())
    assert what in found
    assert bool(found) == bool(what)


def test_figures_are_those_beside_the_mean_of_the_others() -> None:
    rows = [torch.randn(50, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    for number, found in enumerate(figures_of(rows)):
        others = torch.stack(rows[:number] + rows[number + 1 :]).double().mean(0)
        own = rows[number].double()
        assert found.cosine == pytest.approx(float(torch.cosine_similarity(own, others, dim=0)))
        assert found.norm_ratio == pytest.approx(float(own.norm() / others.norm()))
        due = float(own.var(correction=0) / others.var(correction=0))
        assert found.variance_ratio == pytest.approx(due)
    first, second = figures_of([torch.zeros(3), torch.ones(3)])
    assert (first.cosine, first.norm_ratio, second.norm_ratio) == (0.0, 0.0, math.inf)


def test_signs_have_all_the_same_norm_however_they_were_scaled() -> None:
    """So norms and variances say nothing of a result that is signs alone."""
    rows = [torch.randn(64).sign() for _ in range(3)]
    rows.append((1000 * torch.randn(64)).sign())
    assert len({float(row.norm()) for row in rows}) == 1


def test_who_stands_out_is_the_oddest() -> None:
    watch = Watch()
    numbers = random.Random(1)
    for _ in range(20):
        watch.add({seat: numbers.gauss(1, 0.2) - (seat == 3) * 0.5 for seat in range(8)})
    assert watch.oddest(1) == [3]
    assert watch.oddness(3) > 1
    watch.forget(3)
    assert watch.oddness(3) == 0
    assert 3 not in watch.oddest(8)


def test_one_odd_round_is_forgotten() -> None:
    watch = Watch()
    numbers = random.Random(2)
    watch.add({0: -1e9, **{seat: numbers.gauss(1, 0.2) for seat in range(1, 8)}})
    assert watch.oddest(1) == [0]
    for _ in range(40):
        watch.add({seat: numbers.gauss(1, 0.2) for seat in range(8)})
    assert watch.oddness(0) < 1


@given(
    rounds=st.lists(st.dictionaries(st.integers(0, 9), st.floats(), max_size=8), max_size=10),
    number=st.integers(0, 12),
)
def test_whatever_the_figures_are(rounds: list[dict[int, float]], number: int) -> None:
    watch = Watch()
    for figures in rounds:
        watch.add(figures)
    oddest = watch.oddest(number)
    assert len(oddest) <= number
    assert len(set(oddest)) == len(oddest)
    for seat in range(10):
        assert -Watch.LARGEST <= watch.oddness(seat) <= Watch.LARGEST
    if oddest:
        assert watch.oddness(oddest[0]) == max(map(watch.oddness, range(10)))


def test_two_members_are_not_compared() -> None:
    watch = Watch()
    watch.add({0: 1.0, 1: -1.0})
    assert watch.oddest(2) == []
    with pytest.raises(ValueError, match="below 1"):
        Watch(1.0)


def test_worth() -> None:
    worth = Worth(given_before=3.0, given_after=2.5, held_before=3.2, held_after=3.1)
    assert worth.gain == pytest.approx(0.1)
    assert worth.advantage == pytest.approx(0.4)
