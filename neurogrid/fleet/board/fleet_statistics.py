"""Counts of what a leader's machines were about since it began: who came and went, plans, weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from neurogrid.node.histogram import COMPUTE_SECONDS, WAIT_SECONDS, Histogram

__all__ = ["SOURCES", "FleetStatistics"]

SOURCES = ("coordinator", "worker", "cache")


@dataclass
class FleetStatistics:
    """Statistics of one leader. `FleetBoard` counts.

    Attributes:
        num_joined, num_lost, num_wrong: workers; the last are those that computed wrong and were excluded.
        mending_seconds: that it took to place the layers anew that nobody held.
        weight_bytes: that came to workers, by `SOURCES`.
        planning: seconds that each run of the planner took.
        plans: runs by `made` and `impossible`.
    """

    num_joined: int = 0
    num_lost: int = 0
    num_wrong: int = 0
    mending_seconds: Histogram = field(default_factory=lambda: Histogram(WAIT_SECONDS))
    weight_bytes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(SOURCES, 0)))
    planning: Histogram = field(default_factory=lambda: Histogram(COMPUTE_SECONDS))
    plans: Counter[str] = field(default_factory=lambda: Counter({"made": 0, "impossible": 0}))
