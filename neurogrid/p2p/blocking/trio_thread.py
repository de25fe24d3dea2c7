"""A trio loop in a thread of its own, and calls into it from all other threads.

The loop holds one resource, an async context manager that is entered first and left last; calls run beside it,
each in a task. A call ends in its caller's thread with what its task returned or raised. What the
calls do is not known here.

Every call ends: with its task, when its caller is interrupted, at its deadline (`fail_after`), when the thread
is closed, and when the loop dies. Where it could only wait for ever (from the loop's own thread, after a fork,
after the end) it is an error at once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

import trio

from neurogrid.errors import LocalProtocolError, ResponseTimeout, StreamBrokenError

__all__ = ["TrioThread", "fail_after", "without_deadline"]

T = TypeVar("T")
R = TypeVar("R")

logger = logging.getLogger(__name__)

# Leaving a host takes 3 s at most (goodbyes on all connections); beyond this something blocks the loop.
CLOSE_TIMEOUT: Final = 20.0
# For the task of an interrupted call to end: cancellation takes a turn of the loop, unless the loop is blocked.
INTERRUPT_TIMEOUT: Final = 5.0
# A signal that comes in the moment before a thread begins to wait, or to another thread, is not looked at by Python
# until the wait ends: so no wait is longer than this, and Ctrl-C is never lost.
SIGNAL_INTERVAL: Final = 1.0
# What an iteration has ready before it is asked for: enough that the loop need not wait for its reader's thread to
# wake up, and little that is in vain when the reader stops.
ITEMS_AHEAD: Final = 16

# Seconds of `time.monotonic`. A context variable, so that it follows the caller into `asyncio.to_thread`.
_deadline: ContextVar[float] = ContextVar("neurogrid.p2p.blocking.deadline", default=math.inf)


@contextmanager
def fail_after(seconds: float) -> Iterator[None]:
    """Give the calls in this block `seconds` together; the one that is under way then raises ResponseTimeout.

    As `trio.fail_after` for the async API: a cancelled call leaves the connection whole. For the calls without
    a `timeout`, which a peer can keep waiting, such as `send_activation` to one that grants no credit. A message
    that was begun is still sent whole, so its buffer must stay as it is. Blocks nest; the earlier deadline holds.
    """
    token = _deadline.set(min(_deadline.get(), time.monotonic() + seconds))
    try:
        yield
    finally:
        _deadline.reset(token)


def without_deadline() -> None:
    """Forget the deadline in this context: what runs here is not part of the call that it was set for."""
    _deadline.set(math.inf)


class _Call(Generic[R]):
    """One call: a future for its caller, a cancel scope for its task."""

    def __init__(self, function: Callable[[], Awaitable[R]]) -> None:
        self.future: Future[R] = Future()
        # What is active in the caller, a trace for one, is active in the task.
        self.context = copy_context()
        # Shielded: nothing but its own scope cancels a call, so no `Cancelled` can reach its caller.
        self.scope = trio.CancelScope(shield=True)
        self._function = function
        self._deadline = _deadline.get()
        self._end: Exception | None = None  # why the scope was cancelled, if not by the deadline

    async def run(self) -> None:
        remaining = self._deadline - time.monotonic()
        self.scope.deadline = trio.current_time() + remaining
        try:
            with self.scope:
                self.future.set_result(await self._function())
        # Any error belongs to the caller, which gets it unchanged.
        except BaseException as exc:  # noqa: BLE001
            self.fail(exc)
        else:
            self.fail(self._end or ResponseTimeout("the call did not end by its deadline"))

    def cancel(self, reason: Exception | None) -> None:
        """End the task; in the loop's thread."""
        self._end = self._end or reason
        self.scope.cancel()

    def fail(self, error: BaseException) -> None:
        """End the call with an error, if it has not ended."""
        with contextlib.suppress(InvalidStateError):  # it has: by its result, or an error before
            self.future.set_exception(error)


