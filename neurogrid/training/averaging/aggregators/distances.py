"""Krum, multi-Krum and the geometric median: the weights of members, from how far their vectors are from one another.

Only the distances of whole vectors are needed, and those are sums over parts: whoever has a part gives its share, one
adds them up and announces weights, and with those every part is a weighted mean. A point between the vectors is known
by its weights a: its squared distance to vector k is sum_i a_i D_ik - 1/2 sum_ij a_i a_j D_ij.

What a part says of its distances nobody can check without its rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.averaging.aggregators.aggregator import (
    Aggregator,
    check_row,
    check_rows,
    check_weight,
)
from neurogrid.training.averaging.aggregators.mean import Mean

__all__ = ["DistanceAggregator", "GeometricMedian", "Krum", "MultiKrum"]

Doubles = npt.NDArray[np.float64]

_TILE: Final = 16_384
"""Elements of each row that are worked on at once: 128 KiB in float64."""

_MAX_STEPS: Final = 100
_TOLERANCE: Final = 1e-6


class DistanceAggregator(Aggregator):
    """A mean with weights that follow from the distances of whole vectors."""

    def partial_distances(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Squared distances of some elements of all members, float64 [n, n]: parts are added up.

        Args:
            rows: of each member, float32 [m] on the CPU, the elements of one part.

        Raises:
            NotFiniteError: a row has NaN or infinity in it.
        """
        num_rows = len(rows)
        for index, row in enumerate(rows):
            check_row(row, index, len(rows[0]))
        found = torch.zeros(num_rows, num_rows, dtype=torch.float64)
        num_elements = len(rows[0]) if rows else 0
        for start in range(0, num_elements, _TILE):
            # In float64, where the difference of two finite float32 is finite, and so is its square.
            tiles = [row[start : start + _TILE].double() for row in rows]
            for i in range(num_rows):
                for j in range(i):
                    difference = tiles[i] - tiles[j]
                    found[i, j] += torch.dot(difference, difference)
        return found + found.t()

    def weights_from(
        self, distances: torch.Tensor, weights: Sequence[float] | None = None
    ) -> list[float]:
        """The weight of each member in the mean, summing up to 1.

        Args:
            distances: the squared ones of whole vectors, float64 [n, n].
            weights: of each member, as in `aggregate`; all alike if None. A member of weight zero gets zero.

        Raises:
            RemoteProtocolError: the distances cannot be distances: not symmetric, negative, or not finite.
        """
        squares = distances.numpy()
        if weights is None:
            weights = [1.0] * len(squares)
        if squares.shape != (len(weights), len(weights)):
            raise ValueError(f"distances {squares.shape} of {len(weights)} members")
        if not np.isfinite(squares).all():
            raise RemoteProtocolError("a distance is not finite", code=ErrorCode.NOT_FINITE)
        if (squares < 0).any() or (squares != squares.T).any() or squares.diagonal().any():
            raise RemoteProtocolError(
                "distances are negative, not symmetric or not 0 to oneself",
                code=ErrorCode.PROTOCOL_VIOLATION,
            )
        counted = [index for index, weight in enumerate(weights) if check_weight(weight) > 0]
        if not counted:
            raise ValueError("no member has a weight above zero")
        found = np.zeros(len(weights))
        found[counted] = self._weights(
            squares[np.ix_(counted, counted)], np.array([weights[index] for index in counted])
        )
        shares: list[float] = (found / found.sum()).tolist()
        return shares

    def aggregate(self, rows: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        check_rows(rows, weights)
        distances = self.partial_distances(rows)
        return Mean().aggregate(rows, self.weights_from(distances, weights))

    @abstractmethod
    def _weights(self, squares: Doubles, weights: Doubles) -> Doubles:
        """Weights in the mean, of members that all have a weight of their own; not normalised."""


class MultiKrum(DistanceAggregator):
    """The mean, by their weights, of the n - f - 2 members whose n - f - 2 nearest neighbours are nearest.

    Of n members f may be anything, with 2 f + 2 < n (Blanchard and others, 2017; so many may be averaged:
    Damaskinos and others, 2019). Who is chosen does not depend on weights.

    Args:
        num_faulty: f, at least 0; as many as n allows if None, and never more.
    """

    def __init__(self, num_faulty: int | None = None) -> None:
        self.num_faulty = num_faulty
        self.name = self._kind if num_faulty is None else f"{self._kind}:{num_faulty}"

    _kind = "multi_krum"

    def num_neighbours(self, num_members: int) -> int:
        """n - f - 2; at least 1."""
        most = max(0, (num_members - 3) // 2)
        faulty = most if self.num_faulty is None else min(self.num_faulty, most)
        return max(1, num_members - faulty - 2)

    def num_chosen(self, num_members: int) -> int:
        """Number of members that are averaged."""
        return self.num_neighbours(num_members)

    def _weights(self, squares: Doubles, weights: Doubles) -> Doubles:
        num_members = len(weights)
        if num_members == 1:
            return weights
        others = np.sort(squares, axis=1)[:, 1:]  # without oneself, which is at 0
        # Added up in ascending order; of equal ones the first is chosen.
        scores = np.cumsum(others[:, : self.num_neighbours(num_members)], axis=1)[:, -1]
        order = np.argsort(scores, kind="stable")
        chosen = np.zeros(num_members)
        kept = order[: self.num_chosen(num_members)]
        chosen[kept] = weights[kept]
        return chosen


class Krum(MultiKrum):
    """The row of the one member whose n - f - 2 nearest neighbours are nearest; of equal ones the first."""

    _kind = "krum"

    def num_chosen(self, num_members: int) -> int:
        """One, so the others' work is lost: what it costs to be held by no mean."""
        return 1


class GeometricMedian(DistanceAggregator):
    """The point whose distances to all vectors, by their weights, have the least sum; by Weiszfeld's steps.

    It ends after 100 steps, or once a step is shorter than 1e-6 of what members are apart: the least median of one
    member's distances to all. It begins near those that have many near them: from the mean, members that are very far
    away would take dozens of steps to be left, and float64 with them. Of one or two members it is the mean.
    """

    name = "geometric_median"

    def _weights(self, squares: Doubles, weights: Doubles) -> Doubles:
        num_members = len(weights)
        if num_members < 3:
            return weights
        distances = np.sqrt(squares)
        # Of a member that most are near, as long as most are: the others' may be anything.
        medians = np.median(distances, axis=1)
        apart = float(medians.min())
        # Where most are the same, the point is one of them, and there is nothing to divide by.
        floor = max(_TOLERANCE * apart, 1e-150)
        point = _shares(weights / np.maximum(medians, floor))
        for _ in range(_MAX_STEPS):
            pull = squares @ point
            away = np.sqrt(np.maximum(pull - point @ pull / 2, 0))
            new = _shares(weights / np.maximum(away, floor))
            step = new - point
            point = new
            # The same form, of weights whose sum is 0.
            if -(step @ squares @ step) / 2 <= (_TOLERANCE * apart) ** 2:
                break
        return point


def _shares(weights: Doubles) -> Doubles:
    shares: Doubles = weights / weights.sum()
    return shares
