"""Sessions are let in as the workers will let them in: by bytes, first come first served."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from neurogrid.errors import CapacityError
from neurogrid.inference.generation.cache_room import CacheRoom
from neurogrid.model.stages.cost import LayerCost

FULL = LayerCost(weight_bytes=1, cache_bytes_per_token=10)
WINDOW = LayerCost(weight_bytes=1, cache_bytes_per_token=10, max_cached_tokens=20)


class Guests:
    """Sessions that stay until they are told to go."""

    def __init__(self, room: CacheRoom) -> None:
        self.room = room
        self.inside: list[str] = []
        self.scopes: dict[str, trio.CancelScope] = {}

    async def stay(self, name: str, max_length: int) -> None:
        with trio.CancelScope() as scope:
            self.scopes[name] = scope
            async with self.room.session(max_length):
                self.inside.append(name)
                try:
                    await trio.sleep_forever()
                finally:
                    self.inside.remove(name)


async def _enter(nursery: trio.Nursery, guests: Guests, *sessions: tuple[str, int]) -> None:
    for name, max_length in sessions:
        nursery.start_soon(guests.stay, name, max_length)
        await trio.testing.wait_all_tasks_blocked()


async def _leave(guests: Guests, *names: str) -> None:
    for name in names:
        guests.scopes[name].cancel()
    await trio.testing.wait_all_tasks_blocked()


async def test_short_sessions_take_less_and_nobody_is_overtaken() -> None:
    guests = Guests(CacheRoom([[FULL, FULL], [FULL]], max_sessions=2, max_length=100))
    async with trio.open_nursery() as nursery:
        await _enter(nursery, guests, ("a", 100), ("b", 50), ("c", 50), ("d", 100), ("e", 1))
        assert guests.inside == ["a", "b", "c"]
        assert guests.room.num_waiting == 2
        await _leave(guests, "b")
        assert guests.inside == ["a", "c"]  # "e" would fit, and waits its turn
        await _leave(guests, "d")  # gave up waiting: the next one's turn
        assert guests.inside == ["a", "c", "e"]
        await _leave(guests, "a", "c", "e")
        await _enter(nursery, guests, ("f", 100), ("g", 100))
        assert guests.inside == ["f", "g"]
        nursery.cancel_scope.cancel()


async def test_so_many_wait_and_the_next_is_refused() -> None:
    room = CacheRoom([[FULL]], max_sessions=1, max_length=100, max_waiting=2)
    guests = Guests(room)
    async with trio.open_nursery() as nursery:
        await _enter(nursery, guests, ("a", 100), ("b", 100), ("c", 100))
        with pytest.raises(CapacityError, match="2 sessions wait for room"):
            async with room.session(1):
                pass
        await _leave(guests, "a")
        await _enter(nursery, guests, ("d", 100))
        assert room.num_waiting == 2
        nursery.cancel_scope.cancel()


async def test_every_stage_counts_as_its_worker_does() -> None:
    # Short sessions take as much of a window's memory as long ones.
    guests = Guests(CacheRoom([[FULL], [WINDOW]], max_sessions=2, max_length=1000))
    async with trio.open_nursery() as nursery:
        await _enter(nursery, guests, ("a", 20), ("b", 20), ("c", 20))
        assert guests.inside == ["a", "b"]
        nursery.cancel_scope.cancel()
