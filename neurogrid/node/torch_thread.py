"""The thread in which torch runs: one call at a time, in the order in which they came.

`trio.to_thread` would do, but for its price: a limiter, a thread from a cache, and two more turns of the scheduler,
some 15 us of each step of each stage. A call that is over in a moment need not go there at all: handing it over and
back takes 0.3 ms of each step of each stage, where weights have swept the caches in between (`run_briefly`). Knows
nothing of torch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import trio

__all__ = ["TorchThread"]

R = TypeVar("R")


class _Job(Generic[R]):
    """One call, and what came of it."""

    def __init__(self, call: Callable[[], R]) -> None:
        self._call = call
        self._token = trio.lowlevel.current_trio_token()
        self._task = trio.lowlevel.current_task()
        self._result: R
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call, in the thread, and wake the task that waits."""
        try:
            self._result = self._call()
        except BaseException as exc:  # noqa: BLE001 - raised again where the caller waits
            self._error = exc
        with suppress(trio.RunFinishedError):  # then nobody waits any more
            self._token.run_sync_soon(trio.lowlevel.reschedule, self._task)

    def result(self) -> R:
        """Return what the call gave, or raise its error, in the task that waited."""
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it holds this frame, and this frame would hold it
        return self._result


class TorchThread:
    """A thread for as long as the block runs; until it is entered, calls wait.

    The number of calls that wait is bounded where requests are served, not here.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._num_calls = 0
        # A daemon: a kernel that never ends must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="torch", daemon=True)

    def __enter__(self) -> TorchThread:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._jobs.put(None)

    async def run(self, call: Callable[[], R]) -> R:
        """Call `call()` in the thread; returns or raises what it does.

        Cancellation waits for the call to end: torch cannot be interrupted.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        job = _Job(call)
        self._num_calls += 1
        self._jobs.put(job)
        try:
            await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        finally:
            self._num_calls -= 1
        return job.result()

    async def run_briefly(self, call: Callable[[], R]) -> R:
        """As `run`, for a call of a few milliseconds: in the caller's own thread, if no other call is under way.

        It begins at once, and all else in the caller's thread waits until it ends.
        """
        if self._num_calls:
            return await self.run(call)
        await trio.lowlevel.checkpoint_if_cancelled()
        return call()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # with the tensors that it holds
