"""The weighted mean, and that of signs, exactly reproducible (`protocol_spec/training/forms.md`, "The mean").

A weight counts by its ratio to that of the first row that has one: with equal weights all ratios are 1, and the mean is
the plain sum in the order of the members over their number, to the bit. A product is rounded before it is added: a
fused multiply-add would round once, on the machines that have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from neurogrid.errors import NotFiniteError
from neurogrid.training.averaging.aggregators.aggregator import (
    TILE,
    Aggregator,
    check_row,
    check_weight,
)

__all__ = ["Accumulator", "Mean", "MeanOfSigns", "RowSum"]

# A sum that stays below is finite, whatever its rounding.
_LARGEST_SUM = 2.0**127


class Accumulator:
    """A mean that takes row after row, in the order of the members, and keeps none of them.

    Args:
        num_elements: n of every row.
        of_signs: whether -1, 0 and 1 are added for what is negative, zero and positive.
        out: memory for the mean, float32 [n], none of a row's; new if None.
    """

    def __init__(
        self, num_elements: int, *, of_signs: bool = False, out: torch.Tensor | None = None
    ) -> None:
        self._out = out
        self._num_elements = num_elements
        self._of_signs = of_signs
        self._num_rows = 0
        self._sum: torch.Tensor | None = None
        self._first_weight = 0.0
        self._divisor = 0.0
        self._largest_sum = 0.0
        self._largest = (0.0, 0)  # that a row can add, and which row
        self._product = torch.empty(min(TILE, num_elements))

    def add(self, row: torch.Tensor, weight: float, *, counts: float = 1.0) -> None:
        """Add the next member's row, float32 [n] on the CPU.

        Args:
            counts: how often it counts where the sum is divided: of several that were added before, `RowSum.counts`.

        Raises:
            NotFiniteError: the row has NaN or infinity in it, or the sum could become so; `index` is that of the row at
                fault. This mean is spoilt then.
        """
        index = self._num_rows
        self._num_rows += 1
        largest = check_row(row, index, self._num_elements)
        if check_weight(weight) == 0:
            return
        if self._of_signs:
            row, largest = row.sign(), 1.0
        if self._sum is None:
            self._first_weight = weight
            self._divisor = counts
            self._check_sum(largest, index)
            self._sum = torch.empty_like(row) if self._out is None else self._out
            self._sum.copy_(row)
            return
        with np.errstate(over="ignore"):
            ratio = float(np.float32(weight / self._first_weight))
        self._check_sum(largest * ratio, index)
        self._divisor += ratio * counts
        if ratio == 1:
            self._sum.add_(row)
            return
        for start in range(0, self._num_elements, TILE):
            tile = row[start : start + TILE]
            product = torch.mul(tile, ratio, out=self._product[: len(tile)])
            self._sum[start : start + TILE].add_(product)

    def finish(self) -> torch.Tensor:
        """The mean, float32 [n]. Nothing can be added afterwards.

        Raises:
            ValueError: no row had a weight above zero.
        """
        mean, divisor = self.finish_sum(), float(np.float32(self._divisor))
        return mean if divisor == 1 else mean.div_(divisor)

    def finish_sum(self) -> torch.Tensor:
        """The same, not divided: `RowSum` says how it counts."""
        if self._sum is None:
            raise ValueError("no row has a weight above zero")
        total, self._sum = self._sum, None
        return total

    def _check_sum(self, added: float, index: int) -> None:
        self._largest = max(self._largest, (added, -index))
        self._largest_sum += added
        if not self._largest_sum < _LARGEST_SUM:
            worst = -self._largest[1]
            raise NotFiniteError(
                f"the sum may exceed float32: row {worst} is as large as {self._largest[0]:g}, weighted",
                index=worst,
            )


@dataclass(frozen=True, slots=True)
class RowSum:
    """Weight of a sum of several rows beside others.

    Attributes:
        weight: of the first row that has one, in whose units the others were added; 0 where none has.
        counts: what the sum is to be divided by to be their mean.
    """

    weight: float
    counts: float

    @classmethod
    def of(cls, weights: Sequence[float]) -> RowSum:
        """The weight of a sum of rows with these weights."""
        first = next((weight for weight in weights if weight), 0.0)
        with np.errstate(over="ignore"):
            ratios = [float(np.float32(weight / first)) for weight in weights if weight]
        return cls(first, sum(ratios))


class Mean(Aggregator):
    """The mean by weights."""

    name = "mean"
    _of_signs = False

    def begin(self, num_elements: int, *, out: torch.Tensor | None = None) -> Accumulator:
        """A mean of rows of `num_elements`, of which none has come yet; in the memory `out` if it is given."""
        return Accumulator(num_elements, of_signs=self._of_signs, out=out)

    def aggregate(self, rows: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        if not rows:
            raise ValueError("no row has a weight above zero")
        accumulator = self.begin(len(rows[0]))
        for row, weight in zip(rows, weights, strict=True):
            accumulator.add(row, weight)
        return accumulator.finish()


class MeanOfSigns(Mean):
    """The mean by weights of -1, 0 and 1: a vote, in which no member counts for more than its weight."""

    name = "mean_of_signs"
    _of_signs = True
