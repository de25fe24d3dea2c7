"""Whether a run learns: the loss, its trend, and whether members have the same weights."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.runs.learning import Trend, judge_learning

FALLING = [4.0, 3.8, 3.5, 3.1, 2.9, 2.6]
SAME = {"a": (6, b"x"), "b": (6, b"x"), "leader": (6, b"x")}


def test_a_falling_loss_and_equal_weights_are_learning() -> None:
    told = judge_learning(FALLING, SAME, num_in_time=11, num_late=1)
    assert (told.training_verified, told.loss_trend) == (True, Trend.IMPROVING)
    assert (told.hash_agreement_rate, told.num_members) == (1.0, 3)
    assert told.sync_success_rate == pytest.approx(11 / 12)
    assert told.first_loss == pytest.approx(3.6)
    assert told.loss is not None
    assert told.long_loss is not None
    assert told.loss < told.long_loss < told.first_loss


def test_a_few_rounds_say_nothing() -> None:
    for number in range(4):
        told = judge_learning(FALLING[:number], {})
        assert (told.training_verified, told.loss_trend) == (False, Trend.UNKNOWN)
        assert told.reason == f"{number} rounds have a loss, 4 are needed to judge"
    assert told.hash_agreement_rate is None
    assert told.sync_success_rate is None


@pytest.mark.parametrize(
    ("losses", "trend", "reason"),
    [
        (FALLING[::-1], Trend.WORSENING, "the loss rises"),
        ([3.0] * 10, Trend.STABLE, "the loss is not lower than at the beginning"),
        ([*FALLING, math.nan], Trend.WORSENING, "the loss is not finite"),
    ],
)
def test_what_does_not_learn(losses: list[float], trend: Trend, reason: str) -> None:
    told = judge_learning(losses, SAME)
    assert (told.training_verified, told.loss_trend) == (False, trend)
    assert told.reason.startswith(reason)


def test_members_that_drifted_are_counted() -> None:
    told = judge_learning(FALLING, {**SAME, "c": (6, b"y")})
    assert (told.training_verified, told.hash_agreement_rate) == (False, 0.75)
    assert told.reason == "75% of the members have the same weights: the others have drifted"


def test_a_member_that_is_a_round_behind_has_not_drifted() -> None:
    told = judge_learning(FALLING, {**SAME, "c": (5, b"y")})
    assert (told.training_verified, told.hash_agreement_rate) == (True, 1.0)


def test_a_member_that_has_drifted_does_not_agree_alone_after_its_round() -> None:
    told = judge_learning(FALLING, {**SAME, "c": (7, b"y")}, differing={"c"})
    assert (told.training_verified, told.hash_agreement_rate) == (False, 0.75)
    assert judge_learning(FALLING, SAME, differing={"gone"}).training_verified


@given(
    st.lists(st.floats(), max_size=30),
    st.dictionaries(
        st.text(max_size=2), st.tuples(st.integers(0, 3), st.sampled_from((b"x", b"y")))
    ),
    st.sets(st.text(max_size=2)),
)
def test_it_never_says_what_it_cannot_know(
    losses: list[float], digests: dict[str, tuple[int, bytes]], differing: set[str]
) -> None:
    told = judge_learning(losses, digests, differing=differing)
    assert told.reason
    if told.training_verified:
        assert told.loss is not None
        assert told.first_loss is not None
        assert told.loss < told.first_loss
        assert told.hash_agreement_rate in (None, 1.0)
        assert not differing & digests.keys()
    if told.hash_agreement_rate is not None:
        believed = len(digests.keys() - differing)
        assert min(believed, 1) / len(digests) <= told.hash_agreement_rate
        assert told.hash_agreement_rate <= believed / len(digests)
