"""Room for sessions in the memory that was agreed with the workers: first come, first served.

Workers set memory aside for so many sessions of the greatest length. Shorter ones take less of it, by the same
count that the workers make, so that more of them are open at once. Who finds no room waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from neurogrid.errors import CapacityError
from neurogrid.model.cost import LayerCost

__all__ = ["CacheRoom", "MAX_WAITING_SESSIONS"]

MAX_WAITING_SESSIONS = 4096


class CacheRoom:
    """Memory for caches on every stage.

    Args:
        stages: the costs of the layers of each stage.
        max_sessions: sessions of `max_length` tokens that fit on each.
        max_length: tokens.
        max_waiting: sessions that may wait for room.

    Attributes:
        limit_bytes: on all stages together.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[LayerCost]],
        *,
        max_sessions: int,
        max_length: int,
        max_waiting: int = MAX_WAITING_SESSIONS,
    ) -> None:
        self._max_waiting = max_waiting
        self._stages = stages
        self._free = [max_sessions * needed for needed in self._needed(max_length)]
        self.limit_bytes = sum(self._free)
        self._waiting: deque[tuple[list[int], trio.Event]] = deque()

    @property
    def reserved_bytes(self) -> int:
        """Set aside for sessions that are open, on all stages together."""
        return self.limit_bytes - sum(self._free)

    @property
    def num_waiting(self) -> int:
        """Sessions that wait for room."""
        return len(self._waiting)

    @asynccontextmanager
    async def session(self, max_length: int) -> AsyncIterator[None]:
        """Wait until a session of `max_length` tokens has room, and hold that until the block is left.

        Raises:
            CapacityError: too many wait already.
        """
        needed = self._needed(max_length)
        if self._waiting or not self._take(needed):
            if len(self._waiting) >= self._max_waiting:
                raise CapacityError(
                    f"{len(self._waiting)} sessions wait for room on the workers already",
                    needed=len(self._waiting) + 1,
                    available=self._max_waiting,
                )
            await self._wait(needed)
        try:
            yield
        finally:
            self._free = [have + back for have, back in zip(self._free, needed, strict=True)]
            self._admit()

    async def _wait(self, needed: list[int]) -> None:
        place = (needed, trio.Event())
        self._waiting.append(place)
        try:
            await place[1].wait()
        except trio.Cancelled:
            if place in self._waiting:
                self._waiting.remove(place)
            else:  # it was let in, and goes away
                self._free = [have + back for have, back in zip(self._free, needed, strict=True)]
            self._admit()
            raise

    def _admit(self) -> None:
        """Let in those whose turn it is."""
        while self._waiting and self._take(self._waiting[0][0]):
            self._waiting.popleft()[1].set()

    def _take(self, needed: Sequence[int]) -> bool:
        left = [have - take for have, take in zip(self._free, needed, strict=True)]
        if min(left) < 0:
            return False
        self._free = left
        return True

    def _needed(self, max_length: int) -> list[int]:
        return [sum(cost.cache_bytes(max_length) for cost in costs) for costs in self._stages]
