"""Trimmed mean and median: each element by itself, from the values of all members in ascending order.

Members count alike: a weight is a claim, and what these are for is members that may lie. Those of weight zero do not
count at all.

Sorted by a network of comparisons (Batcher; Knuth 5.2.2 M): each is a minimum and a maximum of two rows, at the speed
of memory, where a sort of each element's values takes ten times as long. n = rows, T = elements of a tile.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache

import torch

from neurogrid.errors import ConfigurationError
from neurogrid.training.averaging.aggregators.aggregator import (
    TILE,
    Aggregator,
    check_result,
    check_rows,
)

__all__ = ["Median", "TrimmedMean"]


class _ByOrder(Aggregator):
    def aggregate(self, rows: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        counted = check_rows(rows, weights)
        num_elements = len(counted[0])
        result = torch.empty(num_elements, dtype=torch.float32)
        tile_nT = torch.empty(len(counted), min(TILE, num_elements), dtype=torch.float32)
        smaller_T = torch.empty(tile_nT.shape[1], dtype=torch.float32)
        for start in range(0, num_elements, TILE):
            out = result[start : start + TILE]
            rows_nT = list(tile_nT[:, : len(out)])
            for row, mine in zip(counted, rows_nT, strict=True):
                mine.copy_(row[start : start + TILE])
            smaller = smaller_T[: len(out)]
            for low, high in _comparisons(len(counted)):
                torch.minimum(rows_nT[low], rows_nT[high], out=smaller)
                torch.maximum(rows_nT[low], rows_nT[high], out=rows_nT[high])
                # The old buffer of the lower one is the next to be written to.
                rows_nT[low], smaller = smaller, rows_nT[low]
            self._combine(rows_nT, out)
            # Zeros of both signs are equal, and their order is anybody's: all become the positive one.
            out.add_(0.0)
        return check_result(result, rows)

    @abstractmethod
    def _combine(self, ascending_nT: list[torch.Tensor], out: torch.Tensor) -> None: ...


class TrimmedMean(_ByOrder):
    """The mean of what is left without the int(share x n) smallest and as many of the largest.

    With n below 10 and a share of 0.1 nothing is left out.

    Raises:
        ConfigurationError: `share` is not at least 0 and below 0.5.
    """

    def __init__(self, share: float = 0.1) -> None:
        if not 0 <= share < 0.5:
            raise ConfigurationError(
                f"trimmed_mean:{share:g}: at each side at least 0 and less than 0.5 are left out"
            )
        self.share = share
        self.name = f"trimmed_mean:{share!r}"

    def num_trimmed(self, num_rows: int) -> int:
        """Number of values that are left out at each side; below half of the rows."""
        return int(self.share * num_rows)

    def _combine(self, ascending_nT: list[torch.Tensor], out: torch.Tensor) -> None:
        cut = self.num_trimmed(len(ascending_nT))
        kept = ascending_nT[cut : len(ascending_nT) - cut]
        out.copy_(kept[0])
        for row in kept[1:]:
            out.add_(row)
        out.div_(len(kept))


class Median(_ByOrder):
    """The middle one, or half of each of the two in the middle."""

    name = "median"

    def _combine(self, ascending_nT: list[torch.Tensor], out: torch.Tensor) -> None:
        middle, odd = divmod(len(ascending_nT), 2)
        if odd:
            out.copy_(ascending_nT[middle])
        else:
            lower, upper = ascending_nT[middle - 1], ascending_nT[middle]
            # By halves: the sum of two large ones is infinite.
            torch.add(lower.mul_(0.5), upper.mul_(0.5), out=out)


@cache
def _comparisons(num_rows: int) -> tuple[tuple[int, int], ...]:
    """Pairs of rows of which the smaller values go to the first: in turn, they sort."""
    return tuple(_merge_exchange(num_rows))


def _merge_exchange(num_rows: int) -> Iterator[tuple[int, int]]:
    top = 1 << max(0, num_rows - 1).bit_length() >> 1
    p = top
    while p:
        q, r, distance = top, 0, p
        while True:
            for low in range(num_rows - distance):
                if low & p == r:
                    yield low, low + distance
            if q == p:
                break
            distance, q, r = q - p, q // 2, p
        p //= 2
