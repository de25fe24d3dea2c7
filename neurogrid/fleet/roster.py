"""The workers of one leader, and what each of them holds.

A member is ready once it has confirmed every layer that was placed on it. What goes through members, and which are
chosen for it, is not known here.

Nothing here is sent to anybody: `fleet` plans, places and mends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace

import trio

from neurogrid.fleet.member import Member
from neurogrid.fleet.progress import FleetProgress
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.planner import Plan, PlannedStage
from neurogrid.renewed_event import RenewedEvent

__all__ = ["Roster"]

logger = logging.getLogger(__name__)


class Roster:
    """The members and the plan. Used from one trio thread.

    Args:
        on_lost: called with the peer id of a member that is gone.
        on_given_up: called with the peer id of a member that failed, to close its connection if there is one.

    Attributes:
        plan: the current one.
        why_not: what the last attempt to get layers to somebody failed with.
    """

    def __init__(
        self,
        progress: FleetProgress,
        *,
        on_lost: Callable[[str], None],
        on_given_up: Callable[[str], None],
    ) -> None:
        self.plan = Plan(())
        self.why_not = "no layer was placed yet"
        self._progress = progress
        self._on_lost = on_lost
        self._on_given_up = on_given_up
        self._members: dict[str, Member] = {}
        self._excluded: set[str] = set()
        self._changed = RenewedEvent()

    def add(self, member: Member) -> None:
        """Add a member, in place of an earlier one with the same peer id."""
        self._members[member.peer_id] = member
        self.changed()

    def changed(self) -> None:
        """Tell the tasks that wait for it that a member holds, or is, something else than before."""
        self._changed.set()

    @property
    def change(self) -> trio.Event:
        """Event that is set at the next change after now."""
        return self._changed.next

    def member(self, peer_id: str) -> Member | None:
        """The member of this peer id, if it is there."""
        return self._members.get(peer_id)

    def is_member(self, peer_id: str) -> bool:
        """Whether this worker is there."""
        return peer_id in self._members

    @property
    def members(self) -> tuple[Member, ...]:
        """The members that are there, in the order in which they came."""
        return tuple(self._members.values())

    @property
    def infos(self) -> dict[str, WorkerInfo]:
        """The infos that the members gave when they joined, by peer id."""
        return {m.peer_id: m.info for m in self._members.values()}

    @property
    def holdings(self) -> dict[str, range]:
        """The layers that each member is ready for, by peer id; those that hold none are left out."""
        return {m.peer_id: m.layers for m in self._members.values() if m.layers}

    @property
    def num_ready(self) -> int:
        """Members that hold layers, or stand by and know the model."""
        return sum(bool(m.layers) or m.is_configured for m in self._members.values())

    def num_sessions(self, peer_id: str) -> int:
        """Sessions that go through a member now."""
        return self._members[peer_id].num_sessions if peer_id in self._members else 0

    def has_alternative(self, peer_id: str, layers: range, *, avoid: Collection[str] = ()) -> bool:
        """Whether another member, none of `avoid`, that is quick and means to stay, is ready for these layers."""
        return any(
            member.holds(layers)
            and not (member.is_leaving or member.times.is_slow)
            and member.peer_id != peer_id
            and member.peer_id not in avoid
            for member in self._members.values()
        )

    def holders(self, layers: range) -> list[Member]:
        """Return the members that are ready for all of these layers."""
        return [member for member in self._members.values() if member.holds(layers)]

    def holes(self) -> list[PlannedStage]:
        """Return the stages that no member holds which means to stay."""
        return [
            stage
            for stage in self.plan.stages
            if all(m.is_leaving for m in self.holders(range(stage.start, stage.stop)))
        ]

    def lost(self, peer_id: str, reason: str) -> None:
        """A worker is gone, or has dropped what was placed on it.

        While it is given layers, a lost connection is for the placer to mend.
        """
        member = self._members.get(peer_id)
        if member is not None and member.is_placing:
            member.is_cut = True
            return
        if member is None:
            return
        logger.debug("lost worker %s: %s", peer_id, reason)
        self._progress.lost(peer_id, member.layers, reason)
        self._on_lost(peer_id)
        del self._members[peer_id]
        self.plan = replace(self.plan, stages=tuple(map(self.as_held, self.plan.stages)))
        self.changed()

    def give_up(self, member: Member, reason: str) -> None:
        """A worker failed although its connection may go on: it is lost, and may come back over another one.

        A worker that has come back since is another member, and keeps its connection.
        """
        if self._members.get(member.peer_id) is member:
            self.lost(member.peer_id, reason)
            self._on_given_up(member.peer_id)

    def exclude(self, peer_id: str, reason: str) -> None:
        """A worker is lost for as long as the leader runs, whether it is there now or not."""
        self._excluded.add(peer_id)
        member = self._members.get(peer_id)
        if member is not None:
            member.is_placing = False  # its connection is not to come back
            self.give_up(member, reason)
        else:
            self.lost(peer_id, reason)  # it may be about to join again

    def is_excluded(self, peer_id: str) -> bool:
        """Whether it is to be no member any more."""
        return peer_id in self._excluded

    def leave(self, peer_id: str) -> None:
        """A worker wants to go: it gets no new session where another can have it."""
        member = self._members.get(peer_id)
        if member is not None and not member.is_leaving:
            member.is_leaving = True
            logger.debug("worker %s is about to end", peer_id)
            self.changed()

    def forget_placement(self, member: Member) -> None:
        """A member holds nothing for us any more."""
        member.layers = range(0)
        member.is_configured = False
        self.changed()

    def as_held(self, stage: PlannedStage) -> PlannedStage:
        """The stage, on a member that holds it now; as it is, if nobody does."""
        peer_ids = [member.peer_id for member in self.holders(range(stage.start, stage.stop))]
        if not peer_ids or stage.peer_id in peer_ids:
            return stage
        return replace(stage, peer_id=peer_ids[0])
