"""Room for sessions in the memory that was agreed with the workers: first come, first served.

Workers set memory aside for so many sessions of the greatest length. Shorter ones take less of it, by the same
count that the workers make, so that more of them are open at once. A session that finds no room waits, and the
holder of room that nobody needs is told (`on_shortage`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio

from neurogrid.errors import CapacityError
from neurogrid.model.stages.cost import LayerCost

__all__ = ["CacheRoom", "MAX_WAITING_SESSIONS", "Reservation"]

MAX_WAITING_SESSIONS = 4096


@dataclass(eq=False)
class Reservation:
    """Bytes on each stage that a session has for itself."""

    taken: list[int]


class CacheRoom:
    """Memory for caches on every stage.

    Args:
        stages: the costs of the layers of each stage.
        max_sessions: sessions of `max_length` tokens that fit on each.
        max_length: tokens.
        max_waiting: sessions that may wait for room.

    Attributes:
        limit_bytes: on all stages together.
        on_shortage: called when somebody begins to wait, and whenever room came that is not enough.
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
        self.on_shortage: Callable[[], None] = lambda: None

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

        Raises: as `reserve`.
        """
        reservation = await self.reserve(max_length)
        try:
            yield
        finally:
            self.give_back(reservation)

    async def reserve(self, max_length: int) -> Reservation:
        """Wait until a session of `max_length` tokens has room, and take it.

        Raises:
            CapacityError: too many wait already.
        """
        reservation = self.reserve_now(max_length)
        if reservation is not None:
            return reservation
        if len(self._waiting) >= self._max_waiting:
            raise CapacityError(
                f"{len(self._waiting)} sessions wait for room on the workers already",
                needed=len(self._waiting) + 1,
                available=self._max_waiting,
            )
        needed = self._needed(max_length)
        await self._wait(needed)
        return Reservation(needed)

    def reserve_now(
        self, max_length: int, *, instead_of: Reservation | None = None
    ) -> Reservation | None:
        """Room for a session of `max_length` tokens; None if there is none, or others wait for it.

        Args:
            instead_of: of a session that this one takes the place of: only what it has not is taken, until
                `settle` puts the two together.
        """
        needed = self._needed(max_length)
        if instead_of is not None:
            needed = [max(0, n - has) for n, has in zip(needed, instead_of.taken, strict=True)]
        if self._waiting or not self._take(needed):
            return None
        return Reservation(needed)

    def settle(self, reservation: Reservation, prior: Reservation, max_length: int) -> None:
        """Give back what a session of `max_length` tokens does not need, now that the one before it is over."""
        needed = self._needed(max_length)
        both = zip(reservation.taken, prior.taken, strict=True)
        surplus = [own + its - n for (own, its), n in zip(both, needed, strict=True)]
        reservation.taken, prior.taken = needed, surplus
        self.give_back(prior)

    def give_back(self, reservation: Reservation) -> None:
        """A session is over, wherever it was open."""
        self._free = [f + back for f, back in zip(self._free, reservation.taken, strict=True)]
        reservation.taken = [0] * len(reservation.taken)
        self._admit()

    def admits_next(self, more: Sequence[Reservation]) -> bool:
        """Whether the session that waits longest has room once `more` is given back; also if none waits."""
        if not self._waiting:
            return True
        needed = self._waiting[0][0]
        free = list(self._free)
        for reservation in more:
            free = [f + taken for f, taken in zip(free, reservation.taken, strict=True)]
        return all(f >= n for f, n in zip(free, needed, strict=True))

    async def _wait(self, needed: list[int]) -> None:
        place = (needed, trio.Event())
        self._waiting.append(place)
        self.on_shortage()
        try:
            await place[1].wait()
        except trio.Cancelled:
            if place in self._waiting:
                self._waiting.remove(place)
                self._admit()
            else:  # it was let in, and goes away
                self.give_back(Reservation(needed))
            raise

    def _admit(self) -> None:
        """Let in the sessions whose turn it is."""
        while self._waiting and self._take(self._waiting[0][0]):
            self._waiting.popleft()[1].set()
        if self._waiting:
            self.on_shortage()

    def _take(self, needed: Sequence[int]) -> bool:
        left = [have - take for have, take in zip(self._free, needed, strict=True)]
        if min(left) < 0:
            return False
        self._free = left
        return True

    def _needed(self, max_length: int) -> list[int]:
        return [sum(cost.cache_bytes(max_length) for cost in costs) for costs in self._stages]
