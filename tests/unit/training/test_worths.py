"""What results are worth: what one makes of the weights alone, who measures which, and who stands out by it."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError
from neurogrid.training.checks import (
    Audit,
    Settings,
    Worth,
    measures_of,
    step_alone,
)
from neurogrid.training.leading.witnessed.worths import Worths
from neurogrid.training.members.witnessed.audited_rounds import AuditedRound
from neurogrid.training.optimizers import Distro
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.wire.runs import Epoch, RoundWork, SampleRange

SETTINGS = Settings(((8, 8), (8,)), top_k=4, max_side=4, decay=0.9, is_one_bit=True)
SEATS = range(6)


def distro(weights: torch.Tensor) -> Distro:
    return Distro(weights, SETTINGS.shapes, top_k=4, max_side=4, decay=0.9, one_bit=True)


def test_a_result_alone_moves_the_weights_as_a_round_of_it_does() -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(72, generator=generator)
    member = distro(weights)
    sent = member.encode(torch.randn(72, generator=generator), 0.01)
    kept = weights.clone()
    found = step_alone(weights, sent, SETTINGS, 0.01)
    member.commit(member.mean([sent]))
    assert torch.equal(found, member.theta)
    assert torch.equal(weights, kept)
    assert float((found - weights).abs().max()) == pytest.approx(0.01, rel=1e-4)


def test_gain_and_advantage() -> None:
    """Who trained on its samples has an advantage there; who copied has as much on others', or more."""
    honest, copies = Worth(3.0, 2.5, 3.1, 2.9), Worth(3.0, 2.8, 3.1, 2.6)
    idle, ruin = Worth(3.0, 3.0, 3.1, 3.1), Worth(3.0, 1e9, 3.1, 1e9)
    assert (honest.gain, honest.advantage) == pytest.approx((0.2, 0.3))
    assert copies.gain > 0 > copies.advantage
    assert (idle.gain, idle.advantage) == (0.0, 0.0)
    assert ruin.gain < -1e8
    assert honest.is_finite
    assert not Worth(3.0, math.nan, 3.0, 3.0).is_finite


