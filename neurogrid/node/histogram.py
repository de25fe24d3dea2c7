"""Histograms: counts of values by bounds, so that what happens thousands of times a second fits in a few numbers.

Observing takes half a microsecond and no memory. One thread observes; others may look at it meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

__all__ = ["COMPUTE_SECONDS", "Histogram", "NUM_ROWS", "WAIT_SECONDS"]

# Where bounds lie: a little over two to a factor of ten, as Prometheus has them by default.
COMPUTE_SECONDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Bounds for one call to torch: from a small model's token on a GPU to a long prompt on a CPU."""

WAIT_SECONDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)
"""Bounds for waiting: from that for the next token to that for a queue and a failed worker."""

NUM_ROWS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
"""Bounds for the sessions that share a forward pass."""


class Histogram:
    """Counts of values by their range.

    Args:
        bounds: upper ends of the ranges, inclusive, rising; what is above the last counts too.

    Attributes:
        counts: values in each range, one more than there are bounds.
        total: of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def num_values(self) -> int:
        """Number of values that were counted."""
        return sum(self.counts)

    @property
    def cumulative(self) -> list[tuple[float, int]]:
        """Each bound, infinity the last, with the number of values up to it."""
        result, below = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            result.append((bound, below))
        return result
