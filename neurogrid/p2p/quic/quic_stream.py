"""One stream of a `QuicMuxedConn`, with the same face as a stream of the link over TCP.

A write is handed to the state machine piece by piece, never more than a buffer ahead of what was sent. Cancelled, it
hands over no more: the peer has a prefix of it, and the connection and its other streams know nothing of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamReset

from neurogrid.p2p.link.inbox import Inbox
from neurogrid.p2p.link.muxed_stream import MuxedStream
from neurogrid.p2p.quic.window import StreamWindow
from neurogrid.p2p.streams.intake import Intake, feed

if TYPE_CHECKING:
    from neurogrid.p2p.quic.connection import QuicMuxedConn

__all__ = ["QuicMuxedStream"]

# When go-libp2p closes a stream it says at once that it reads no more, and it may do so before it has read our end of
# the negotiation. Over TCP what still comes is dropped there; so what is short is dropped here.
STOPPED_BYTES = 64 * 1024


class QuicMuxedStream(MuxedStream):
    """Made by `QuicMuxedConn.open_stream` and `accept_stream`. One task may read at a time, and one write.

    Attributes:
        muxed_conn: the connection.
        stream_id: QUIC's number of the stream.
        window: what the peer may send on it.
        inbox: what arrived and was not read.
        fin_received: whether the peer has finished.
        is_discarding: whether what arrives is dropped.
        was_reset: why it was given up, or None.
        reset_by_peer: whether the peer gave it up, rather than this side or the connection.
        is_stopped: whether the peer wants no more bytes.
    """

    def __init__(self, connection: QuicMuxedConn, stream_id: int, window: StreamWindow) -> None:
        self.muxed_conn = connection
        self.stream_id = stream_id
        self.window = window
        self.inbox = Inbox()
        self.fin_received = False
        self.is_discarding = False
        self.was_reset: str | None = None
        self.reset_by_peer = False
        self.is_stopped = False
        self._connection = connection
        self._num_written = 0
        self._num_dropped = 0
        self._fin_wanted = False
        self._is_reading = False
        self._readable = trio.Event()
        self._writable = trio.Event()

    # ------------------------------------------------------------------ reading

    async def receive_each(self, intake: Intake) -> bool:
        return await feed(intake, self.receive_some, self.receive_into)

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if not await self._wait_readable():
            return b""
        data = self.inbox.take(max_bytes)
        self._connection.consumed(self.window, len(data))
        await self._connection.breathe(len(data))
        return data

    async def receive_into(self, destination: memoryview) -> int:
        if not await self._wait_readable():
            return 0
        taken = self.inbox.take_into(destination)
        self._connection.consumed(self.window, taken)
        await self._connection.breathe(taken)
        return taken

    async def _wait_readable(self) -> bool:
        """Wait for bytes; False at the end."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._is_reading:
            raise trio.BusyResourceError("another task is reading from this stream")
        self._is_reading = True
        try:
            while not self.inbox.size:
                if self.was_reset is not None:
                    raise MuxedStreamReset(self.was_reset)
                if self.fin_received:
                    return False
                if self.is_discarding:
                    raise MuxedStreamReset("the stream was closed here")
                self._connection.check_alive()
                self._readable = trio.Event()
                await self._readable.wait()
        finally:
            self._is_reading = False
        return True

    # ------------------------------------------------------------------ writing

    async def write(self, *data: bytes | bytearray | memoryview) -> None:
        # Some bytes are dropped, without an error, for a peer that reads no more.
        await trio.lowlevel.checkpoint_if_cancelled()
        self._check_writable()
        for buffer in data:
            await self._write(memoryview(buffer).cast("B"))

    async def _write(self, view: memoryview) -> None:
        while view:
            while not (room := self._room()) and not self.is_stopped:
                self._writable = trio.Event()
                self._connection.wait_writable(self)
                await self._writable.wait()
                self._check_writable()
            if self.is_stopped:
                self._drop(len(view))
                return
            piece = bytes(view[:room])
            view = view[len(piece) :]
            self._num_written += len(piece)
            self._connection.core.send_stream_data(self.stream_id, piece)
            self._connection.flush()
            await self._connection.breathe(len(piece))
            self._check_writable()

    def write_nowait(self, data: bytes) -> bool:
        self._check_writable()
        if self.is_stopped or self._room() < len(data):
            return False
        self._num_written += len(data)
        self._connection.core.send_stream_data(self.stream_id, data)
        self._connection.flush()
        return True

    def check_open(self) -> None:
        if self.was_reset is not None:
            raise MuxedStreamReset(self.was_reset)
        self._connection.check_alive()

    def _check_writable(self) -> None:
        self.check_open()
        if self._fin_wanted:
            raise MuxedStreamClosed("this side has finished sending")

    def _drop(self, num_bytes: int) -> None:
        self._num_dropped += num_bytes
        if self._num_dropped > STOPPED_BYTES:
            raise MuxedStreamReset("the peer reads no more")

    def _room(self) -> int:
        """Number of bytes that may be handed over to qh3 now."""
        sender = self._sender
        if sender is None:
            return 0
        unsent = self._num_written - int(sender.highest_offset)
        return max(0, self._connection.limits.send_buffer - unsent)

    @property
    def _sender(self) -> Any:
        raw = self._connection.core.find(self.stream_id)
        return None if raw is None else raw.sender

    async def close_write(self) -> None:
        self._finish()
        self._connection.flush()

    async def close(self) -> None:
        self._finish()
        self._discard()
        self._connection.flush()

    async def reset(self) -> None:
        self.give_up("the stream was reset here")
        self._connection.flush()

    def give_up(self, reason: str) -> None:
        """Reset without sending anything yet."""
        if self.was_reset is None:
            self.was_reset = reason
        self._fin_wanted = True
        self._discard()
        if not self._connection.core.is_over:
            self._connection.core.give_up(self.stream_id)
        self._writable.set()

    def _finish(self) -> None:
        if self._fin_wanted:
            return
        self._fin_wanted = True
        # Behind a reset, ours or our answer to the peer's, there is no end to send.
        is_sending = self.was_reset is None and not self.is_stopped and self._sender is not None
        if is_sending and not self._connection.core.is_over:
            self._connection.core.send_stream_data(self.stream_id, b"", end_stream=True)
        self._writable.set()

    def _discard(self) -> None:
        if not self.is_discarding:
            self.is_discarding = True
            self._connection.consumed(self.window, self.inbox.clear())
            self._connection.note_closed(self)
        self._readable.set()

    # ------------------------------------------------------------------ what happens to it

    def deliver(self, data: bytes, *, is_end: bool) -> None:
        """Bytes have arrived."""
        if self.is_discarding:
            self._connection.consumed(self.window, len(data))
        elif data:
            self.inbox.append(data, 0, len(data))
        if is_end:
            self.fin_received = True
        self._readable.set()

    def peer_reset(self) -> None:
        """The peer gave it up. What arrived before can still be read, and the end if that was all."""
        if self.fin_received:
            return
        if self.was_reset is None:
            self.was_reset = "the peer reset the stream"
            self.reset_by_peer = True
        if not self._connection.core.is_over:
            self._connection.core.give_up(self.stream_id)
        self.wake()

    def peer_stopped(self) -> None:
        """The peer wants no more bytes."""
        self.is_stopped = True
        self._writable.set()

    def wake(self) -> None:
        """Let reader and writer look again."""
        self._readable.set()
        self._writable.set()

    def wake_writer(self) -> bool:
        """Let the writer go on if there is room for a good part of a buffer; whether there was."""
        if self._sender is not None and self._room() * 2 < self._connection.limits.send_buffer:
            return False
        self._writable.set()
        return True
