"""The part of a vector that one peer aggregates: rows come in any order, and are added in the order of the members.

Pure, but for the clock time that adding takes. Whoever drives it adds (`ChunkRows.add`) in a thread or not; rows that
are not their turn yet wait encoded, which is the smaller form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.wire import Data, ErrorCode
from neurogrid.training.averaging.aggregators import Accumulator, Aggregator, Mean
from neurogrid.training.averaging.codecs import Codec
from neurogrid.training.averaging.plan import ReductionPlan
from neurogrid.training.averaging.reductions.result import PLAIN

__all__ = ["MAX_WINDOW", "ChunkRows", "Gathering", "Row"]

MAX_WINDOW = 16
"""Chunks of one member that may wait here to be answered."""


class Row:
    """One member's chunk, encoded.

    Attributes:
        member: its place among the members of the plan.
        request_id: of the message that brought it; 0 for one's own.
    """

    __slots__ = ("data", "member", "request_id")

    def __init__(self, member: int, data: Data, request_id: int) -> None:
        self.member = member
        self.data = data
        self.request_id = request_id


class ChunkRows:
    """The rows of one chunk.

    Attributes:
        chunk: its index.
        is_busy: somebody adds.
    """

    def __init__(
        self,
        chunk: int,
        num_elements: int,
        plan: ReductionPlan,
        codec: Codec,
        aggregator: Aggregator,
    ) -> None:
        self.chunk = chunk
        self.num_elements = num_elements
        self.is_busy = False
        self._plan = plan
        self._codec = codec
        self._aggregator = aggregator
        self._accumulator: Accumulator | None = None
        self._decoded: list[Tensor] = []
        self._waiting: dict[int, Row] = {}
        self._came: set[int] = set()
        self._num_taken = 0

    @property
    def is_ready(self) -> bool:
        """Whether the row whose turn it is has come."""
        return self._num_taken in self._waiting

    @property
    def is_complete(self) -> bool:
        """Whether all rows were taken."""
        return self._num_taken == len(self._plan.members)

    def has(self, member: int) -> bool:
        """Whether this member's row has come."""
        return member in self._came

    def put(self, row: Row) -> None:
        """Keep a row until its turn."""
        self._waiting[row.member] = row
        self._came.add(row.member)

    def take(self) -> Row | None:
        """The row whose turn it is, if it has come: it must be added next."""
        row = self._waiting.pop(self._num_taken, None)
        if row is not None:
            self._num_taken += 1
        return row

    def add(self, row: Row) -> None:
        """Decode a row and add it.

        Raises:
            RemoteProtocolError: it is no form of the codec.
            NotFiniteError: an element is not finite, or the aggregate would not be; `index` is the member at fault.
        """
        values = self._decode(row.data)
        if row.member == 0 and isinstance(self._aggregator, Mean):
            self._accumulator = self._aggregator.begin(self.num_elements)
        if self._accumulator is None:
            self._decoded.append(values)
        else:
            self._accumulator.add(values, self._plan.weights[row.member])

    def _decode(self, data: Data) -> Tensor:
        if self._codec.name != PLAIN:
            return self._codec.decode(data, self.num_elements)
        # Not copied: an accumulator does not keep it, and looks itself whether it is finite, as aggregators do.
        return torch.frombuffer(data, dtype=torch.float32)

    def finish(self) -> Tensor:
        """The aggregate of all rows, float32 [num_elements].

        Raises:
            NotFiniteError: it would not be finite; `index` is the member at fault.
        """
        if self._accumulator is not None:
            return self._accumulator.finish()
        decoded, self._decoded = self._decoded, []
        return self._aggregator.aggregate(decoded, self._plan.weights)


class Gathering:
    """The chunks that a peer aggregates, and what has come of them.

    Args:
        chunks: indices of those that are aggregated here.

    Attributes:
        unanswered: by member, its rows that came and were not answered.
    """

    def __init__(
        self, plan: ReductionPlan, chunks: range, codec: Codec, aggregator: Aggregator
    ) -> None:
        self.chunks = chunks
        self.unanswered: Counter[str] = Counter()
        self._plan = plan
        self._codec = codec
        self._aggregator = aggregator
        self._members: Mapping[str, int] = {
            peer_id: index for index, peer_id in enumerate(plan.members)
        }
        self._open: dict[int, ChunkRows] = {}  # begun, and not finished
        self._finished: set[int] = set()

    def is_member(self, peer_id: str) -> bool:
        """Whether this peer's vector is aggregated."""
        return peer_id in self._members

    def put(self, peer_id: str, chunk: int, data: Data, request_id: int) -> ChunkRows:
        """Keep what a member sent, if it is right; returns the chunk, which may be ready now.

        Raises:
            RequestRefusedError: it is not; the text says why.
        """
        member = self._members.get(peer_id)
        if member is None:
            raise RequestRefusedError(
                f"{peer_id} is no member of this reduction", code=ErrorCode.UNAUTHORIZED
            )
        if chunk not in self.chunks:
            raise RequestRefusedError(
                f"chunk {chunk} is not aggregated here", code=ErrorCode.POSITION_MISMATCH
            )
        rows = self._open.get(chunk)
        if chunk in self._finished or (rows is not None and rows.has(member)):
            raise RequestRefusedError(
                f"chunk {chunk} came twice", code=ErrorCode.PROTOCOL_VIOLATION
            )
        start, stop = self._plan.chunk_span(chunk)
        expected = self._codec.num_bytes(stop - start)
        if len(data) != expected:
            raise RequestRefusedError(
                f"chunk {chunk} has {len(data)} B, and {stop - start} elements are {expected} B",
                code=ErrorCode.SHAPE_MISMATCH,
            )
        if self.unanswered[peer_id] >= MAX_WINDOW:
            raise RequestRefusedError(
                f"{MAX_WINDOW} chunks wait to be answered", code=ErrorCode.LIMIT_EXCEEDED
            )
        if rows is None:
            rows = self._open[chunk] = ChunkRows(
                chunk, stop - start, self._plan, self._codec, self._aggregator
            )
        rows.put(Row(member, data, request_id))
        if request_id:
            self.unanswered[peer_id] += 1
        return rows

    def missing(self, own: str) -> frozenset[str]:
        """The members that the first chunk which lacks rows waits for.

        Not those whose rows of later chunks have not come: they may wait for the aggregate of this one.

        Args:
            own: this peer, which is not among them.
        """
        for chunk in self.chunks:
            if chunk in self._finished:
                continue
            rows = self._open.get(chunk)
            absent = {
                peer_id
                for peer_id, index in self._members.items()
                if peer_id != own and (rows is None or not rows.has(index))
            }
            if absent:
                return frozenset(absent)
        return frozenset()

    def close(self, chunk: int) -> None:
        """A chunk is aggregated."""
        del self._open[chunk]
        self._finished.add(chunk)
