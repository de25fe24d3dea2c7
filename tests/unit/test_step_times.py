"""What a step may take follows from what steps took."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.fleet.step_times import MIN_STEPS, NUM_RECENT, StepTimes

SECONDS = st.floats(1e-5, 10.0)


def seen(*steps: float, num_layers: int = 4) -> StepTimes:
    times = StepTimes()
    for seconds in steps:
        times.observe(1, num_layers, seconds)
    return times


def test_nothing_is_expected_of_who_was_hardly_seen() -> None:
    assert StepTimes().expected(1, 4) is None
    assert seen(*[0.1] * (MIN_STEPS - 1)).expected(1, 4) is None


def test_steady_steps_leave_little_room_and_unsteady_ones_more() -> None:
    steady = seen(*[0.1] * 50).expected(1, 4)
    unsteady = seen(*[0.05, 0.15] * 25).expected(1, 4)
    assert steady is not None
    assert unsteady is not None
    assert 0.1 <= steady < 0.11
    assert unsteady > 0.2


def test_a_single_slow_step_is_forgotten_little_by_little() -> None:
    times = seen(*[0.1] * 50, 10.0)
    after = times.expected(1, 4)
    assert after is not None
    assert after > 1.0
    for _ in range(60):
        times.observe(1, 4, 0.1)
    later = times.expected(1, 4)
    assert later is not None
    assert later < 0.2


def test_a_prefill_may_take_what_its_tokens_take() -> None:
    times = seen(*[0.1] * 50)
    unknown = times.expected(100, 4)
    times.observe(100, 4, 1.0)
    known = times.expected(100, 4)
    assert unknown is not None
    assert known is not None
    assert 1.0 < known < unknown


def test_fewer_layers_take_less() -> None:
    times = seen(*[0.1] * 50)
    whole, half = times.expected(1, 4), times.expected(1, 2)
    assert whole is not None
    assert half is not None
    assert abs(whole - 2 * half) < 1e-9


def test_the_latest_tokens_are_kept_as_the_worker_told_them() -> None:
    times = seen(0.1, 0.1)
    times.observe(100, 4, 1.0, computed=0.9)
    assert times.recent == ()
    for number in range(NUM_RECENT + 2):
        times.observe(1, 4, 0.4, computed=number / 1000)
    assert times.recent == tuple((4, number / 1000) for number in range(2, NUM_RECENT + 2))
    times.forget_recent()
    assert times.recent == ()


@given(st.lists(SECONDS, min_size=16, max_size=100), st.integers(1, 64))
def test_the_bound_is_finite_and_not_below_what_a_steady_worker_takes(
    steps: list[float], num_tokens: int
) -> None:
    times = seen(*steps, num_layers=1)
    expected = times.expected(num_tokens, 1)
    assert expected is not None
    assert min(steps) * 0.99 <= expected < 1e4


def test_few_tokens_say_nothing_of_a_prompt() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(1, 2, 0.1)
        times.observe(512, 2, 1.0)
    before = times.expected(512, 2)
    for _ in range(20):
        times.observe(9, 2, 0.2)
    assert times.expected(512, 2) == before
    few = times.expected(9, 2)
    assert few is not None
    assert 0.2 < few < 1.0
