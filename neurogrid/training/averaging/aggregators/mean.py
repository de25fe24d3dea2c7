"""The weighted mean, and that of signs, exactly reproducible (`protocol_spec/training/forms.md`, "The mean").

A weight counts by its ratio to that of the first row that has one: with equal weights all ratios are 1, and the mean is
the plain sum in the order of the members over their number, to the bit. A product is rounded before it is added: a
fused multiply-add would round once, on the machines that have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        self._product = torch.empty(min(TILE, num_elements), dtype=torch.float32)

    def add(self, row: torch.Tensor, weight: float, *, counts: float = 1.0) -> None:
        """Add the next member's row, float32 [n] on the CPU.

        Args:
            counts: how often it counts where the sum is divided: of several that were added before, `RowSum.counts`.

        Raises:
            NotFiniteError: the row has NaN or infinity in it, or the sum could become so; `index` is that of the row at
                fault. This mean is spoilt then.
        """
        self.add_pieces([row], weight, counts=counts)

    def add_pieces(
        self, pieces: Iterable[torch.Tensor], weight: float, *, counts: float = 1.0
    ) -> None:
        """Add the next member's row, as `add` does, of pieces in order: each is read before the next one is asked for.

        Raises:
            ValueError: they do not have the elements of a row.
        """
        index = self._num_rows
        self._num_rows += 1
        is_counted = check_weight(weight) > 0
        is_first = is_counted and self._sum is None
        ratio = 1.0
        if is_first:
            self._first_weight = weight
            self._sum = (
                torch.empty(self._num_elements, dtype=torch.float32)
                if self._out is None
                else self._out
            )
        elif is_counted:
            with np.errstate(over="ignore"):
                ratio = float(np.float32(weight / self._first_weight))
        largest, start = 0.0, 0
        for piece in pieces:
            largest = max(largest, check_row(piece, index, len(piece)))
            if is_counted and start + len(piece) <= self._num_elements:
                self._add_piece(piece, start, None if is_first else ratio)
            start += len(piece)
        if start != self._num_elements:
            raise ValueError(
                f"row {index} is of {start} elements, and {self._num_elements} are due"
            )
        if is_counted:
            self._divisor += ratio * counts
            self._check_sum((1.0 if self._of_signs else largest) * ratio, index)

    def _add_piece(self, piece: torch.Tensor, start: int, ratio: float | None) -> None:
        """Add a piece of a row that counts so much; None for the first row, which is none added to."""
        assert self._sum is not None
        if self._of_signs:
            piece = piece.sign()
        total = self._sum[start : start + len(piece)]
        if ratio is None:
            total.copy_(piece)
        elif ratio == 1:
            total.add_(piece)
        else:
            for at in range(0, len(piece), TILE):
                tile = piece[at : at + TILE]
                product = torch.mul(tile, ratio, out=self._product[: len(tile)])
                total[at : at + TILE].add_(product)

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
