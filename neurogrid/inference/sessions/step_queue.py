"""Steps that wait for a worker's torch thread, and how they extend a session.

The order is that of `steps`. Knows sessions and models, and no messages.

T = tokens, D = hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import trio

from neurogrid.errors import RequestRefusedError
from neurogrid.inference.sessions.passes import prepare, run_steps
from neurogrid.inference.sessions.spans import stage_span
from neurogrid.inference.sessions.statistics import ComputeStatistics
from neurogrid.inference.sessions.steps import Step, Turns
from neurogrid.inference.sessions.table import Session
from neurogrid.model.caches.cache import MAX_FEW
from neurogrid.model.files.tensors import is_finite
from neurogrid.node.activity import Activity
from neurogrid.node.batcher import Batcher
from neurogrid.p2p.wire import ErrorCode
from neurogrid.worker.state import WorkerState

__all__ = ["Extension", "WorkerSteps"]

logger = logging.getLogger(__name__)

# Steps of one coordinator that wait for the torch thread: one of each of hundreds of sessions, and a few of those of
# 1.0.0.
MAX_WAITING_STEPS = 1024
# Seconds that an activation waits for those before it. They came together, and their tasks begin in any order.
EARLY_TIMEOUT = 2.0


class Extension(NamedTuple):
    """The outcome of a step.

    Attributes:
        hidden: [1, T, D].
        seconds_waited: for its turns.
        batch: number and size of the batch that it ran with, as far as that has results; empty for none.
    """

    hidden: torch.Tensor
    seconds_waited: float
    batch: tuple[int, ...]


class WorkerSteps:
    """The queue before the torch thread.

    Attributes:
        statistics: of what was computed.
    """

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self.statistics = ComputeStatistics()
        self._turns = Turns()
        # Asked often, and in the torch thread: the clock itself, not `trio.current_time`, which goes to look for it.
        self._clock = trio.lowlevel.current_clock().current_time
        self._activity = Activity(self._clock)
        self._chunk: int | None = None
        self._steps: Batcher[Step, torch.Tensor] = Batcher(
            self._choose,
            self._compute,
            self._run_torch,
            max_waiting=MAX_WAITING_STEPS,
            group=lambda step: step.owner,
            linger=self._linger,
        )

    @property
    def num_waiting(self) -> int:
        """Steps whose turn has not come."""
        return self._steps.num_waiting

    async def run(self) -> None:
        """Compute what comes; runs as long as the worker."""
        await self._steps.run()

    def withdraw(self, session: Session) -> None:
        """Compute nothing more for a session that is over."""
        self._activity.gone(session.number)
        self._steps.withdraw(lambda step: step.session == session.number)

    async def extend(
        self,
        session: Session,
        position: int,
        hidden_BTD: torch.Tensor,
        batch: tuple[int, ...] = (),
    ) -> Extension:
        """Run the session's layers on new tokens, which must continue it, or what was sent before them, or take the
        place of its last ones.

        Args:
            batch: number and size of the batch that they came with; empty for none.

        Raises:
            RequestRefusedError: they do not, are no numbers, are too many, or could not be computed.
        """
        num_tokens = hidden_BTD.shape[1]
        came = self._clock()
        try:
            session.turn.acquire_nowait()  # `async with` would give way to others first, in vain
        except trio.WouldBlock:
            await session.turn.acquire()
        try:
            # 1.0.0 has no sessions, and nothing under way before this: what is not there was lost.
            if position > session.length and session.session_id:
                with trio.move_on_after(EARLY_TIMEOUT):
                    while position > session.length:
                        await session.turn.wait()
            waited = self._clock() - came
            if session.is_over:
                raise _ended(session)
            goes_back = session.goes_back_to(position)
            if position != session.length and not goes_back:
                raise RequestRefusedError(
                    f"an activation for position {position} came to a session of "
                    f"{session.length} tokens",
                    code=ErrorCode.POSITION_MISMATCH,
                )
            images = session.images
            if images is not None and images.cuts(position, position + num_tokens):
                raise RequestRefusedError(
                    f"an activation of {num_tokens} tokens at position {position} has a part of an image, whose tokens "
                    "see each other",
                    code=ErrorCode.POSITION_MISMATCH,
                )
            if position + num_tokens > session.max_length:
                raise RequestRefusedError(
                    f"{position + num_tokens} tokens are more than the {session.max_length} "
                    "that were agreed",
                    code=ErrorCode.LIMIT_EXCEEDED,
                )
            if not await self._is_finite(hidden_BTD):
                raise RequestRefusedError(
                    f"{session.origin} gave NaN or infinity", code=ErrorCode.NOT_FINITE
                )
            step = Step(
                session.number,
                session.model,
                session.start,
                session.stop,
                position,
                hidden_BTD,
                session.cache,
                self._clock(),
                batch,
                adapter=session.adapter,
                goes_back=goes_back,
                # An image is not cut, either.
                is_whole=(session.takes_cuts and num_tokens <= MAX_FEW)
                or (images is not None and images.is_whole(position, position + num_tokens)),
                owner=session.owner,
            )
            self._activity.came(session.number)
            with stage_span(step, session.session_id):
                result_BTD = await self._steps.submit(step)
            if result_BTD is None:
                raise _ended(session)
            session.length, session.last_position = position + num_tokens, position
            session.last_used = trio.current_time()
            session.turn.notify_all()
        finally:
            session.turn.release()
        return Extension(result_BTD, waited + step.queue_seconds, step.batch)

    async def prepare(self, session: Session) -> None:
        """Do beforehand what the next token of a session needs besides what is to come, while nobody waits."""
        # At its end there is no next: a table of positions may end there too, which a GPU does not forgive.
        is_between = 0 < session.length < session.max_length
        if not is_between or self.num_waiting or self._activity.num_active > 1:
            return
        try:
            session.turn.acquire_nowait()
        except trio.WouldBlock:
            return  # what is to come is here
        try:
            await self._state.torch_thread.run_briefly(
                partial(
                    prepare,
                    session.model,
                    start=session.start,
                    stop=session.stop,
                    position=session.length,
                    cache=session.cache,
                )
            )
        finally:
            session.turn.release()

    async def _is_finite(self, hidden_BTD: torch.Tensor) -> bool:
        """Look at a token here, which takes some microseconds, and at more of them where torch runs."""
        if hidden_BTD.shape[1] == 1:
            return is_finite(hidden_BTD)
        return await self._state.torch_thread.run(partial(is_finite, hidden_BTD))

    def _linger(self, waiting: Sequence[Step]) -> float:
        return self._turns.seconds_until_next(waiting, now=self._clock())

    def _choose(self, waiting: Sequence[Step]) -> list[Step]:
        steps = self._turns.next(waiting, now=self._clock())
        # A session that is alone keeps nobody waiting: in one go it gets the bits of the whole model. Those that
        # are open and do nothing, as finished ones may be for a while, do not count.
        self._chunk = None if self._activity.num_active <= 1 else self._state.settings.prefill_chunk
        logger.debug("%d of %d steps that wait run together", len(steps), len(waiting))
        return steps

    async def _run_torch(
        self,
        compute: Callable[[Sequence[Step]], Sequence[torch.Tensor | Exception | None]],
        steps: Sequence[Step],
    ) -> Sequence[torch.Tensor | Exception | None]:
        thread, call = self._state.torch_thread, partial(compute, steps)
        if not steps[0].is_decoded:
            return await thread.run(call)
        is_brief = self._activity.is_brief
        started = self._clock()
        results = await (thread.run_briefly if is_brief else thread.run)(call)
        self._activity.stepped(self._clock() - started)
        return results

    def _compute(self, steps: Sequence[Step]) -> list[torch.Tensor | Exception | None]:
        is_decoded, num_tokens = steps[0].is_decoded, sum(step.num_tokens for step in steps)
        started = self._clock()
        results = run_steps(steps, chunk=self._chunk)
        ended = self._clock()
        if not is_decoded:
            num_tokens -= steps[0].num_tokens  # what is left for further chunks
        call = self.statistics.called(
            is_decoded=is_decoded,
            num_rows=len(steps),
            num_tokens=num_tokens,
            seconds=ended - started,
        )
        for step in steps:
            waited = started - step.waits_since
            self.statistics.queue.observe(waited)
            step.queue_seconds += waited
            step.waits_since = ended
            step.calls.append(call)
        return results


def _ended(session: Session) -> RequestRefusedError:
    return RequestRefusedError(
        f"session {session.session_id} ended before its turn came",
        code=ErrorCode.SESSION_UNKNOWN,
        is_expected=True,
    )
