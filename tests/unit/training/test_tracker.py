"""The tracker of a run: trends that are honest about noise, agreement on weights, and the worth of members."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from neurogrid.training.runs.learning import judge_learning
from neurogrid.training.runs.tracker import (
    NUM_LEAST,
    NUM_TRACKED,
    Direction,
    MemberShare,
    TrackedRun,
    TrackerMember,
    find_trend,
    track,
)

FIGURES = st.lists(st.floats(-1e30, 1e30), max_size=30)


def noise(num: int, seed: int, *, alike: float = 0.0, is_heavy: bool = False) -> list[float]:
    """Figures around 3 that go nowhere: with neighbours that are alike, or with spikes."""
    rng, at, found = Random(seed), 0.0, []
    for _ in range(20 + num):
        at = alike * at + rng.gauss(0, 0.1)
        found.append(3 + at / (rng.random() if is_heavy else 1))
    return found[20:]


@pytest.mark.parametrize(
    ("num", "alike", "is_heavy", "most"),
    [
        *((num, 0.0, is_heavy, 0.02) for num in (10, 15, 30) for is_heavy in (False, True)),
        *((num, 0.5, False, 0.07) for num in (10, 15, 30)),
    ],
)
def test_noise_has_a_direction_as_seldom_as_is_said(
    num: int, alike: float, is_heavy: bool, most: float
) -> None:
    """Of 100 looks at noise one is wrong, and some where neighbours are alike, which so few figures cannot show."""
    told = [
        find_trend(noise(num, seed, alike=alike, is_heavy=is_heavy)).direction
        for seed in range(400)
    ]
    wrong = told.count(Direction.FALLING) + told.count(Direction.RISING)
    assert wrong <= most * len(told)


@pytest.mark.parametrize(("sign", "direction"), [(1, Direction.FALLING), (-1, Direction.RISING)])
@pytest.mark.parametrize(("num", "spread", "least"), [(20, 0.1, 0.95), (30, 0.3, 0.95)])
def test_a_curve_is_seen_through_noise(
    sign: int, direction: Direction, num: int, spread: float, least: float
) -> None:
    found = []
    for seed in range(60):
        rng = Random(seed)
        curve = [2 + 2 * math.exp(-3 * at / num) + rng.gauss(0, spread) for at in range(num)]
        found.append(find_trend([sign * figure for figure in curve]))
    assert sum(each.direction is direction for each in found) >= least * len(found)
    # From the first to the last it is 1.9, and the slope a straight one.
    for each in found:
        assert each.low is not None
        assert each.high is not None
        assert each.low <= (each.change or 0.0) <= each.high


def test_a_loss_that_fell_at_once_and_stays_is_seen_to_have_fallen_and_then_to_stay() -> None:
    """Losses of a run of two members: what they fell by at first is no noise."""
    losses = [6.154, 5.821, 5.203, 4.146, 3.069, 2.652, 2.303, 2.274, 2.310, 2.236, 2.270, 2.295]
    losses += [2.309, 2.277, 2.291, 2.279, 2.283, 2.281, 2.284, 2.278]
    for num in (12, 15, 20):
        assert find_trend(losses[:num]).direction is Direction.FALLING
    assert find_trend(losses[-12:]).direction in (Direction.FLAT, Direction.UNCLEAR)


def test_figures_without_noise_go_where_they_go() -> None:
    assert find_trend([10.0 - at for at in range(NUM_LEAST)]).direction is Direction.FALLING
    assert find_trend([math.exp(at) for at in range(NUM_LEAST)]).direction is Direction.RISING
    flat = find_trend([3.0] * NUM_LEAST)
    assert (flat.direction, flat.change, flat.low, flat.high) == (Direction.FLAT, 0.0, 0.0, 0.0)
    assert find_trend([0.0] * NUM_LEAST).direction is Direction.FLAT


def test_little_noise_is_flat_and_much_is_unclear() -> None:
    rng = Random(7)
    jitter = [rng.gauss(0, 1) for _ in range(NUM_TRACKED)]
    little = find_trend([3 + 0.005 * each for each in jitter])
    much = find_trend([3 + 0.5 * each for each in jitter])
    assert (little.direction, much.direction) == (Direction.FLAT, Direction.UNCLEAR)
    assert (much.low or 0) < 0 < (much.high or 0)


def test_too_few_figures_say_nothing_and_old_ones_neither() -> None:
    for num in range(NUM_LEAST):
        told = find_trend([9.0 - at for at in range(num)])
        assert (told.direction, told.num, told.change) == (Direction.UNKNOWN, num, None)
    told = find_trend([*(100.0 - at for at in range(40)), *([5.0] * NUM_TRACKED)])
    assert (told.direction, told.num) == (Direction.FLAT, NUM_TRACKED)


def test_a_loss_that_is_no_number_rises_and_one_of_before_is_left_out() -> None:
    falling = [4.0 - 0.1 * at for at in range(20)]
    assert find_trend([*falling, math.nan]).direction is Direction.RISING
    told = find_trend([*falling[:10], math.inf, *falling[10:]])
    assert (told.direction, told.num) == (Direction.FALLING, 20)


@example([0.0, 0.0, 0.0, 1.0, 0.0, 1.0, -1.0, 2.0, 1.0, -11004.0, 0.0])  # as many rise as fall
@given(FIGURES)
def test_a_trend_is_one_of_its_order(figures: list[float]) -> None:
    """Whatever comes, it is judged; backwards it is the other way round, and upside down too."""
    told = find_trend(figures)
    opposite = {Direction.FALLING: Direction.RISING, Direction.RISING: Direction.FALLING}
    for other in (find_trend(figures[::-1]), find_trend([-each for each in figures])):
        assert other.direction is opposite.get(told.direction, told.direction)
    if told.direction is Direction.FALLING:
        assert told.high is not None
        assert told.high < 0
    assert (told.change is None) is (len(figures) < NUM_LEAST)


# The run as a whole


def line(round_number: int, **figures: float) -> dict[str, float]:
    return {
        "round": round_number,
        "tokens": 100.0 * round_number,
        "seconds": 2.0 * round_number,
    } | figures


def looked(
    lines: list[dict[str, float]],
    members: list[TrackerMember] | None = None,
    shares: list[MemberShare] | None = None,
) -> TrackedRun:
    losses = [each["loss"] for each in lines if "loss" in each]
    learning = judge_learning(losses, {"a": (3, b"x"), "leader": (3, b"x")})
    return track(lines, losses, shares or [], members or [], learning)


def test_figures_have_means_and_a_trend() -> None:
    told = looked(
        [line(n, loss=5 - 0.1 * n, gradient_norm=1.0, eval_loss=4.0) for n in range(1, 21)]
    )
    assert told.loss.latest is not None
    assert told.loss.short is not None
    assert told.loss.long is not None
    assert told.loss.latest == pytest.approx(3.0)
    assert told.loss.latest < told.loss.short < told.loss.long < 4.9
    assert told.loss.trend.direction is Direction.FALLING
    assert told.tokens_per_second.latest == pytest.approx(50.0)
    assert told.tokens_per_second.trend.direction is Direction.FLAT
    assert told.gradient_norm.short == pytest.approx(1.0)
    assert told.eval_loss.trend.num == 20


def test_a_run_that_has_not_begun_has_no_figures() -> None:
    told = looked([])
    for figure in (told.loss, told.eval_loss, told.tokens_per_second, told.gradient_norm):
        assert (figure.latest, figure.short, figure.long) == (None, None, None)
        assert figure.trend.direction is Direction.UNKNOWN
    assert (told.members, told.agreement.differing) == ((), ())


def test_a_rate_is_of_lines_that_were_written_at_different_times() -> None:
    """A leader that was away writes several at once; one that went on from a checkpoint has taken tokens back."""
    lines = [line(1), line(2), line(3, seconds=4.0), line(4, seconds=6.0), line(5, tokens=50.0)]
    told = looked(lines)
    assert told.tokens_per_second.latest == pytest.approx(50.0)
    assert told.tokens_per_second.short == pytest.approx((100 + 50) / 2)
    assert told.tokens_per_second.trend.num == 2


def test_who_differs_is_named_by_how_long() -> None:
    members = [
        TrackerMember("a", "attic", 0, round=9),
        TrackerMember("b", "barn", 1, round=9, differs_since=8),
        TrackerMember("c", "cellar", 2, round=8, differs_since=5),
    ]
    told = looked([], members)
    assert [(each.name, each.since_round, each.round) for each in told.agreement.differing] == [
        ("cellar", 5, 8),
        ("barn", 8, 9),
    ]
    assert {each.name: each.agrees for each in told.members} == {
        "attic": True,
        "barn": False,
        "cellar": False,
    }
    assert (told.agreement.rate, told.agreement.num_members) == (1.0, 2)


def test_a_member_is_worth_what_it_counted_for() -> None:
    members = [
        TrackerMember("a", "attic", 0, num_rounds=4, num_samples=60),
        TrackerMember("b", "barn", 1, num_rounds=2, num_late=2, num_samples=40),
        TrackerMember("c", "cellar", 2),
        TrackerMember("d", "den", None),
    ]
    shares = [
        MemberShare(1, {0: 10, 1: 30}),
        MemberShare(2, {0: 10, 1: 10}),
        MemberShare(3, {0: 20, 1: 0}),
        MemberShare(4, {0: 20, 1: 0}),
    ]
    told = looked([], members, shares)
    assert [(each.name, each.worth, each.in_time) for each in told.members] == [
        ("attic", pytest.approx((0.25 + 0.5 + 1 + 1) / 4), 1.0),
        ("barn", pytest.approx((0.75 + 0.5) / 4), 0.5),
        ("cellar", None, None),
        ("den", None, None),
    ]
    assert told.num_shares == 4


@given(st.lists(st.dictionaries(st.integers(0, 4), st.integers(0, 100)), max_size=12))
def test_worths_are_shares(samples: list[dict[int, int]]) -> None:
    members = [TrackerMember(f"p{seat}", f"m{seat}", seat) for seat in range(5)]
    shares = [MemberShare(number, each) for number, each in enumerate(samples, 1)]
    told = looked([], members, shares)
    assert all(each.worth is None or 0 <= each.worth <= 1 for each in told.members)
    if samples and all(each.keys() == set(range(5)) and sum(each.values()) for each in samples):
        assert sum(each.worth or 0 for each in told.members) == pytest.approx(1.0)
