"""Search for the peers of a plan, and their order: the choice whose slowest stage is fastest.

`fastest_cuts` is exact for an order; left is the order, by a bisection over the time of the slowest stage with
one question for each limit: is there an order in which the layers are covered?

- Layers all the same and no links: the peers that reach farthest, one after another. Exact.
- Few kinds of peers: dynamic programming over the sets of peers used ("how far do they reach?"); peers that
  are alike count as one kind, so that twelve different peers or hundreds of two kinds are searched. Exact.
- More stages than need be: all orders, each with its best cuts, if they are few; else the same dynamic programming over
  the sets of peers and every layer that they can reach, for there the farthest is not the best. Exact.
- Otherwise the farthest reach, the roomiest first and last, and a bounded local search. It may miss an order,
  and take a stage more than need be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import permutations
from math import perm, prod

from neurogrid.planner.cuts import (
    INFINITE,
    Cuts,
    cover,
    even_cuts,
    fastest_cuts,
    slowest_seconds,
)
from neurogrid.planner.problem import Order, Problem

__all__ = ["MAX_ORDERS", "Found", "best_order", "neighbours"]

# Slowest stage in seconds, the peers, and the cuts.
Found = tuple[float, Order, Cuts]
Oracle = Callable[[float], Order | None]
Cutter = Callable[[Problem, Order, float], tuple[float, Cuts] | None]

# The bisection over orders ends here: plans that differ by less count as equally fast.
PRECISION = 1e-3
# Sets of peers that are searched exactly: 25 ms for each limit in CPython, and some 15 limits.
MAX_STATES = 5_000
# All orders of up to five peers.
MAX_ORDERS = 120
# Stages that the local search may look at: half a second.
MAX_LOOKS = 400_000


def best_order(problem: Problem, num_stages: int, *, is_fewest: bool) -> Found | None:
    """The fastest split into exactly so many stages; None if none was found that fits.

    Args:
        is_fewest: whether less stages are known not to fit.
    """
    kinds = _kinds(problem)
    if problem.is_even:
        return _bisect(problem, lambda limit: _farthest(problem, num_stages, limit))
    if not is_fewest and perm(len(problem.peers), num_stages) <= MAX_ORDERS:
        return _try_all(problem, num_stages)
    num_states = _num_states(problem, kinds)
    if not is_fewest and num_states * problem.num_layers <= MAX_STATES:
        return _bisect(
            problem, lambda limit: _exact_anywhere(problem, num_stages, limit, kinds), even_cuts
        )
    if num_states <= MAX_STATES:
        return _bisect(problem, lambda limit: _exact(problem, num_stages, limit, kinds))
    found = _bisect(problem, lambda limit: _farthest(problem, num_stages, limit))
    roomiest = tuple(range(num_stages))
    for order in (roomiest, roomiest[::-1]):
        better = fastest_cuts(problem, order, found[0] if found else INFINITE)
        if better and (found is None or better[0] < found[0]):
            found = (better[0], order, better[1])
    return found and _improve(problem, found)


def neighbours(problem: Problem, order: Order, first: int = 0) -> Iterator[Order]:
    """Orders that differ by one change at a place: another peer there, two swapped, or one moved.

    The changes at place `first` come first.
    """
    unused = sorted(set(range(len(problem.peers))) - set(order))
    places = list(range(len(order)))
    for place in [first, *places[:first], *places[first + 1 :]]:
        for peer in unused:
            yield (*order[:place], peer, *order[place + 1 :])
        rest = (*order[:place], *order[place + 1 :])
        for other in places:
            if other != place:
                swapped = list(order)
                swapped[place], swapped[other] = swapped[other], swapped[place]
                yield tuple(swapped)
                yield (*rest[:other], order[place], *rest[other:])


def _try_all(problem: Problem, num_stages: int) -> Found | None:
    best: Found | None = None
    for order in permutations(range(len(problem.peers)), num_stages):
        found = even_cuts(problem, order, best[0] if best else INFINITE)
        if found is not None and (best is None or found[0] < best[0]):
            best = found[0], order, found[1]
    return best


def _bisect(problem: Problem, oracle: Oracle, cuts: Cutter = fastest_cuts) -> Found | None:
    """The least limit for which `oracle` knows an order, to `PRECISION`; `cuts` finds the best cuts in it."""
    order = oracle(INFINITE)
    if order is None:
        return None
    found = _cut(problem, order, INFINITE, cuts)
    too_fast = 0.0
    while found[0] - too_fast > PRECISION * found[0]:
        limit = (found[0] + too_fast) / 2
        order = oracle(limit)
        if order is None:
            too_fast = limit
        else:
            found = _cut(problem, order, limit, cuts)
    return found


def _cut(problem: Problem, order: Order, limit: float, cuts: Cutter = fastest_cuts) -> Found:
    cut = cuts(problem, order, limit)
    assert cut is not None  # the oracle has covered the layers in this order
    return min(cut[0], limit), order, cut[1]


def _farthest(problem: Problem, num_stages: int, limit: float) -> Order | None:
    """Order the peers: one after another that which reaches farthest; of equal ones the least roomy."""
    unused = list(range(len(problem.peers)))
    usable = problem.usable
    order: list[int] = []
    start, previous = 0, None
    latest = problem.num_layers - num_stages
    for _ in range(num_stages):
        latest += 1
        reached, _, peer = max(
            (min(problem.reach(previous, peer, start, limit), latest), -usable[peer], -peer)
            for peer in unused
        )
        if reached <= start:
            return None
        start, previous = reached, -peer
        order.append(previous)
        unused.remove(previous)
    return tuple(order) if start == problem.num_layers else None


def _alike(kinds: list[int]) -> list[int]:
    """Return for each peer, as bits, the peers of its kind before it."""
    peers = range(len(kinds))
    return [sum(1 << j for j in peers if j < i and kinds[j] == kinds[i]) for i in peers]


def _exact(problem: Problem, num_stages: int, limit: float, kinds: list[int]) -> Order | None:
    """An order that covers the layers, if there is one.

    `states`: a set of used peers (as bits), and the last of them where links count, to the farthest layer
    that they reach in any order, and that order.
    """
    peers = range(len(problem.peers))
    alike = _alike(kinds)
    states: dict[tuple[int, int | None], tuple[int, Order]] = {(0, None): (0, ())}
    latest = problem.num_layers - num_stages
    for _ in range(num_stages):
        latest += 1
        following: dict[tuple[int, int | None], tuple[int, Order]] = {}
        for (used, _last), (start, order) in states.items():
            previous = order[-1] if order else None
            for peer in peers:
                # Of peers that are alike, the first that is free.
                if used >> peer & 1 or alike[peer] & ~used:
                    continue
                reached = min(problem.reach(previous, peer, start, limit), latest)
                if reached <= start:
                    continue
                key = (used | 1 << peer, peer if problem.has_links else None)
                if key not in following or reached > following[key][0]:
                    following[key] = (reached, (*order, peer))
        states = following
    return next((o for reached, o in states.values() if reached == problem.num_layers), None)


def _exact_anywhere(
    problem: Problem, num_stages: int, limit: float, kinds: list[int]
) -> Order | None:
    """Find what `_exact` gives, where each stage may end before the farthest layer that it reaches, too.

    `states`: a set of used peers, the last of them where links count, and where it ends, to an order.
    """
    alike = _alike(kinds)
    states: dict[tuple[int, int | None, int], Order] = {(0, None, 0): ()}
    latest = problem.num_layers - num_stages
    for _ in range(num_stages):
        latest += 1
        following: dict[tuple[int, int | None, int], Order] = {}
        for (used, _last, start), order in states.items():
            previous = order[-1] if order else None
            for peer in range(len(kinds)):
                if used >> peer & 1 or alike[peer] & ~used:
                    continue
                reached = min(problem.reach(previous, peer, start, limit), latest)
                last = peer if problem.has_links else None
                for stop in range(start + 1, reached + 1):
                    following.setdefault((used | 1 << peer, last, stop), (*order, peer))
        states = following
    return next((o for (_, _, stop), o in states.items() if stop == problem.num_layers), None)


def _kinds(problem: Problem) -> list[int]:
    """A number for each peer; the same for peers that do the same in any place."""
    if problem.has_links:
        return list(range(len(problem.peers)))
    known: dict[object, int] = {}
    return [
        known.setdefault((usable, peer.speed, peer.kept), len(known))
        for peer, usable in zip(problem.peers, problem.usable, strict=True)
    ]


def _num_states(problem: Problem, kinds: list[int]) -> int:
    sets = prod(count + 1 for count in Counter(kinds).values())
    return sets * (len(kinds) if problem.has_links else 1)


def _improve(problem: Problem, found: Found) -> Found:
    """Change the order at the slowest stage, and elsewhere, as long as it gets faster."""
    looks = 0
    while True:
        slowest, order, cuts = found
        for candidate in neighbours(problem, order, _slowest_place(problem, order, cuts)):
            looks += len(candidate)
            if looks > MAX_LOOKS:
                return found
            limit = slowest * (1 - PRECISION)
            if cover(problem, candidate, limit) is not None:
                found = _cut(problem, candidate, limit)
                break
        else:
            return found


def _slowest_place(problem: Problem, order: Order, cuts: Cuts) -> int:
    slowest = slowest_seconds(problem, order, cuts)
    previous, start = None, 0
    for place, (peer, stop) in enumerate(zip(order, cuts, strict=True)):
        if problem.seconds(previous, peer, start, stop) == slowest:
            return place
        previous, start = peer, stop
    raise AssertionError("no stage is the slowest")
