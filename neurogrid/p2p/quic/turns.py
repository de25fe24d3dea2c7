"""When a connection's tasks wait and when they let others run: an alarm that can be moved, and breath in between."""

from __future__ import annotations

import math
from typing import Final

import trio

__all__ = ["Alarm", "Breath"]

# After so many bytes moved without waiting, a task lets the others run.
_BYTES: Final = 256 * 1024
# What a read or write costs in such bytes, however short it is.
_CALL: Final = 8 * 1024


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


class Breath:
    """Counts what was moved without waiting."""

    def __init__(self) -> None:
        self._num_bytes = 0

    async def take(self, num_bytes: int) -> None:
        """Let other tasks run if enough was moved."""
        self._num_bytes += num_bytes + _CALL
        if self._num_bytes >= _BYTES:
            self._num_bytes = 0
            await trio.lowlevel.cancel_shielded_checkpoint()
