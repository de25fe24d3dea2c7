"""Deadlines of many that wait: one task for all of them, since a cancel scope for each costs as much as a message.

Nearly every deadline is set, and cleared long before it comes. So to set and to clear are a dictionary's; the task
sleeps until the earliest it knew of, looks again, and ends when none is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import trio

__all__ = ["Deadlines", "Expiring"]

# The task sleeps no longer than this, so that it outlives the last of those that wait by no more. Seconds.
MAX_SLEEP = 0.2


class Expiring(Protocol):
    """Anything that has a deadline."""

    def expire(self) -> None:
        """The deadline has come. Must not block."""

    def abandon(self) -> None:
        """Nobody watches the deadline any more: the host is closing. Must not block."""


class Deadlines:
    """The deadlines of one table.

    Args:
        spawn: `spawn(function)` starts a task that lives as long as what the deadlines are about: `Host.start_soon`.
    """

    def __init__(self, spawn: Callable[..., object]) -> None:
        self._spawn = spawn
        self._deadlines: dict[Expiring, float] = {}
        self._next = math.inf  # when the task looks; never, where there is none
        self._sleep = trio.CancelScope()
        self._is_over = False

    def __len__(self) -> int:
        return len(self._deadlines)

    def set(self, waiting: Expiring, deadline: float) -> None:
        """Call `waiting.expire()` at `deadline`, of trio's clock, unless it is cleared before.

        Raises:
            trio.BusyResourceError: it has a deadline already.
        """
        if waiting in self._deadlines:
            raise trio.BusyResourceError("another task is waiting for this")
        if self._is_over:
            waiting.abandon()
            return
        self._deadlines[waiting] = deadline
        if deadline < self._next:
            if self._next == math.inf:
                self._spawn(self._run)
            self._next = self._sleep.deadline = deadline

    def clear(self, waiting: Expiring) -> None:
        """Forget a deadline, if it is still to come."""
        self._deadlines.pop(waiting, None)

    async def _run(self) -> None:
        try:
            while self._deadlines:
                earliest = min(self._deadlines.values())
                self._next = min(earliest, trio.current_time() + MAX_SLEEP)
                self._sleep = trio.CancelScope(deadline=self._next)
                with self._sleep:
                    await trio.sleep(math.inf)
                self._expire(trio.current_time())
        except trio.Cancelled:
            self._is_over = True
            abandoned = list(self._deadlines)
            self._deadlines.clear()
            for waiting in abandoned:
                waiting.abandon()
            raise
        self._next = math.inf

    def _expire(self, now: float) -> None:
        due = [waiting for waiting, deadline in self._deadlines.items() if deadline <= now]
        for waiting in due:
            del self._deadlines[waiting]
            waiting.expire()
