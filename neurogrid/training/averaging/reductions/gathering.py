"""The part of a vector that one peer aggregates: rows come in any order, and are added in the order of their senders.

Pure, but for the clock time that adding takes. Whoever drives it adds (`ChunkRows.add`) in a thread or not; rows that
are not their turn yet wait encoded, which is the smaller form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from neurogrid.errors import LocalProtocolError, RequestRefusedError
from neurogrid.p2p.wire import Data, ErrorCode
from neurogrid.training.averaging.aggregators import Accumulator, Aggregator, Mean, RowSum
from neurogrid.training.averaging.codecs import Codec, parse_codec
from neurogrid.training.averaging.plan import ReductionPlan, Way
from neurogrid.training.averaging.reductions.result import PLAIN

__all__ = ["MAX_WINDOW", "OF_ROWS", "ChunkRows", "Gathering", "Row", "gather"]

MAX_WINDOW = 16
"""Chunks of one member that may wait here to be answered."""

OF_ROWS = parse_codec(PLAIN)
"""The form in which a row of a grid hands on what it gave: what a form loses is lost twice, and not three times."""


class Row:
    """One sender's chunk, encoded.

    Attributes:
        place: its sender's, among those of the chunk.
        request_id: of the message that brought it; 0 for one's own.
    """

    __slots__ = ("data", "place", "request_id")

    def __init__(self, place: int, data: Data, request_id: int) -> None:
        self.place = place
        self.data = data
        self.request_id = request_id


class ChunkRows:
    """The rows of one chunk.

    Attributes:
        chunk: its index.
        places: peer ids of those that rows come from, in the order in which they are added, and the place of each.
        senders: the same, by place.
        weights: of each.
        is_busy: somebody adds.

    Args:
        counts: of each sender, how often it counts (`Accumulator.add`).
        is_sum: the rows are not divided by their number, since others are to be added.
        out: memory for what a `Mean` makes of them; new if None.
    """

    def __init__(
        self,
        chunk: int,
        num_elements: int,
        places: Mapping[str, int],
        weights: Sequence[float],
        codec: Codec,
        aggregator: Aggregator,
        counts: Sequence[float],
        *,
        is_sum: bool,
        out: Tensor | None = None,
    ) -> None:
        self._out = out
        self.chunk = chunk
        self.num_elements = num_elements
        self.places, self.senders, self.weights = places, tuple(places), weights
        self.is_busy = False
        self._counts, self._is_sum = counts, is_sum
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
        return self._num_taken == len(self.senders)

    def has(self, place: int) -> bool:
        """Whether the row of the sender at this place has come."""
        return place in self._came

    @property
    def absent(self) -> frozenset[str]:
        """The senders whose rows have not come."""
        return frozenset(
            peer_id for place, peer_id in enumerate(self.senders) if place not in self._came
        )

    def put(self, row: Row) -> None:
        """Keep a row until its turn."""
        self._waiting[row.place] = row
        self._came.add(row.place)

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
            NotFiniteError: an element is not finite, or the aggregate would not be; `index` is the place at fault.
        """
        if row.place == 0 and isinstance(self._aggregator, Mean):
            self._accumulator = self._aggregator.begin(self.num_elements, out=self._out)
        if self._accumulator is None:
            self._decoded.append(self._decode(row.data))
        else:
            counts = self._counts[row.place] if self._counts else 1.0
            pieces = self._pieces_of(row.data)
            self._accumulator.add_pieces(pieces, self.weights[row.place], counts=counts)

    def _decode(self, data: Data) -> Tensor:
        if self._codec.name != PLAIN:
            return self._codec.decode(data, self.num_elements)
        # Not copied: an accumulator does not keep it, and looks itself whether it is finite, as aggregators do.
        return torch.frombuffer(data, dtype=torch.float32)

    def _pieces_of(self, data: Data) -> Iterable[Tensor]:
        if self._codec.name != PLAIN:
            return self._codec.decode_in_pieces(data, self.num_elements)
        return [self._decode(data)]

    def finish(self) -> Tensor:
        """The aggregate of all rows, float32 [num_elements]; zeros where none has a weight.

        Raises:
            NotFiniteError: it would not be finite; `index` is the place at fault.
        """
        if not any(self.weights):
            return torch.zeros(self.num_elements, dtype=torch.float32)
        if self._accumulator is not None:
            return self._accumulator.finish_sum() if self._is_sum else self._accumulator.finish()
        decoded, self._decoded = self._decoded, []
        return self._aggregator.aggregate(decoded, self.weights)


