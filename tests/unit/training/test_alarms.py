"""Alarms: each is raised by what it is named for, and not by a run that learns."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.runs.alarms import (
    NUM_FLAT,
    Accused,
    Alarm,
    AlarmKind,
    MemberFacts,
    Waiting,
    find_alarms,
)

LEARNING = [2 + 5 * math.exp(-number / 10) for number in range(30)]


def noisy(values: list[float], amount: float, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [value + amount * draw.gauss(0, 1) for value in values]


def kinds(alarms: tuple[Alarm, ...]) -> list[AlarmKind]:
    return [alarm.kind for alarm in alarms]


def members(*cosines: float | None, in_a_row: int = 3) -> list[MemberFacts]:
    return [
        MemberFacts(seat, f"m{seat}", 1.0, 0.5, cosine, {"torch": "2.10"}, apart_in_a_row=in_a_row)
        for seat, cosine in enumerate(cosines)
    ]


def test_a_run_that_learns_has_none() -> None:
    for length in range(len(LEARNING)):
        assert find_alarms(LEARNING[:length], members(0.6, 0.5, 0.7)) == ()
    assert find_alarms([], []) == ()


# The loss


def test_a_loss_that_does_not_fall_is_flat() -> None:
    flat = noisy([3.0] * NUM_FLAT, 0.01)
    assert AlarmKind.FLAT_LOSS in kinds(find_alarms(flat, []))
    assert find_alarms(flat[1:], []) == (), "too few to say so"
    assert kinds(find_alarms([3.0] * NUM_FLAT, [])) == [AlarmKind.FLAT_LOSS]


def test_a_slow_fall_that_stands_out_of_the_noise_is_not_flat() -> None:
    falling = noisy([3.0 - 0.01 * number for number in range(NUM_FLAT)], 0.01)
    assert find_alarms(falling, []) == ()


def test_a_rising_loss_diverges() -> None:
    rising = [*LEARNING, 2.4, 2.9, 3.6, 4.8]
    [alarm] = find_alarms(rising, [])
    assert alarm.kind is AlarmKind.DIVERGING_LOSS
    assert "smaller [inner] lr" in alarm.text


def test_one_bad_round_does_not_make_a_loss_diverge() -> None:
    assert find_alarms([*LEARNING[:15], 3.6, *LEARNING[15:18]], []) == ()


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_diverges(loss: float) -> None:
    [alarm] = find_alarms([3.0, loss], [])
    assert alarm.kind is AlarmKind.DIVERGING_LOSS
    assert "last checkpoint" in alarm.text


# Members


def test_one_member_apart() -> None:
    [alarm] = find_alarms(LEARNING, members(0.7, 0.1, 0.6, 0.65))
    assert (alarm.kind, alarm.seat) == (AlarmKind.MEMBER_APART, 1)
    assert alarm.text.startswith("m1 is apart for 3 rounds: the cosine ")
    once = members(0.7, 0.1, 0.6, 0.65, in_a_row=2)
    assert find_alarms(LEARNING, once) == (), "few samples point anywhere now and then"


def test_a_member_with_few_samples_is_not_apart() -> None:
    told = members(0.75, 0.3, 0.7)
    few = [replace(told[0], num_samples=48), replace(told[1], num_samples=12)]
    assert find_alarms(LEARNING, [*few, replace(told[2], num_samples=40)]) == ()
    many = replace(told[1], num_samples=40)
    [alarm] = find_alarms(LEARNING, [few[0], many, told[2]])
    assert (alarm.kind, alarm.seat) == (AlarmKind.MEMBER_APART, 1)
    away = replace(few[1], cosine=-0.1)
    assert kinds(find_alarms(LEARNING, [few[0], away])) == [AlarmKind.MEMBER_APART]


def test_members_that_all_differ_alike_are_not_apart() -> None:
    assert find_alarms(LEARNING, members(0.3, 0.35, 0.28)) == ()
    assert find_alarms(LEARNING, members(0.3, None, 0.9)) == (), "of two, neither is the odd one"


def test_a_member_that_points_away_is_apart_even_of_two() -> None:
    [alarm] = find_alarms(LEARNING, members(0.9, -0.2))
    assert (alarm.kind, alarm.seat) == (AlarmKind.MEMBER_APART, 1)


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        (MemberFacts(3, "m", gradient_norm=0.0), "gradient"),
        (
            MemberFacts(3, "m", gradient_norm=1.0, difference_norm=0.0, still_in_a_row=3),
            "difference",
        ),
        (MemberFacts(3, "m", gradient_norm=0.0, difference_norm=0.0), "gradient"),
    ],
)
def test_zero_gradients(facts: MemberFacts, what: str) -> None:
    [alarm] = find_alarms(LEARNING, [facts])
    assert (alarm.kind, alarm.seat) == (AlarmKind.ZERO_GRADIENTS, 3)
    assert f"its {what}" in alarm.text


def test_a_rate_that_warms_up_from_zero_is_no_alarm() -> None:
    assert find_alarms([8.3], [MemberFacts(0, "m", 1.0, 0.0, still_in_a_row=1)]) == ()
    assert find_alarms(LEARNING, [MemberFacts(0, "m", 1.0, 0.1, still_in_a_row=3)]) == ()


def test_a_member_that_is_late_each_time_never_reaches_its_target() -> None:
    assert find_alarms(LEARNING, [MemberFacts(0, "slow", late_in_a_row=2)]) == ()
    [alarm] = find_alarms(LEARNING, [MemberFacts(0, "slow", late_in_a_row=3)])
    assert (alarm.kind, alarm.seat) == (AlarmKind.TARGET_NOT_REACHED, 0)


def test_a_round_that_does_not_end() -> None:
    waiting = Waiting(12, 340.0, 20.0, ("slow", "slower"))
    [alarm] = find_alarms(LEARNING, [], waiting=waiting)
    assert (alarm.kind, alarm.seat) == (AlarmKind.TARGET_NOT_REACHED, None)
    assert alarm.text.startswith("round 12 has been waited for 340 s, for slow, slower")
    for seconds, usual in ((90.0, 20.0), (20.0, 1.0), (1e6, 0.0)):
        assert find_alarms(LEARNING, [], waiting=Waiting(1, seconds, usual)) == ()


def test_another_version_of_what_computes() -> None:
    told = [
        MemberFacts(
            seat,
            f"m{seat}",
            versions={"torch": version, "transformers": "5.1", "tokenizers": f"{seat}"},
        )
        for seat, version in enumerate(("2.10", "2.9", "2.10"))
    ]
    [alarm] = find_alarms(LEARNING, told)
    assert (alarm.kind, alarm.seat) == (AlarmKind.VERSIONS_DIFFER, 1)
    assert alarm.text.startswith("m1 has torch 2.9 where most have 2.10: ")
    older = replace(told[1], versions={"torch": "2.9", "transformers": "4.9"})
    [alarm] = find_alarms(LEARNING, [told[0], older, told[2]])
    assert "m1 has torch 2.9 where most have 2.10, and transformers 4.9 where most" in alarm.text
    assert find_alarms(LEARNING, [*told[::2], MemberFacts(1, "m1")]) == (), "it has not said"


@given(
    st.lists(st.floats(), max_size=40),
    st.lists(
        st.builds(
            MemberFacts,
            seat=st.integers(0, 5),
            name=st.sampled_from("abc"),
            gradient_norm=st.none() | st.floats(0, 1e30),
            difference_norm=st.none() | st.floats(0, 1e30),
            cosine=st.none() | st.floats(-1, 1),
            versions=st.dictionaries(st.just("torch"), st.sampled_from(("1", "2", "3"))),
            late_in_a_row=st.integers(0, 5),
            apart_in_a_row=st.integers(0, 5),
            still_in_a_row=st.integers(0, 5),
        ),
        max_size=5,
    ),
)
def test_whatever_is_told_alarms_are_lines(losses: list[float], facts: list[MemberFacts]) -> None:
    for alarm in find_alarms(losses, facts):
        assert alarm.text.isprintable()


def test_who_is_accused_is_said_once_and_the_latest() -> None:
    accused = [Accused(1, "it is accused"), Accused(2, "it is accused, too"), Accused(1, "ejected")]
    found = find_alarms(LEARNING, members(0.6, 0.5), accused=accused)
    assert found == (
        Alarm(AlarmKind.CHEATING, "ejected", 1),
        Alarm(AlarmKind.CHEATING, "it is accused, too", 2),
    )
