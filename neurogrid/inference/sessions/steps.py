"""Continuous batching: what waits for the torch thread, and what of it runs together next.

What came while the last call ran is the next batch; an idle thread waits for a burst at most. `Batcher` is the
queue and the one task that empties it. `next_steps` chooses for a worker: all tokens that are decoded over the
same layers go through in one forward pass, and between two such passes at most one chunk of one prefill.

It knows no sessions and no messages. The choice is a pure function; what is computed is another's.

T = tokens, D = hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
import trio

from neurogrid.errors import RequestRefusedError
from neurogrid.inference.sessions.passes import forward, forward_rows
from neurogrid.inference.sessions.statistics import StageCall
from neurogrid.model.caches.cache import StageCache
from neurogrid.model.stages.stage import Row
from neurogrid.p2p.wire import ErrorCode
from neurogrid.worker.held_model import HeldModel

__all__ = ["Batcher", "Step", "next_steps", "run_steps"]

J = TypeVar("J")
R = TypeVar("R")

# Seconds that a peer is told to wait when too much waits already: some steps' time.
FULL_RETRY_AFTER = 1.0


@dataclass(eq=False, slots=True)
class _Waiting(Generic[J, R]):
    """A job and whoever waits for it."""

    job: J
    done: trio.Event = field(default_factory=trio.Event)
    result: R | None = None
    error: Exception | None = None
    is_withdrawn: bool = False


class Batcher(Generic[J, R]):
    """A bounded queue of jobs that run in the torch thread: several together where they can be.

    A job that finds nobody before it runs at once; what comes meanwhile is left to `run`.

    Args:
        choose: which of the waiting jobs run next, the oldest first among them; at least one.
        compute: runs those, in the torch thread. Gives for each its result, the error that it alone has, or
            None where it is not finished: then it waits again, behind the others.
        run_torch: calls a function in the torch thread.
        max_waiting: jobs that may wait; more are refused.
        linger: seconds to wait for more that should run with these, which wait; 0 for none.
    """

    def __init__(
        self,
        choose: Callable[[Sequence[J]], Sequence[J]],
        compute: Callable[[Sequence[J]], Sequence[R | Exception | None]],
        run_torch: Callable[..., Awaitable[Sequence[R | Exception | None]]],
        *,
        max_waiting: int,
        linger: Callable[[Sequence[J]], float] = lambda waiting: 0.0,
    ) -> None:
        self._linger = linger
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
        if len(self._waiting) >= self._max_waiting:
            raise RequestRefusedError(
                f"{len(self._waiting)} steps wait already",
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
        chosen = self._choose([item.job for item in self._waiting])
        ids = set(map(id, chosen))
        self._running = [item for item in self._waiting if id(item.job) in ids]
        self._waiting = [item for item in self._waiting if id(item.job) not in ids]
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
        except Exception as exc:  # noqa: BLE001  told to each that waits, who raises it
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


@dataclass(eq=False, slots=True)
class Step:
    """Tokens that extend one session over layers [start, stop).

    Attributes:
        hidden: [1, T, D]; what is left of it where a chunk has run.
        position: of its first token.
        is_decoded: whether it is one token of a session that has begun: those share a forward pass.
        results: what the chunks gave, in order.
        waits_since: when it came, or its last chunk was done (`time.perf_counter`).
        queue_seconds: for which it has waited for its turns.
        calls: to torch that it has been part of.
    """

    model: HeldModel
    start: int
    stop: int
    position: int
    hidden: torch.Tensor
    cache: StageCache
    results: list[torch.Tensor] = field(default_factory=list)
    waits_since: float = field(default_factory=time.perf_counter)
    queue_seconds: float = 0.0
    calls: list[StageCall] = field(default_factory=list)
    is_decoded: bool = field(init=False)

    def __post_init__(self) -> None:
        # Asked for often: once for each of those that wait with it. What is left of a prefill stays one.
        self.is_decoded = self.num_tokens == 1 and self.position > 0

    @property
    def num_tokens(self) -> int:
        """Tokens that have not run yet."""
        return self.hidden.shape[1]

    def shares_forward(self, other: Step) -> bool:
        """Whether both run over the same layers of the same model."""
        mine = (self.model, self.start, self.stop)
        return mine == (other.model, other.start, other.stop)


def next_steps(waiting: Sequence[Step], *, after_prefill: bool) -> list[Step]:
    """The steps that run next: all that can be decoded with the oldest, or a chunk of the oldest prefill.

    Args:
        waiting: in the order in which they came; at least one.
        after_prefill: whether a prefill ran last: then it is the turn of those that decode.
    """
    decoded = [step for step in waiting if step.is_decoded]
    prefill = next((step for step in waiting if not step.is_decoded), None)
    if prefill is not None and not (decoded and after_prefill):
        return [prefill]
    return [step for step in decoded if step.shares_forward(decoded[0])]


def run_steps(steps: Sequence[Step], *, chunk: int | None) -> list[torch.Tensor | Exception | None]:
    """Compute what `next_steps` chose; in the torch thread.

    Args:
        chunk: tokens of a prefill that run in one go; None for all of them.

    Returns:
        For each step its result [1, T, D], its error, or None where more chunks are to come.
    """
    first = steps[0]
    if first.is_decoded:
        rows = [Row(step.hidden, step.position, step.cache) for step in steps]
        return forward_rows(first.model, rows, start=first.start, stop=first.stop)
    assert len(steps) == 1
    size = first.num_tokens if chunk is None or not first.model.traits.takes_chunks else chunk
    try:
        result_BTD = forward(
            first.model,
            first.hidden[:, :size],
            start=first.start,
            stop=first.stop,
            position=first.position,
            cache=first.cache,
        )
    except RequestRefusedError as exc:
        return [exc]
    first.results.append(result_BTD)
    first.position += result_BTD.shape[1]
    first.hidden = first.hidden[:, size:]
    if first.num_tokens:
        return [None]
    return [first.results[0] if len(first.results) == 1 else torch.cat(first.results, dim=1)]
