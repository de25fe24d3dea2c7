"""The ends of a model for many generations, in one torch thread: those that wait go together.

Between two steps of a session stand three things: the head, the choice of a token, and its embedding. They are one
call here, so that the thread is asked once a step, and rows that came out of the last stage together enter the first
one together. All sessions of a coordinator come through here, so this is where micro-batches are brought together.

T = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import trio

from neurogrid.inference.generation.micro_batches import MicroBatches
from neurogrid.inference.generation.prompt_readers import PromptReader
from neurogrid.model.stages.stage import MAX_ROWS, Ends
from neurogrid.node.activity import Activity
from neurogrid.node.batcher import Batcher
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
    images: Sequence[tuple[int, torch.Tensor]] = ()

    @property
    def is_row(self) -> bool:
        return len(self.token_ids) == 1 and self.position > 0 and not self.images


@dataclass(eq=False, slots=True)
class _Choice:
    hidden: torch.Tensor
    position: int
    choose: Choose[Any]
    session: Hashable
    proposed: Sequence[int] = ()

    @property
    def is_row(self) -> bool:
        return self.hidden.shape[1] == 1


@dataclass(eq=False, slots=True)
class _Reading:
    hidden: torch.Tensor
    position: int
    reader: PromptReader

    @property
    def is_row(self) -> bool:
        return False


_Job: TypeAlias = _Embedding | _Choice | _Reading


# Of a choice: one, or one for each token that was proposed and chosen, and one more; and the embedding of the last. Of
# a reading: nothing.
_Result: TypeAlias = torch.Tensor | tuple[Sequence[Chosen[Any]], torch.Tensor | None] | bool


class EndsQueue:
    """The ends of a model, for many at once. Made by `open_ends`."""

    def __init__(self, ends: Ends, thread: TorchThread, *, shares_forward: bool) -> None:
        self._ends = ends
        self._thread = thread
        self._shares_forward = shares_forward
        self._activity = Activity()
        self._micro_batches = MicroBatches()
        self._gates: dict[
            Hashable, trio.Event
        ] = {}  # where sessions wait that have a token to send
        self._timer = trio.CancelScope()
        self.batcher: Batcher[_Job, _Result] = Batcher(
            self._select,
            self._compute,
            self._run_torch,
            max_waiting=MAX_WAITING_ENDS,
            linger=self._linger,
        )

    async def embed(
        self,
        token_ids: Sequence[int],
        *,
        position: int,
        session: Hashable,
        images: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> torch.Tensor:
        """Return the input of layer 0: [1, T, D]; see `Ends.embed`, and `Ends.embed_images`."""
        self._activity.came(session)
        with span("inference.embed"):
            result = await self.batcher.submit(_Embedding(token_ids, position, images))
        assert isinstance(result, torch.Tensor)  # nothing is withdrawn here but by cancellation
        return result

    @property
    def num_active(self) -> int:
        """Sessions that have come of late."""
        return self._activity.num_active

    async def leave(self, session: Hashable, peer_ids: Sequence[str]) -> tuple[int, ...]:
        """Wait for the sessions that are to go through the stages together with this one, which has one token to send.

        Args:
            peer_ids: of the stages that the session goes through.

        Returns:
            Number and size of the batch that leaves now; empty for one that goes alone.
        """
        if not self._shares_forward:
            return ()
        self._micro_batches.arrived(session, peer_ids, trio.current_time())
        self._let_leave()
        batch = self._micro_batches.batch(session)
        if batch is None:
            gate = self._gates[session] = trio.Event()
            await gate.wait()
            batch = self._micro_batches.batch(session)
            assert batch is not None
        return batch

    async def choose(
        self, hidden_BTD: torch.Tensor, *, position: int, choose: Choose[C], session: Hashable
    ) -> tuple[Chosen[C], torch.Tensor | None]:
        """Choose from the logits after the last token of `hidden_BTD`; see `Ends.logits`.

        Args:
            position: of the first token of `hidden_BTD`.
            session: the one that goes on; those that left together with it are waited for.
            choose: what it raises is raised here.

        Returns:
            The choice, and the input of layer 0 for its token, [1, 1, D].
        """
        if session in self._micro_batches:
            self._micro_batches.came_back(session)
        chosen, ahead_BTD = await self._submit(_Choice(hidden_BTD, position, choose, session))
        return chosen[0], ahead_BTD

    async def choose_each(
        self,
        hidden_BTD: torch.Tensor,
        *,
        position: int,
        proposed: Sequence[int],
        choose: Choose[C],
        session: Hashable,
    ) -> tuple[Sequence[Chosen[C]], torch.Tensor | None]:
        """Choose from the logits after each token of `hidden_BTD`, as long as the next one is what was chosen.

        Args:
            position, session: as of `choose`.
            proposed: the tokens of `hidden_BTD` but for the first.
            choose: is called for each in order, and sees the logits that it would see if the token were alone.

        Returns:
            The choices, one or more, and the input of layer 0 for the token of the last.
        """
        assert hidden_BTD.shape[1] == len(proposed) + 1
        return await self._submit(_Choice(hidden_BTD, position, choose, session, proposed))

    async def _submit(self, job: _Choice) -> tuple[Sequence[Chosen[Any]], torch.Tensor | None]:
        self._activity.came(job.session)
        with span("inference.logits"):
            result = await self.batcher.submit(job)
        assert isinstance(result, tuple)
        return result

    async def read(self, hidden_BTD: torch.Tensor, *, position: int, reader: PromptReader) -> None:
        """Show a reader what left the last layer for tokens of its prompt, piece by piece: others go between them.

        Args:
            position: of the first token of `hidden_BTD`.
        """
        num_tokens = hidden_BTD.shape[1]
        for start in range(0, num_tokens, reader.max_tokens):
            piece_BTD = hidden_BTD[:, start : start + reader.max_tokens]
            with span("inference.read"):
                await self.batcher.submit(_Reading(piece_BTD, position + start, reader))

    def go_alone(self, session: Hashable) -> None:
        """Have no others wait for a session, which goes through the stages by itself this time."""
        if session in self._micro_batches:
            self._micro_batches.ended(session)
            self._let_leave()
            self.batcher.look_again()

    def forget(self, session: Hashable) -> None:
        """Wait no more for a session: it is over, or has to find another way."""
        self._activity.gone(session)
        self._gates.pop(session, None)
        self.go_alone(session)

    async def run(self) -> None:
        """Compute what comes, and let micro-batches leave in time; runs as long as the ends are served."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.batcher.run)
            while True:
                self._timer = trio.CancelScope(deadline=self._micro_batches.leaves_at)
                with self._timer:
                    await trio.sleep(math.inf)
                self._let_leave()

    def _let_leave(self) -> None:
        for session in self._micro_batches.leave(trio.current_time()):
            if (gate := self._gates.pop(session, None)) is not None:
                gate.set()
        self._timer.deadline = self._micro_batches.leaves_at

    def _linger(self, waiting: Sequence[_Job]) -> float:
        return 0.0 if self._select(waiting) else math.inf

    def _select(self, waiting: Sequence[_Job]) -> Sequence[_Job]:
        """The waiting jobs that run next: those that can run together, and that nobody else is waited for with."""
        if not self._shares_forward:
            return waiting[:1]
        together: dict[object, list[_Job]] = {}
        for job in waiting:
            key: object = job
            if isinstance(job, _Choice) and job.session in self._micro_batches and not job.proposed:
                if not self._micro_batches.is_back(job.session):
                    continue
                key = self._micro_batches.companions(job.session)
            elif isinstance(job, _Embedding) and job.is_row:
                key = _Embedding
            together.setdefault(key, []).append(job)
        return next(iter(together.values()), [])[:MAX_ROWS]

    async def _run_torch(
        self,
        compute: Callable[[Sequence[_Job]], Sequence[_Result | Exception | None]],
        jobs: Sequence[_Job],
    ) -> Sequence[_Result | Exception | None]:
        call = partial(compute, jobs)
        is_brief = jobs[0].is_row and self._activity.is_brief
        started = time.perf_counter()
        results = await (self._thread.run_briefly if is_brief else self._thread.run)(call)
        chose = [job.session for job in jobs if isinstance(job, _Choice)]
        if chose:
            self._activity.stepped(time.perf_counter() - started)
            for session in chose:
                self._micro_batches.chosen(session, trio.current_time())
            self._let_leave()
        return results

    def _compute(self, jobs: Sequence[_Job]) -> Sequence[_Result | Exception | None]:
        with torch.inference_mode():
            if isinstance(jobs[0], _Reading):
                return self._read([job for job in jobs if isinstance(job, _Reading)])
            if isinstance(jobs[0], _Embedding):
                return self._embed([job for job in jobs if isinstance(job, _Embedding)])
            return self._choose([job for job in jobs if isinstance(job, _Choice)])

    def _read(self, jobs: Sequence[_Reading]) -> Sequence[_Result]:
        for job in jobs:
            job.reader.read(self._ends, job.hidden.contiguous(), job.position)
        return [True] * len(jobs)

    def _embed(self, jobs: Sequence[_Embedding]) -> Sequence[torch.Tensor]:
        if len(jobs) == 1:
            job = jobs[0]
            if job.images:
                return [
                    self._ends.embed_images(
                        job.token_ids, position=job.position, embeddings=job.images
                    )
                ]
            return [self._ends.embed(job.token_ids, position=job.position)]
        return self._embed_rows([job.token_ids[0] for job in jobs], [job.position for job in jobs])

    def _embed_rows(
        self, token_ids: Sequence[int], positions: Sequence[int]
    ) -> Sequence[torch.Tensor]:
        return self._ends.embed_rows(token_ids, positions=positions).chunk(len(token_ids))

    def _choose(self, jobs: Sequence[_Choice]) -> Sequence[_Result | Exception | None]:
        if jobs[0].proposed:  # it is alone
            try:
                return [self._choose_each(jobs[0])]
            except Exception as exc:  # noqa: BLE001  as below
                return [exc]
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
            results.append(([chosen], None))
        if followed:
            self._follow(jobs, results, followed)
        return results

    def _choose_each(self, job: _Choice) -> _Result:
        """One row at a time, each as it is alone: so it has the same bits, and none is computed that is not used."""
        chosen: list[Chosen[Any]] = []
        for at, expected in enumerate([*job.proposed, None]):
            hidden_B1D = job.hidden[:, at : at + 1].contiguous()
            chosen.append(job.choose(self._ends.logits(hidden_B1D, position=job.position + at)))
            if chosen[-1].token_id is None or chosen[-1].token_id != expected:
                break
        token_id = chosen[-1].token_id
        if token_id is None:
            return chosen, None
        return chosen, self._ends.embed([token_id], position=job.position + len(chosen))

    def _follow(
        self,
        jobs: Sequence[_Choice],
        results: list[_Result | Exception | None],
        followed: Sequence[int],
    ) -> None:
        """Embed the tokens that were chosen, all together."""
        chosen = [result[0][0] for i in followed if isinstance(result := results[i], tuple)]
        positions = [jobs[i].position + jobs[i].hidden.shape[1] for i in followed]
        token_ids = [each.token_id for each in chosen if each.token_id is not None]
        if len(followed) == 1:
            hidden = [self._ends.embed(token_ids, position=positions[0])]
        else:
            hidden = list(self._embed_rows(token_ids, positions))
        for i, each, hidden_BTD in zip(followed, chosen, hidden, strict=True):
            results[i] = ([each], hidden_BTD)

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
            nursery.start_soon(queue.run)
            yield queue
            nursery.cancel_scope.cancel()
