"""Many deadlines, one task: each comes when it is due, and none that was cleared."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.p2p.exchange.deadlines import MAX_SLEEP, Deadlines

pytestmark = pytest.mark.usefixtures("autojump_clock")


class Sleeper:
    """Notes what becomes of its deadline."""

    def __init__(self) -> None:
        self.expired_at: float | None = None
        self.is_abandoned = False

    def expire(self) -> None:
        self.expired_at = trio.current_time()

    def abandon(self) -> None:
        self.is_abandoned = True


def run(test: Callable[[], Awaitable[None]]) -> None:
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))


# When each is set, how long after that it is due, and when it is cleared.
TIMES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 19)), max_size=12)


@given(TIMES)
def test_each_expires_when_it_is_due_unless_it_is_cleared(
    times: list[tuple[int, int, int]],
) -> None:
    async def test() -> None:
        start = trio.current_time()
        sleepers = [Sleeper() for _ in times]

        async def live(sleeper: Sleeper, since: int, delay: int, until: int) -> None:
            await trio.sleep_until(start + since)
            deadlines.set(sleeper, start + since + delay)
            await trio.sleep_until(start + max(since, until) + 0.5)
            deadlines.clear(sleeper)

        async with trio.open_nursery() as nursery:
            deadlines = Deadlines(nursery.start_soon)
            for sleeper, each in zip(sleepers, times, strict=True):
                nursery.start_soon(live, sleeper, *each)
        assert len(deadlines) == 0
        for sleeper, (since, delay, until) in zip(sleepers, times, strict=True):
            is_due = since + delay <= max(since, until)
            assert sleeper.expired_at == (start + since + delay if is_due else None)
            assert not sleeper.is_abandoned

    run(test)


async def test_one_task_serves_all_and_ends_when_none_is_left() -> None:
    started = 0

    def spawn(function: Callable[[], Awaitable[None]]) -> None:
        nonlocal started
        started += 1
        nursery.start_soon(function)

    async with trio.open_nursery() as nursery:
        deadlines = Deadlines(spawn)
        for _ in range(3):
            sleeper = Sleeper()
            for delay in (30, 20, 10):
                deadlines.set(sleeper, trio.current_time() + delay)
                deadlines.clear(sleeper)
            assert len(nursery.child_tasks) == 1
            await trio.sleep(MAX_SLEEP)
            await trio.testing.wait_all_tasks_blocked()
            assert not nursery.child_tasks
            assert sleeper.expired_at is None
    assert started == 3


async def test_nothing_has_two_deadlines() -> None:
    async with trio.open_nursery() as nursery:
        deadlines, sleeper = Deadlines(nursery.start_soon), Sleeper()
        deadlines.set(sleeper, trio.current_time() + 1)
        with pytest.raises(trio.BusyResourceError):
            deadlines.set(sleeper, trio.current_time() + 2)
        deadlines.clear(sleeper)


async def test_when_its_task_is_cancelled_those_that_wait_are_told_and_later_ones_too() -> None:
    early, late = Sleeper(), Sleeper()
    async with trio.open_nursery() as nursery:
        deadlines = Deadlines(nursery.start_soon)
        deadlines.set(early, trio.current_time() + 1)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert early.is_abandoned
    deadlines.set(late, trio.current_time() + 1)
    assert late.is_abandoned
    assert len(deadlines) == 0
