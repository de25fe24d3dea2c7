"""The planner: from a model, peers and links to a plan. Pure, and the same for any order of the peers.

Few stages go before fast ones: each adds a hop to every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from neurogrid.errors import CapacityError, ConfigurationError
from neurogrid.planner.cuts import Cuts
from neurogrid.planner.fewer_moves import cheapest
from neurogrid.planner.plan import Plan, PlannedStage, Replica
from neurogrid.planner.problem import Order, Problem
from neurogrid.planner.replicas import place_replicas
from neurogrid.planner.search import best_order
from neurogrid.planner.world import Links, ModelSize, PeerCapacity

__all__ = ["make_plan", "make_replicas", "stages_of"]


def make_plan(
    model: ModelSize,
    peers: Sequence[PeerCapacity],
    links: Links | None = None,
    *,
    num_stages: int | None = None,
    generation: int = 1,
) -> Plan:
    """Split the layers into contiguous stages, in order, each on a peer of its own; spare peers are replicas.

    Args:
        num_stages: that many stages exactly; None for the fewest that fit.
        generation: of the plan.

    Raises:
        ConfigurationError: there is nothing to plan, or more stages were asked for than there are layers or
            workers.
        CapacityError: the layers do not fit; says how many bytes are needed and there.
    """
    if not peers:
        raise ConfigurationError("there is no worker to plan for")
    if num_stages is not None and num_stages > len(model.layers):
        raise ConfigurationError(
            f"{num_stages} stages were asked for, and the model has {len(model.layers)} layers"
        )
    if num_stages is not None and num_stages > len(peers):
        raise ConfigurationError(
            f"{num_stages} stages were asked for, and there are {len(peers)} workers"
        )
    problem = Problem(model, peers, links or Links())
    for count in [num_stages] if num_stages else _counts(problem):
        found = best_order(problem, count, is_fewest=num_stages is None)
        if found is not None:
            stages = stages_of(problem, *cheapest(problem, found))
            return Plan(stages, place_replicas(problem, stages), generation)
    raise _does_not_fit(problem, num_stages or min(len(peers), len(model.layers)))


def make_replicas(
    model: ModelSize, peers: Sequence[PeerCapacity], stages: Sequence[PlannedStage]
) -> tuple[Replica, ...]:
    """Choose the `Plan.replicas` that peers with none of these stages stand by with; the stages stay as they are.

    Args:
        peers: those of the stages among them.
    """
    return place_replicas(Problem(model, peers, Links()), stages)


def stages_of(problem: Problem, order: Order, cuts: Cuts) -> tuple[PlannedStage, ...]:
    """The stages of peers in this order."""
    return tuple(
        PlannedStage(problem.peers[peer].peer_id, start, stop, problem.num_bytes(start, stop))
        for peer, start, stop in zip(order, (0, *cuts[:-1]), cuts, strict=True)
    )


def _counts(problem: Problem) -> range:
    """Numbers of stages worth a try: the memory of the roomiest so many is enough, all in all."""
    most = min(len(problem.peers), problem.num_layers)
    together = accumulate(problem.usable)
    enough = (count for count, usable in enumerate(together, 1) if usable >= problem.total_bytes)
    return range(next(enough, most + 1), most + 1)


def _does_not_fit(problem: Problem, num_peers: int) -> CapacityError:
    needed, available = problem.total_bytes, sum(problem.usable[:num_peers])
    largest, roomiest = max(layer.total_bytes for layer in problem.model.layers), problem.usable[0]
    if largest > roomiest:
        detail = f"one layer alone takes {largest:,} B, and the roomiest has {roomiest:,} B"
    elif available >= needed:
        detail = "but no cut between layers gives each worker what it can hold: add a worker"
    elif problem.model.is_quantised:
        detail = "add workers, give them more memory, or lower --max-seq-len or --max-sessions"
    else:
        detail = (
            "add workers, give them more memory, lower --max-seq-len or --max-sessions, or make the layers "
            "smaller with --quantize"
        )
    return CapacityError(
        f"the layers do not fit: {needed:,} B needed, {available:,} B available on "
        f"{num_peers} worker{'s' if num_peers != 1 else ''} ({detail})",
        needed=needed,
        available=available,
    )
