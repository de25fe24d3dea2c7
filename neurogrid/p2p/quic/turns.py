"""An alarm that can be moved: when the task that keeps a connection's time is to wake."""

from __future__ import annotations

import math

import trio

__all__ = ["Alarm"]


class Alarm:
    """A time to be woken at. One task waits; any may move the time, which costs next to nothing."""

    def __init__(self) -> None:
        self._scope: trio.CancelScope | None = None

    async def wait(self, deadline: float) -> None:
        """Wait until `deadline` (trio's clock), or what `move` makes of it."""
        try:
            with trio.CancelScope(deadline=deadline) as self._scope:
                await trio.sleep(math.inf)
        finally:
            self._scope = None

    def move(self, deadline: float | None) -> None:
        """Wake at another time; None wakes at once."""
        if self._scope is not None:
            self._scope.deadline = -math.inf if deadline is None else deadline
