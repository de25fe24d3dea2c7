"""Whether more is about to come: sessions whose tokens ran together before send their next ones in a burst.

A queue that does not wait for the end of a burst splits it for good: sessions that ran in two batches come back in two.
One that waits for sessions that are elsewhere wastes a step's time: in a chain others have their turn at another stage
just then. So a queue waits for the sessions with which the waiting ones came the last time, and for no others. Which
sessions came together says more than which ran together: one that a burst was begun without is waited for the next
time, and two bursts that did wait for each other's end come apart again.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Set
from dataclasses import dataclass, field

import trio

__all__ = ["Burst"]

# The gap between two sessions of a burst at most: a part of a step, at least and at most so many seconds.
GAP_PART, MIN_GAP, MAX_GAP = 0.1, 0.0005, 0.005
# A session that came in a burst the last time is waited for longer.
PATIENCE_PART = 0.4
# A session that has not come for so many steps is not waited for: batches that take turns, one for each stage of a
# chain, come again before that. Nor one that has not come for the time of so many steps, and seconds besides: then no
# session has.
IDLE_STEPS, IDLE_SECONDS = 16, 1.0
# No session is waited for longer than this. Seconds.
MAX_ROUND = 0.25
# Seconds of a step for which everything else in a process can wait.
BRIEF = 0.01


@dataclass(slots=True)
class _Seen:
    """A session, as one queue sees it.

    Attributes:
        came: when it came last.
        num_steps: those of the queue that had run by then.
        stepped: when its last step ended.
        away: seconds from there until it came again, the last time.
        burst: the sessions that came together with it, itself included.
        last_burst: the same, of the time before.
    """

    came: float
    num_steps: int
    stepped: float | None = None
    away: float | None = None
    burst: set[Hashable] = field(default_factory=set)
    last_burst: set[Hashable] = field(default_factory=set)


class Burst:
    """The sessions that have come to one queue of late.

    Args:
        clock: gives seconds.

    Attributes:
        step_seconds: what the last step took; 0.0 before the first.
    """

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self.step_seconds = 0.0
        self._clock = clock
        self._last = 0.0
        self._current: set[Hashable] = set()
        self._num_steps = 0
        # The latest last.
        self._seen: OrderedDict[Hashable, _Seen] = OrderedDict()

    @property
    def num_active(self) -> int:
        """Sessions that have come of late."""
        horizon = self._clock() - IDLE_STEPS * self.step_seconds - IDLE_SECONDS
        while self._seen:
            session, seen = next(iter(self._seen.items()))
            if seen.came >= horizon and self._num_steps - seen.num_steps <= IDLE_STEPS:
                break
            del self._seen[session]
        return len(self._seen)

    @property
    def is_brief(self) -> bool:
        """Whether there is one session, and its steps take a moment: run at once, they keep no other waiting."""
        return 0.0 < self.step_seconds <= BRIEF and self.num_active <= 1

    def came(self, session: Hashable) -> None:
        """A token of this session has come."""
        now = self._clock()
        if now > self._last + self._gap(GAP_PART) or session in self._current:
            self._current = set()
        self._current.add(session)
        self._last = now
        seen = self._seen.setdefault(session, _Seen(now, self._num_steps))
        seen.came, seen.num_steps = now, self._num_steps
        seen.last_burst, seen.burst = seen.burst, self._current
        if seen.stepped is not None:
            seen.away = self._last - seen.stepped
        self._seen.move_to_end(session)

    def stepped(self, seconds: float, sessions: Collection[Hashable]) -> None:
        """A step of these has run, and took so long."""
        self.step_seconds = seconds
        self._num_steps += 1
        now = self._clock()
        for session in sessions:
            seen = self._seen.get(session)
            if seen is not None:
                seen.stepped = now

    def gone(self, session: Hashable) -> None:
        """No more will come of a session."""
        self._seen.pop(session, None)

    def misses(self, waiting: Set[Hashable], others: Collection[Hashable]) -> bool:
        """Whether one of `others` that has come of late is not among those that wait."""
        return self.num_active > len(waiting) and any(
            other in self._seen and other not in waiting for other in others
        )

    def delay(self, waiting: Set[Hashable]) -> float:
        """Seconds to wait for one more of a burst, when these are there; 0 if none is about to come."""
        if self.num_active <= len(waiting):
            return 0.0
        bursts = {id(seen.last_burst): seen.last_burst for seen in self._those(waiting)}.values()
        if any(self.misses(waiting, burst) for burst in bursts):
            gap = self._gap(PATIENCE_PART)
        elif all(len(burst) > 1 for burst in bursts):
            return 0.0
        else:  # one is new, or was alone: it may be the first of those that will come with it
            gap = self._gap(GAP_PART)
        # However many others come meanwhile, the first waits no longer than a step.
        until = min(self._last + gap, self.first_came(waiting) + max(self.step_seconds, MAX_GAP))
        return max(until - self._clock(), 0.0)

    def first_came(self, waiting: Collection[Hashable]) -> float:
        """When the first of these came, on the clock; minus infinity if that is too long ago to be known."""
        came = (self._seen[each].came if each in self._seen else -math.inf for each in waiting)
        return min(came, default=self._clock())

    def away(self, sessions: Collection[Hashable]) -> float:
        """Seconds of the quickest way around of one of these, from its step until it comes again; 0.0 if unknown.

        At most `MAX_ROUND`: a session that is away for longer does something else besides.
        """
        ways = (seen.away for seen in self._those(sessions) if seen.away is not None)
        return min(min(ways, default=0.0), MAX_ROUND)

    def _those(self, sessions: Collection[Hashable]) -> Iterator[_Seen]:
        return (self._seen[each] for each in sessions if each in self._seen)

    def _gap(self, part: float) -> float:
        return min(max(part * self.step_seconds, MIN_GAP), MAX_GAP)
