"""Give layers to members: one after the other at each, all members at once, with what comes of it told.

Which layers to whom is the plan's business, and how the bytes travel that of `placer`.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from neurogrid.errors import NoRouteError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.fleet.member import Member
from neurogrid.fleet.placing.placer import Placer
from neurogrid.fleet.progress import FleetProgress
from neurogrid.fleet.roster import Roster
from neurogrid.fleet.stalls import StallWatch
from neurogrid.model.unused_memory import give_back_memory
from neurogrid.planner import PlannedStage, name_range

__all__ = ["Assigner"]


class Assigner:
    """Gives the layers of one model to the members of a roster."""

    def __init__(self, roster: Roster, placer: Placer, progress: FleetProgress) -> None:
        self._roster = roster
        self._placer = placer
        self._progress = progress

    async def stages(
        self, stages: Sequence[PlannedStage], *, patience: float
    ) -> list[NoRouteError]:
        """Bring every stage to its member, all at once; returns what went wrong.

        Args:
            patience: seconds to wait for a connection that breaks meanwhile.

        Raises:
            ModelError: a layer is missing at a worker, and may not be sent.
        """
        failures: list[NoRouteError] = []

        async def give(member: Member, layers: range) -> None:
            try:
                await self.layers(member, layers, patience=patience)
            except NoRouteError as exc:
                failures.append(exc)

        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                for stage in stages:
                    member = self._roster.member(stage.peer_id)
                    layers = range(stage.start, stage.stop)
                    if member is None:
                        failures.append(_lost_before(stage.peer_id, layers))
                    elif not member.holds(layers):
                        nursery.start_soon(give, member, layers)
        return failures

    async def configure(self, member: Member) -> None:
        """Have a member know the model, so that it can stand by."""
        async with member.lock:
            if not member.is_configured:
                await self._placer.configure(member.worker)
                member.is_configured = True

    async def layers(self, member: Member, layers: range, *, patience: float) -> None:
        """Bring layers to a member; when its connection breaks, wait `patience` seconds for another.

        Its sessions end, unless it has some of the layers already and no others.

        Raises:
            NoRouteError: it did not get ready; names it, and says why.
            ModelError: a layer is missing there, and may not be sent.
        """
        peer_id, progress = member.peer_id, self._progress
        num_bytes = self._placer.num_bytes(layers)
        progress.transfer_planned(peer_id, num_bytes)
        stalls = StallWatch(progress, peer_id, num_bytes)
        async with member.lock:
            if not set(member.layers) <= set(layers):
                member.layers = range(0)
            member.assigned = layers
            member.is_placing = True

            def is_back() -> None:
                member.is_cut = False

            try:
                with unwrap_errors():
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(stalls.run)
                        await self._placer.place(
                            member.worker,
                            layers,
                            stalls.reports,
                            is_configured=member.is_configured,
                            is_back=is_back,
                            patience=patience,
                        )
                        # It has them: what breaks from here on, or has broken since it said so, is for nobody to mend.
                        member.is_placing = False
                        nursery.cancel_scope.cancel()
                member.is_configured = True
            finally:
                member.is_placing = False
                if member.is_cut:
                    self._roster.lost(peer_id, "its connection broke while it got its layers")
            if self._roster.member(peer_id) is not member:
                raise _lost_before(peer_id, layers)
            member.layers = layers
            self._roster.changed()
            await trio.to_thread.run_sync(give_back_memory)


def _lost_before(peer_id: str, layers: range) -> NoRouteError:
    text = f"worker {peer_id} was lost before it had {name_range(layers)}"
    return NoRouteError(text, layers=layers, peer_id=peer_id)
