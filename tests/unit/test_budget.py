"""The budget of bytes: who waits, who does not, and that nothing is lost when somebody gives up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.p2p.streams.bounds import Bounds
from neurogrid.p2p.streams.budget import ByteBudget

pytestmark = pytest.mark.usefixtures("autojump_clock")

Test = Callable[[], Awaitable[None]]


def run(test: Test) -> None:
    trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_there_is_room() -> None:
    budget = ByteBudget(per_peer=100, total=200)
    assert await budget.wait_room("a", 100, timeout=0)
    budget.add("a", 100)
    assert await budget.wait_room("b", 50, timeout=0)
    assert not await budget.wait_room("b", 51, timeout=5)
    assert not await budget.wait_room("a", 1, timeout=5)
    assert trio.current_time() > 9


async def test_what_is_larger_than_all_is_alone() -> None:
    budget = ByteBudget(per_peer=100, total=150)
    assert await budget.wait_room("a", 1000, timeout=0)
    budget.add("a", 1000)
    assert not await budget.wait_room("a", 1, timeout=1)
    assert not await budget.wait_room("b", 1, timeout=1)
    budget.remove("a", 1000)
    budget.add("b", 1)
    assert not await budget.wait_room("a", 1000, timeout=1)


async def test_who_waits_goes_on_when_there_is_room() -> None:
    budget = ByteBudget(per_peer=100, total=150)
    budget.add("a", 100)
    got: list[tuple[str, float]] = []

    async def wait(peer_id: str) -> None:
        assert await budget.wait_room(peer_id, 60, timeout=60)
        budget.add(peer_id, 60)
        got.append((peer_id, trio.current_time()))

    async with trio.open_nursery() as nursery:
        start = trio.current_time()
        nursery.start_soon(wait, "b")
        nursery.start_soon(wait, "c")
        await trio.sleep(5)
        budget.remove("a", 100)
        await trio.sleep(5)
        # Two of 60 do not fit: whoever looked first has it.
        assert [round(at - start) for _, at in got] == [5]
        budget.remove(got[0][0], 60)
    assert {peer for peer, _ in got} == {"b", "c"}


async def test_whoever_gives_up_holds_nothing() -> None:
    budget = ByteBudget(per_peer=100, total=100)
    budget.add("a", 100)
    with trio.move_on_after(1):
        await budget.wait_room("b", 10, timeout=60)
    assert budget.held_bytes == 100
    budget.remove("a", 100)
    assert budget.held_bytes == 0
    assert not budget._held  # not even a zero


def test_hold_gives_back_also_after_an_error() -> None:
    budget = ByteBudget(per_peer=100, total=100)
    try:
        with budget.hold("a", 500):
            assert budget.held_bytes == 500
            raise ValueError
    except ValueError:
        pass
    assert budget.held_bytes == 0


def test_greedy_peers_leave_room_for_who_holds_nothing() -> None:
    mib, budget = 2**20, ByteBudget(per_peer=1024 * 2**20, total=4096 * 2**20)
    left = []
    for number in range(
        9
    ):  # each takes all that it gets, in the largest messages and then smaller ones
        for num_bytes in (256 * mib, 64 * mib, 8 * mib, mib):
            while budget.try_add(f"greedy {number}", num_bytes):
                pass
        left.append(4096 * mib - budget.held_bytes)
    assert left[:4] == [3072 * mib, 2048 * mib, 1024 * mib, 512 * mib]
    assert budget.try_add("honest", 8 * mib)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 120), st.integers(0, 3)), max_size=40)
)
def test_no_more_is_held_than_may_be(messages: list[tuple[str, int, int]]) -> None:
    """Every message gets its turn in the end, and until then the bounds hold."""

    async def test() -> None:
        budget = ByteBudget(per_peer=50, total=100)
        held: Counter[str] = Counter()
        num_done = 0

        async def receive(peer_id: str, num_bytes: int, seconds: int) -> None:
            nonlocal num_done
            assert await budget.wait_room(peer_id, num_bytes, timeout=100_000)
            others = held.total()
            assert not held[peer_id] or held[peer_id] + num_bytes <= 50
            assert not others or held[peer_id] + num_bytes <= 100 - others - num_bytes
            with budget.hold(peer_id, num_bytes):
                held[peer_id] += num_bytes
                assert budget.held_bytes == held.total()
                await trio.sleep(seconds)
                held[peer_id] -= num_bytes
            num_done += 1

        async with trio.open_nursery() as nursery:
            for message in messages:
                nursery.start_soon(receive, *message)
        assert num_done == len(messages)
        assert not budget._held

    run(test)


def test_bounds_that_no_peer_could_use_up_are_none() -> None:
    """A peer that is alone has what it was promised: what it holds, and as much that is left to others."""
    bounds = Bounds(max_bytes_per_peer=100, max_bytes=200)
    budget = ByteBudget(per_peer=bounds.max_bytes_per_peer, total=bounds.max_bytes)
    budget.add("a", 40)
    assert budget.try_add("a", 60)
    with pytest.raises(ValueError, match="at least twice max_bytes_per_peer, 100, not 199"):
        Bounds(max_bytes_per_peer=100, max_bytes=199)
