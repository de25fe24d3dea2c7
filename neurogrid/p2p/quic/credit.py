"""Flow control by what was read: how much a peer may send, and how many streams it may open.

qh3 doubles each limit as soon as half of it has arrived, whether or not anybody reads, and again when the peer
complains that it is blocked: a reader that has stopped would be sent gigabytes. So what qh3 takes for its limits and
for its list of streams to tell the peer about are objects of ours, which it cannot raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from qh3._hazmat import RangeSet

__all__ = ["Allowance", "FinishedStreams", "PendingGrants", "StreamGrant"]


class Allowance:
    """A limit of the connection, in the form of qh3's `Limit`. Only `raise_to` raises it.

    Attributes:
        frame_type, name: of the frame that tells the peer.
        used: how much the peer has used up.
        sent: what the peer was told last.
    """

    def __init__(self, frame_type: int, name: str, value: int) -> None:
        self.frame_type = frame_type
        self.name = name
        self.used = 0
        self.sent = value
        self._value = value

    @property
    def value(self) -> int:
        """Amount that the peer may use in all."""
        return self._value

    @value.setter
    def value(self, _: int) -> None:
        """qh3 would double it."""

    def raise_to(self, value: int) -> None:
        """Allow more; never less."""
        self._value = max(self._value, value)


class StreamGrant:
    """The bytes that the peer may send on one stream, in the form of a stream that qh3 tells the peer about.

    Attributes:
        stream_id: of the stream.
        max_stream_data_local: bytes that the peer may send in all.
        max_stream_data_local_sent: what the peer was told last.
        highest_offset: always 0, so that qh3 sees no reason to allow more.
    """

    __slots__ = (
        "_stream",
        "highest_offset",
        "max_stream_data_local",
        "max_stream_data_local_sent",
        "stream_id",
    )

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.stream_id: int = stream.stream_id
        self.max_stream_data_local: int = stream.max_stream_data_local
        self.max_stream_data_local_sent = self.max_stream_data_local
        self.highest_offset = 0

    @property
    def receiver(self) -> StreamGrant:
        """The object in which qh3 looks for what arrived: this one."""
        return self

    @property
    def is_finished(self) -> bool:
        """Whether all has arrived, so that the peer need not be told."""
        return bool(self._stream.receiver.is_finished)

    def raise_to(self, value: int) -> None:
        """Allow more, and expect it."""
        self.max_stream_data_local = self._stream.max_stream_data_local = value


class PendingGrants:
    """The grants that the peer is to be told, in the form of qh3's set of streams with new limits."""

    def __init__(self) -> None:
        self._grants: set[StreamGrant] = set()

    def add(self, grant: object) -> None:
        """Add a grant; qh3 adds streams, for which it is not to decide."""
        if isinstance(grant, StreamGrant):
            self._grants.add(grant)

    def discard(self, stream: object) -> None:
        """A stream is over; its grant knows."""

    def clear(self) -> None:
        """All grants have been told."""
        self._grants.clear()

    def __iter__(self) -> Iterator[StreamGrant]:
        return iter(self._grants)

    def __len__(self) -> int:
        return len(self._grants)


class FinishedStreams:
    """The numbers of streams that are over, in the form of qh3's set of them, but as ranges: it never shrinks.

    Args:
        forget: called with the number of each stream that ends.
    """

    def __init__(self, forget: Callable[[int], None]) -> None:
        self._forget = forget
        self._ranges: dict[int, RangeSet] = {}  # by the stream's opener and its direction

    def add(self, stream_id: int) -> None:
        """A stream is over."""
        index = stream_id >> 2
        self._ranges.setdefault(stream_id & 3, RangeSet()).add(index, index + 1)
        self._forget(stream_id)

    def __contains__(self, stream_id: int) -> bool:
        ranges = self._ranges.get(stream_id & 3)
        return ranges is not None and (stream_id >> 2) in ranges
