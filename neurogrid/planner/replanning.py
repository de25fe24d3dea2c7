"""A new plan when peers join, leave or change: as few bytes as possible, and only if it is worth it.

Pure. Sessions that run are not disturbed: they stay with the generation of their plan, whose layers their
peers keep until they are drained (`PeerCapacity.kept` says so to the planner, which then counts on no more room than
is left beside them).

- A stage without its peer has to be mended: by a replica, which has the bytes; by a spare peer; or by a plan
  from scratch in which peers keep what they hold. Of these, what sends the fewest bytes, then the fastest.
- Otherwise a plan from scratch is worth it if it is faster, or has fewer stages, by enough to pay for its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from neurogrid.errors import CapacityError
from neurogrid.planner.plan import Plan, PlannedStage, name_range
from neurogrid.planner.planning import make_plan
from neurogrid.planner.problem import Problem
from neurogrid.planner.replicas import place_replicas
from neurogrid.planner.world import Links, ModelSize, PeerCapacity

__all__ = ["Replanned", "replan"]

# Speeds are measured anew with some noise; what is gained must stand out from it.
MIN_GAIN = 0.2
# A plan that saves a tenth of the time may take a tenth of this to get into place. Seconds.
PAYBACK_SECONDS = 3600.0
# Assumed where nobody measured how fast weights go out: one gigabit a second. Bytes a second.
SEND_RATE = 125e6


@dataclass(frozen=True)
class Replanned:
    """The plan to use from now on, which may be the current one.

    Attributes:
        plan: of the next generation if its stages differ; otherwise the current one, perhaps with other
            replicas.
        moved_bytes: what has to be sent for its stages before new sessions can use it.
        is_required: whether the current plan can serve no more.
        reason: one line for people.
    """

    plan: Plan
    moved_bytes: int
    is_required: bool
    reason: str


def replan(
    current: Plan,
    model: ModelSize,
    peers: Sequence[PeerCapacity],
    links: Links | None = None,
    *,
    num_stages: int | None = None,
    send_rate: float = SEND_RATE,
) -> Replanned:
    """The plan for the world as it is now.

    Args:
        peers: those that are there now, with what they hold.
        num_stages: as for `make_plan`.
        send_rate: bytes a second at which weights go out, all peers together.

    Raises:
        ConfigurationError: as `make_plan`, if the current plan can serve no more.
        CapacityError: the same.
    """
    problem = Problem(model, peers, links or Links())
    lost = [stage for stage in current.stages if not _stands(problem, stage)]
    following = current.generation + 1
    if lost:
        mended = _mend(problem, current, lost)
        try:
            fresh = make_plan(
                model, peers, links, num_stages=num_stages, generation=following
            ).stages
        except CapacityError:
            if mended is None:
                raise
            fresh = mended
        candidates = [stages for stages in (mended, fresh) if stages is not None]
        stages = min(candidates, key=lambda s: (_moved(problem, s), *_speed(problem, s)))
        replicas = place_replicas(problem, stages, standing=current.replicas)
        names = ", ".join(name_range(range(stage.start, stage.stop)) for stage in lost)
        reason = f"{names} had no peer any more"
        return Replanned(Plan(stages, replicas, following), _moved(problem, stages), True, reason)
    try:
        stages = make_plan(model, peers, links, num_stages=num_stages).stages
    except CapacityError:
        # Beside what is kept for sessions there is no room for another plan.
        stages = current.stages
    gain, moved = _gain(problem, current.stages, stages), _moved(problem, stages)
    if gain >= MIN_GAIN and moved / send_rate <= gain * PAYBACK_SECONDS:
        replicas = place_replicas(problem, stages, standing=current.replicas)
        return Replanned(Plan(stages, replicas, following), moved, False, f"{gain:.0%} better")
    replicas = place_replicas(problem, current.stages, standing=current.replicas)
    if stages == current.stages:
        reason = "the plan is as good as can be"
    else:
        reason = f"another plan would be {gain:.0%} better and send {moved:,} B: not worth it"
    return Replanned(replace(current, replicas=replicas), 0, False, reason)


def _stands(problem: Problem, stage: PlannedStage) -> bool:
    peer = problem.index_of.get(stage.peer_id)
    return peer is not None and problem.fits(peer, stage.start, stage.stop)


def _mend(
    problem: Problem, current: Plan, lost: Sequence[PlannedStage]
) -> tuple[PlannedStage, ...] | None:
    """The current stages, the lost ones on replicas or spare peers; None if there are not enough."""
    taken = {stage.peer_id for stage in current.stages}
    stages = []
    for stage in current.stages:
        if stage not in lost:
            stages.append(stage)
            continue
        able = [
            (
                problem.missing_bytes(index, stage.start, stage.stop),
                problem.seconds(None, index, stage.start, stage.stop),
                peer.peer_id,
            )
            for index, peer in enumerate(problem.peers)
            if peer.peer_id not in taken and problem.fits(index, stage.start, stage.stop)
        ]
        if not able:
            return None
        *_, peer_id = min(able)
        taken.add(peer_id)
        stages.append(replace(stage, peer_id=peer_id))
    return tuple(stages)


def _moved(problem: Problem, stages: Sequence[PlannedStage]) -> int:
    return sum(
        problem.missing_bytes(problem.index_of[stage.peer_id], stage.start, stage.stop)
        for stage in stages
    )


def _speed(problem: Problem, stages: Sequence[PlannedStage]) -> tuple[float, float]:
    """Seconds of the slowest stage, and of all of them one after another."""
    seconds, previous = [], None
    for stage in stages:
        peer = problem.index_of[stage.peer_id]
        seconds.append(problem.seconds(previous, peer, stage.start, stage.stop))
        previous = peer
    return max(seconds), sum(seconds)


def _gain(problem: Problem, old: Sequence[PlannedStage], new: Sequence[PlannedStage]) -> float:
    """The fraction of time that the new stages save: of the slowest, or of a token on its own.

    Nothing if either gets worse by more than the other gets better. Without speeds: of the number of stages.
    """
    if not problem.has_seconds:
        return 1 - len(new) / len(old)
    pairs = zip(_speed(problem, old), _speed(problem, new), strict=True)
    gains = [1 - after / before if before else 0.0 for before, after in pairs]
    return max(gains) if sum(gains) > 0 else 0.0
