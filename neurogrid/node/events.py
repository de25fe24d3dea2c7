"""Events of a cluster, in words, on a bounded bus.

A publisher never waits. A subscriber that reads too slowly loses the oldest of what it has not read, and is
told how many. The last events are kept for subscribers that come later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Final

import trio

from neurogrid.errors import CapacityError

__all__ = ["Event", "EventBus", "EventKind", "Severity", "Subscription"]

MAX_SUBSCRIBERS: Final = 32
# Events that a subscriber may be behind, and that are kept for subscribers that come later.
MAX_UNREAD: Final = 256
MAX_KEPT: Final = 100
MAX_TEXT_CHARS: Final = 500


class EventKind(StrEnum):
    """The subject of an event."""

    WORKING = "working"
    PLANNED = "planned"
    READY = "ready"
    WORKER_JOINED = "worker_joined"
    WORKER_LOST = "worker_lost"
    WORKER_STALLED = "worker_stalled"
    WORKER_SUSPECTED = "worker_suspected"
    WORKER_WRONG = "worker_wrong"
    MENDING = "mending"
    MENDED = "mended"
    REPLICATED = "replicated"
    DRIFTED = "drifted"
    SESSION_REROUTED = "session_rerouted"
    SESSION_FAILED = "session_failed"
    DROPPED = "dropped"
    # Of a training run.
    TOLD = "told"
    BEGAN = "began"
    MEMBER_LOST = "member_lost"
    CHECKPOINT = "checkpoint"
    ALARM = "alarm"
    ENDING = "ending"
    ENDED = "ended"


class Severity(StrEnum):
    """Severity of an event, for somebody who watches."""

    INFO = "info"
    GOOD = "good"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        number: counts the events of a bus from 1; 0 for a note about a subscriber's own losses.
        at: Unix time, in seconds.
        text: one line, at most `MAX_TEXT_CHARS` characters.
        peer_id: the worker that it is about; empty for none.
    """

    number: int
    at: float
    kind: EventKind
    severity: Severity
    text: str
    peer_id: str = ""


class Subscription:
    """The events from when it was made. Made by `EventBus.subscribe`; for one reader."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._unread: deque[Event] = deque()
        self._num_dropped = 0
        self._is_closed = False
        self._came = trio.Event()

    async def wait(self) -> None:
        """Return when there is something to read, or the bus is closed."""
        await self._came.wait()

    def take(self) -> list[Event]:
        """All that is unread, oldest first; begins with a note of what was lost, if anything was."""
        events = list(self._unread)
        self._unread.clear()
        if not self._is_closed:
            self._came = trio.Event()
        if self._num_dropped:
            text = f"{self._num_dropped} older events are left out: they were not read in time"
            note = Event(0, self._clock(), EventKind.DROPPED, Severity.WARNING, text)
            events.insert(0, note)
            self._num_dropped = 0
        return events

    def _close(self) -> None:
        self._is_closed = True
        self._came.set()

    def _push(self, event: Event) -> None:
        if len(self._unread) >= MAX_UNREAD:
            self._unread.popleft()
            self._num_dropped += 1
        self._unread.append(event)
        self._came.set()


class EventBus:
    """Events for any number of subscribers, up to `MAX_SUBSCRIBERS`. Used from one trio thread.

    Args:
        clock: Unix time, in seconds.

    Attributes:
        is_closed: readers may stop.
    """

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self.is_closed = False
        self._clock = clock
        self._numbers = count(1)
        self._subscriptions: list[Subscription] = []
        self._kept: deque[Event] = deque(maxlen=MAX_KEPT)

    @property
    def last(self) -> tuple[Event, ...]:
        """The last `MAX_KEPT` events, oldest first."""
        return tuple(self._kept)

    def publish(
        self,
        kind: EventKind,
        text: str,
        *,
        severity: Severity = Severity.INFO,
        peer_id: str = "",
    ) -> Event:
        """Tell all subscribers."""
        if len(text) > MAX_TEXT_CHARS:
            text = text[: MAX_TEXT_CHARS - 1] + "…"
        event = Event(next(self._numbers), self._clock(), kind, severity, text, peer_id)
        self._kept.append(event)
        for subscription in self._subscriptions:
            subscription._push(event)
        return event

    def close(self) -> None:
        """Let all subscribers go: there will be no more events worth waiting for."""
        self.is_closed = True
        for subscription in self._subscriptions:
            subscription._close()

    @property
    def is_full(self) -> bool:
        """Whether as many listen as can."""
        return len(self._subscriptions) >= MAX_SUBSCRIBERS

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        """Get what is published until the block is left.

        Raises:
            CapacityError: `MAX_SUBSCRIBERS` listen already.
        """
        if self.is_full:
            raise CapacityError(
                f"{MAX_SUBSCRIBERS} subscribers listen already",
                needed=MAX_SUBSCRIBERS + 1,
                available=MAX_SUBSCRIBERS,
            )
        subscription = Subscription(self._clock)
        self._subscriptions.append(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.remove(subscription)
