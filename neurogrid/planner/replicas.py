"""Replicas that the left-over peers stand by with: whole stages, the ones with the least redundancy first.

The least roomy peer chooses first, since it has the least choice. It begins with the stage that has the fewest
replicas (of those the slowest, then the one that it holds most of) and goes on with neighbours that have as few,
as long as it has room.
"""

from __future__ import annotations

from collections.abc import Sequence

from neurogrid.planner.plan import PlannedStage, Replica
from neurogrid.planner.problem import Problem

__all__ = ["place_replicas"]


def place_replicas(
    problem: Problem, stages: Sequence[PlannedStage], *, standing: Sequence[Replica] = ()
) -> tuple[Replica, ...]:
    """Replicas on all peers without a stage that can hold one, in the order of their layers.

    Args:
        standing: replicas that are there already; they stay, if they are of whole stages and have room.
    """
    index_of = problem.index_of
    busy = {index_of[stage.peer_id] for stage in stages}
    counts = [0] * len(stages)
    replicas = []
    starts, stops = {stage.start for stage in stages}, {stage.stop for stage in stages}
    for replica in standing:
        peer = index_of.get(replica.peer_id)
        is_whole = replica.start in starts and replica.stop in stops
        if peer is None or peer in busy or not is_whole:
            continue
        if problem.fits(peer, replica.start, replica.stop):
            busy.add(peer)
            replicas.append(replica)
            for i, stage in enumerate(stages):
                counts[i] += replica.start <= stage.start and stage.stop <= replica.stop
    previous = [None, *(index_of[stage.peer_id] for stage in stages)]
    slowness = [
        problem.seconds(before, index_of[stage.peer_id], stage.start, stage.stop)
        for before, stage in zip(previous, stages, strict=False)
    ]
    for peer in reversed(range(len(problem.peers))):
        if peer in busy:
            continue
        fitting = [i for i, s in enumerate(stages) if problem.fits(peer, s.start, s.stop)]
        if not fitting:
            continue

        def urgency(i: int, peer: int = peer) -> tuple[object, ...]:
            stage = stages[i]
            missing = problem.missing_bytes(peer, stage.start, stage.stop)
            return counts[i], -slowness[i], missing, i

        first = min(fitting, key=urgency)
        last, fewest = first, counts[first]
        while last + 1 < len(stages) and counts[last + 1] == fewest:
            if not problem.fits(peer, stages[first].start, stages[last + 1].stop):
                break
            last += 1
        while first > 0 and counts[first - 1] == fewest:
            if not problem.fits(peer, stages[first - 1].start, stages[last].stop):
                break
            first -= 1
        for i in range(first, last + 1):
            counts[i] += 1
        start, stop = stages[first].start, stages[last].stop
        peer_id = problem.peers[peer].peer_id
        replicas.append(Replica(peer_id, start, stop, problem.num_bytes(start, stop)))
    return tuple(
        sorted(replicas, key=lambda replica: (replica.start, replica.stop, replica.peer_id))
    )