class TrioThread(Generic[T]):
    """A thread with a trio loop and a resource in it.

        with TrioThread(open_host, name="neurogrid") as thread:
            thread.call(partial(thread.resource.connect, address))

    Leaving the block cancels the calls under way, leaves the resource, and ends the thread. An error of the
    resource leaves the block as in the async API.

    The thread is a daemon: a program may end without leaving the block.
    """

    def __init__(
        self,
        opener: Callable[[], AbstractAsyncContextManager[T]],
        *,
        name: str,
        what: str = "host",
        close_timeout: float = CLOSE_TIMEOUT,
    ) -> None:
        """Start nothing yet.

        Args:
            name: of the thread.
            what: the resource, in the text of errors.
            close_timeout: seconds for leaving it.
        """
        self._opener = opener
        self._what = what
        self._close_timeout = close_timeout
        self._opened: Future[T] = Future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._pid = os.getpid()
        self._token: trio.lowlevel.TrioToken | None = None
        self._closing = trio.Event()
        self._opening = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._calls: set[_Call[Any]] = set()
        self._is_closing = False
        self._error: BaseException | None = None

    @property
    def resource(self) -> T:
        """The resource that the opener opened. Its methods belong to the loop's thread: `call` them."""
        return self._opened.result(timeout=0)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that the thread runs in, and not a fork of it."""
        return os.getpid() == self._pid

    # The life of the thread

    def __enter__(self) -> TrioThread[T]:
        try:
            self._thread.start()
            _result(self._opened)
        except BaseException:
            # What the opener raised, or an interrupt while we waited for it.
            self._request_close()
            if self._thread.ident is not None:  # a thread that has not begun yet will end at once
                self._thread.join(self._close_timeout)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """End the thread.

        Raises:
            LocalProtocolError: it does not end. Logged only, when `error` is on its way already.
        """
        failure = self.close()
        if failure is None:
            return
        if error is None:
            raise failure
        if failure is not error:
            logger.error("%s: %s", self._thread.name, failure)

    def close(self) -> BaseException | None:
        """End the thread; returns what went wrong with it, now or before. Again: nothing happens."""
        if not self.is_here:
            return None  # the thread stayed in the other process, with all that it holds
        self._request_close()
        if threading.get_ident() == self._thread.ident:
            return None  # a finaliser that the loop happened to run; the loop ends after it
        self._thread.join(self._close_timeout)
        if self._thread.is_alive():
            return LocalProtocolError(
                f"the thread {self._thread.name!r} did not end within {self._close_timeout:g} s: "
                "something blocks its loop"
            )
        error, self._error = self._error, None
        return error

    def _request_close(self) -> None:
        # The loop sets its token, then looks at the flag; we the other way round. So one of the two sees.
        self._is_closing = True
        self._soon(self._begin_close)

    def _begin_close(self) -> None:
        if not self._opened.done():
            self._opening.cancel()
        self._closing.set()

    def _run(self) -> None:
        try:
            trio.run(self._main)
        # It is raised in the thread that opens or closes this one.
        except BaseException as exc:  # noqa: BLE001
            self._error = exc
        finally:
            # After a crash the token of a loop would take calls, and lose them.
            self._token = None
            for call in tuple(self._calls):
                call.fail(self._broken())
            self._calls.clear()
            if not self._opened.done():
                error = self._error or LocalProtocolError("closed while it was being opened")
                self._opened.set_exception(error)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        with self._opening:
            if self._is_closing:
                return
            async with self._opener() as resource, trio.open_nursery() as nursery:
                self._nursery = nursery
                self._opened.set_result(resource)
                try:
                    await self._closing.wait()
                finally:
                    # Also when the resource broke beneath us, and we are cancelled.
                    self._nursery = None
                    self._is_closing = True
                    for call in tuple(self._calls):
                        call.cancel(self._broken())

    # Calls

    def call(self, function: Callable[[], Awaitable[R]]) -> R:
        """Run `function` in a task of the loop; returns what it returns, raises what it raises.

        From any thread but the loop's own. When the caller is interrupted (KeyboardInterrupt), the task is
        cancelled before the interrupt goes on.

        Raises:
            LocalProtocolError: the thread has ended, or this call would wait for itself.
            StreamBrokenError: the thread was closed while the call was under way.
            ResponseTimeout: the deadline of `fail_after` passed.
        """
        self._check_caller()
        call = _Call(function)
        try:
            self._submit(call)
            return _result(call.future)
        finally:
            if not call.future.done():
                self._interrupt(call)

    def call_sync(self, function: Callable[[], R]) -> R:
        """`call` for what is quick and not async."""

        async def run() -> R:
            return function()

        return self.call(run)

    def iterate(self, function: Callable[[], AsyncGenerator[R, None]]) -> Iterator[R]:
        """Yield what an async generator yields, which runs in a task of the loop, at most `ITEMS_AHEAD` ahead.

        It begins when the first item is asked for, and ends with the last one, when it is closed or dropped, and
        as calls do: by an interrupt, a deadline of `fail_after` where it began, and with the thread.

        Raises:
            As `call`, and what the generator raises.
        """
        self._check_caller()
        items: SimpleQueue[tuple[R] | None] = SimpleQueue()  # bounded by the semaphore
        room = trio.Semaphore(ITEMS_AHEAD)

        async def produce() -> None:
            async with aclosing(function()) as produced:
                async for item in produced:
                    await room.acquire()
                    items.put((item,))

        call = _Call(produce)
        call.future.add_done_callback(lambda _: items.put(None))
        try:
            self._submit(call)
            while (item := _next(items)) is not None:
                self._soon(room.release)
                yield item[0]
            call.future.result()
        finally:
            if not call.future.done():
                self._interrupt(call)

    def _check_caller(self) -> None:
        if not self.is_here:
            raise LocalProtocolError(
                f"this {self._what} lives in the process that opened it: after a fork, open another"
            )
        if threading.get_ident() == self._thread.ident:
            raise LocalProtocolError(
                "a blocking call from the loop's own thread would wait for itself: "
                "make it in a handler, which has a thread of its own"
            )

    def _submit(self, call: _Call[Any]) -> None:
        # From here on the loop ends the call, whatever becomes of the loop.
        self._calls.add(call)
        if self._is_closing or not self._soon(partial(self._start, call)):
            call.fail(self._closed())
        elif self._token is None:
            call.fail(self._broken())  # the loop has ended since

    def _start(self, call: _Call[Any]) -> None:
        if self._nursery is None:
            self._calls.discard(call)
            call.fail(self._broken())
        else:
            call.context.run(self._nursery.start_soon, self._run_call, call)

    async def _run_call(self, call: _Call[Any]) -> None:
        try:
            await call.run()
        finally:
            self._calls.discard(call)

    def _interrupt(self, call: _Call[Any]) -> None:
        # Not where the loop itself ran a finaliser, which drops an iteration.
        is_elsewhere = threading.get_ident() != self._thread.ident
        if self.is_here and self._soon(partial(call.cancel, None)) and is_elsewhere:
            # The task should not outlive its call; but where something blocks the loop, it does.
            with contextlib.suppress(TimeoutError):
                call.future.exception(INTERRUPT_TIMEOUT)

    def _soon(self, function: Callable[[], object]) -> bool:
        """Have the loop call `function`; False when it has ended."""
        token = self._token
        if token is None:
            return False
        try:
            token.run_sync_soon(function)
        except trio.RunFinishedError:
            return False
        return True

    def _closed(self) -> LocalProtocolError:
        why = f" ({self._error!r})" if self._error is not None else ""
        return LocalProtocolError(f"the {self._what} was closed{why}: open another for more calls")

    def _broken(self) -> StreamBrokenError:
        why = f": {self._error!r}" if self._error is not None else ""
        return StreamBrokenError(f"the {self._what} was closed during this call{why}")


def _result(future: Future[T]) -> T:
    while not future.done():
        with contextlib.suppress(TimeoutError):
            future.exception(SIGNAL_INTERVAL)
    return future.result()


def _next(items: SimpleQueue[T]) -> T:
    while True:
        with contextlib.suppress(Empty):
            return items.get(timeout=SIGNAL_INTERVAL)
