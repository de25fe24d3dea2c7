"""Who is waited for: those who came together the last time, for a part of a step, and nobody else."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import trio
import trio.testing

from neurogrid.node.batcher import Batcher
from neurogrid.node.burst import (
    BRIEF,
    IDLE_SECONDS,
    IDLE_STEPS,
    MAX_GAP,
    MAX_ROUND,
    MIN_GAP,
    Burst,
)

STEP = 0.004


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def burst(clock: Clock) -> Burst:
    return Burst(clock)


def ran(burst: Burst, *sessions: Hashable) -> None:
    """These came, and went through together."""
    for session in sessions:
        burst.came(session)
    burst.stepped(STEP, sessions)


def two_wait_for_a_third(burst: Burst) -> None:
    burst.came(1)
    burst.came(2)
    assert burst.delay({1, 2}) > MIN_GAP
    burst.came(3)
    assert burst.delay({1, 2, 3}) == 0.0


def test_who_came_together_is_waited_for_and_others_are_not(burst: Burst, clock: Clock) -> None:
    ran(burst, 1, 2, 3)
    clock.now += STEP
    ran(burst, 4, 5)
    clock.now += STEP
    two_wait_for_a_third(burst)
    burst.came(4)
    assert burst.delay({1, 2, 3, 4}) > 0.0
    burst.gone(5)
    assert burst.delay({1, 2, 3, 4}) == 0.0


def test_one_that_comes_as_the_others_begin_is_waited_for_the_next_time(
    burst: Burst, clock: Clock
) -> None:
    for _ in range(2):
        ran(burst, 1, 2)
        clock.now += STEP
    burst.came(3)
    burst.stepped(STEP, [3])
    clock.now += STEP
    ran(burst, 1, 2)
    burst.came(3)  # torn off: 1 and 2 have begun
    burst.stepped(STEP, [3])
    clock.now += STEP
    two_wait_for_a_third(burst)


def test_two_bursts_that_ran_together_come_apart_again(burst: Burst, clock: Clock) -> None:
    for _ in range(2):
        burst.came(1)
        burst.came(2)
        clock.now += STEP
        burst.came(3)
        burst.came(4)
        burst.stepped(STEP, [1, 2, 3, 4])
        clock.now += STEP
    burst.came(1)
    burst.came(2)
    assert burst.delay({1, 2}) == 0.0


def test_a_burst_is_over_when_nothing_has_come_for_a_part_of_a_step(
    burst: Burst, clock: Clock
) -> None:
    ran(burst, 1, 2)
    burst.came(1)
    delay = burst.delay({1})
    assert 0.0 < delay < STEP
    clock.now += delay / 2
    assert burst.delay({1}) == pytest.approx(delay / 2)
    clock.now += delay / 2
    assert burst.delay({1}) == 0.0
    burst.stepped(STEP, [1])
    ran(burst, 2)
    burst.came(1)
    assert burst.delay({1}) < 1.01 * MIN_GAP  # torn apart: no more than for one that comes along


def test_one_that_is_new_may_bring_others_along(burst: Burst) -> None:
    burst.came("alone")
    assert burst.delay({"alone"}) == 0.0
    burst.stepped(STEP, ["alone"])
    ran(burst, 1, 2)
    burst.came("new")
    assert burst.delay({"new"}) == pytest.approx(MIN_GAP)


def test_the_way_around_is_that_of_the_quickest(burst: Burst, clock: Clock) -> None:
    ran(burst, "quick", "slow")
    burst.came("new")
    assert burst.away(["new", "quick", "slow"]) == 0.0  # nobody knows what one takes
    for _ in range(4):
        clock.now += 0.02
        ran(burst, "quick")
    ran(burst, "slow")
    assert burst.away(["slow", "new"]) == pytest.approx(0.08)
    assert burst.away(["slow", "quick"]) == pytest.approx(0.02)
    clock.now += 60.0
    burst.came("slow")
    assert burst.away(["slow"]) == MAX_ROUND


def test_the_first_waits_no_longer_than_a_step(burst: Burst, clock: Clock) -> None:
    ran(burst, "first", "missing", *range(50))
    clock.now += STEP
    burst.came("first")
    started, waiting = clock.now, {"first"}
    while burst.delay(waiting):
        waiting.add(str(clock.now))
        burst.came(str(clock.now))
        clock.now += MIN_GAP / 2
    assert clock.now - started < 1.1 * max(STEP, MAX_GAP)


def test_who_waits_while_others_step_is_not_put_off(burst: Burst, clock: Clock) -> None:
    ran(burst, "a")
    ran(burst, "b")
    burst.came("a")
    assert burst.first_came({"a"}) == clock.now
    for _ in range(IDLE_STEPS + 1):
        clock.now += STEP
        ran(burst, "b")
    assert burst.num_active == 1
    assert burst.first_came({"a"}) == burst.first_came({"a", "b"}) == -math.inf
    assert burst.delay({"a"}) == 0.0


def test_who_does_not_come_while_others_step_is_waited_for_no_more(
    burst: Burst, clock: Clock
) -> None:
    ran(burst, "finished", "next")
    for _ in range(IDLE_STEPS - 1):
        burst.came("next")
        assert burst.misses({"next"}, ["next", "finished"])
        burst.stepped(STEP, ["next"])
        clock.now += 0.001
    burst.came("next")
    burst.stepped(STEP, ["next"])
    assert not burst.misses({"next"}, ["next", "finished"])
    assert burst.delay({"next"}) == 0.0
    assert burst.is_brief
    burst.came("finished")  # it goes on
    assert burst.num_active == 2


def test_who_does_not_come_for_a_while_is_waited_for_no_more(burst: Burst, clock: Clock) -> None:
    ran(burst, 1, 2)
    clock.now += IDLE_SECONDS + IDLE_STEPS * STEP + 0.001
    burst.came(1)
    assert burst.num_active == 1
    assert burst.delay({1}) == 0.0


def test_a_lone_session_of_short_steps_is_brief(burst: Burst) -> None:
    burst.came(1)
    assert not burst.is_brief  # nobody knows yet
    burst.stepped(BRIEF, [1])
    assert burst.is_brief
    burst.stepped(2 * BRIEF, [1])
    assert not burst.is_brief
    burst.stepped(BRIEF, [1])
    burst.came(2)
    assert not burst.is_brief
    burst.gone(1)
    assert burst.is_brief


def test_a_queue_takes_a_burst_together_and_waits_for_nobody_who_is_late() -> None:
    calls: list[list[int]] = []
    burst = Burst()

    async def run_torch(function: Callable[..., Any], jobs: Sequence[int]) -> Any:
        calls.append(list(jobs))
        burst.stepped(STEP, jobs)
        return function(jobs)

    batcher: Batcher[int, int] = Batcher(
        list, list, run_torch, max_waiting=8, linger=lambda waiting: burst.delay(set(waiting))
    )

    async def submit(job: int, at: float) -> None:
        await trio.sleep_until(at)
        burst.came(job)
        assert await batcher.submit(job) == job

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(batcher.run)
            gaps = (0.0004, 0.0004, 0.0015, 0.01, 0.0015, 0.0004)
            for at, gap in enumerate(gaps, 1):
                calls.append([])
                async with trio.open_nursery() as jobs:
                    for job in (1, 2, 3):
                        jobs.start_soon(submit, job, at + gap * (job - 1))
            await trio.sleep(3.0)
            calls.append([])
            await submit(1, trio.current_time())
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    together, apart = [[], [1, 2, 3]], [[], [1], [2], [3]]
    # The first of all knows of nobody. What has run together is waited for, what has not comes together if it is close.
    assert calls == [[], [1], [2, 3], *together, *together, *apart, *apart, *together, [], [1]]
