"""Oddness of a result, by itself or beside those of the others: a reason to look, and no proof. Pure.

Thresholds as other systems have them refuse members by a round's figures (`refusal`). They hold where gradients of many
samples are whole; not for the few frequencies of DisTrO, whose honest cosines fall below any of them, and whose signs
have all the same norm. So here a figure refuses nobody: it is compared with those of the others over some rounds, and
who stands out is looked at more often (`Watch`). An audit that finds nothing has cost an audit.

Source: protocol_spec/training/checks.md, "Suspicion".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

__all__ = ["LEAST_FIGURES", "Figures", "Thresholds", "Watch", "Worth", "refusal"]

LEAST_FIGURES: Final = 3
"""Figures of a round, below which nobody can be told apart."""


@dataclass(frozen=True, slots=True)
class Figures:
    """A member's vector beside the aggregate of the others'.

    Attributes:
        cosine: of the two.
        norm_ratio: norm of the member's, over that of the aggregate.
        variance_ratio: variance of its elements, over that of the aggregate's.
    """

    cosine: float
    norm_ratio: float
    variance_ratio: float


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds of a round's figures, beyond which a vector is refused. The defaults are those of NeuroShard."""

    min_cosine: float = 0.3
    min_norm_ratio: float = 0.1
    max_norm_ratio: float = 10.0
    max_variance_ratio: float = 100.0


def refusal(figures: Figures, thresholds: Thresholds) -> str:
    """Reason to refuse a vector: the first figure that is beyond its threshold, in words; empty for none."""
    if not figures.cosine >= thresholds.min_cosine:
        return f"its cosine to the others is {figures.cosine:.3f}"
    if not thresholds.min_norm_ratio <= figures.norm_ratio <= thresholds.max_norm_ratio:
        return f"its norm is {figures.norm_ratio:.3g} times that of the others"
    if not figures.variance_ratio <= thresholds.max_variance_ratio:
        return f"its variance is {figures.variance_ratio:.3g} times that of the others"
    return ""


@dataclass(frozen=True, slots=True)
class Worth:
    """The loss before and after a member's update alone, where it was to train and where it was not.

    Attributes:
        given_before, given_after: on the samples that the member was given.
        held_before, held_after: on samples that it was not given: held out, or another's.
    """

    given_before: float
    given_after: float
    held_before: float
    held_after: float

    @property
    def gain(self) -> float:
        """Drop of the loss on samples that the member was not given."""
        return self.held_before - self.held_after

    @property
    def advantage(self) -> float:
        """Drop of the loss on what the member was given, less `gain`: none for one that did not compute on it."""
        return (self.given_before - self.given_after) - self.gain

    @property
    def is_finite(self) -> bool:
        """Whether all four losses are numbers; what they are not, of an update that ruins the weights."""
        losses = (self.given_before, self.given_after, self.held_before, self.held_after)
        return all(map(math.isfinite, losses))


class Watch:
    """Figures of members over rounds, each beside those of the others in its round.

    A figure counts by how far it is below the median of the round, in units of the median distance from that; at most
    `LARGEST`, so that one odd batch is soon forgotten.

    Args:
        memory: of what was before a round, the share that counts on: from 0 to below 1.
    """

    LARGEST = 5.0

    def __init__(self, memory: float = 0.9) -> None:
        if not 0 <= memory < 1:
            raise ValueError(f"a memory of {memory:g}: from 0 to below 1 is wanted")
        self._memory = memory
        self._means: dict[int, float] = {}
        self._weights: dict[int, float] = {}

    def add(self, figures: Mapping[int, float]) -> None:
        """The figures of a round by seat; the lower, the odder. What is no number is as low as can be."""
        finite = {seat: -math.inf if math.isnan(each) else each for seat, each in figures.items()}
        if len(finite) < LEAST_FIGURES:
            return
        middle = median(finite.values())
        spread = median(abs(each - middle) for each in finite.values() if math.isfinite(each))
        for seat, each in finite.items():
            short = 0.0 if each >= middle else self.LARGEST
            if spread > 0 and math.isfinite(each):
                short = max(-self.LARGEST, min(self.LARGEST, (middle - each) / spread))
            self._means[seat] = self._memory * self._means.get(seat, 0.0) + short
            self._weights[seat] = self._memory * self._weights.get(seat, 0.0) + 1

    def oddness(self, seat: int) -> float:
        """Mean of how far below the others a seat was, over the rounds; 0 for one that was never seen."""
        return self._means.get(seat, 0.0) / self._weights.get(seat, 1.0)

    def oddest(self, number: int) -> list[int]:
        """The seats that are below the others the most, the farthest first."""
        below = [seat for seat in self._means if self.oddness(seat) > 0]
        return sorted(below, key=lambda seat: (-self.oddness(seat), seat))[:number]

    def forget(self, seat: int) -> None:
        """A member is gone."""
        self._means.pop(seat, None)
        self._weights.pop(seat, None)
