"""One replica of a run: a chain on a seat, what it does in a round, and what its members have told of that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from neurogrid.training.leading.chains.chain import Chain
from neurogrid.training.leading.chains.sums import sum_of
from neurogrid.training.runs.entries import Assignment
from neurogrid.training.runs.state import Occupant
from neurogrid.training.stages.holdings import Cut
from neurogrid.training.wire.runs import Averaged, Committed, StepDone

__all__ = ["Replica", "figures_of"]


@dataclass
class Replica:
    """A chain that takes its steps by itself, and averages what it has learned with others.

    Attributes:
        chain: with its members.
        seat: of the run.
        name: for people.
        work: of the round; None where it has none, and only takes over what others have learned.
        is_ready: whether it has taken the steps of the round.
        fault: why it cannot; empty for nothing.
        averaged, committed: what its members have told of the attempt.
    """

    chain: Chain
    seat: int
    name: str
    work: Assignment | None = None
    is_ready: bool = False
    fault: str = ""
    averaged: dict[str, Averaged] = field(default_factory=dict)
    committed: dict[str, Committed] = field(default_factory=dict)
    _losses: list[float] = field(default_factory=list)
    _labels: int = 0
    _norms: list[float] = field(default_factory=list)
    _seconds: float = 0.0
    _waited: float = 0.0

    @property
    def occupant(self) -> Occupant:
        """Occupant of the seat, by which the run knows it."""
        return Occupant(self.chain.peers[0], self.chain.number)

    @property
    def weight(self) -> float:
        """Weight with which it counts in the round."""
        return 0.0 if self.work is None else self.work.share

    @property
    def cut(self) -> Cut:
        """Its members and layers, for a round."""
        return Cut(self.chain.peers, self.chain.bounds, self.weight)

    def begin(self, work: Assignment | None) -> None:
        """A round begins."""
        self.work, self.is_ready, self.fault = work, False, ""
        self._losses, self._norms = [], []
        self._labels, self._seconds, self._waited = 0, 0.0, 0.0

    @property
    def num_steps(self) -> int:
        """Steps that it has taken in the round."""
        return len(self._norms)

    def has_committed(self) -> bool:
        """Whether all members have taken over what the round came to."""
        return len(self.committed) == len(self.chain.peers)

    def begin_attempt(self) -> None:
        """Forget what was told of the attempt before."""
        self.averaged, self.committed = {}, {}

    def note(self, loss: float, labels: int, norm: float, done: Sequence[StepDone]) -> None:
        """A step was taken.

        Args:
            loss: the mean of the batch.
            labels: over which.
            norm: of the gradients.
        """
        if math.isfinite(loss * labels):
            self._losses.append(loss * labels)
            self._labels += labels
        self._norms.append(norm)
        self._seconds += math.fsum(each.seconds + each.waited for each in done)
        self._waited += math.fsum(each.waited for each in done)


def figures_of(replicas: Sequence[Replica]) -> Mapping[str, float]:
    """Figures of a round, from what the replicas in it have told."""
    figures: dict[str, float] = {
        "replicas": len(replicas),
        "members": sum(len(each.chain.peers) for each in replicas),
        "stages": max(len(each.chain.stages) for each in replicas),
    }
    norms = [norm for each in replicas for norm in each._norms if math.isfinite(norm)]
    if norms:
        figures["gradient_norm"] = round(math.fsum(norms) / len(norms), 6)
    if total := math.fsum(each._seconds for each in replicas):
        figures["waited"] = round(math.fsum(each._waited for each in replicas) / total, 4)
    if labels := sum(each._labels for each in replicas):
        losses = sum_of(loss for each in replicas for loss in each._losses)
        if math.isfinite(losses):
            figures["loss"] = round(losses / labels, 6)
    return figures
