"""Explanation of a plan: for each peer what it got and what that takes, or why it got nothing.

Times are estimates from the peers' own measurements: one token of one session (decode), short context. Data
out, no text layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neurogrid.planner.plan import Plan, PlannedStage, Replica
from neurogrid.planner.problem import Problem
from neurogrid.planner.sizes import format_bytes
from neurogrid.planner.world import Links, ModelSize, PeerCapacity

__all__ = ["Explanation", "PeerReport", "explain"]


@dataclass(frozen=True)
class PeerReport:
    """One peer in a plan.

    Attributes:
        stage: its number, from 1; None for a peer without one.
        layers: [start, stop) that it computes or stands by with; None for a peer that got nothing.
        weight_bytes, cache_bytes, workspace_bytes, training_bytes: of these layers; 0 for none.
        spare_bytes: what it has free beside them.
        missing_bytes: weights that have to be sent to it.
        step_seconds: for a token, the way there included; None where it is not known, or for no stage.
        reason: why it has no stage; empty for those that have one.
    """

    peer_id: str
    stage: int | None
    layers: tuple[int, int] | None
    weight_bytes: int
    cache_bytes: int
    workspace_bytes: int
    spare_bytes: int
    missing_bytes: int
    step_seconds: float | None
    reason: str
    training_bytes: int = 0


@dataclass(frozen=True)
class Explanation:
    """All peers, stages first, in order; and how fast the whole is expected to be.

    Attributes:
        tokens_per_second: of one session that generates alone; None if a stage's speed is not known.
        peak_tokens_per_second: of enough sessions to keep every stage busy, one token at a time in each.
    """

    peers: tuple[PeerReport, ...]
    tokens_per_second: float | None
    peak_tokens_per_second: float | None


def explain(
    plan: Plan, model: ModelSize, peers: Sequence[PeerCapacity], links: Links | None = None
) -> Explanation:
    """Report what each of `peers` has in `plan`, which was made for them."""
    problem = Problem(model, peers, links or Links())
    reports, previous = [], None
    for number, stage in enumerate(plan.stages, 1):
        peer = problem.index_of[stage.peer_id]
        is_known = problem.peers[peer].speed is not None
        seconds = None
        if is_known:
            seconds = problem.seconds(previous, peer, stage.start, stage.stop) + model.stage_seconds
        reports.append(_report(problem, peer, stage, number, seconds, ""))
        previous = peer
    for replica in plan.replicas:
        numbers = [
            str(number)
            for number, stage in enumerate(plan.stages, 1)
            if replica.start <= stage.start and stage.stop <= replica.stop
        ]
        reason = f"stands by for stage {' and '.join(numbers)}"
        peer = problem.index_of[replica.peer_id]
        reports.append(_report(problem, peer, replica, None, None, reason))
    for peer, capacity in enumerate(problem.peers):
        if plan.stage_of(capacity.peer_id) or plan.replica_of(capacity.peer_id):
            continue
        reports.append(_report(problem, peer, None, None, None, _why_nothing(problem, plan, peer)))
    return Explanation(tuple(reports), *_rates(problem, plan, reports))


def _report(
    problem: Problem,
    peer: int,
    part: PlannedStage | Replica | None,
    number: int | None,
    seconds: float | None,
    reason: str,
) -> PeerReport:
    usable = problem.usable[peer]
    weights = missing = training = 0
    if part is not None:
        layers = problem.model.layers[part.start : part.stop]
        weights = sum(layer.weight_bytes for layer in layers)
        training = sum(layer.training_bytes for layer in layers)
        missing = problem.missing_bytes(peer, part.start, part.stop)
    taken = part.num_bytes if part else 0
    return PeerReport(
        peer_id=problem.peers[peer].peer_id,
        stage=number,
        layers=(part.start, part.stop) if part else None,
        weight_bytes=weights,
        cache_bytes=taken - weights - training,
        workspace_bytes=problem.model.workspace_bytes if part else 0,
        spare_bytes=max(usable - taken, 0),
        missing_bytes=missing,
        step_seconds=seconds,
        reason=reason,
        training_bytes=training,
    )


def _why_nothing(problem: Problem, plan: Plan, peer: int) -> str:
    usable = problem.usable[peer]
    layer = min(layer.total_bytes for layer in problem.model.layers)
    stage = min(stage.num_bytes for stage in plan.stages)
    if usable < layer:
        return (
            f"too little memory: {format_bytes(usable)} usable, and one layer takes "
            f"{format_bytes(layer)}"
        )
    if usable < stage:
        return (
            f"not needed, and too little memory to stand by: {format_bytes(usable)} usable, and the "
            f"smallest stage takes {format_bytes(stage)}"
        )
    if problem.peers[peer].kept:
        return "no room beside the layers that it keeps for running sessions"
    return "not needed: the others hold all layers"


def _rates(
    problem: Problem, plan: Plan, reports: Sequence[PeerReport]
) -> tuple[float | None, float | None]:
    seconds = [report.step_seconds for report in reports[: len(plan.stages)]]
    known = [step for step in seconds if step is not None]
    if len(known) < len(seconds) or not all(known):
        return None, None
    ends = problem.model.ends_seconds
    last = problem.index_of[plan.stages[-1].peer_id]
    alone = sum(known) + problem.way_back(last) + ends
    return 1 / alone, 1 / max(*known, ends)
