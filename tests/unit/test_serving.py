"""Who is served when: within the bounds, in turns, and nobody for ever or twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.p2p.exchange.served_requests import Serving
from neurogrid.p2p.streams.bounds import Bounds


def run(test: Callable[[trio.Nursery], Awaitable[None]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await test(nursery)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


class Log:
    """Jobs that last a second, or until they are let go; and what became of them."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.started: list[str] = []
        self.done: list[str] = []
        self.go = trio.Event()

    def submit(self, peer_id: str, name: str, *, seconds: float | None = 1.0) -> bool:
        async def job() -> None:
            self.started.append(name)
            if seconds is None:
                await self.go.wait()
            else:
                await trio.sleep(seconds)

        return self.serving.submit(peer_id, job, lambda: self.done.append(name))


def test_jobs_run_in_their_order_within_the_bound_of_a_peer() -> None:
    async def test(nursery: trio.Nursery) -> None:
        log = Log(Serving(nursery.start_soon, Bounds(max_running_per_peer=2)))
        assert all(log.submit("a", f"a{index}") for index in range(5))
        assert (log.serving.num_running, log.serving.num_waiting("a")) == (2, 3)
        await trio.sleep(10)
        # Two at a time: which of two tasks runs first, is trio's affair.
        for jobs in (log.started, log.done):
            assert [sorted(jobs[at : at + 2]) for at in (0, 2, 4)] == [
                ["a0", "a1"],
                ["a2", "a3"],
                ["a4"],
            ]
        assert log.serving.num_running == 0

    run(test)


def test_too_many_that_wait_are_not_taken() -> None:
    async def test(nursery: trio.Nursery) -> None:
        bounds = Bounds(max_running_per_peer=1, max_waiting_per_peer=2)
        log = Log(Serving(nursery.start_soon, bounds))
        assert [log.submit("a", f"a{index}") for index in range(5)] == [True] * 3 + [False] * 2
        assert log.submit("b", "b0")
        await trio.sleep(10)
        # Those that were not taken are the caller's affair.
        assert sorted(log.done) == ["a0", "a1", "a2", "b0"]
        assert log.submit("a", "a5")

    run(test)


def test_peers_take_turns_job_by_job() -> None:
    async def test(nursery: trio.Nursery) -> None:
        log = Log(Serving(nursery.start_soon, Bounds(max_running=1)))
        for index in range(4):
            log.submit("a", f"a{index}")
        for index in range(2):
            log.submit("b", f"b{index}")
        log.submit("c", "c0")
        await trio.sleep(20)
        assert log.started == ["a0", "a1", "b0", "c0", "a2", "b1", "a3"]

    run(test)


def test_room_that_comes_free_goes_round_also_when_jobs_never_end() -> None:
    """A peer at the head of the row does not take every place that the others leave."""

    async def test(nursery: trio.Nursery) -> None:
        log = Log(Serving(nursery.start_soon, Bounds(max_running=4)))
        for index in range(4):
            log.submit("short", f"s{index}")
        for index in range(10):
            log.submit("endless", f"e{index}", seconds=None)
        for index in range(2):
            log.submit("late", f"l{index}")
        await trio.sleep(1.5)
        assert sorted(log.started[4:]) == ["e0", "e1", "l0", "l1"]

    run(test)


def test_what_waits_is_dropped_with_its_peer_and_what_runs_goes_on() -> None:
    async def test(nursery: trio.Nursery) -> None:
        log = Log(Serving(nursery.start_soon, Bounds(max_running_per_peer=1)))
        for index in range(3):
            log.submit("a", f"a{index}")
        await trio.testing.wait_all_tasks_blocked()
        log.serving.forget("a")
        assert log.done == ["a1", "a2"]
        assert log.serving.num_waiting("a") == 0
        await trio.sleep(10)
        assert log.started == ["a0"]
        assert log.done == ["a1", "a2", "a0"]
        log.serving.forget("nobody")

    run(test)


def test_a_job_that_is_cancelled_gives_its_place_back() -> None:
    async def test(nursery: trio.Nursery) -> None:
        async with trio.open_nursery() as inner:
            log = Log(Serving(inner.start_soon, Bounds(max_running_per_peer=1)))
            log.submit("a", "a0", seconds=None)
            await trio.testing.wait_all_tasks_blocked()
            inner.cancel_scope.cancel()
        assert log.done == ["a0"]
        assert log.serving.num_running == 0

    run(test)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.integers(0, 5),  # seconds that it takes
            st.integers(0, 2),  # seconds until the next comes
        ),
        max_size=60,
    ),
    st.sets(st.sampled_from("abcd")),
)
def test_bounds_hold_and_each_ends_once(
    jobs: list[tuple[str, int, int]], forgotten: set[str]
) -> None:
    bounds = Bounds(max_running=4, max_running_per_peer=2, max_waiting_per_peer=3)

    async def test(nursery: trio.Nursery) -> None:
        serving = Serving(nursery.start_soon, bounds)
        running: Counter[str] = Counter()
        ended: Counter[int] = Counter()
        taken: set[int] = set()
        ran: set[int] = set()

        def submit(number: int, peer_id: str, seconds: int) -> bool:
            async def job() -> None:
                running[peer_id] += 1
                ran.add(number)
                assert running[peer_id] <= 2
                assert running.total() <= 4
                await trio.sleep(seconds)
                running[peer_id] -= 1

            return serving.submit(peer_id, job, lambda: ended.update([number]))

        for number, (peer_id, seconds, pause) in enumerate(jobs):
            if submit(number, peer_id, seconds):
                taken.add(number)
            assert serving.num_waiting(peer_id) <= 3
            await trio.sleep(pause)
        for peer_id in forgotten:
            serving.forget(peer_id)
        await trio.sleep(1000)
        assert ended == Counter(taken)
        assert {number for number in taken if jobs[number][0] not in forgotten} <= ran
        assert serving.num_running == 0
        assert not serving._waiting
        assert not serving._running

    run(test)
