"""Bytes in, messages out, for one direction of one stream.

A table says what a first byte may be: that of `MessageDecoder` is 1.0.0 with its legacy header, that of
`StreamDecoder` 1.1.0 without. No decoder does I/O, and none looks into Data.

Strategy: a header is gathered in at most 50 bytes. Data is gathered in a bytearray of its own,
which is given away with the message: its memory is aligned and writable, and nobody else's. The
buffer grows with what arrived, to eight times that at most, so a length that is announced and never
sent costs nothing, and less than 1.7 times the length is copied in all, however the input was cut.
A transport that can receive into memory of ours asks for the rest of a large Data, and copies nothing.
"""

from __future__ import annotations

import mmap
import sys
from typing import Final

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.wire.codes import MessageCode, MessageTable
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.headers import Header, decode_header, header_bytes
from neurogrid.p2p.wire.limits import DEFAULT_LIMITS, Limits
from neurogrid.p2p.wire.messages import Data, TensorMessage
from neurogrid.p2p.wire.types import ErrorCode, v10_table, v11_table

__all__ = ["Decoder", "MessageDecoder", "StreamDecoder"]

# Bytes. Below this a buffer is made whole: smaller steps save nothing that matters beside a
# stream's own cost.
_FIRST_BUFFER: Final = 16 * 1024
# Fourfold steps, but no last step for a remainder: once an eighth has arrived, room is made for all.
_GROWTH: Final = 4
_LAST_STEP: Final = 8
# Bytes. Less than this is not worth a buffer of its own: it comes with one read, and with what follows it.
_LEAST_DIRECT: Final = 64 * 1024
# Bytes: a chunk of weights with its numbers. Pages of memory that are mapped anew cost more than clearing it.
_LARGEST_HEAP_BUFFER: Final = 2 * 1024 * 1024

_NO_BODY: Final = memoryview(bytearray())


class Decoder:
    """The decoder of the protocol that a table describes.

    Args:
        table: what may stand on the stream, and the largest Data of each message.
        from_peer: the peer id to put into each message.
    """

    def __init__(self, table: MessageTable, *, from_peer: str | None = None) -> None:
        self._table = table
        self._from_peer = from_peer
        self._head = bytearray()  # of the header that is being gathered
        self._header: Header | None = None  # complete, its Data is being gathered
        self._body = _NO_BODY
        self._filled = 0
        self._eof = False
        self._error: RemoteProtocolError | None = None

    @property
    def error(self) -> RemoteProtocolError | None:
        """The violation found, if any: the next call raises it. Ask before waiting for more."""
        return self._error

    @property
    def awaited_bytes(self) -> int:
        """The Data bytes that the header of the message under way announced, those that arrived
        included; 0 between messages and within a header. A reader may have to hold that many next."""
        return 0 if self._header is None else self._header.data_bytes

    @property
    def num_gathered(self) -> int:
        """The bytes of the message under way that have arrived, those of its header included; 0 between messages."""
        if self._header is None:
            return len(self._head)
        return header_bytes(self._header.msg_type) + self._filled

    def receive_data(self, data: Data) -> list[TensorMessage]:
        """Take the next bytes of the stream; give the messages that they complete, in order.

        Their `data` is a writable memoryview over memory that belongs to the message alone; the
        input is not kept. Messages that were complete before a violation are still returned; the
        violation is raised by the next call (and told by `error` at once), so the outcome does not
        depend on how the input was cut.

        Raises:
            RemoteProtocolError: an unknown type (PROTOCOL_VIOLATION), a length over its limit (LIMIT_EXCEEDED), or
                one for which this machine has no memory (BUSY). The decoder stays broken: every later call raises it
                again.
            LocalProtocolError: called after `receive_eof`.
        """
        if self._error is not None:
            raise self._error
        view = memoryview(data).cast("B")
        if self._eof and view:
            raise LocalProtocolError("data after the end of the stream")
        messages: list[TensorMessage] = []
        at = 0
        try:
            while at < len(view):
                if self._header is None:
                    at += self._take_header(view[at:])
                else:
                    at += self._take_body(view[at:], self._header.data_bytes)
                if self._header is not None and self._filled == self._header.data_bytes:
                    messages.append(self._finish(self._header))
        except RemoteProtocolError as error:
            self._error = error
            if not messages:
                raise
        return messages

    def get_buffer(self) -> memoryview | None:
        """Memory for the rest of a large Data, so that a transport can receive into it without a copy.

        Tell `buffer_filled` how much of it was written, from its start, before anything else is called. None
        when the next bytes belong to `receive_data`: between messages, within a header, for a small rest.

        Raises:
            RemoteProtocolError: the decoder is broken, or this machine has no memory for it (BUSY).
        """
        if self._error is not None:
            raise self._error
        if self._header is None or self._header.data_bytes - self._filled < _LEAST_DIRECT:
            return None
        if len(self._body) < self._header.data_bytes:
            try:
                self._move_body(_whole_buffer(self._header.data_bytes))
            except RemoteProtocolError as error:
                self._error = error
                raise
        return self._body[self._filled : self._header.data_bytes]

    def buffer_filled(self, num_bytes: int) -> list[TensorMessage]:
        """The first `num_bytes` of `get_buffer` are bytes of the stream; gives the message if it is complete.

        Raises:
            LocalProtocolError: there is no such buffer, or it is smaller.
        """
        if self._header is None or num_bytes > len(self._body) - self._filled:
            raise LocalProtocolError(f"no buffer for {num_bytes} bytes was lent")
        self._filled += num_bytes
        if self._filled < self._header.data_bytes:
            return []
        return [self._finish(self._header)]

    def receive_eof(self) -> None:
        """The peer ended its side of the stream.

        Raises:
            RemoteProtocolError: in the middle of a message (PROTOCOL_VIOLATION), or broken before.
        """
        if self._error is not None:
            raise self._error
        self._eof = True
        if self._header is not None:
            cut = f"{self._filled} of {self._header.data_bytes} bytes of data"
        elif self._head:
            cut = f"{len(self._head)} bytes of a header"
        else:
            return
        self._error = violation(f"the stream ended after {cut}")
        raise self._error

    def _take_header(self, view: memoryview) -> int:
        """Move bytes into the header, read it when it is whole; return how many were taken."""
        head = self._head
        msg_type = self._type_of(head[0] if head else view[0])
        missing = header_bytes(msg_type) - len(head)
        if len(view) < missing:
            head += view
            return len(view)
        whole = head + view[:missing] if head else view[:missing]
        self._header = decode_header(msg_type, whole, max_data=self._table.max_data(msg_type))
        head.clear()
        return missing

    def _type_of(self, first: int) -> MessageCode | None:
        msg_type = self._table.by_number.get(first)
        if msg_type is None and (first or self._table.max_legacy is None):
            raise violation(f"0x{first:02x} is no message type here")
        return msg_type

    def _take_body(self, view: memoryview, wanted: int) -> int:
        """Move bytes into the body; return how many were taken."""
        taken = min(wanted - self._filled, len(view))
        if taken == wanted:
            self._body = memoryview(bytearray(view[:taken]))
        else:
            if self._filled + taken > len(self._body):
                self._grow(self._filled + taken, wanted)
            self._body[self._filled : self._filled + taken] = view[:taken]
        self._filled += taken
        return taken

    def _grow(self, arrived: int, wanted: int) -> None:
        """Make room for a multiple of what arrived, or for all that is wanted."""
        room = wanted
        if wanted > max(_FIRST_BUFFER, _LAST_STEP * arrived):
            room = max(_FIRST_BUFFER, _GROWTH * arrived)
        self._move_body(_heap_buffer(room))

    def _move_body(self, larger: memoryview) -> None:
        larger[: self._filled] = self._body[: self._filled]
        self._body = larger

    def _finish(self, header: Header) -> TensorMessage:
        # One that is given away is nobody else's, be it empty.
        body = self._body if header.data_bytes else memoryview(bytearray())
        self._body = _NO_BODY
        self._filled, self._header = 0, None
        return TensorMessage(
            header.msg_type,
            header.layer_id,
            header.seq_id,
            header.request_id,
            body,
            header.trace_context,
            self._from_peer,
        )