@given(
    st.binary(min_size=32, max_size=32),
    st.sets(st.integers(0, 20)),
    st.sets(st.integers(0, 20)),
    st.sets(st.integers(0, 20)),
    st.floats(0, 1),
)
def test_each_claim_is_measured_once_or_none_is(
    seed: bytes, agreed: set[int], then: set[int], now: set[int], share: float
) -> None:
    found = measures_of(seed, agreed, sorted(then), sorted(now), share)
    may = then & now
    assert all(each.seat != each.auditor and each.auditor in may for each in found)
    due = {seat for seat in agreed & now if may - {seat}}
    assert [each.seat for each in found] in ([], list(dict.fromkeys(each.seat for each in found)))
    assert {each.seat for each in found} in (set(), due)
    # The work is shared as evenly as can be.
    loads = Counter(each.auditor for each in found)
    if found and agreed & now <= may and len(may) > 1:
        assert max(loads.values()) <= -(-len(due) // len(may)) + 1


def test_of_so_many_rounds_the_share_is_measured() -> None:
    seeds = [number.to_bytes(32, "little") for number in range(1000)]
    num = sum(bool(measures_of(seed, SEATS, SEATS, SEATS, 0.2)) for seed in seeds)
    assert 160 < num < 240
    assert not any(measures_of(seed, SEATS, SEATS, SEATS, 0.0) for seed in seeds)
    assert all(measures_of(seed, SEATS, SEATS, SEATS, 1.0) for seed in seeds[:50])


def measured(rounds: int, *, odd: dict[int, Worth], silent: int | None = None) -> Worths:
    """Rounds in which each seat is measured by the next one."""
    found = Worths()
    for step in range(rounds):
        pairs = [Audit(seat, (seat + 1) % len(SEATS)) for seat in SEATS]
        found.drawn(step, pairs)
        for each in pairs:
            plain = Worth(3.0, 2.9 - 0.01 * ((each.seat + step) % 3), 3.0, 2.96)
            if each.auditor != silent:
                found.told(step, each.auditor, each.seat, odd.get(each.seat, plain))
        found.look(step + 1)
    return found


@pytest.mark.parametrize(
    "worth",
    [
        Worth(3.0, 3.1, 3.0, 3.1),  # a flipped sign
        Worth(3.0, 2.96, 3.0, 2.8),  # a copy
        Worth(3.0, 3.0, 3.0, 3.0),  # nothing computed
        Worth(3.0, 1e9, 3.0, 1e9),  # weights that it would ruin
    ],
)
def test_who_is_worth_less_for_some_rounds_is_watched(worth: Worth) -> None:
    assert measured(2, odd={4: worth}).watched(SEATS) == ()
    assert measured(6, odd={4: worth}).watched(SEATS) == (4,)
    assert measured(6, odd={4: worth}).watched([0, 1, 2]) == ()
    assert measured(6, odd={}).watched(SEATS) == ()


def test_what_is_shown_is_a_mean_over_the_last() -> None:
    worths = measured(30, odd={2: Worth(3.0, 2.8, 3.0, 2.9)})
    look = next(each for each in worths.looks(SEATS) if each.seat == 2)
    assert (look.num, look.gain, look.advantage) == (30, pytest.approx(0.1), pytest.approx(0.1))
    assert [each.seat for each in worths.looks([2, 5, 77])] == [2, 5]
    told = worths.take_figures()
    assert told["measured"] == 30 * len(SEATS)
    assert worths.take_figures() == {}


def test_only_who_was_drawn_is_heard_once_and_nobody_waits_for_who_is_silent() -> None:
    worths = measured(3, odd={}, silent=1)
    assert 0 not in [each.seat for each in worths.looks(SEATS)]
    worths.look(99)
    worths.told(2, 1, 0, Worth(3.0, 2.0, 3.0, 2.0))  # its round is over
    worths.drawn(7, [Audit(0, 1), Audit(3, 2)])
    for auditor, seat in ((2, 0), (1, 3), (0, 1)):
        worths.told(7, auditor, seat, Worth(3.0, 2.0, 3.0, 2.0))
    assert 0 not in [each.seat for each in worths.looks(SEATS)]
    worths.told(7, 1, 0, Worth(3.0, 2.5, 3.0, 2.9))
    worths.told(7, 1, 0, Worth(3.0, 9.0, 3.0, 9.0))
    (look,) = [each for each in worths.looks(SEATS) if each.seat == 0]
    assert (look.num, look.gain) == (1, pytest.approx(0.1))


@pytest.mark.parametrize(
    ("works", "seat", "about", "beside"),
    [
        ((1, 3, 5), 3, 1, 3),
        ((1, 3, 5), 2, 1, 3),
        ((1, 3, 5), 6, 3, 1),
        ((1, 3, 5), 2, 3, 5),
        ((3,), 2, 3, None),
    ],
)
def test_a_seat_measures_on_its_own_work_or_that_of_the_next(
    works: tuple[int, ...], seat: int, about: int, beside: int | None
) -> None:
    ranges = (SampleRange(0, 0, 1),)
    told = Epoch(
        bytes(16), 1, "round_train", works=tuple(RoundWork(s, 0, 1, ranges) for s in works)
    )
    assert AuditedRound(told).seat_beside(seat, about) == beside


def test_it_is_of_runs_with_audits() -> None:
    whole = '[model]\nconfig = "c"\n[data]\npath = "d"\n[outer]\nmethod = "distro"\n[stop]\nrounds = 9\n'
    run = parse_run_file(whole + "[checks]\naudit = 0.1\nworth = 0.2\n")
    assert (run.checks.audit, run.checks.worth) == (0.1, 0.2)
    assert parse_run_file(whole).checks.worth == 0
    with pytest.raises(ConfigurationError, match=r"\[checks\] worth is above 0 only with audit"):
        parse_run_file(whole + "[checks]\nworth = 0.2\n")
