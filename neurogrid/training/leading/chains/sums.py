"""Sums of what members tell: each number may be as large as there are, and their sum larger."""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["sum_of"]


def sum_of(values: Iterable[float]) -> float:
    """The sum of numbers; infinite or NaN where it is no number, or is none on the way."""
    try:
        return math.fsum(values)
    except OverflowError:
        return math.inf
    except ValueError:  # of infinities with different signs
        return math.nan
