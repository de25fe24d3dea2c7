"""Calls that a host makes in a task of its own, so that the task that asked for them may give up waiting.

A dial, a negotiation or a goodbye that is cut half-way leaves half a connection behind, which costs both sides
more than to let it finish: each has a deadline of its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from neurogrid.errors import NeuroGridError, PeerUnreachableError

__all__ = ["DetachedCall"]

T = TypeVar("T")


class DetachedCall(Generic[T]):
    """One such call. `run` belongs into the host's nursery; `wait` may be called by several tasks.

    Args:
        function: what to do. An error of ours that it raises is raised by `wait`; any other ends the host.
        undo: what to do with a result that nobody waits for any more. Quick.
    """

    def __init__(
        self,
        function: Callable[[], Awaitable[T]],
        *,
        undo: Callable[[T], Awaitable[None]] | None = None,
    ) -> None:
        self._function = function
        self._undo = undo
        self._done = trio.Event()
        self._results: list[T] = []
        self._error: NeuroGridError | None = None
        self._num_wanting = 0  # tasks that wait, or have the result

    async def run(self) -> None:
        """Do it."""
        try:
            self._results.append(await self._function())
        except NeuroGridError as exc:
            self._error = exc
        finally:
            self._done.set()
        await self._tidy_up()

    async def wait(self) -> T:
        """Wait until it is done, and return its result.

        Raises:
            NeuroGridError: what the call raised; `PeerUnreachableError` if the host closed before.

        Cancellation ends the waiting, not the call.
        """
        self._num_wanting += 1
        try:
            await self._done.wait()
        except trio.Cancelled:
            self._num_wanting -= 1
            with trio.CancelScope(shield=True):
                await self._tidy_up()  # it may have been done in the same moment
            raise
        if self._error is not None:
            raise self._error
        if not self._results:
            raise PeerUnreachableError("this host is closing")
        return self._results[0]

    async def _tidy_up(self) -> None:
        if self._undo is not None and not self._num_wanting and self._results:
            await self._undo(self._results.pop())
