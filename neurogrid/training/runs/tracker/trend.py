"""Whether figures fall, rise or stay, as far as their noise lets anybody say.

    trend = find_trend(losses)
    trend.direction, trend.low, trend.high

The slope is Theil and Sen's, the median of those between each two figures; its interval is Sen's, by Kendall's
statistic. Both go by order alone, so that a spike or two change nothing, and noise need not be normal. Figures that
follow each other closely say less than as many that do not: the variance is widened by the correlation of neighbours,
as Hamed and Rao's is by those of all lags.

Pure. Sources: P. K. Sen (1968), Estimates of the regression coefficient based on Kendall's tau; K. H. Hamed and
A. R. Rao (1998), A modified Mann-Kendall trend test for autocorrelated data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import NormalDist, fmean, median
from typing import Final

__all__ = ["CONFIDENCE", "NUM_LEAST", "NUM_TRACKED", "Direction", "TrackedTrend", "find_trend"]

CONFIDENCE: Final = 0.99
"""Confidence with which a direction is told: of a hundred looks at nothing but noise one is wrong.

Of noise whose neighbours have a correlation of 0.5, five are; where it wanders as a trend does, more."""

NUM_LEAST: Final = 10
"""Figures below which nothing is said: from here on Kendall's statistic is close to normal."""

NUM_TRACKED: Final = 30
"""Figures that a trend is of, at most, the newest."""

# Of their level: figures that change by less over the whole window are flat.
_FLAT: Final = 0.01
# Neighbours that are more alike leave no figures to judge by.
_MAX_CORRELATION: Final = 0.9


class Direction(StrEnum):
    """The direction in which figures go."""

    UNKNOWN = "unknown"
    """Too few figures to tell."""
    FALLING = "falling"
    FLAT = "flat"
    """Changes, if any, are less than a hundredth of the level."""
    RISING = "rising"
    UNCLEAR = "unclear"
    """Falling as well as rising is possible: the noise is larger than the change."""


@dataclass(frozen=True, slots=True)
class TrackedTrend:
    """The trend of figures, and how sure it is.

    Attributes:
        num: figures that it was taken of.
        change: what they change by from the first of these to the last, in their own unit; None where unknown.
        low, high: between which that lies with `CONFIDENCE`.
    """

    direction: Direction
    num: int
    change: float | None = None
    low: float | None = None
    high: float | None = None


def find_trend(figures: Sequence[float]) -> TrackedTrend:
    """The trend of the newest figures, at most `NUM_TRACKED`, one a round. Those that are not finite are left out.

    A newest one that is not finite is rising: nothing is further from learning.
    """
    newest = figures[-NUM_TRACKED:]
    known = [figure for figure in newest if math.isfinite(figure)]
    num = len(known)
    if newest and not math.isfinite(newest[-1]):
        return TrackedTrend(Direction.RISING, num)
    if num < NUM_LEAST:
        return TrackedTrend(Direction.UNKNOWN, num)
    slopes = sorted(
        (known[later] - known[first]) / (later - first)
        for later in range(1, num)
        for first in range(later)
    )
    spread = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(_variance(known))
    # An interval that is wider than all slopes ends with them. So figures of which each is below the one before are
    # falling, however alike neighbours are: ten of a random walk are so once in 250 times, up or down.
    reach = math.ceil((len(slopes) + spread) / 2)
    low, high = slopes[max(len(slopes) - 1 - reach, 0)], slopes[min(reach, len(slopes) - 1)]
    steps = num - 1
    margin = _FLAT * abs(fmean(known))
    direction = Direction.UNCLEAR
    if high < 0:
        direction = Direction.FALLING
    elif low > 0:
        direction = Direction.RISING
    elif -margin <= steps * low and steps * high <= margin:
        direction = Direction.FLAT
    return TrackedTrend(direction, num, steps * median(slopes), steps * low, steps * high)


def _variance(figures: Sequence[float]) -> float:
    """Variance of Kendall's statistic, corrected for ties and for the correlation of neighbours about the curve."""
    num = len(figures)

    def of(count: int) -> float:
        return count * (count - 1) * (2 * count + 5)

    ties = sum(of(count) for count in Counter(figures).values())
    alike = _correlation(figures)
    return (of(num) - ties) / 18 * (1 + alike) / (1 - alike)


def _correlation(figures: Sequence[float]) -> float:
    """The correlation of neighbouring figures about the curve that only falls, or only rises: 0 to 0.9.

    Such a curve takes all that a trend can be, bent as it may be, and what it cannot take is noise. A little is added
    for what the fit takes of that, too.
    """
    rising = sum(
        (later > first) - (later < first)
        for at, later in enumerate(figures)
        for first in figures[:at]
    )
    upside_down = [-figure for figure in figures]
    # Of figures that do neither more than the other, both curves are looked at.
    curves = [figures] * (rising >= 0) + [upside_down] * (rising <= 0)
    return max(map(_correlation_about_a_rise, curves))


def _correlation_about_a_rise(figures: Sequence[float]) -> float:
    squares, products, num_pairs = [0.0], [0.0], 0
    for level in _levels(figures):
        mean = fmean(level)
        beside = [figure - mean for figure in level]
        squares += [each * each for each in beside]
        products += [each * later for each, later in pairwise(beside)]
        num_pairs += len(level) - 1
    square = math.fsum(squares)
    if not square:
        return 0.0
    return min(max(math.fsum(products) / square + 1 / num_pairs, 0.0), _MAX_CORRELATION)


def _levels(figures: Sequence[float]) -> list[list[float]]:
    """The figures, in order, in levels whose means rise: the curve that fits best and does not fall has these means."""
    levels: list[list[float]] = []
    for figure in figures:
        levels.append([figure])
        while len(levels) > 1 and fmean(levels[-2]) >= fmean(levels[-1]):
            last = levels.pop()
            levels[-1] += last
    return levels
