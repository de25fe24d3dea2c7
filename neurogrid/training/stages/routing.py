"""Routes of micro-batches: at each stage one goes to the member whose queue is the shortest. Pure.

A queue is counted in seconds: what a member was given of the step, at the pace of its steps before. So members that are
as fast have as many micro-batches, a slower one has fewer, and one that would only be waited for has none. All routes
of a step are known before it: what a step computes depends on them and on nothing that happens meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

__all__ = ["lanes_of", "routes"]


def routes(num_micro_batches: int, paces: Sequence[Sequence[float | None]]) -> bytes:
    """The routes of all micro-batches of a step.

    Args:
        paces: of the members of each stage, seconds that a micro-batch takes them, above 0; None where that is not
            known, which counts as the mean of the others of the stage.

    Returns:
        A byte for each micro-batch and stage, in this order: which member of the stage it goes to, from 0.
    """
    num_stages = len(paces)
    found = bytearray(num_micro_batches * num_stages)
    for stage, members in enumerate(paces):
        known = [pace for pace in members if pace is not None]
        typical = fmean(known) if known else 1.0
        seconds = [typical if pace is None else pace for pace in members]
        queues = [0.0] * len(seconds)
        for number in range(num_micro_batches):
            lane = min(range(len(seconds)), key=lambda each: queues[each] + seconds[each])
            queues[lane] += seconds[lane]
            found[number * num_stages + stage] = lane
    return bytes(found)


def lanes_of(route: bytes, number: int, num_stages: int) -> tuple[int, ...]:
    """Return the lane of each stage that a micro-batch goes through, from 0; lane 0 of each where no routes are given.

    Args:
        route: what `routes` gave, or nothing.
    """
    if not route:
        return (0,) * num_stages
    return tuple(route[number * num_stages : (number + 1) * num_stages])