def _whole_buffer(num_bytes: int) -> memoryview:
    """Writable memory that costs what is written to it, or, up to the size of a chunk, what it announces."""
    if num_bytes <= _LARGEST_HEAP_BUFFER:
        return _heap_buffer(num_bytes)
    try:
        if sys.platform == "win32":
            return memoryview(mmap.mmap(-1, num_bytes))
        # Private: a process that is forked must not see what arrives later.
        return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    except (OSError, MemoryError) as exc:
        raise _no_memory(num_bytes) from exc


def _heap_buffer(num_bytes: int) -> memoryview:
    try:
        return memoryview(bytearray(num_bytes))
    except MemoryError as exc:
        raise _no_memory(num_bytes) from exc


def _no_memory(num_bytes: int) -> RemoteProtocolError:
    """The end of this stream alone: what the peer announced is not worth the process."""
    return RemoteProtocolError(
        f"there is no memory here for a message of {num_bytes} bytes", code=ErrorCode.BUSY
    )


_V10_TABLE: Final = v10_table()
_V11_TABLE: Final = v11_table()


class MessageDecoder(Decoder):
    """Decoder of a stream of `/neurogrid/tensor/1.0.0`; a first byte 0x00 begins a legacy header.

    Args:
        limits: the largest Data for each type.
        from_peer: the peer id to put into each message.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS, *, from_peer: str | None = None) -> None:
        table = _V10_TABLE if limits is DEFAULT_LIMITS else v10_table(limits)
        super().__init__(table, from_peer=from_peer)


class StreamDecoder(Decoder):
    """Decoder of a stream of `/neurogrid/tensor/1.1.0`: extended and traced headers only.

    Args:
        limits: the largest Data for each type.
        from_peer: the peer id to put into each message.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS, *, from_peer: str | None = None) -> None:
        table = _V11_TABLE if limits is DEFAULT_LIMITS else v11_table(limits)
        super().__init__(table, from_peer=from_peer)
