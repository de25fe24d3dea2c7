"""One arrangement of members as stages, and what they have told of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from neurogrid.errors import NeuroGridError
from neurogrid.training.stages.pace import PaceWatch
from neurogrid.training.wire.runs import Applied, StepDone

__all__ = ["Chain", "ChainBroken", "Pieces"]

Pieces = Mapping[str, bytes]
"""Blobs by the names of pieces of state."""


class ChainBroken(NeuroGridError):
    """A member of the chain is lost, or has failed; the text says which and why."""


@dataclass
class Chain:
    """An arrangement of stages.

    Attributes:
        number: of it, greater than any before.
        stages: peer ids of each, by lane.
        bounds: stage i has layers [bounds[i], bounds[i + 1]).
        begun: steps that the state had made that it begins with.
        holders: members that have that state, and are to keep it.
        pieces: of that state, for the others.
        providers: peer ids of those that have them, beside the leader.
        step: that is under way; -1 before the first.
        is_decided: whether that one is to be applied, or not: Apply is on its way.
        counts: micro-batches of that step that go through each member.
        num_micro_batches: of the last step that trained.
        bubble: the share of that one in which members wait by the order alone.
        done, applied: what members have told, by step and peer.
        paces: of the stages, by number, where each is one member.
    """

    number: int
    stages: tuple[tuple[str, ...], ...]
    bounds: tuple[int, ...]
    begun: int
    holders: frozenset[str] = frozenset()
    pieces: Pieces = field(default_factory=dict)
    providers: tuple[str, ...] = ()
    step: int = -1
    is_decided: bool = False
    num_micro_batches: int = 0
    bubble: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    done: dict[tuple[int, str], StepDone] = field(default_factory=dict)
    applied: dict[tuple[int, str], Applied] = field(default_factory=dict)
    paces: dict[int, PaceWatch] = field(default_factory=dict)

    @property
    def peers(self) -> tuple[str, ...]:
        """All members, by stage and lane."""
        return tuple(peer for stage in self.stages for peer in stage)

    @property
    def firsts(self) -> tuple[str, ...]:
        """The first member of each stage."""
        return tuple(stage[0] for stage in self.stages)

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of members of each stage; empty where each is one."""
        return tuple(map(len, self.stages)) if len(self.peers) > len(self.stages) else ()

    @property
    def state_step(self) -> int:
        """Steps that the state has made that a member has which has done all that it was told."""
        if self.step < 0:
            return self.begun
        return self.step + 1 if self.is_decided else self.step

    def all_done(self, step: int) -> bool:
        """Whether all members have computed their parts of a step."""
        return all((step, peer) in self.done for peer in self.peers)

    def all_applied(self, step: int, peers: Sequence[str]) -> bool:
        """Whether these have done what becomes of a step."""
        return all((step, peer) in self.applied for peer in peers)

    def forget_before(self, step: int) -> None:
        """Forget what was told of steps up to this one."""
        self.done = {key: told for key, told in self.done.items() if key[0] > step}
        self.applied = {key: told for key, told in self.applied.items() if key[0] > step}
