"""Groups of sessions that decode together in one forward pass: sessions of similar length.

A pure function. Rows of one forward are padded to the longest of them, which costs memory traffic
and storage; a second forward reads the weights a second time. So rows share a forward as long as the
padding that this takes is less than the weights. Lengths grow together, so the answer stays the same
from step to step until a session comes or goes.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["group_rows", "zone_of"]


def zone_of(length: int, bounds: Sequence[int]) -> int:
    """Number of the zone between `bounds` in which the next token of a row of `length` tokens is."""
    return sum(length >= bound for bound in bounds)


def group_rows(
    lengths: Sequence[int],
    *,
    weight_bytes: int,
    token_bytes: int,
    max_rows: int,
    bounds: Sequence[int] = (),
    max_places: int | None = None,
) -> list[list[int]]:
    """Split rows into groups that each run as one forward.

    Args:
        lengths: tokens that each row has cached.
        weight_bytes: what one forward reads, whatever its rows.
        token_bytes: what each place of the cache takes in all layers that see everything.
        max_rows: of one group.
        bounds: lengths that the rows of a group must not straddle.
        max_places: rows of a group times the longest of them, unless it is alone; None for any number.

    Returns:
        Indices into `lengths`; every one exactly once, the longest rows of a zone first.
    """
    zones: dict[int, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        zones.setdefault(zone_of(lengths[i], bounds), []).append(i)
    groups = []
    for order in zones.values():
        descending = [lengths[i] for i in order]
        for start, stop in _cut(descending, weight_bytes, token_bytes, max_rows):
            size = stop - start
            if max_places is not None:
                size = max(min(size, max_places // max(descending[start], 1)), 1)
            groups += [order[i : min(i + size, stop)] for i in range(start, stop, size)]
    return groups


def _cut(
    lengths: list[int], weight_bytes: int, token_bytes: int, max_rows: int
) -> list[tuple[int, int]]:
    """Cut `lengths`, which descend, into ranges [start, stop) so that the fewest bytes are read."""
    if len(lengths) <= max_rows:
        padding = len(lengths) * lengths[0] - sum(lengths)
        if padding * token_bytes <= weight_bytes:
            return [(0, len(lengths))]
    # best[k]: least bytes for the k longest rows, and how many of those are before the last group.
    best: list[tuple[int, int]] = [(0, 0)]
    for stop in range(1, len(lengths) + 1):
        options = []
        tokens = 0
        for start in range(stop - 1, max(stop - max_rows, 0) - 1, -1):
            tokens += lengths[start]
            padding = lengths[start] * (stop - start) - tokens
            options.append((best[start][0] + weight_bytes + padding * token_bytes, start))
        best.append(min(options))
    cuts = []
    stop = len(lengths)
    while stop:
        start = best[stop][1]
        cuts.append((start, stop))
        stop = start
    return cuts[::-1]
