"""The ends of a model for many generations, in one torch thread: those that wait go together.

Between two steps of a session stand three things: the head, the choice of a token, and its embedding. They are one
call here, so that the thread is asked once a step, and rows that came out of the last stage together enter the first
one together. Here is also where sessions are brought together: all of a micro-batch go on at once.

T = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import trio

from neurogrid.inference.generation.micro_batches import MicroBatch, MicroBatches
from neurogrid.model.stages.stage import MAX_ROWS, Ends
from neurogrid.node.batcher import Batcher
from neurogrid.node.burst import Burst
from neurogrid.node.torch_thread import TorchThread
from neurogrid.p2p.streams.tracing import span

__all__ = ["Choose", "Chosen", "EndsQueue", "open_ends"]

C = TypeVar("C")

# One of each generation under way, and of those that are told so when they are more.
MAX_WAITING_ENDS = 4096


@dataclass(frozen=True, slots=True)
class Chosen(Generic[C]):
    """A choice from logits.

    Attributes:
        value: whatever it is.
        token_id: of the token that goes on from here; None where none does.
    """

    value: C
    token_id: int | None


# Logits [V] in float32 to a choice; runs in the torch thread.
Choose: TypeAlias = Callable[[torch.Tensor], Chosen[C]]


@dataclass(eq=False, slots=True)
class _Embedding:
    token_ids: Sequence[int]
    position: int

    @property
    def is_row(self) -> bool:
        return len(self.token_ids) == 1 and self.position > 0


@dataclass(eq=False, slots=True)
class _Choice:
    hidden: torch.Tensor
    position: int
    choose: Choose[Any]
    session: Hashable

    @property
    def is_row(self) -> bool:
        return self.hidden.shape[1] == 1

    @property
    def next_position(self) -> int:
        return self.position + self.hidden.shape[1]


_Job: TypeAlias = _Embedding | _Choice


@dataclass(frozen=True, slots=True)
class _Turn:
    """Jobs that can run together, and seconds until they should.

    Attributes:
        micro_batch: the one that they are of, if any.
        is_whole: whether no session of it is missing that has come of late.
    """

    jobs: Sequence[_Job]
    delay: float = 0.0
    micro_batch: MicroBatch | None = None
    is_whole: bool = True


# Of a choice: what it is, and the embedding of its token.
_Result: TypeAlias = torch.Tensor | tuple[Chosen[Any], torch.Tensor | None]


class EndsQueue:
    """The ends of a model, for many at once. Made by `open_ends`."""

    def __init__(self, ends: Ends, thread: TorchThread, *, shares_forward: bool) -> None:
        self._ends = ends
        self._thread = thread
        self._shares_forward = shares_forward
        self._burst = Burst()
        self._micro_batches = MicroBatches()
        self.batcher: Batcher[_Job, _Result] = Batcher(
            self._select,
            self._compute,
            self._run_torch,
            max_waiting=MAX_WAITING_ENDS,
            linger=self._linger,
        )

    async def embed(
        self, token_ids: Sequence[int], *, position: int, session: Hashable
    ) -> torch.Tensor:
        """Return the input of layer 0: [1, T, D]; see `Ends.embed`."""
        self._burst.came(session)
        with span("inference.embed"):
            result = await self.batcher.submit(_Embedding(token_ids, position))
        assert isinstance(result, torch.Tensor)  # nothing is withdrawn here but by cancellation
        return result

    async def choose(
        self,
        hidden_BTD: torch.Tensor,
        *,
        position: int,
        choose: Choose[C],
        session: Hashable,
        peer_ids: Sequence[str],
    ) -> tuple[Chosen[C], torch.Tensor | None]:
        """Choose from the logits after the last token of `hidden_BTD`; see `Ends.logits`.

        Args:
            position: of the first token of `hidden_BTD`.
            session: the one that goes on; sessions that go together are waited for.
            choose: what it raises is raised here.
            peer_ids: of the stages that the session goes through.

        Returns:
            The choice, and the input of layer 0 for its token, [1, 1, D].
        """
        job = _Choice(hidden_BTD, position, choose, session)
        self._burst.came(session)
        if job.is_row:
            self._micro_batches.join(session, peer_ids)
        with span("inference.logits"):
            result = await self.batcher.submit(job)
        assert isinstance(result, tuple)
        return result

    def forget(self, session: Hashable) -> None:
        """Wait no more for what comes of a session."""
        self._burst.gone(session)
        self._micro_batches.leave(session)

    def _linger(self, waiting: Sequence[_Job]) -> float:
        return min(turn.delay for turn in self._turns(waiting))

    def _select(self, waiting: Sequence[_Job]) -> Sequence[_Job]:
        turn = min(self._turns(waiting), key=lambda turn: turn.delay)
        if turn.micro_batch is not None:
            turn.micro_batch.starts(trio.current_time(), is_whole=turn.is_whole)
        return turn.jobs[:MAX_ROWS]

    def _turns(self, waiting: Sequence[_Job]) -> list[_Turn]:
        """Group the waiting jobs that can run together, in the order in which the first of each came."""
        if not self._shares_forward or self._burst.num_active <= 1:
            return [_Turn(waiting[:1])]
        together: dict[object, list[_Job]] = {}
        for job in waiting:
            key: object = job
            if job.is_row and isinstance(job, _Choice):
                key = self._micro_batches.of(job.session)
            elif job.is_row:
                key = _Embedding
            together.setdefault(key, []).append(job)
        return [
            self._turn_of(key, jobs) if isinstance(key, MicroBatch) else _Turn(jobs)
            for key, jobs in together.items()
        ]

    def _turn_of(self, micro_batch: MicroBatch, jobs: Sequence[_Job]) -> _Turn:
        waiting = {job.session for job in jobs if isinstance(job, _Choice)}
        is_whole = not self._burst.misses(waiting, micro_batch.sessions)
        now, came = trio.current_time(), self._burst.first_came(waiting)
        away = self._burst.away([*waiting, *micro_batch.sessions])
        if is_whole:
            delay = 0.0
        elif micro_batch.is_gathering:
            # The way around of the quickest: nobody is held up by one that is slower.
            delay = came + away - now
        else:
            delay = self._burst.delay(waiting)
        # Nor by those that take turns with them.
        after_others = min(micro_batch.others_started, came) + micro_batch.spacing(away) - now
        return _Turn(jobs, max(delay, after_others, 0.0), micro_batch, is_whole)

    async def _run_torch(
        self,
        compute: Callable[[Sequence[_Job]], Sequence[_Result | Exception | None]],
        jobs: Sequence[_Job],
    ) -> Sequence[_Result | Exception | None]:
        call = partial(compute, jobs)
        is_brief = jobs[0].is_row and self._burst.is_brief
        started = time.perf_counter()
        results = await (self._thread.run_briefly if is_brief else self._thread.run)(call)
        chose = [job.session for job in jobs if isinstance(job, _Choice)]
        if chose:
            self._burst.stepped(time.perf_counter() - started, chose)
        return results

    def _compute(self, jobs: Sequence[_Job]) -> Sequence[_Result | Exception | None]:
        with torch.inference_mode():
            if isinstance(jobs[0], _Embedding):
                return self._embed([job for job in jobs if isinstance(job, _Embedding)])
            return self._choose([job for job in jobs if isinstance(job, _Choice)])

    def _embed(self, jobs: Sequence[_Embedding]) -> Sequence[torch.Tensor]:
        if len(jobs) == 1:
            return [self._ends.embed(jobs[0].token_ids, position=jobs[0].position)]
        return self._embed_rows([job.token_ids[0] for job in jobs], [job.position for job in jobs])

    def _embed_rows(
        self, token_ids: Sequence[int], positions: Sequence[int]
    ) -> Sequence[torch.Tensor]:
        return self._ends.embed_rows(token_ids, positions=positions).chunk(len(token_ids))

    def _choose(self, jobs: Sequence[_Choice]) -> Sequence[_Result | Exception | None]:
        results: list[_Result | Exception | None] = []
        followed: list[int] = []
        for job, logits_V in zip(jobs, self._logits(jobs), strict=True):
            try:
                chosen = job.choose(logits_V)
            except Exception as exc:  # noqa: BLE001  of this one alone: raised where it is waited for
                results.append(exc)
                continue
            if chosen.token_id is not None:
                followed.append(len(results))
            results.append((chosen, None))
        if followed:
            self._follow(jobs, results, followed)
        return results

    def _follow(
        self,
        jobs: Sequence[_Choice],
        results: list[_Result | Exception | None],
        followed: Sequence[int],
    ) -> None:
        """Embed the tokens that were chosen, all together."""
        chosen = [result[0] for i in followed if isinstance(result := results[i], tuple)]
        positions = [jobs[i].next_position for i in followed]
        token_ids = [each.token_id for each in chosen if each.token_id is not None]
        if len(followed) == 1:
            hidden = [self._ends.embed(token_ids, position=positions[0])]
        else:
            hidden = list(self._embed_rows(token_ids, positions))
        for i, each, hidden_BTD in zip(followed, chosen, hidden, strict=True):
            results[i] = (each, hidden_BTD)

    def _logits(self, jobs: Sequence[_Choice]) -> Sequence[torch.Tensor]:
        if len(jobs) == 1:
            return [self._ends.logits(jobs[0].hidden, position=jobs[0].position)]
        hidden_R1D = torch.cat([job.hidden for job in jobs])
        return list(self._ends.logits_rows(hidden_R1D, positions=[job.position for job in jobs]))


@asynccontextmanager
async def open_ends(ends: Ends, *, shares_forward: bool) -> AsyncIterator[EndsQueue]:
    """Serve the ends of a model until the block is left.

    Args:
        ends: loaded.
        shares_forward: whether tokens of several sessions may go through together: `SplitTraits.row_bounds`.
    """
    with TorchThread() as thread:
        queue = EndsQueue(ends, thread, shares_forward=shares_forward)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(queue.batcher.run)
            yield queue
            nursery.cancel_scope.cancel()
