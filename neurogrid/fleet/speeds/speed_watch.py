"""Watch over the speeds of a fleet's members, now and then, by the steps of sessions, or by a trial without any.

What is found goes into the next plan: `drift` says when it counts, `trials` when a member without sessions is looked
at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import trio

from neurogrid.fleet.member import Member
from neurogrid.fleet.progress import FleetProgress
from neurogrid.fleet.speeds.drift import MIN_STEPS, DriftWatch, Steps, drifts, with_drifts
from neurogrid.fleet.speeds.trials import Trials
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.fleet.worker_questions import capacities
from neurogrid.planner import ModelSize, PeerSpeed

__all__ = ["DRIFT_INTERVAL", "SpeedWatch"]

# Between looks at how fast the members are. Seconds.
DRIFT_INTERVAL: Final = 15.0


class SpeedWatch:
    """The watch over the speeds of one fleet's members.

    Args:
        trials: how members are looked at that no session goes through.
        on_news: called when a member is slower or faster than it was taken for.

    Attributes:
        look_at: trio's time of the next look.
        trials: as given.
    """

    def __init__(
        self, trials: Trials, progress: FleetProgress, on_news: Callable[[], None]
    ) -> None:
        self.trials = trials
        self.look_at = 0.0
        self._progress = progress
        self._on_news = on_news
        self._drifts = DriftWatch()

    def applied(self, infos: Sequence[WorkerInfo]) -> list[WorkerInfo]:
        """Return these infos, each with the slowness that is known of its member."""
        return with_drifts(infos, self._drifts.known)

    def forget(self, peer_id: str) -> None:
        """A member is new, and is believed."""
        self._drifts.forget(peer_id)
        self.trials.times.forget(peer_id)

    def look(self, members: Sequence[Member], size: ModelSize, nursery: trio.Nursery) -> None:
        """Find members slower or faster than taken for, if it is time, and have one that is due tried in `nursery`."""
        now = trio.current_time()
        if now < self.look_at:
            return
        self.look_at = now + DRIFT_INTERVAL
        peers = capacities([member.info for member in members], len(size.layers))
        speeds = {peer.peer_id: peer.speed for peer in peers if peer.speed}
        steps = {member.peer_id: member.times.recent for member in members}
        found = drifts(speeds, steps, size)
        for member in members:
            if member.peer_id in found:
                member.times.forget_recent()  # each look at steps of its own
        self._take_in(found)
        due = next((member for member in members if self._is_due(member, steps)), None)
        if due is not None and not self.trials.is_running:
            nursery.start_soon(self._try, due, speeds, steps, size)

    def _take_in(self, found: Mapping[str, float]) -> list[str]:
        """Take in findings; return the members that are taken for slower or faster than before."""
        news, now = self._drifts.look(found), trio.current_time()
        for peer_id in news:
            slowness = self._drifts.known.get(peer_id, 1.0)
            if slowness > 1:
                self.trials.times.found_slow(peer_id, now)
            else:
                self.trials.times.found_fast(peer_id, now)
            self._progress.drifted(peer_id, slowness)
        if news:
            self._on_news()
        return news

    def _is_due(self, member: Member, steps: Mapping[str, Steps]) -> bool:
        """Whether it is time to try a member, and others compute with which it can be compared."""
        return (
            self.trials.times.is_due(member.peer_id, trio.current_time())
            and bool(member.layers)
            and not (member.num_sessions or member.is_leaving or member.is_cut or member.is_resting)
            and any(len(s) >= MIN_STEPS for other, s in steps.items() if other != member.peer_id)
        )

    async def _try(
        self,
        member: Member,
        speeds: Mapping[str, PeerSpeed],
        steps: Mapping[str, Steps],
        size: ModelSize,
    ) -> None:
        """Look at a member by a trial; `steps` are those that all took just before."""
        peer_id = member.peer_id
        taken = await self.trials.run(member)
        if taken is None:
            return
        found = drifts(speeds, {**steps, peer_id: taken}, size)
        # A trial is short and has no company: that it shows nobody faster than it said.
        news = self._take_in({peer_id: max(found[peer_id], 1.0)} if peer_id in found else {})
        if not (news or self._drifts.is_doubted(peer_id)):
            self.trials.times.found_slow(peer_id, trio.current_time())
