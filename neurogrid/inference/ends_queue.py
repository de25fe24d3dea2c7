"""Embedding and logits of many generations in one torch thread: those that wait go together.

T = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
import trio

from neurogrid.inference.batching import Batcher
from neurogrid.model.stage import MAX_ROWS, Ends
from neurogrid.p2p.tracing import span

__all__ = ["EndsQueue", "open_ends"]

# One of each generation under way, and of those that are told so when they are more.
MAX_WAITING_ENDS = 4096


@dataclass(eq=False, slots=True)
class _Embedding:
    token_ids: Sequence[int]
    position: int

    @property
    def is_row(self) -> bool:
        return len(self.token_ids) == 1 and self.position > 0


@dataclass(eq=False, slots=True)
class _Logits:
    hidden: torch.Tensor
    position: int

    @property
    def is_row(self) -> bool:
        return self.hidden.shape[1] == 1


_Job: TypeAlias = _Embedding | _Logits


class EndsQueue:
    """The ends of a model, for many at once. Made by `open_ends`."""

    def __init__(self, ends: Ends, *, shares_forward: bool) -> None:
        self._ends = ends
        self._shares_forward = shares_forward
        self._limiter = trio.CapacityLimiter(1)
        self.batcher: Batcher[_Job, torch.Tensor] = Batcher(
            self._choose, self._compute, self._run_torch, max_waiting=MAX_WAITING_ENDS
        )

    async def embed(self, token_ids: Sequence[int], *, position: int) -> torch.Tensor:
        """What enters layer 0: [1, T, D]; see `Ends.embed`."""
        with span("inference.embed"):
            return await self._submit(_Embedding(token_ids, position))

    async def logits(self, hidden_BTD: torch.Tensor, *, position: int) -> torch.Tensor:
        """Logits [V] after the last token of `hidden_BTD`; see `Ends.logits`.

        Args:
            position: of the first token of `hidden_BTD`.
        """
        with span("inference.logits"):
            return await self._submit(_Logits(hidden_BTD, position))

    async def _submit(self, job: _Job) -> torch.Tensor:
        result = await self.batcher.submit(job)
        assert result is not None  # nothing is withdrawn here but by cancellation
        return result

    def _choose(self, waiting: Sequence[_Job]) -> list[_Job]:
        first = waiting[0]
        if not (self._shares_forward and first.is_row):
            return [first]
        same = [job for job in waiting if type(job) is type(first) and job.is_row]
        return same[:MAX_ROWS]

    async def _run_torch(self, *call: object) -> Sequence[torch.Tensor | Exception | None]:
        return await trio.to_thread.run_sync(*call, limiter=self._limiter)  # type: ignore[arg-type]

    def _compute(self, jobs: Sequence[_Job]) -> Sequence[torch.Tensor | Exception | None]:
        with torch.inference_mode():
            first = jobs[0]
            if isinstance(first, _Embedding):
                embeddings = [job for job in jobs if isinstance(job, _Embedding)]
                return self._embed(embeddings)
            return self._logits([job for job in jobs if isinstance(job, _Logits)])

    def _embed(self, jobs: Sequence[_Embedding]) -> Sequence[torch.Tensor]:
        if len(jobs) == 1:
            return [self._ends.embed(jobs[0].token_ids, position=jobs[0].position)]
        token_ids = [job.token_ids[0] for job in jobs]
        return self._ends.embed_rows(token_ids, positions=[job.position for job in jobs]).chunk(
            len(jobs)
        )

    def _logits(self, jobs: Sequence[_Logits]) -> Sequence[torch.Tensor]:
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
    queue = EndsQueue(ends, shares_forward=shares_forward)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(queue.batcher.run)
        yield queue
        nursery.cancel_scope.cancel()
