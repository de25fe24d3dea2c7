"""Shares of a vector: how much of it each member reduces, so that all take the same time. Integers, and pure."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["fair_shares"]


def fair_shares(bandwidths: Sequence[int]) -> list[int]:
    """Parts of the members, up to a common factor.

    With T = N (1 + (n - 2) p) / b for all k that reduce, and their p adding up to 1, p is in proportion to
    (n - 2 + k) b - sum(b): more members reduce as long as that is above zero for the slowest of them.
    """
    others = len(bandwidths) - 2
    if others <= 0:
        return list(bandwidths)
    total, slowest = 0, 0
    for number, bandwidth in enumerate(sorted(bandwidths, reverse=True), 1):
        if (others + number) * bandwidth <= total + bandwidth:
            break
        total, slowest = total + bandwidth, bandwidth
        factor = others + number
    if not total:
        return list(bandwidths)
    return [factor * each - total if each >= slowest else 0 for each in bandwidths]
