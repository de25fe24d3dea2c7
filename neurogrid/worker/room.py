"""The memory of a worker and its tenants: how much each was promised, and who gives way. Pure: times are given.

No more is promised than there is. A tenant that has had nothing to compute for a while gives its memory when another
one's assignment needs it, the longest unused first, and never for nothing: if the others' memory would not do either,
nobody gives way. Who was just given its memory, or has work under way, is safe. One that has all its layers and has not
been asked for anything yet, as a replica that stands by, is safe for a shorter time than one that was in use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from neurogrid.errors import CapacityError

__all__ = ["PLACING_SECONDS", "UNUSED_SECONDS", "Promise", "Room"]

# A tenant whose layers are still coming is safe for so long after each: one of 1 GB at 8 Mbit/s takes half of it.
PLACING_SECONDS: Final = 1800.0
# One that has them all, and has not used them: long enough for the requests that they were brought for.
UNUSED_SECONDS: Final = 30.0


@dataclass(slots=True)
class Promise:
    """Memory that a tenant was promised.

    Attributes:
        num_bytes: for its layers and the caches of its sessions.
        beside_bytes: that it has beside those, as for adapters.
        safe_until: before this time it gives way to nobody.
        num_under_way: steps that came and are not done; while there are any it gives way to nobody.
    """

    num_bytes: int
    safe_until: float
    beside_bytes: int = 0
    num_under_way: int = 0

    @property
    def total_bytes(self) -> int:
        """All that it has."""
        return self.num_bytes + self.beside_bytes

    def gives_way(self, now: float) -> bool:
        """Whether another tenant may have its memory."""
        return not self.num_under_way and now >= self.safe_until


class Room:
    """Promises of memory to tenants, by their owner.

    Args:
        idle_after: seconds without work after which a tenant gives way to one that needs its memory.
    """

    def __init__(self, idle_after: float) -> None:
        self._idle_after = idle_after
        self._promises: dict[str, Promise] = {}

    def __contains__(self, owner: str) -> bool:
        return owner in self._promises

    def __iter__(self) -> Iterator[tuple[str, Promise]]:
        return iter(tuple(self._promises.items()))

    def promised(self, owner: str) -> int:
        """Bytes that an owner was promised; 0 for none."""
        promise = self._promises.get(owner)
        return promise.total_bytes if promise is not None else 0

    @property
    def promised_bytes(self) -> int:
        """Bytes that all were promised."""
        return sum(promise.total_bytes for promise in self._promises.values())

    def free(self, owner: str, capacity: int, now: float) -> int:
        """Bytes that an assignment of `owner` may take in all.

        What it was promised before counts as free, and so does what others would give way with.
        """
        return max(capacity - self._held_by_others(owner, now), 0)

    def ask(
        self,
        owner: str,
        num_bytes: int,
        capacity: int,
        now: float,
        *,
        keeps_beside: bool = False,
        purpose: str = "",
    ) -> tuple[str, ...]:
        """Promise so much to `owner`, in the place of what it was promised before.

        Args:
            capacity: bytes that all may have together.
            keeps_beside: it goes on having what it has beside its layers and caches.
            purpose: what they are needed for, for the error.

        Returns:
            Who gives way for it: these are promised nothing any more.

        Raises:
            CapacityError: there is not as much, whoever gives way; says what is asked for and what others hold. Then
                nothing has changed.
        """
        mine = self._promises.get(owner) or Promise(0, now)
        beside = mine.beside_bytes if keeps_beside else 0
        needed = num_bytes + beside
        if needed > self.free(owner, capacity, now):
            raise self._too_much(owner, needed, capacity, now, purpose)
        others = {other: p for other, p in self._promises.items() if other != owner}
        missing = needed + sum(p.total_bytes for p in others.values()) - capacity
        going: list[str] = []
        for other in sorted(others, key=lambda other: others[other].safe_until):
            if missing <= 0:
                break
            if others[other].gives_way(now):
                going.append(other)
                missing -= others[other].total_bytes
        # The largest of them may do without some that were idle for longer.
        for other in tuple(going):
            if missing + others[other].total_bytes <= 0:
                going.remove(other)
                missing += others[other].total_bytes
        for other in going:
            del self._promises[other]
        mine.num_bytes, mine.beside_bytes = num_bytes, beside
        mine.safe_until = now + self._placing_after
        self._promises[owner] = mine
        return tuple(going)

    def set_beside(self, owner: str, num_bytes: int) -> None:
        """Note what an owner has beside its layers and caches; `free` has said that there is room."""
        promise = self._promises.get(owner)
        if promise is not None:
            promise.beside_bytes = num_bytes

    def leave(self, owner: str) -> None:
        """An owner is promised nothing any more."""
        self._promises.pop(owner, None)

    def came(self, owner: str, now: float) -> None:
        """A layer of an owner's came: it may wait for the next."""
        if (promise := self._promises.get(owner)) is not None:
            promise.safe_until = now + self._placing_after

    def ready(self, owner: str, now: float) -> None:
        """An owner has all that it was to get."""
        if (promise := self._promises.get(owner)) is not None:
            promise.safe_until = now + min(self._idle_after, UNUSED_SECONDS)

    def used(self, owner: str, now: float) -> None:
        """An owner has opened a session."""
        if (promise := self._promises.get(owner)) is not None:
            promise.safe_until = now + self._idle_after

    def begin(self, owner: str) -> Promise | None:
        """A step of an owner's came; give what is returned to `end`."""
        if (promise := self._promises.get(owner)) is not None:
            promise.num_under_way += 1
        return promise

    def end(self, promise: Promise | None, now: float) -> None:
        """A step is done."""
        if promise is not None:
            promise.num_under_way -= 1
            promise.safe_until = max(promise.safe_until, now + self._idle_after)

    @property
    def _placing_after(self) -> float:
        return max(self._idle_after, PLACING_SECONDS)

    def _held_by_others(self, owner: str, now: float) -> int:
        return sum(
            promise.total_bytes
            for other, promise in self._promises.items()
            if other != owner and not promise.gives_way(now)
        )

    def _too_much(
        self, owner: str, needed: int, capacity: int, now: float, purpose: str
    ) -> CapacityError:
        others = [
            promise
            for other, promise in self._promises.items()
            if other != owner and not promise.gives_way(now)
        ]
        held = sum(promise.total_bytes for promise in others)
        free = max(capacity - held, 0)
        text = f"{needed:,} B are needed{purpose and ' '}{purpose}, and this worker has {free:,} B"
        if others:
            holds = "s hold" if len(others) != 1 else " holds"
            text += f": {len(others)} other coordinator{holds} {held:,} B of its {capacity:,} B"
            idle = [promise.safe_until - now for promise in others if not promise.num_under_way]
            if idle:
                text += f", and the first of them gives way in {min(idle):.0f} s if it stays idle"
        return CapacityError(text, needed=needed, available=free)
