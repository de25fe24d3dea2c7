"""The bytes of one connection on their way in: headers put together, payload put where it belongs.

Payload goes to the reader's own memory while that is lent, and into the stream's inbox otherwise. Payload
that finds no room, because the connection holds too much unread, is told and dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from neurogrid.p2p.link.frames import HEADER_BYTES
from neurogrid.p2p.link.limits import ConnectionBuffers
from neurogrid.p2p.link.stream_state import StreamState
from neurogrid.p2p.link.windows import Windows

__all__ = ["Inflow"]


class Inflow:
    """Cuts what arrives into headers and payload.

    Args:
        buffers: the connection's account of unread bytes.
        windows: told of the bytes that are read at once, or dropped, for the peer's credit.
        on_header: called with a buffer and the offset of a header in it; it may call `expect_payload`.
        on_data: called with a stream that has got bytes.
        on_too_much: called with a stream whose bytes the connection cannot hold; it has to reset it.
        on_end: called with the stream and the flags of a frame whose payload is complete.
    """

    def __init__(
        self,
        *,
        buffers: ConnectionBuffers,
        windows: Windows,
        on_header: Callable[[bytes | bytearray, int], None],
        on_data: Callable[[StreamState], None],
        on_too_much: Callable[[StreamState], None],
        on_end: Callable[[StreamState, int], None],
    ) -> None:
        self._buffers = buffers
        self._windows = windows
        self._on_header = on_header
        self._on_data = on_data
        self._on_too_much = on_too_much
        self._on_end = on_end
        self._head = bytearray()  # of a header that came in pieces
        self._left = 0  # bytes of payload to come
        self._flags = 0
        self._stream: StreamState | None = None  # None: the payload is dropped

    def receive(self, data: bytes) -> None:
        """Take the next bytes; pieces of `data` may be kept."""
        at, stop = 0, len(data)
        while at < stop:
            if self._left:
                num_bytes = min(self._left, stop - at)
                self._take_payload(data, at, at + num_bytes)
                at += num_bytes
            elif not self._head and stop - at >= HEADER_BYTES:
                self._on_header(data, at)
                at += HEADER_BYTES
            else:
                num_bytes = min(HEADER_BYTES - len(self._head), stop - at)
                self._head += data[at : at + num_bytes]
                at += num_bytes
                if len(self._head) == HEADER_BYTES:
                    head, self._head = self._head, bytearray()
                    self._on_header(head, 0)

    def expect_payload(self, stream: StreamState | None, num_bytes: int, flags: int) -> None:
        """Take the bytes that follow as the payload of a frame; of no stream if it is to be dropped."""
        self._left = num_bytes
        self._flags = flags
        self._stream = stream

    def forget(self, stream: StreamState) -> None:
        """A stream was given up: the rest of its frame, if it is the one that arrives, is dropped."""
        if self._stream is stream:
            self._stream = None

    def target(self, num_bytes: int) -> memoryview | None:
        """Return memory that a reader lent for the next `num_bytes`, if these are one frame's payload; else None."""
        stream = self._stream
        if stream is None or stream.loan is None or not 0 < num_bytes <= self._left:
            return None
        free = stream.loan.free
        return free[:num_bytes] if num_bytes <= len(free) else None

    def placed(self, num_bytes: int) -> None:
        """The bytes are where `target` has pointed."""
        stream = self._stream
        assert stream is not None
        self._left -= num_bytes
        self._fill_loan(stream, num_bytes)
        if not self._left:
            self._end()

    def _take_payload(self, data: bytes, start: int, stop: int) -> None:
        self._left -= stop - start
        stream = self._stream
        if stream is not None:
            if stream.is_discarding:
                self._windows.credit(stream, stop - start)
            else:
                self._deliver(stream, data, start, stop)
        if not self._left:
            self._end()

    def _deliver(self, stream: StreamState, data: bytes, start: int, stop: int) -> None:
        if stream.loan is not None:
            free = stream.loan.free
            num_bytes = min(stop - start, len(free))
            free[:num_bytes] = memoryview(data)[start : start + num_bytes]
            self._fill_loan(stream, num_bytes)
            start += num_bytes
        if start == stop:
            return
        if self._buffers.take(stop - start):
            stream.inbox.append(data, start, stop)
            self._on_data(stream)
        else:
            self._on_too_much(stream)

    def _fill_loan(self, stream: StreamState, num_bytes: int) -> None:
        loan = stream.loan
        assert loan is not None
        loan.filled += num_bytes
        is_full = loan.filled == len(loan.memory)
        if is_full:
            stream.loan = None
        self._windows.credit(stream, num_bytes)
        if is_full or not loan.wants_all:
            self._on_data(stream)

    def _end(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            self._on_end(stream, self._flags)
