"""Drift of a fleet's members: the speeds that they have in fact, against what they said of themselves.

Pure. What makes all of them slower (a long context, much company, a busy machine that they share) makes none of them
the slower one: only what sets a member apart from the others counts. And only what lasts: a member has drifted when
several looks in a row, each at steps of its own, have found it so.

How slow a member is, is the median of means: a machine that gives a process a tenth of the time lets most steps pass
at full speed and stops in a few for long, which a median of steps would not see; and one long stop is not allowed to
decide, as it would be by the mean of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median, median_low
from typing import Final

from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.planner import ModelSize, PeerSpeed

__all__ = [
    "MIN_DRIFT",
    "MIN_STEPS",
    "NUM_LOOKS",
    "DriftWatch",
    "Steps",
    "drifts",
    "how_fast",
    "with_drifts",
]

# By this factor a member has to be faster or slower than it is taken for: steps of one speed differ by half as much.
MIN_DRIFT: Final = 2.0
# A member that drifted before and is within this factor of what it said is as fast as it said.
MAX_USUAL: Final = 1.4
# Means of which the median is taken, and the steps that make each of them worth something.
NUM_MEANS: Final = 7
MIN_STEPS: Final = 8 * NUM_MEANS
# Looks in a row that have to agree.
NUM_LOOKS: Final = 3

Steps = Sequence[tuple[int, float]]
"""Steps of one token each: the layers that it went through, and the seconds that it took."""


def drifts(
    speeds: Mapping[str, PeerSpeed], steps: Mapping[str, Steps], size: ModelSize
) -> dict[str, float]:
    """Return how many times slower than its speed each member is, compared with the others; empty for fewer than two.

    Args:
        speeds: that the members are planned with, by peer id.
        steps: that they took of late; those with fewer than `MIN_STEPS` are left out.
    """
    factors = {
        peer_id: _slowness(steps[peer_id], speed, size)
        for peer_id, speed in speeds.items()
        if len(steps.get(peer_id, ())) >= MIN_STEPS
    }
    if len(factors) < 2:
        return {}
    usual = median_low(factors.values())
    return {peer_id: factor / usual for peer_id, factor in factors.items()}


def _slowness(steps: Steps, speed: PeerSpeed, size: ModelSize) -> float:
    """Times that steps took, over what they should have."""
    read_bytes = sum(layer.read_bytes for layer in size.layers) / len(size.layers)
    layer_seconds = read_bytes / speed.bytes_per_second + speed.layer_seconds
    bounds = [len(steps) * i // NUM_MEANS for i in range(NUM_MEANS + 1)]
    ratios = []
    for first, last in pairwise(bounds):
        some = steps[first:last]
        taken = sum(seconds for _, seconds in some)
        ratios.append(taken / sum(size.stage_seconds + n * layer_seconds for n, _ in some))
    return max(median(ratios), 1e-9)


class DriftWatch:
    """Findings of the looks at a fleet so far.

    Attributes:
        known: how many times slower than they said members are, by peer id; without those that are as they said.
    """

    def __init__(self) -> None:
        self.known: dict[str, float] = {}
        self._doubts: dict[str, int] = {}

    def look(self, found: Mapping[str, float]) -> list[str]:
        """Take in one look (`drifts`); return the members taken for slower or faster from now on than before."""
        news = []
        for peer_id, factor in found.items():
            if not _differs(self.known.get(peer_id, 1.0), factor):
                self._doubts.pop(peer_id, None)
                continue
            self._doubts[peer_id] = self._doubts.get(peer_id, 0) + 1
            if self._doubts[peer_id] < NUM_LOOKS:
                continue
            self.forget(peer_id)
            if not _is_usual(factor):
                self.known[peer_id] = factor
            news.append(peer_id)
        return news

    def is_doubted(self, peer_id: str) -> bool:
        """Whether the last look at a member found it otherwise than it is taken for."""
        return peer_id in self._doubts

    def forget(self, peer_id: str) -> None:
        """Believe the member with this peer id again."""
        self.known.pop(peer_id, None)
        self._doubts.pop(peer_id, None)


def _differs(known: float, factor: float) -> bool:
    """Whether a factor is another than the one that a member is planned with; one that wavers is not."""
    if known != 1 and _is_usual(factor):
        return True
    return not 1 / MIN_DRIFT < factor / known < MIN_DRIFT


def _is_usual(factor: float) -> bool:
    return 1 / MAX_USUAL < factor < MAX_USUAL


def how_fast(slowness: float) -> str:
    """`computes 3.1 times slower than it said`: what is known of a member, in words."""
    if slowness == 1:
        return "computes as fast as it said again"
    by = slowness if slowness > 1 else 1 / slowness
    how = "slower" if slowness > 1 else "faster"
    return f"computes {by:.1f} times {how} than it said, compared with the others"


def with_drifts(infos: Sequence[WorkerInfo], known: Mapping[str, float]) -> list[WorkerInfo]:
    """Return these infos, each with the slowness that is known of its member."""
    return [replace(info, slowness=known.get(info.peer_id, 1.0)) for info in infos]
