"""One data set of several sources, of which each has as many samples as its weight says.

Samples of small sources come several times, as often as is allowed; of large ones some are left out. Which, comes of
the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import numpy as np

from neurogrid.errors import ConfigurationError
from neurogrid.training.data.manifest import MAX_PARTS
from neurogrid.training.data.preparing.samples import Arrays, Samples, Source
from neurogrid.training.data.preparing.shuffling import Numbers, samples_at

__all__ = ["MAX_REPEAT", "MAX_WEIGHT", "Mixture", "check_weights", "mixed_sizes"]

MAX_WEIGHT: Final = 10**6
MAX_REPEAT: Final = 1000


def check_weights(weights: Sequence[float], repeat: int) -> None:
    """See that weights are some.

    Raises:
        ConfigurationError: they are not.
    """
    if not 2 <= len(weights) <= MAX_PARTS:
        raise ConfigurationError(f"a mixture has 2 to {MAX_PARTS} sources, not {len(weights)}")
    for weight in weights:
        if not 0 < weight <= MAX_WEIGHT:
            raise ConfigurationError(f"a weight is above 0 and at most {MAX_WEIGHT}, not {weight}")
    if not 1 <= repeat <= MAX_REPEAT:
        raise ConfigurationError(f"repeat is 1 to {MAX_REPEAT}, not {repeat}")


def mixed_sizes(sizes: Sequence[int], weights: Sequence[float], repeat: int) -> tuple[int, ...]:
    """Samples of each source in an epoch: in the proportions of the weights, and as many as there can be.

    The epoch ends where a source has come `repeat` times, or where every sample of all of them has come.

    Args:
        sizes: samples of each source, at least 1.
        weights: of the sources.
        repeat: times that a sample may come.

    Raises:
        ConfigurationError: a source would have none.
    """
    shares = [Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    lasts = [size / share for size, share in zip(sizes, shares, strict=True)]
    total = min(max(lasts), repeat * min(lasts))
    counts = tuple(int(total * share) for share in shares)
    if not all(counts):
        number = counts.index(0) + 1
        raise ConfigurationError(
            f"source {number} of the mixture would have no sample among {sum(counts):,}: give it more weight, or let "
            "others repeat more often"
        )
    return counts


class Mixture:
    """Samples of several sources, in the order of the sources.

    Args:
        parts: of each source its samples, and how many of the mixture are from it.
        seed: which samples of a source come once more than others comes of it.
    """

    def __init__(self, parts: Sequence[tuple[Samples, int]], seed: int) -> None:
        self._parts, self._seed = [samples for samples, _ in parts], seed
        self._starts = np.cumsum([0, *(count for _, count in parts)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def load(self, numbers: Numbers) -> Arrays:
        """See `Samples.load`."""
        sources = np.searchsorted(self._starts, numbers, side="right") - 1
        mixed: dict[str, np.ndarray[Any, Any]] = {}
        for source in np.unique(sources).tolist():
            here = sources == source
            samples = self._parts[source]
            passed = (numbers[here] - self._starts[source]) % len(samples)
            for name, array in samples.load(samples_at(self._seed, len(samples), passed)).items():
                if name not in mixed:
                    mixed[name] = np.empty((len(numbers), *array.shape[1:]), array.dtype)
                mixed[name][here] = array
        return mixed


def common_fields(sources: Sequence[Source], names: Sequence[str]) -> dict[str, object]:
    """Fields of the manifest that are about all samples, which have one tokenizer.

    Raises:
        ConfigurationError: sources do not go together; the text names them.
    """
    common = dict(sources[0].about)
    for source, name in zip(sources[1:], names[1:], strict=True):
        length, other = common["sequence_length"], source.about["sequence_length"]
        if length != other:
            raise ConfigurationError(
                f"{names[0]} and {name} do not go together: their sequence_length is {length} and {other}"
            )
        common["tokenizer"] = common["tokenizer"] or source.about["tokenizer"]
        common["vocab_size"] = max(common["vocab_size"], source.about["vocab_size"])
    return common
