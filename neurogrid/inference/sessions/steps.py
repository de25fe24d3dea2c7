"""Continuous batching on a worker: which of the steps that wait (`node.batcher`) run together next.

A forward pass takes the tokens of one batch, as their coordinator has numbered them, and those of none, over the
same layers. A batch waits until it is whole, or has waited long enough. Between two such passes runs at most one
chunk of one prefill. Where several coordinators have steps that wait, they take turns, whatever they have: a turn is
one pass.

It knows no sessions and no messages. The choice is a pure function.

Source: protocol_spec/sessions.md, "Batches".

T = tokens, D = hidden size.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from neurogrid.inference.sessions.statistics import StageCall
from neurogrid.model.adapters import Adapter
from neurogrid.model.caches.cache import StageCache
from neurogrid.worker.held_model import HeldModel

__all__ = ["Step", "Turns", "next_steps", "seconds_until_next"]

# Seconds that a step waits for the rest of its batch: one may have been given up on its way.
BATCH_TIMEOUT: Final = 0.05
# Coordinators whose turns are remembered: more than are served at once.
MAX_OWNERS: Final = 64


@dataclass(eq=False, slots=True)
class Step:
    """Tokens that extend one session over layers [start, stop).

    Attributes:
        session: the number of its session.
        owner: the coordinator of that.
        hidden: [1, T, D]; what is left of it where a chunk has run.
        position: of its first token.
        batch: number and size of the batch that it came with, and has run with when it has; empty for none.
        is_decoded: whether it is one token of a session that has begun: those share a forward pass.
        results: what the chunks gave, in order.
        waits_since: when it came, or its last chunk was done, on the clock of its queue. Seconds.
        queue_seconds: for which it has waited for its turns.
        calls: to torch that it has been part of.
        adapter: of its session; None for none.
        goes_back: whether its cache has to forget first what is behind `position`.
        is_whole: it is not run in chunks, so that a later one can go back into it.
    """

    session: int
    model: HeldModel
    start: int
    stop: int
    position: int
    hidden: torch.Tensor
    cache: StageCache
    waits_since: float
    batch: tuple[int, ...] = ()
    results: list[torch.Tensor] = field(default_factory=list)
    queue_seconds: float = 0.0
    calls: list[StageCall] = field(default_factory=list)
    adapter: Adapter | None = None
    goes_back: bool = False
    is_whole: bool = False
    owner: str = ""
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


class Turns:
    """Turns of coordinators: the next is for the one whose last turn is the longest ago, of those with steps to run."""

    def __init__(self) -> None:
        # The longest ago first, with whether its turn was a prefill's: then it is that of those that decode.
        self._last: OrderedDict[str, bool] = OrderedDict()

    def next(self, waiting: Sequence[Step], *, now: float) -> list[Step]:
        """The steps that run next, all of one coordinator; it is its turn then. None if all wait.

        Args:
            waiting: in the order in which they came.
            now: on the clock of `Step.waits_since`.
        """
        by_owner = _by_owner(waiting)
        # Who never had a turn is first, in the order in which they came.
        newcomers = [owner for owner in by_owner if owner not in self._last]
        for owner in (*newcomers, *self._last):
            if owner not in by_owner:
                continue
            after_prefill = self._last.get(owner, True)
            steps = next_steps(by_owner[owner], after_prefill=after_prefill, now=now)
            if steps:
                self._last[owner] = not steps[0].is_decoded
                self._last.move_to_end(owner)
                if len(self._last) > MAX_OWNERS:
                    self._last.popitem(last=False)
                return steps
        return []

    @staticmethod
    def seconds_until_next(waiting: Sequence[Step], *, now: float) -> float:
        """Seconds until something of what waits is to run, if nothing more comes; inf for never."""
        by_owner = _by_owner(waiting).values()
        return min((seconds_until_next(its, now=now) for its in by_owner), default=math.inf)


def _by_owner(waiting: Sequence[Step]) -> dict[str, Sequence[Step]]:
    if all(step.owner == waiting[0].owner for step in waiting):
        return {waiting[0].owner: waiting} if waiting else {}
    found: dict[str, list[Step]] = {}
    for step in waiting:
        found.setdefault(step.owner, []).append(step)
    return dict(found)


def next_steps(waiting: Sequence[Step], *, after_prefill: bool, now: float) -> list[Step]:
    """The steps of one coordinator that run next: those that are decoded together, or a chunk of the oldest prefill.

    None if all wait.

    Args:
        waiting: in the order in which they came.
        after_prefill: whether a prefill ran last: then it is the turn of those that decode.
        now: on the clock of `Step.waits_since`.
    """
    decoded = _next_decoded(waiting, now)
    prefill = next((step for step in waiting if not step.is_decoded), None)
    if prefill is not None and not (decoded and after_prefill):
        return [prefill]
    return decoded


def seconds_until_next(waiting: Sequence[Step], *, now: float) -> float:
    """Seconds until something of what one coordinator has waiting is to run, if nothing more comes; inf for never."""
    if next_steps(waiting, after_prefill=False, now=now):
        return 0.0
    return min((step.waits_since + BATCH_TIMEOUT - now for step in waiting), default=math.inf)


def _next_decoded(waiting: Sequence[Step], now: float) -> list[Step]:
    """The oldest batch that is whole or has waited long enough, and what is of none, over the same layers."""
    batches: dict[int, list[Step]] = {}
    for step in waiting:
        if step.is_decoded and step.batch:
            batches.setdefault(step.batch[0], []).append(step)
    chosen: list[Step] = []
    has_batch = False
    for step in waiting:
        if not step.is_decoded or (chosen and not step.shares_forward(chosen[0])):
            continue
        if not step.batch:
            chosen.append(step)
            continue
        its = batches.pop(step.batch[0], [])
        is_due = len(its) >= step.batch[1] or now >= step.waits_since + BATCH_TIMEOUT
        if its and is_due and not has_batch:
            has_batch = True
            chosen += [other for other in its if other.shares_forward(step)]
    return chosen
