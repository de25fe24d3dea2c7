"""Bands: distances that two honest processors may have, in which the distance of a claim is counted. Pure.

The same gradient computed by two kinds of processors is not the same bits. How far apart they are is measured, of the
whole and of each tensor: as an angle, and as the logarithm of the ratio of the norms (`Apart`). What honest pairs reach
at most is the `Band`; a distance is counted in bands (`excess`): 0 for the same bits, at most 1 for honest pairs.

All of these are metrics, so their maximum is one: what A and C are apart is at most what A and B, and B and C, are.
Therefore two thresholds: who finds a claim more than 2 bands off accuses; a third confirms what is more than 1 off.
An honest member is never confirmed as a cheat, and an honest accuser always is: 2 < accused to accuser <= accused to
third + third to accuser, and the last is at most 1.

A tensor whose gradient is as small as rounding has any direction. So each tensor is taken to have one more element: the
floor times the root of its number of elements, the same for both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["ACCUSED_FROM", "CONFIRMED_FROM", "Apart", "Band", "Sums", "apart", "measured_band"]

ACCUSED_FROM: Final = 2.0
"""Bands that a claim must be off, for who finds it to accuse."""

CONFIRMED_FROM: Final = 1.0
"""Bands that a claim must be off, for a third to confirm the accusation."""

# A band is wider than what was seen, which was not all that there is: of 150 gradients of a small Llama over as many
# rounds, in bfloat16 and in float32, the farthest were six times as far apart as those of the first 30 rounds.
_MARGIN: Final = 8.0


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums by which two vectors a and b are compared.

    Attributes:
        a, b, difference: sums of the squares of a, of b, and of a - b.
        num_elements: of each.
    """

    a: float
    b: float
    difference: float
    num_elements: int


@dataclass(frozen=True, slots=True)
class Apart:
    """Distance of two gradients.

    Attributes:
        angle: between the whole vectors, in radians.
        log_ratio: of their norms: the natural logarithm's magnitude.
        tensor_angle, tensor_log_ratio: the largest of any tensor.
    """

    angle: float
    log_ratio: float
    tensor_angle: float
    tensor_log_ratio: float


@dataclass(frozen=True, slots=True)
class Band:
    """The largest distance that two honest processors may have.

    The default is for processors of which nothing is known: about four times what products in bfloat16 were from those
    in float32 at most. Between kinds of float32 it can be narrower by far, and is to be measured.

    Attributes:
        angle, log_ratio, tensor_angle, tensor_log_ratio: as of `Apart`; above 0.
        floor: gradient of an element below which nothing is told from rounding.
        rounding: of an encoding, a share of the norm of a chunk; of momenta, of the largest element.
    """

    angle: float = 0.08
    log_ratio: float = 0.08
    tensor_angle: float = 0.6
    tensor_log_ratio: float = 0.3
    floor: float = 1e-7
    rounding: float = 1e-4

    def __post_init__(self) -> None:
        widths = (
            self.angle,
            self.log_ratio,
            self.tensor_angle,
            self.tensor_log_ratio,
            self.rounding,
        )
        if not all(0 < each < math.inf for each in widths) or not 0 <= self.floor < math.inf:
            raise ValueError(f"a band is as wide as finite numbers above 0, not {self}")

    def excess(self, found: Apart, *, rounding: float = 0.0) -> float:
        """The distance in bands.

        Args:
            rounding: that an encoding and a momentum were off.
        """
        return max(
            found.angle / self.angle,
            found.log_ratio / self.log_ratio,
            found.tensor_angle / self.tensor_angle,
            found.tensor_log_ratio / self.tensor_log_ratio,
            rounding / self.rounding,
        )


def apart(tensors: Sequence[Sums], floor: float = 0.0) -> Apart:
    """Compute the distance of two gradients from the sums of each of their tensors."""
    whole = Sums(
        math.fsum(each.a for each in tensors),
        math.fsum(each.b for each in tensors),
        math.fsum(each.difference for each in tensors),
        sum(each.num_elements for each in tensors),
    )
    angles, ratios = zip(*(_apart(each, floor) for each in tensors), strict=True)
    return Apart(*_apart(whole, floor), max(angles), max(ratios))


def measured_band(found: Iterable[Apart], *, floor: float, rounding: float = 1e-4) -> Band:
    """The band for processors of which pairs were found to be so far apart: eight times as wide as the farthest.

    Args:
        found: of pairs of processors that computed the same, with the same floor.
        rounding: as of `Band`.

    Raises:
        ValueError: no pair.
    """
    pairs = list(found)
    if not pairs:
        raise ValueError("a band is measured by at least one pair of processors")

    def width(name: str) -> float:
        # Pairs that are alike bit for bit have no distance, and a band has a width.
        widest: float = max(getattr(each, name) for each in pairs)
        return max(1e-6, _MARGIN * widest)

    return Band(
        width("angle"),
        width("log_ratio"),
        width("tensor_angle"),
        width("tensor_log_ratio"),
        floor,
        rounding,
    )


def _apart(sums: Sums, floor: float) -> tuple[float, float]:
    """Angle and logarithm of the ratio of norms, of vectors with one more element.

    A vector of zeros is at a right angle to all others, and its norm beside that of another one is out of every band.
    """
    more = floor * floor * sums.num_elements
    a, b = math.sqrt(sums.a + more), math.sqrt(sums.b + more)
    if a == b == 0:
        return 0.0, 0.0
    if not (a > 0 and b > 0) or not math.isfinite(a + b + sums.difference):
        return math.pi / 2, math.inf
    # Of the unit vectors; by the difference, since a cosine near 1 has no digits left for small angles.
    chord = math.sqrt(max(0.0, (sums.difference - (a - b) ** 2) / (a * b)))
    return 2 * math.asin(min(1.0, chord / 2)), abs(math.log(a / b))
