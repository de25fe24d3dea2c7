"""Selection of a session's members: ready ones, in the order of their stages, the least busy of each.

One that is lost, wants to go or is slow is bypassed where another holds the same layers (a replica). Nothing here is
sent to anybody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Final, cast

import trio

from neurogrid.errors import NoRouteError, PeerRefusedError, TransportError
from neurogrid.fleet.member import Member
from neurogrid.fleet.roster import Roster
from neurogrid.inference.pipeline.pipeline_stage import PipelineStage
from neurogrid.inference.pipeline.session_worker import SessionWorker
from neurogrid.p2p.wire import ErrorCode
from neurogrid.planner import PlannedStage, name_range

__all__ = ["Selection", "Selector", "joined"]

# Codes that say: this worker no longer has what was placed on it.
PLACE_AGAIN: Final = frozenset(
    {ErrorCode.CONFIG_REQUIRED, ErrorCode.BUSY, ErrorCode.LAYER_NOT_HELD, ErrorCode.SHUTTING_DOWN}
)


class Selection:
    """Ready members in the order of their stages. A context manager: its members count it while it is used.

    Attributes:
        hops: members and the layers that they compute in this session.
        stages: the same, as a pipeline takes them, in order.
    """

    def __init__(self, chosen: Sequence[tuple[Member, PlannedStage]]) -> None:
        self.hops = tuple((member, range(stage.start, stage.stop)) for member, stage in chosen)
        self.stages = tuple(
            PipelineStage(
                replace(stage, peer_id=member.peer_id),
                cast(
                    SessionWorker, member.worker
                ),  # as `remote_workers` makes all of a coordinator's
                member.times,
                member.info.latency or 0.0,
            )
            for member, stage in chosen
        )

    @property
    def has_same_bits(self) -> bool:
        """Whether a token gets the same bits on all of them, whatever it is computed with."""
        return all(stage.worker.same_bits for stage in self.stages)

    def __enter__(self) -> Selection:
        for member, _ in self.hops:
            member.num_sessions += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        for member, _ in self.hops:
            member.num_sessions -= 1


class Selector:
    """Chooses among the members of a roster."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    @property
    def why_not_ready(self) -> str | None:
        """Layers that no member is ready for at this moment, and why, in words; None where a session can be opened."""
        if self._find_selection(()) is not None:
            return None
        holes = [name_range(range(stage.start, stage.stop)) for stage in self._roster.holes()]
        missing = f"no worker is ready for {', '.join(holes)}: " if holes else ""
        return missing + self._roster.why_not

    async def select(self, *, timeout: float, avoid: Collection[str] = ()) -> Selection:
        """The least busy ready holder of each stage; waits until every stage has one.

        Args:
            timeout: seconds.
            avoid: peers to go around, as far as others hold what they do.

        Raises:
            NoRouteError: a stage had none in time; says why.
        """
        with trio.CancelScope(deadline=trio.current_time() + timeout):
            return await self._wait_selection(avoid)
        raise self._nobody_ready(timeout)

    def _nobody_ready(self, timeout: float) -> NoRouteError:
        holes = [range(stage.start, stage.stop) for stage in self._roster.holes()]
        return NoRouteError(
            f"no worker was ready for {', '.join(map(name_range, holes))} within {timeout:g} s: "
            f"{self._roster.why_not}",
            layers=[layer for hole in holes for layer in hole],
        )

    async def _wait_selection(self, avoid: Collection[str]) -> Selection:
        while (found := self._find_selection(avoid)) is None:
            await self._roster.change.wait()
        return found

    def is_settled(self, selection: Selection) -> bool:
        """Whether all its members are there and quick, have their layers and mean to stay."""
        return all(
            self._roster.member(member.peer_id) is member
            and member.holds(layers)
            and not (member.is_leaving or member.times.is_slow)
            for member, layers in selection.hops
        )

    def should_leave(self, selection: Selection) -> bool:
        """Whether a session would do well to move: a member of its own wants to go, is slow, or is gone."""
        return self.gone(selection) is not None or any(
            (member.is_leaving or member.times.is_slow)
            and self._roster.has_alternative(member.peer_id, layers)
            for member, layers in selection.hops
        )

    def gone(self, selection: Selection) -> str | None:
        """The peer id of a member that is none of the fleet any more; None where all are."""
        members = (member for member, _ in selection.hops)
        return next(
            (each.peer_id for each in members if self._roster.member(each.peer_id) is not each),
            None,
        )

    def _find_selection(self, avoid: Collection[str]) -> Selection | None:
        chosen: list[tuple[Member, PlannedStage]] = []
        for stage in self._roster.plan.stages:
            holders = self._roster.holders(range(stage.start, stage.stop))
            if not holders:
                return None
            best = min(
                holders,
                key=lambda member: (
                    member.peer_id in avoid,
                    member.times.is_slow,
                    member.is_leaving,
                    member.num_sessions,
                    member.peer_id != stage.peer_id,
                ),
            )
            chosen.append((best, stage))
        return Selection(joined(chosen)) if chosen else None

    def failed(self, error: NoRouteError, selection: Selection) -> bool:
        """A session's step failed on a member that was chosen for it; returns whether it is out of the choice by now.

        It is if it cannot be reached, or no longer has its layers, or was found slow. Any other failure is the
        session's business: it goes around that member, if it can.
        """
        member = self._roster.member(error.peer_id or "")
        cause = error.__cause__
        if member is None or all(member is not chosen for chosen, _ in selection.hops):
            return True
        if isinstance(cause, TransportError):
            self._roster.give_up(member, str(cause))
            return True
        code = cause.code if isinstance(cause, PeerRefusedError) else None
        if code == ErrorCode.PEER_UNREACHABLE and error.unreachable_from is None:
            # Its predecessor says so, and it does not answer us either.
            self._roster.give_up(member, str(cause))
            return True
        if code in PLACE_AGAIN:
            self._roster.forget_placement(member)
            return True
        return member.times.is_slow


def joined(chosen: Sequence[tuple[Member, PlannedStage]]) -> list[tuple[Member, PlannedStage]]:
    """Return the same members, each once: one chosen for several stages gets all between them, which it holds, too."""
    result: list[tuple[Member, PlannedStage]] = []
    at = 0
    while at < len(chosen):
        member, first = chosen[at]
        last = max(i for i, (other, _) in enumerate(chosen) if other is member)
        num_bytes = sum(stage.num_bytes for _, stage in chosen[at : last + 1])
        result.append((member, replace(first, stop=chosen[last][1].stop, num_bytes=num_bytes)))
        at = last + 1
    return result
