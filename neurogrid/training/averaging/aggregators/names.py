"""An aggregator by its name, as run files and rounds say it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from neurogrid.errors import ConfigurationError
from neurogrid.training.averaging.aggregators.aggregator import Aggregator
from neurogrid.training.averaging.aggregators.distances import GeometricMedian, Krum, MultiKrum
from neurogrid.training.averaging.aggregators.mean import Mean, MeanOfSigns
from neurogrid.training.averaging.aggregators.order import Median, TrimmedMean

__all__ = ["parse_aggregator"]

_PLAIN: Final[dict[str, Callable[[], Aggregator]]] = {
    "mean": Mean,
    "trimmed_mean": TrimmedMean,
    "median": Median,
    "krum": Krum,
    "multi_krum": MultiKrum,
    "geometric_median": GeometricMedian,
    "mean_of_signs": MeanOfSigns,
}


def parse_aggregator(name: str) -> Aggregator:
    """The aggregator called `name`.

    `mean`, `trimmed_mean`, `median`, `krum`, `multi_krum`, `geometric_median` or `mean_of_signs`; besides
    `trimmed_mean:SHARE`, of which `trimmed_mean` is the one with 0.1, and `krum:F` and `multi_krum:F` with F members
    that may be anything.

    Raises:
        ConfigurationError: there is none of that name.
    """
    if plain := _PLAIN.get(name):
        return plain()
    if match := re.fullmatch(r"trimmed_mean:(0\.[0-9]{1,4}|0)", name, re.ASCII):
        return TrimmedMean(float(match[1]))
    if match := re.fullmatch(r"(multi_)?krum:([0-9]{1,4})", name, re.ASCII):
        return (MultiKrum if match[1] else Krum)(int(match[2]))
    raise ConfigurationError(
        f"no aggregator is called {name[:40]!r}: there are {', '.join(_PLAIN)}, trimmed_mean:0.2 and the like, krum:2 "
        "and multi_krum:2 and the like"
    )