class Gathering:
    """The chunks that a peer aggregates, and what has come of them.

    Args:
        plan: whose chunks they are.
        chunks: indices of those that are aggregated here.
        places: of each chunk, the peer ids that rows come from, in the order in which they are added, and the place of
            each in it.
        weights: of each place.
        codec: the form in which they come.
        counts: of each place, how often it counts (`Accumulator.add`); empty where each does once.
        hands_on: what is aggregated here is no answer yet, but a sum that goes on to where that is made.

    Attributes:
        chunks: as given.
        memory_of: gives the memory for the aggregate of a chunk, float32 of its elements; None where that is new.
        unanswered: by sender, its rows that came and were not answered.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        chunks: range,
        places: Callable[[int], Mapping[str, int]],
        weights: Sequence[float],
        codec: Codec,
        aggregator: Aggregator,
        counts: Sequence[float] = (),
        *,
        hands_on: bool = False,
    ) -> None:
        self.chunks = chunks
        self.memory_of: Callable[[int], Tensor] | None = None
        self.unanswered: Counter[str] = Counter()
        self._plan = plan
        self._find_places = places
        self._weights = weights
        self._codec = codec
        self._aggregator = aggregator
        self._counts = counts
        self._hands_on = hands_on
        self._open: dict[int, ChunkRows] = {}  # begun, and not finished
        self._finished: set[int] = set()

    def put(self, peer_id: str, chunk: int, data: Data, request_id: int) -> ChunkRows:
        """Keep what a member sent, if it is right; returns the chunk, which may be ready now.

        Raises:
            RequestRefusedError: it is not; the text says why.
        """
        rows = self._open.get(chunk)
        places = rows.places if rows is not None else self._places_of(chunk)
        place = places.get(peer_id)
        if place is None:
            raise RequestRefusedError(
                f"chunk {chunk} is not aggregated here", code=ErrorCode.POSITION_MISMATCH
            )
        if chunk in self._finished or (rows is not None and rows.has(place)):
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
                chunk,
                stop - start,
                places,
                self._weights,
                self._codec,
                self._aggregator,
                self._counts,
                is_sum=self._hands_on,
                out=self.memory_of(chunk) if self.memory_of is not None else None,
            )
        rows.put(Row(place, data, request_id))
        if request_id:
            self.unanswered[peer_id] += 1
        return rows

    def _places_of(self, chunk: int) -> Mapping[str, int]:
        return self._find_places(chunk) if chunk in self.chunks else {}

    def missing(self, own: str) -> frozenset[str]:
        """The senders that the first chunk which lacks rows waits for.

        Not those whose rows of later chunks have not come: they may wait for the aggregate of this one. Nobody, while
        an answer is owed to all of them that is made elsewhere.

        Args:
            own: this peer, which is not among them.
        """
        for chunk in self.chunks:
            if chunk in self._finished:
                continue
            rows = self._open.get(chunk)
            absent = frozenset(self._places_of(chunk)) if rows is None else rows.absent
            if absent - {own}:
                return absent - {own}
            if self._hands_on and not absent:
                break
        return frozenset()

    def close(self, chunk: int) -> None:
        """A chunk is aggregated."""
        del self._open[chunk]
        self._finished.add(chunk)


def gather(
    plan: ReductionPlan, own: str, codec: Codec, aggregator: Aggregator
) -> tuple[ReductionPlan, Gathering, Gathering | None]:
    """Gather by a plan what one peer aggregates.

    Args:
        own: its peer id.
        codec, aggregator: those that the plan names.

    Returns:
        The plan of those that it exchanges chunks with as members do: of its row in a grid, else all of it; what it
        aggregates for them; and what of the rows' aggregates comes together there, None without rows.

    Raises:
        LocalProtocolError: it has no place in a grid, or rows cannot be put together by the aggregator.
    """
    row, sums = plan, None
    if plan.way is Way.GRID:
        number = plan.row_of(own)
        if number is None:
            raise LocalProtocolError("this peer is neither member nor reducer of the plan")
        if not isinstance(aggregator, Mean):
            raise LocalProtocolError(f"{plan.aggregator} of rows is not that of their members")
        row = plan.row_plans[number]
        of_rows = [RowSum.of(each.weights) for each in plan.row_plans]
        weights, counts = [its.weight for its in of_rows], [its.counts for its in of_rows]
        sums = Gathering(
            plan,
            plan.chunks_at(own),
            lambda chunk: _places(plan.row_reducers_of(chunk)),
            weights,
            OF_ROWS,
            Mean(),
            counts,
        )
    chunks = row.chunks_of(own)
    if plan.way is Way.EVERYBODY:
        chunks = range(plan.num_chunks if own in plan.members else 0)
    places = _places(row.members)
    gathering = Gathering(
        plan,
        chunks,
        lambda chunk: places,
        row.weights,
        codec,
        aggregator,
        hands_on=sums is not None,
    )
    return row, gathering, sums


def _places(senders: Iterable[str]) -> dict[str, int]:
    return {peer_id: place for place, peer_id in enumerate(senders)}
