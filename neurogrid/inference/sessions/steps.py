"""Continuous batching on a worker: which of the steps that wait (`node.batcher`) run together next.

All tokens that are decoded over the same layers go through in one forward pass, and between two such passes at most
one chunk of one prefill.

It knows no sessions and no messages. The choice is a pure function.

T = tokens, D = hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from neurogrid.errors import RequestRefusedError
from neurogrid.inference.sessions.passes import forward, forward_rows
from neurogrid.inference.sessions.statistics import StageCall
from neurogrid.model.caches.cache import StageCache
from neurogrid.model.stages.stage import Row
from neurogrid.worker.held_model import HeldModel

__all__ = ["Step", "next_steps", "run_steps"]


@dataclass(eq=False, slots=True)
class Step:
    """Tokens that extend one session over layers [start, stop).

    Attributes:
        session: the number of its session.
        hidden: [1, T, D]; what is left of it where a chunk has run.
        position: of its first token.
        is_decoded: whether it is one token of a session that has begun: those share a forward pass.
        results: what the chunks gave, in order.
        waits_since: when it came, or its last chunk was done (`time.perf_counter`).
        queue_seconds: for which it has waited for its turns.
        calls: to torch that it has been part of.
    """

    session: int
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
