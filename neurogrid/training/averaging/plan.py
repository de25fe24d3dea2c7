"""The plan of one reduction: whose vectors, cut how, summed where, and in what form they travel.

Pure: made by the leader of a group, announced to its members, and carried out by `reductions`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ReductionPlan", "Way"]


class Way(StrEnum):
    """The way that vectors take to become one."""

    BUTTERFLY = "butterfly"
    """Each reducer has a part: a chunk is sent to its reducer, and the aggregate is the answer. A server that averages
    for all is the one reducer of such a plan."""

    EVERYBODY = "everybody"
    """Each member sends its whole vector to every other, and aggregates by itself."""


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """One reduction.

    Attributes:
        reduction: u64, chosen at random by the leader; no two plans have the same.
        members: peer ids (base58) of those whose vectors are aggregated, in the order in which they are added.
        weights: of each member, finite, not negative, at least one above zero.
        reducers: peer ids of those that aggregate parts; they need not be members. Empty with `Way.EVERYBODY`.
        cuts: chunk indices, one more than `reducers`: reducer i aggregates the chunks [cuts[i], cuts[i + 1]).
        num_elements: float32 elements of the vector.
        chunk_elements: elements of every chunk but the last; a multiple of the codec's block.
        codec: the form of what members send (`parse_codec`).
        result_codec: the form of the aggregate. What is applied is its decoded form, also by who encoded it.
        aggregator: how rows become one (`parse_aggregator`).
        way: which of the two ways.
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
        for index, reducer in enumerate(self.reducers):
            if self.cuts[index] <= chunk < self.cuts[index + 1]:
                return reducer
        raise IndexError(f"no reducer has chunk {chunk} of {self.num_chunks}")

    def chunks_of(self, reducer: str) -> range:
        """The chunks that a peer aggregates; none where it is no reducer."""
        if reducer not in self.reducers:
            return range(0)
        index = self.reducers.index(reducer)
        return range(self.cuts[index], self.cuts[index + 1])
