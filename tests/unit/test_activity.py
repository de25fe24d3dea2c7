"""Who has come of late, and whether there is time for what is brief."""

from __future__ import annotations

import pytest

from neurogrid.node.activity import BRIEF, IDLE_SECONDS, IDLE_STEPS, Activity

STEP = 0.004


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_session_that_does_not_come_while_others_step_does_nothing() -> None:
    activity = Activity(Clock())
    for session in (1, 2):
        activity.came(session)
    for _ in range(IDLE_STEPS):
        activity.came(1)
        activity.stepped(STEP)
    assert activity.num_active == 2
    activity.stepped(STEP)
    assert activity.num_active == 1


def test_none_that_comes_for_a_while_does_anything() -> None:
    clock = Clock()
    activity = Activity(clock)
    activity.came(1)
    activity.stepped(STEP)
    clock.now += IDLE_SECONDS
    assert activity.num_active == 1
    clock.now += IDLE_STEPS * STEP + 0.001
    assert activity.num_active == 0


@pytest.mark.parametrize("seconds", [BRIEF, 2 * BRIEF])
def test_a_lone_session_of_short_steps_is_brief(seconds: float) -> None:
    activity = Activity(Clock())
    activity.came(1)
    assert not activity.is_brief  # what a step takes is not known
    activity.stepped(seconds)
    assert activity.is_brief == (seconds <= BRIEF)
    activity.came(2)
    assert not activity.is_brief
    activity.gone(2)
    assert activity.is_brief == (seconds <= BRIEF)
