"""Threads for the handlers of a blocking protocol: bounded in number, in order where order matters.

The loop never waits for a handler: what arrives is handed to a thread. Two ways, which the caller chooses:

- at once: one call for each message, side by side. For handlers of requests. They may wait for peers, which
  may wait for them in turn, so they must not wait for each other.
- in order: one call at a time for each handler, in the order in which the messages arrived.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

import trio

from neurogrid.errors import LocalProtocolError
from neurogrid.p2p.blocking.trio_thread import without_deadline
from neurogrid.p2p.exchange.subscribers import is_async

__all__ = ["HandlerThreads", "MAX_HANDLER_THREADS"]

P = ParamSpec("P")
R = TypeVar("R")

# Twice what the protocol serves of one peer at once (`Bounds.max_running_per_peer`): a peer whose requests take long
# leaves as many threads to the others. Most of them wait, for peers or for the one lock of a model; a thread
# that waits costs some tens of KiB.
MAX_HANDLER_THREADS: Final = 128


class HandlerThreads:
    """Runs the handlers of one host. Made in any thread, used in the loop's, stopped from outside."""

    def __init__(self, *, max_threads: int = MAX_HANDLER_THREADS) -> None:
        self._limiter = trio.CapacityLimiter(max_threads)
        self._changed = threading.Condition()
        self._running: dict[int, str] = {}  # by thread
        self._is_stopped = False

    def at_once(self, handler: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
        """`handler` as an async function: each call in a thread of its own."""
        _check(handler)

        @functools.wraps(handler)
        async def serve(*args: P.args, **kwargs: P.kwargs) -> R:
            return await self._run(partial(handler, *args, **kwargs))

        return serve

    def in_order(self, handler: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
        """`handler` as a sync function that takes a turn at once, and gives what is left to await."""
        _check(handler)
        row: deque[_Turn] = deque()

        @functools.wraps(handler)
        def serve(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
            return _Turn(row, partial(self._run, partial(handler, *args, **kwargs)))

        return serve

    def stop(self, timeout: float) -> list[str]:
        """Let no handler begin any more, and wait for those that run; from any thread.

        Returns:
            The names of those that still run after `timeout` seconds; the caller's own is not among them.
        """
        with self._changed:
            self._is_stopped = True
            self._changed.wait_for(lambda: not self._others(), timeout)
            return self._others()

    async def _run(self, call: partial[R]) -> R:
        name = _name(call.func)
        run_sync: Any = trio.to_thread.run_sync  # its stubs lack two of the arguments
        # Abandoned when the host is left: a handler that hangs must not hold the loop. `stop` waits for it.
        result: R = await run_sync(
            self._call,
            name,
            call,
            thread_name=f"neurogrid handler {name}",
            abandon_on_cancel=True,
            limiter=self._limiter,
        )
        return result

    def _call(self, name: str, call: partial[R]) -> R:
        # A message to ourselves comes in the context of the call that sent it.
        without_deadline()
        thread = threading.get_ident()
        with self._changed:
            if self._is_stopped:
                raise LocalProtocolError("the host was closed before this handler began")
            self._running[thread] = name
        try:
            return call()
        finally:
            with self._changed:
                del self._running[thread]
                self._changed.notify_all()

    def _others(self) -> list[str]:
        own = threading.get_ident()
        return [name for thread, name in self._running.items() if thread != own]


class _Turn(Coroutine[Any, Any, Any]):
    """One call in a row of calls: it waits for those before it. Closed unawaited, it gives up its place."""

    def __init__(self, row: deque[_Turn], run: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._row = row
        self._has_come = trio.Event()
        self._steps = self._wait_and_run(run)
        row.append(self)
        if row[0] is self:
            self._has_come.set()

    async def _wait_and_run(self, run: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        try:
            await self._has_come.wait()
            return await run()
        finally:
            self._leave()

    def _leave(self) -> None:
        if self in self._row:
            self._row.remove(self)
            if self._row:
                self._row[0]._has_come.set()

    # A coroutine by delegation: only so can the end of one that never began be noticed.

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._steps.__await__()

    def send(self, value: Any) -> Any:
        return self._steps.send(value)

    def throw(
        self,
        kind: Any,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> Any:
        return self._steps.throw(value if isinstance(value, BaseException) else kind)

    def close(self) -> None:
        self._steps.close()
        self._leave()


def _check(handler: Callable[..., object]) -> None:
    if is_async(handler):
        raise LocalProtocolError(
            f"{_name(handler)} is async; handlers of a blocking protocol are plain functions"
        )


def _name(handler: Callable[..., object]) -> str:
    return getattr(handler, "__qualname__", None) or repr(handler)
