"""The plan of one reduction: whose vectors, cut how, summed where, and in what form they travel.

Pure: made by the leader of a group, announced to its members, and carried out by `reductions`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

__all__ = ["ReductionPlan", "Way"]


class Way(StrEnum):
    """The way that vectors take to become one."""

    BUTTERFLY = "butterfly"
    """Each reducer has a part: a chunk is sent to its reducer, and the aggregate is the answer. A server that averages
    for all is the one reducer of such a plan."""

    EVERYBODY = "everybody"
    """Each member sends its whole vector to every other, and aggregates by itself."""

    GRID = "grid"
    """Members are rows, each a butterfly by itself. The aggregates of the rows go to one of their reducers, another for
    each chunk, and what comes of them is the answer: a member has to do with as many as the root of their number."""


@dataclass(frozen=True)
class ReductionPlan:
    """One reduction.

    Attributes:
        reduction: u64, chosen at random by the leader; no two plans have the same.
        members: peer ids (base58) of those whose vectors are aggregated, in the order in which they are added.
        weights: of each member, finite, not negative, at least one above zero.
        reducers: peer ids of those that aggregate parts; they need not be members. Empty with `Way.EVERYBODY`. With
            `Way.GRID` those of the first row, each of which is a member of it, then those of the next.
        cuts: chunk indices, one more than `reducers`: reducer i aggregates the chunks [cuts[i], cuts[i + 1]). With
            `Way.GRID` so for each row, one behind the other.
        num_elements: float32 elements of the vector.
        chunk_elements: elements of every chunk but the last; a multiple of the codec's block.
        codec: the form of what members send (`parse_codec`).
        result_codec: the form of the aggregate. What is applied is its decoded form, also by who encoded it.
        aggregator: how rows become one (`parse_aggregator`).
        way: which of the ways.
        rows: with `Way.GRID` places in `members`, one more than there are rows: row r is [rows[r], rows[r + 1]).
        row_reducers: likewise, in `reducers`.
    """

    reduction: int
    members: tuple[str, ...]
    weights: tuple[float, ...]
    reducers: tuple[str, ...]
    cuts: tuple[int, ...]
    num_elements: int
    chunk_elements: int
    codec: str = "f32"
    result_codec: str = "f32"
    aggregator: str = "mean"
    way: Way = Way.BUTTERFLY
    rows: tuple[int, ...] = ()
    row_reducers: tuple[int, ...] = ()

    @property
    def num_chunks(self) -> int:
        """Chunks of the vector."""
        return math.ceil(self.num_elements / self.chunk_elements)

    def chunk_span(self, chunk: int) -> tuple[int, int]:
        """The elements [start, stop) of a chunk."""
        start = chunk * self.chunk_elements
        return start, min(start + self.chunk_elements, self.num_elements)

    def reducer_of(self, chunk: int) -> str:
        """The peer that aggregates a chunk, with `Way.BUTTERFLY`."""
        if not 0 <= chunk < self.cuts[-1]:
            raise IndexError(f"no reducer has chunk {chunk} of {self.num_chunks}")
        return self.reducers[bisect_right(self.cuts, chunk) - 1]

    def chunks_of(self, reducer: str) -> range:
        """The chunks that a peer aggregates; none where it is no reducer."""
        if reducer not in self.reducers:
            return range(0)
        index = self.reducers.index(reducer)
        return range(self.cuts[index], self.cuts[index + 1])

    def sends_to(self, peer: str) -> set[str]:
        """The peers that a member sends chunks to."""
        if self.way is Way.EVERYBODY:
            return {*self.members} - {peer}
        row = self.row_of(peer)
        if row is None:
            return {*self.reducers} - {peer}
        mine = self.row_plans[row].chunks_of(peer)
        homes = {
            other
            for number, plan in enumerate(self.row_plans)
            for other in plan.reducers
            if self._of_row(number, _common(mine, plan.chunks_of(other)))
        }
        return {*self.row_plans[row].reducers, *homes} - {peer}

    # With Way.GRID

    @cached_property
    def row_plans(self) -> tuple[ReductionPlan, ...]:
        """Each row, as the butterfly that it is by itself."""
        plans = []
        members, reducers = pairwise(self.rows), pairwise(self.row_reducers)
        for row, ((first, last), (low, high)) in enumerate(zip(members, reducers, strict=True)):
            plans.append(
                replace(
                    self,
                    members=self.members[first:last],
                    weights=self.weights[first:last],
                    reducers=self.reducers[low:high],
                    cuts=self.cuts[low + row : high + row + 1],
                    way=Way.BUTTERFLY,
                    rows=(),
                    row_reducers=(),
                )
            )
        return tuple(plans)

    def row_of(self, peer: str) -> int | None:
        """The row that a peer is a member of; None for none."""
        return self._rows_by_peer.get(peer)

    @cached_property
    def _rows_by_peer(self) -> dict[str, int]:
        return {peer: row for row, plan in enumerate(self.row_plans) for peer in plan.members}

    def row_reducers_of(self, chunk: int) -> tuple[str, ...]:
        """The peers that aggregate a chunk, each in its row, in the order of the rows: so their sums are added."""
        return tuple(plan.reducer_of(chunk) for plan in self.row_plans)

    def home_of(self, chunk: int) -> str:
        """The peer of these that adds what the rows gave: of another row for each chunk, one row after the other."""
        return self.row_plans[chunk % len(self.row_plans)].reducer_of(chunk)

    def chunks_at(self, peer: str) -> range:
        """The chunks whose home a member is."""
        row = self._rows_by_peer[peer]
        return self._of_row(row, self.row_plans[row].chunks_of(peer))

    def _of_row(self, row: int, chunks: range) -> range:
        """Choose of chunks those whose home is in a row."""
        num_rows = len(self.row_plans)
        return range(chunks.start + (row - chunks.start) % num_rows, chunks.stop, num_rows)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
