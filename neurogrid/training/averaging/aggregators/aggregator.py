"""The interface of aggregators, and checks of rows, weights and results."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch

from neurogrid.errors import NotFiniteError

__all__ = ["TILE", "Aggregator", "check_result", "check_row", "check_rows"]

TILE: Final = 65_536
"""Elements of each row that are worked on at once, 256 KiB: a core's cache holds some rows of them."""


class Aggregator(ABC):
    """Makes one vector of several. It holds no state: threads may share one.

    Attributes:
        name: what `parse_aggregator` takes; two aggregators with the same name give the same bits.
    """

    name: str

    @abstractmethod
    def aggregate(self, rows: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """One vector of `rows`, float32 [n], new.

        The same rows in the same order give the same bits on every machine, but for those of a `DistanceAggregator`,
        whose distances differ in the last bits where libraries do.

        Args:
            rows: of each member, float32 [n] on the CPU, in the order of the members; not written to.
            weights: of each member, finite, not negative, at least one above zero. A member of weight zero has no
                part in the aggregate, whatever its row is, as long as that is finite.

        Raises:
            NotFiniteError: a row has NaN or infinity in it, or the aggregate would; `index` is the row's.
        """


def check_rows(rows: Sequence[torch.Tensor], weights: Sequence[float]) -> list[torch.Tensor]:
    """The rows that count, once all are found to be finite and alike.

    Raises:
        ValueError: no row, no weight above zero, or rows of several lengths.
        NotFiniteError: a row has NaN or infinity in it.
    """
    if len(rows) != len(weights):
        raise ValueError(f"{len(rows)} rows have {len(weights)} weights")
    for index, row in enumerate(rows):
        check_row(row, index, len(rows[0]))
    counted = [row for row, w in zip(rows, weights, strict=True) if check_weight(w) > 0]
    if not counted:
        raise ValueError("no row has a weight above zero")
    return counted


def check_row(row: torch.Tensor, index: int, num_elements: int) -> float:
    """The largest magnitude in a row, which is found to be finite; 0 without elements."""
    if row.dtype != torch.float32 or row.shape != (num_elements,):
        raise ValueError(
            f"row {index} is {row.dtype} {list(row.shape)}, and float32 [{num_elements}] is due"
        )
    if not num_elements:
        return 0.0
    low, high = torch.aminmax(row)
    largest = max(-low.item(), high.item())
    # NaN goes through all of it.
    if not math.isfinite(low.item() + high.item()) and not bool(torch.isfinite(row).all()):
        raise NotFiniteError(
            f"row {index} has NaN or infinity in it and is not aggregated", index=index
        )
    return largest


def check_weight(weight: float) -> float:
    """The weight itself.

    Raises:
        ValueError: it is negative, NaN or infinite.
    """
    if not 0 <= weight < math.inf:
        raise ValueError(f"a weight of {weight}: finite and not negative is wanted")
    return weight


def check_result(result: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """The aggregate itself.

    Raises:
        NotFiniteError: finite rows became something that is not; `index` is that of the row with the largest element.
    """
    if math.isfinite(result.sum().item()) or bool(torch.isfinite(result).all()):
        return result
    index = max(range(len(rows)), key=lambda i: check_row(rows[i], i, len(rows[i])))
    raise NotFiniteError(
        f"the aggregate is not finite: row {index} has elements as large as {float(rows[index].abs().max()):g}",
        index=index,
    )
