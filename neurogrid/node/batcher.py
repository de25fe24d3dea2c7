"""A queue in front of the torch thread, and what of it runs together.

Jobs that come during one call are the next batch; an idle thread waits for what belongs to those that are there.
`Batcher` is the queue and the one task that empties it; what is chosen and what is computed is its owner's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import trio

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.wire import ErrorCode

__all__ = ["Batcher"]

J = TypeVar("J", bound=Hashable)
R = TypeVar("R")

# Seconds that a peer is told to wait when too much waits already: some steps' time.
FULL_RETRY_AFTER = 1.0


@dataclass(eq=False, slots=True)
class _Waiting(Generic[J, R]):
    """A job that a task waits for."""

    job: J
    done: trio.Event = field(default_factory=trio.Event)
    result: R | None = None
    error: Exception | None = None
    is_withdrawn: bool = False


class Batcher(Generic[J, R]):
    """A bounded queue of jobs that run in the torch thread: several together where they can be.

    A job that finds none before it runs at once; jobs that come meanwhile are left to `run`. No two
    that wait are equal.

    Args:
        choose: which of the waiting jobs run next, the oldest first among them; at least one.
        compute: runs those, in the torch thread. Gives for each its result, the error that it alone has, or
            None where it is not finished: then it waits again, behind the others.
        run_torch: calls a function in the torch thread.
        max_waiting: jobs of one group that may wait; more are refused.
        group: of a job; all are of one where none is given.
        linger: seconds to wait for more that should run with these, which wait; 0 if some of them are to run now, and
            infinite until more come or `look_again` is called.
    """

    def __init__(
        self,
        choose: Callable[[Sequence[J]], Sequence[J]],
        compute: Callable[[Sequence[J]], Sequence[R | Exception | None]],
        run_torch: Callable[..., Awaitable[Sequence[R | Exception | None]]],
        *,
        max_waiting: int,
        linger: Callable[[Sequence[J]], float] = lambda waiting: 0.0,
        group: Callable[[J], Hashable] = lambda job: None,
    ) -> None:
        self._linger = linger
        self._group = group
        self._choose = choose
        self._compute = compute
        self._run_torch = run_torch
        self._max_waiting = max_waiting
        self._waiting: list[_Waiting[J, R]] = []
        self._running: list[_Waiting[J, R]] = []
        self._came = trio.Event()

    @property
    def num_waiting(self) -> int:
        """Jobs whose turn has not come."""
        return len(self._waiting)

    async def submit(self, job: J) -> R | None:
        """The result of `job` when its turn has come; None if it was withdrawn before it was finished.

        Cancelled while it waits, it leaves the queue; while it runs, cancellation waits for the call to end:
        torch cannot be interrupted. A job that runs at once may be over without any other task's turn.

        Raises:
            RequestRefusedError: too many wait already.
            Exception: what `compute` gave for this job, or raised.
        """
        num_waiting = len(self._waiting)
        if num_waiting >= self._max_waiting:  # else none of the groups is full
            group = self._group(job)
            num_waiting = sum(self._group(item.job) == group for item in self._waiting)
        if num_waiting >= self._max_waiting:
            raise RequestRefusedError(
                f"{num_waiting} steps wait already",
                code=ErrorCode.SESSION_LIMIT,
                retry_after=FULL_RETRY_AFTER,
            )
        item: _Waiting[J, R] = _Waiting(job)
        is_first = not (self._waiting or self._running)
        self._waiting.append(item)
        try:
            if is_first and not self._linger([job]):
                # Nobody to wait for: without turns of the scheduler, for `run`, for what ended, and back.
                await self._run_next()
            else:
                self._came.set()
            if not item.done.is_set():
                await item.done.wait()
        except trio.Cancelled:
            item.is_withdrawn = True
            if item in self._waiting:
                self._waiting.remove(item)
            elif not item.done.is_set():
                with trio.CancelScope(shield=True):
                    await item.done.wait()
            raise
        if item.error is not None:
            raise item.error
        return item.result

    def withdraw(self, is_meant: Callable[[J], bool]) -> None:
        """Take jobs out of the queue; one that runs ends with this call to torch."""
        for item in self._waiting:
            if is_meant(item.job):
                item.is_withdrawn = True
                item.done.set()
        self._waiting = [item for item in self._waiting if not item.is_withdrawn]
        for item in self._running:
            if is_meant(item.job):
                item.is_withdrawn = True

    def look_again(self) -> None:
        """Ask again what is to run: what the waiting jobs waited for has changed."""
        self._came.set()

    async def run(self) -> None:
        """Empty the queue; runs as long as its owner."""
        while True:
            if self._waiting and not self._running:
                delay = self._linger([item.job for item in self._waiting])
                if not delay:
                    await self._run_next()
                    continue
                self._came = trio.Event()
                with trio.move_on_after(delay):
                    await self._came.wait()
            else:
                self._came = trio.Event()
                await self._came.wait()

    async def _run_next(self) -> None:
        """Run those of the waiting whose turn it is; by one task at a time."""
        chosen = set(self._choose([item.job for item in self._waiting]))
        self._running = [item for item in self._waiting if item.job in chosen]
        self._waiting = [item for item in self._waiting if item.job not in chosen]
        assert self._running
        try:
            await self._run_chosen()
        finally:
            if self._waiting:
                self._came.set()

    async def _run_chosen(self) -> None:
        running = self._running
        results: Sequence[R | Exception | None]
        try:
            results = await self._run_torch(self._compute, [item.job for item in running])
        except Exception as exc:  # noqa: BLE001  told to each task that waits, which raises it
            results = [exc] * len(running)
        except BaseException:
            for item in running:  # the owner ends: nobody is left waiting for what never comes
                item.is_withdrawn = True
                item.done.set()
            raise
        finally:
            self._running = []
        for item, result in zip(running, results, strict=True):
            if result is None and not item.is_withdrawn:
                self._waiting.append(item)
                continue
            if isinstance(result, Exception):
                item.error = result
            else:
                item.result = result
            item.done.set()
