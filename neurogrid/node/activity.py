"""Sessions that have had a step of late, and the time that steps take, for a queue before the torch thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

import trio

__all__ = ["Activity"]

# A session that has not come for so many steps does nothing: batches that take turns, one for each stage of a chain,
# come again before that. Nor does one that has not come for the time of so many steps, and seconds besides: then no
# session has.
IDLE_STEPS: Final = 16
IDLE_SECONDS: Final = 1.0
# Seconds of a step for which everything else in a process can wait.
BRIEF: Final = 0.01


class Activity:
    """The sessions that have come to one queue of late.

    Args:
        clock: gives seconds.

    Attributes:
        step_seconds: what the last step took; 0.0 before the first.
    """

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self.step_seconds = 0.0
        self._clock = clock
        self._num_steps = 0
        # When each came, and after how many steps; the latest last.
        self._came: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    @property
    def num_active(self) -> int:
        """Sessions that have come of late."""
        horizon = self._clock() - IDLE_STEPS * self.step_seconds - IDLE_SECONDS
        while self._came:
            session, (came, num_steps) = next(iter(self._came.items()))
            if came >= horizon and self._num_steps - num_steps <= IDLE_STEPS:
                break
            del self._came[session]
        return len(self._came)

    @property
    def is_brief(self) -> bool:
        """Whether there is one session, and its steps take a moment: run at once, they keep no other waiting."""
        return 0.0 < self.step_seconds <= BRIEF and self.num_active <= 1

    def came(self, session: Hashable) -> None:
        """A session has something to compute."""
        self._came[session] = (self._clock(), self._num_steps)
        self._came.move_to_end(session)

    def stepped(self, seconds: float) -> None:
        """A step has run, and took so long."""
        self.step_seconds = seconds
        self._num_steps += 1

    def gone(self, session: Hashable) -> None:
        """No more will come of a session."""
        self._came.pop(session, None)
