"""Sessions that are finished and stay open for a while, for generations that begin with the same tokens.

A generation that goes on where another one ended, as each turn of a conversation does, takes that one's session over
and computes the new tokens alone. A generation that shares a part of one gets a copy, where there is room for both.

Kept sessions live in room that nobody else wants. They go, the longest unused first, as soon as somebody waits for
room or a worker has none; when a member of theirs leaves or is lost, or the plan changes; and after some minutes.
Workers may drop them at any time: then everything is computed, as if nothing had been kept. Those that go for want of
room or use are written to disk, where all their workers can do so.

Source: protocol_spec/sessions.md, "Prefixes".
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import trio

from neurogrid.fleet.placing.fleet import Fleet
from neurogrid.inference.generation.cache_room import CacheRoom, Reservation
from neurogrid.inference.generation.prefixes import MIN_REUSED, reusable
from neurogrid.inference.generation.stored_prefixes import (
    StoredPrefix,
    StoredPrefixes,
    prefix_name,
    stages_of,
)
from neurogrid.inference.pipeline.selection import Selection, Selector
from neurogrid.inference.pipeline.session import PipelineSession
from neurogrid.inference.pipeline.session_worker import Prior

__all__ = ["Beginning", "KeptSession", "KeptSessions", "any_session", "open_kept_sessions"]

logger = logging.getLogger(__name__)

# Seconds that a session is kept; less than workers keep one that nobody uses.
KEEP_SECONDS = 300.0
EXPIRY_INTERVAL = 5.0
# Each is looked at when a generation begins.
MAX_KEPT = 256

Accepts: TypeAlias = Callable[[int], bool]


def any_session(session_id: int) -> bool:
    """Accept any session to begin with."""
    return True


@dataclass(eq=False)
class KeptSession:
    """A session that nobody extends.

    Attributes:
        pipeline: open on the workers of `selection`.
        tokens: those in its caches, with one for each image of which none is (`ImageInputs.identities`).
        calls: tokens of each forward pass that computed them, in order.
        generation: of the plan.
        adapter: the key of what it was computed with; empty for the base model alone.
    """

    pipeline: PipelineSession
    selection: Selection
    tokens: list[int]
    calls: list[int]
    reservation: Reservation
    generation: int
    adapter: bytes
    until: float = field(default_factory=lambda: trio.current_time() + KEEP_SECONDS)
    closed: trio.Event = field(default_factory=trio.Event)


@dataclass(eq=False)
class Beginning:
    """Room for a session of `max_length` tokens, and what it may begin with.

    Attributes:
        kept: a kept session; None for nothing.
        num_tokens: how many of its tokens.
        is_copy: they are copied; otherwise it is taken over.
        adapter: the key of what it is computed with; empty for the base model alone.
        is_alone: whether the session begins with nothing of others, and is closed when it ends.
    """

    reservation: Reservation
    max_length: int
    adapter: bytes
    kept: KeptSession | None = None
    num_tokens: int = 0
    is_copy: bool = False
    is_alone: bool = False

    @property
    def prior(self) -> Prior | None:
        """The prior that the workers are told; None for none."""
        if self.kept is None:
            return None
        return Prior(self.kept.pipeline.session_id, self.num_tokens, stays_open=self.is_copy)


class KeptSessions:
    """The kept sessions of one coordinator, the longest unused first. Made by `open_kept_sessions`.

    Args:
        shortest_cut: the fewest tokens that caches of so many can be cut back to.
        replays: whether the calls of a session must be repeatable as they were, on workers where that matters.
        is_enabled: False keeps none.

    Attributes:
        room: as given.
        is_enabled: as given, until the coordinator ends.
        stored: those that are on disk.
    """

    def __init__(
        self,
        room: CacheRoom,
        fleet: Fleet,
        selector: Selector,
        nursery: trio.Nursery,
        *,
        shortest_cut: Callable[[int], int],
        replays: bool,
        is_enabled: bool,
    ) -> None:
        self.room = room
        self._fleet = fleet
        self._selector = selector
        self._nursery = nursery
        self._shortest_cut = shortest_cut
        self._replays = replays
        self.is_enabled = is_enabled
        self.stored = StoredPrefixes(shortest_cut=shortest_cut, replays=replays)
        self._kept: list[KeptSession] = []
        self._closing: list[KeptSession] = []
        room.on_shortage = self._make_room

    def __len__(self) -> int:
        return len(self._kept)

    # ------------------------------------------------------------------ for a session that begins

    @asynccontextmanager
    async def begin(
        self,
        token_ids: Sequence[int],
        max_length: int,
        adapter: bytes,
        *,
        accepts: Accepts = any_session,
        outside: Callable[[int], int] = int,
    ) -> AsyncIterator[Beginning]:
        """Wait for room for a session, and find what it can begin with; the room is held until the block is left.

        Args:
            token_ids: as `KeptSession.tokens` has them.
            adapter: the key of what is added to the layers, of which caches depend; empty for nothing.
            outside: the most of so many tokens that end in no image.
            accepts: whether it may begin with the kept session of this id.

        Raises:
            CapacityError: too many wait for room already.
        """
        beginning = self._begin_now(token_ids, max_length, adapter, accepts, outside)
        if beginning is None:
            beginning = Beginning(await self.room.reserve(max_length), max_length, adapter)
            kept, num_tokens = self._best(token_ids, adapter, accepts, outside)
            if kept is not None:
                self._going_on(beginning, kept, num_tokens)
        try:
            yield beginning
        finally:
            if not beginning.is_copy:
                self.give_up(beginning)
            self.room.give_back(beginning.reservation)

    @asynccontextmanager
    async def begin_alone(self, max_length: int, adapter: bytes) -> AsyncIterator[Beginning]:
        """Wait for room for a session that computes all of its tokens, and is not kept. Args, raises: as `begin`."""
        reservation = await self.room.reserve(max_length)
        try:
            yield Beginning(reservation, max_length, adapter, is_alone=True)
        finally:
            self.room.give_back(reservation)

    def _begin_now(
        self,
        token_ids: Sequence[int],
        max_length: int,
        adapter: bytes,
        accepts: Accepts,
        outside: Callable[[int], int],
    ) -> Beginning | None:
        """Begin with a kept session, if nobody has to be waited for: in its room, or beside it."""
        kept, num_tokens = self._best(token_ids, adapter, accepts, outside)
        if kept is None:
            return None
        num_left = len(kept.tokens) - num_tokens
        if num_left:
            reservation = self.room.reserve_now(max_length)
            if reservation is not None:
                return self._going_on(Beginning(reservation, max_length, adapter), kept, num_tokens)
            if num_left > num_tokens:
                return None  # more would be lost than is won
        reservation = self.room.reserve_now(max_length, instead_of=kept.reservation)
        if reservation is None:
            return None
        self._kept.remove(kept)
        return Beginning(reservation, max_length, adapter, kept, num_tokens)

    def _going_on(self, beginning: Beginning, kept: KeptSession, num_tokens: int) -> Beginning:
        """Let one that has room of its own begin with a kept session: with a copy, where that is not all used."""
        beginning.kept, beginning.num_tokens = kept, num_tokens
        beginning.is_copy = num_tokens < len(kept.tokens)
        self._kept.remove(kept)
        if beginning.is_copy:
            self._kept.append(kept)  # it is of use
        return beginning

    def _best(
        self,
        token_ids: Sequence[int],
        adapter: bytes,
        accepts: Accepts,
        outside: Callable[[int], int],
    ) -> tuple[KeptSession | None, int]:
        """The kept session with the most tokens that can be gone on from, and how many."""
        best: tuple[KeptSession | None, int] = None, 0
        for kept in self._kept:
            if kept.adapter != adapter or not accepts(kept.pipeline.session_id):
                continue
            num_tokens = reusable(
                kept.tokens,
                kept.calls,
                token_ids,
                shortest_cut=self._shortest_cut,
                replays=self._replays and not kept.selection.has_same_bits,
            )
            if outside(num_tokens) != num_tokens:
                continue  # in an image: it has all of that in its caches, or none
            if num_tokens >= max(best[1], MIN_REUSED) and self._is_current(kept):
                best = kept, num_tokens
        return best

    def _is_current(self, kept: KeptSession) -> bool:
        is_planned = kept.generation == self._fleet.plan.generation
        return is_planned and self._selector.is_settled(kept.selection)

    def taken(self, beginning: Beginning) -> None:
        """The new session is open, with the tokens of the kept one."""
        kept, beginning.kept = beginning.kept, None
        if kept is not None and not beginning.is_copy:
            self.room.settle(beginning.reservation, kept.reservation, beginning.max_length)

    def give_up(self, beginning: Beginning) -> None:
        """Nobody goes on from the kept session, which may be over on some workers: close it on all."""
        kept, beginning.kept = beginning.kept, None
        if kept is None or (beginning.is_copy and kept not in self._kept):
            return
        if not beginning.is_copy:
            self.room.settle(beginning.reservation, kept.reservation, beginning.max_length)
        self._evict(kept)

    # ------------------------------------------------------------------ for a session that ends

    def keep(
        self,
        pipeline: PipelineSession,
        selection: Selection,
        tokens: Sequence[int],
        calls: Sequence[int],
        beginning: Beginning,
    ) -> bool:
        """Keep a session whose caches have just these tokens, in the room that it had; False if it cannot be."""
        kept = KeptSession(
            pipeline,
            selection,
            list(tokens),
            list(calls),
            beginning.reservation,
            self._fleet.plan.generation,
            beginning.adapter,
        )
        is_of_use = self.is_enabled and not beginning.is_alone and len(tokens) >= MIN_REUSED
        takes_priors = all(item.worker.takes_priors for item in selection.stages)
        if not (is_of_use and takes_priors and self._is_current(kept)):
            return False
        beginning.reservation = Reservation([0] * len(kept.reservation.taken))
        self._kept.append(kept)
        if len(self._kept) > MAX_KEPT:
            self._evict(self._kept[0], is_good=True)
        self._make_room()
        return True

    # ------------------------------------------------------------------ what makes them go

    async def evict_all(self) -> bool:
        """Close all of them, and wait until that is done; False if there was none."""
        for kept in list(self._kept):
            self._evict(kept, is_good=True)
        closing = list(self._closing)
        for kept in closing:
            await kept.closed.wait()
        return bool(closing)

    def _make_room(self) -> None:
        """Close as many as the session that waits longest needs."""
        while self._kept and not self.room.admits_next([k.reservation for k in self._closing]):
            self._evict(self._kept[0], is_good=True)

    def _evict(self, kept: KeptSession, *, is_good: bool = False) -> None:
        """Close it; to disk, if it is as good as ever."""
        if kept in self._kept:
            self._kept.remove(kept)
        self._closing.append(kept)
        self._nursery.start_soon(self._close, kept, is_good)

    async def _close(self, kept: KeptSession, is_good: bool) -> None:
        try:
            if not (is_good and await self._store(kept)):
                await kept.pipeline.aclose()
        finally:
            self._closing.remove(kept)
            kept.closed.set()
            self.room.give_back(kept.reservation)

    async def _store(self, kept: KeptSession) -> bool:
        """Have it written to disk where it is, if that is of use; whether it is there, and closed."""
        prefix = StoredPrefix(
            tuple(kept.tokens), tuple(kept.calls), kept.adapter, stages_of(kept.selection)
        )
        is_wanted = (
            self.is_enabled
            and self._is_current(kept)
            # Where images are in it, those would have to come back, too.
            and min(kept.tokens) >= 0
            and all(item.worker.stores_prefixes for item in kept.selection.stages)
            and self.stored.lacks(prefix)
        )
        if not is_wanted or not await kept.pipeline.store(prefix_name(prefix.tokens)):
            return False
        logger.debug("%d tokens of a session are on disk", len(prefix.tokens))
        self.stored.add(prefix)
        return True

    async def follow_fleet(self) -> None:
        """Close the sessions whose members leave or are lost; runs until cancelled."""
        while True:
            await self._fleet.change.wait()
            for kept in [kept for kept in self._kept if not self._is_current(kept)]:
                self._evict(kept)

    async def expire(self) -> None:
        """Close the sessions that were not used for long; runs until cancelled."""
        while True:
            await trio.sleep(EXPIRY_INTERVAL)
            now = trio.current_time()
            for kept in [kept for kept in self._kept if kept.until <= now]:
                self._evict(kept, is_good=True)


@asynccontextmanager
async def open_kept_sessions(
    room: CacheRoom,
    fleet: Fleet,
    selector: Selector,
    *,
    shortest_cut: Callable[[int], int],
    replays: bool,
    is_enabled: bool,
) -> AsyncIterator[KeptSessions]:
    """Keep finished sessions until the block is left."""
    async with trio.open_nursery() as nursery:
        kept = KeptSessions(
            room,
            fleet,
            selector,
            nursery,
            shortest_cut=shortest_cut,
            replays=replays,
            is_enabled=is_enabled,
        )
        nursery.start_soon(kept.follow_fleet)
        nursery.start_soon(kept.expire)
        try:
            yield kept
        finally:
            kept.is_enabled = False  # workers drop what is left with the connection
            nursery.cancel_scope.cancel()
