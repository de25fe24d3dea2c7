"""Fewer bytes to send, where that costs little speed: peers keep the layers that they have.

Of all plans whose slowest stage is at most `MOVE_TOLERANCE` slower than the fastest, the one that sends the
fewest bytes; of equal ones the most even. Cuts are exact for an order (`cheapest_cuts`). All orders are tried
where they are few; else the fastest order, the order of what the peers hold, and a bounded local search from
the better of the two.
"""

from __future__ import annotations

from itertools import permutations
from math import perm

from neurogrid.planner.cuts import Cuts, cheapest_cuts
from neurogrid.planner.problem import Order, Problem
from neurogrid.planner.search import MAX_ORDERS, Found, neighbours

__all__ = ["MOVE_TOLERANCE", "cheapest"]

# How much slower the slowest stage may get to save bytes: about what a measured speed is off from run to run.
MOVE_TOLERANCE = 0.1
# Steps of the dynamic programming in all: about half a second.
MAX_STEPS = 400_000
MIN_TRIES = 4

# Bytes to send and squares of seconds, the peers, the cuts.
Cheapest = tuple[tuple[int, float], Order, Cuts]


def cheapest(problem: Problem, fastest: Found) -> tuple[Order, Cuts]:
    """The peers and cuts of the plan that sends the fewest bytes, given the fastest one."""
    slowest, order, cuts = fastest
    if not problem.holds_something():
        found = cheapest_cuts(problem, order, slowest)
        return order, found[1] if found else cuts
    limit = slowest * (1 + MOVE_TOLERANCE)
    best = _try(problem, order, limit)
    assert best is not None  # the fastest plan is within the limit
    if perm(len(problem.peers), len(order)) <= MAX_ORDERS:
        for candidate in permutations(range(len(problem.peers)), len(order)):
            best = _better(best, _try(problem, candidate, limit))
        return best[1:]
    best = _better(best, _try(problem, _order_of_holders(problem, order), limit))
    tries = max(
        MAX_STEPS // (problem.num_layers * max(problem.num_layers, 5 * len(order))), MIN_TRIES
    )
    while True:
        before = best
        for candidate in neighbours(problem, best[1]):
            tries -= 1
            if tries < 0 or best[0][0] == 0:
                return best[1:]
            best = _better(best, _try(problem, candidate, limit))
            if best is not before:
                break
        else:
            return best[1:]


def _try(problem: Problem, order: Order, limit: float) -> Cheapest | None:
    found = cheapest_cuts(problem, order, limit)
    return (found[0], order, found[1]) if found else None


def _better(best: Cheapest, other: Cheapest | None) -> Cheapest:
    return other if other is not None and other[0] < best[0] else best


def _order_of_holders(problem: Problem, order: Order) -> Order:
    """Order the peers that hold most, by the first layer that they hold; others from `order` where layers lack."""
    held = [peer.held for peer in problem.peers]
    holders = sorted((i for i in range(len(held)) if held[i]), key=lambda i: (-len(held[i]), i))
    chosen = holders[: len(order)]
    fillers = [peer for peer in order if peer not in chosen][: len(order) - len(chosen)]
    covered = frozenset[int]().union(*(held[peer] for peer in chosen))
    # Runs of layers that nobody holds: first layer to number of layers, and of fillers for them.
    gaps: dict[int, int] = {}
    first = -1
    for layer in range(problem.num_layers):
        if layer in covered:
            first = -1
        else:
            first = layer if first < 0 else first
            gaps[first] = gaps.get(first, 0) + 1
    places = {peer: float(min(held[peer])) for peer in chosen}
    filled = dict.fromkeys(gaps, 0)
    for peer in fillers:
        if gaps:
            gap = max(gaps, key=lambda first: (gaps[first] / (filled[first] + 1), -first))
            filled[gap] += 1
            places[peer] = gap + filled[gap] / len(order)
        else:
            places[peer] = float(problem.num_layers)
    return tuple(sorted(places, key=lambda peer: (places[peer], peer)))
