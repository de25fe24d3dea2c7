"""An event that is set again and again: each time wakes the tasks that wait then, and no task that waits later."""

from __future__ import annotations

import trio

__all__ = ["RenewedEvent"]


class RenewedEvent:
    """`set` as often as there is news, and `wait` for the next time."""

    __slots__ = ("next",)

    def __init__(self) -> None:
        self.next = trio.Event()
        """The event of the next time, for a task that looks first and waits then."""

    def set(self) -> None:
        """Wake the tasks that wait."""
        self.next.set()
        self.next = trio.Event()

    async def wait(self) -> None:
        """Return when it is set the next time."""
        await self.next.wait()
