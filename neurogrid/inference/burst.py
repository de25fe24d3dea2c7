"""Whether more is about to come: sessions whose tokens ran together before send their next ones in a burst.

Who does not wait for the end of a burst tears it apart, and for good: what ran apart comes apart. Who waits for
sessions that are elsewhere wastes a step's time. So a queue waits as long as one comes soon after the other, and no
longer once all are there that have come of late.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import trio

__all__ = ["Burst"]

# What may lie between two of a burst: a part of a step, at least and at most so many seconds.
GAP_PART, MIN_GAP, MAX_GAP = 0.4, 0.0005, 0.005
# Who has not come for so many steps is not waited for: those that take turns, a batch for each stage of a chain, come
# again before that. Nor who has not come for the time of so many steps, and seconds besides: then nobody has.
IDLE_STEPS, IDLE_SECONDS = 16, 1.0
# Seconds of a step for which everything else in a process can wait.
BRIEF = 0.01


class Burst:
    """What has come to one queue of late.

    Args:
        clock: gives seconds.

    Attributes:
        step_seconds: what the last step took; 0.0 before the first.
    """

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self.step_seconds = 0.0
        self._clock = clock
        self._last = 0.0
        self._num_steps = 0
        # When each came, and how many steps had run by then; the latest last.
        self._seen: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    @property
    def num_active(self) -> int:
        """Sessions that have come of late."""
        horizon = self._clock() - IDLE_STEPS * self.step_seconds - IDLE_SECONDS
        while self._seen:
            key, (came, num_steps) = next(iter(self._seen.items()))
            if came >= horizon and self._num_steps - num_steps <= IDLE_STEPS:
                break
            del self._seen[key]
        return len(self._seen)

    @property
    def is_brief(self) -> bool:
        """Whether there is one session, and its steps take a moment: who runs them at once keeps nobody waiting."""
        return 0.0 < self.step_seconds <= BRIEF and self.num_active <= 1

    def came(self, key: Hashable) -> None:
        """A token of this session has come."""
        self._last = self._clock()
        self._seen[key] = self._last, self._num_steps
        self._seen.move_to_end(key)

    def stepped(self, seconds: float) -> None:
        """A step has run, and took so long."""
        self.step_seconds = seconds
        self._num_steps += 1

    def gone(self, key: Hashable) -> None:
        """No more will come of this session."""
        self._seen.pop(key, None)

    def delay(self, num_waiting: int) -> float:
        """Seconds to wait for one more, when so many are there; 0 if none is about to come."""
        if num_waiting >= self.num_active:
            return 0.0
        gap = min(max(GAP_PART * self.step_seconds, MIN_GAP), MAX_GAP)
        return max(self._last + gap - self._clock(), 0.0)
