"""Cuts of the layers into stages, once the order of the peers is known.

The fastest cuts for as few stages as need be: within a limit for the slowest stage, each peer takes as many
layers as it can; the limit is found by bisection. It takes O(stages x log layers) for each limit. The cheapest
cuts within such a limit: dynamic programming over (stages, layers), for the fewest bytes to send.
"""

from __future__ import annotations

from neurogrid.planner.problem import Order, Problem

__all__ = ["Cuts", "cheapest_cuts", "cover", "even_cuts", "fastest_cuts", "slowest_seconds"]

# Where each stage ends.
Cuts = tuple[int, ...]

# The bisection ends when the limit is known this well: a tenth of what is told apart elsewhere.
PRECISION = 1e-4
INFINITE = float("inf")


def cover(problem: Problem, order: Order, limit: float) -> Cuts | None:
    """Cuts with no stage slower than `limit`, each as late as can be; None if there are none."""
    start, previous, cuts = 0, None, []
    latest = problem.num_layers - len(order)
    for peer in order:
        latest += 1  # the peers after this one need a layer each
        stop = min(problem.reach(previous, peer, start, limit), latest)
        if stop <= start:
            return None
        cuts.append(stop)
        start, previous = stop, peer
    return tuple(cuts) if start == problem.num_layers else None


def slowest_seconds(problem: Problem, order: Order, cuts: Cuts) -> float:
    """Seconds of the slowest stage."""
    previous: tuple[int | None, ...] = (None, *order[:-1])
    return max(map(problem.seconds, previous, order, (0, *cuts[:-1]), cuts))


def fastest_cuts(
    problem: Problem, order: Order, limit: float = INFINITE
) -> tuple[float, Cuts] | None:
    """The least possible slowest stage in this order, and its cuts; None if none is within `limit`."""
    cuts = cover(problem, order, limit)
    if cuts is None:
        return None
    slowest, fastest = slowest_seconds(problem, order, cuts), 0.0
    while slowest - fastest > PRECISION * slowest:
        middle = (slowest + fastest) / 2
        found = cover(problem, order, middle)
        if found is None:
            fastest = middle
        else:
            cuts, slowest = found, min(slowest_seconds(problem, order, found), middle)
    return slowest_seconds(problem, order, cuts), cuts


def even_cuts(problem: Problem, order: Order, limit: float) -> tuple[float, Cuts] | None:
    """Find what `fastest_cuts` gives, by dynamic programming over every place for every cut.

    More stages than need be can leave a peer before a layer that it cannot take, so that the farthest reach of
    those before it is not the best. Here nothing is missed, at O(stages x layers x layers).
    """
    best: dict[int, tuple[float, Cuts]] = {0: (0.0, ())}
    previous: int | None = None
    latest = problem.num_layers - len(order)
    for peer in order:
        latest += 1
        reached: dict[int, tuple[float, Cuts]] = {}
        for start, (slowest, cuts) in best.items():
            last = min(problem.reach(previous, peer, start, limit), latest)
            for stop in range(start + 1, last + 1):
                seconds = max(slowest, problem.seconds(previous, peer, start, stop))
                if stop not in reached or seconds < reached[stop][0]:
                    reached[stop] = seconds, (*cuts, stop)
        best, previous = reached, peer
    return best.get(problem.num_layers)


def cheapest_cuts(
    problem: Problem, order: Order, limit: float
) -> tuple[tuple[int, float], Cuts] | None:
    """Find the cuts that send the fewest bytes, of those with no stage slower than `limit`.

    Equal ones: the most even, by the sum of the squares of the stages' seconds.

    Returns:
        (bytes to send, that sum), and the cuts; None if no cuts are within the limit.
    """
    num_layers = problem.num_layers
    best: dict[int, tuple[int, float]] = {0: (0, 0.0)}
    origins: list[dict[int, int]] = []
    previous: int | None = None
    latest = num_layers - len(order)
    for peer in order:
        latest += 1
        reached: dict[int, tuple[int, float]] = {}
        origin: dict[int, int] = {}
        for start, (sent, squares) in best.items():
            for stop in range(
                start + 1, min(problem.reach(previous, peer, start, limit), latest) + 1
            ):
                seconds = problem.seconds(previous, peer, start, stop)
                cost = (
                    sent + problem.missing_bytes(peer, start, stop),
                    squares + seconds * seconds,
                )
                if stop not in reached or cost < reached[stop]:
                    reached[stop], origin[stop] = cost, start
        best, previous = reached, peer
        origins.append(origin)
    if num_layers not in best:
        return None
    cuts = [num_layers]
    for origin in reversed(origins[1:]):
        cuts.append(origin[cuts[-1]])
    return best[num_layers], tuple(reversed(cuts))
