"""The part of py-libp2p's connection and stream beside reading and writing, the same over TCP and QUIC."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Self

import trio
from libp2p.abc import IMuxedConn, IMuxedStream
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamReset

from neurogrid.p2p.streams.intake import Intake

__all__ = ["MuxedConn", "MuxedStream"]


class MuxedConn(IMuxedConn):
    """A connection as py-libp2p's swarm has it.

    Attributes:
        event_started: set once streams can be opened.
        event_shutting_down: set when no more can be.
        event_closed: set when it is over.
        end_reason: why nothing can come or go any more; None while it can.
    """

    # After so many bytes moved without waiting, a task lets the others run: some 300 us of work.
    BREATH_BYTES: ClassVar[int]
    # What a read or write costs in such bytes, however short it is.
    BREATH_CALL: ClassVar[int]

    def __init__(self, *, is_initiator: bool) -> None:
        self.event_started = trio.Event()
        self.event_shutting_down = trio.Event()
        self.event_closed = trio.Event()
        self.end_reason: str | None = None
        self._is_initiator = is_initiator
        self._unbreathed = 0

    @property
    def is_initiator(self) -> bool:
        """Whether we dialled."""
        return self._is_initiator

    @property
    def is_closed(self) -> bool:
        """Whether it is over."""
        return self.event_closed.is_set()

    @abstractmethod
    def get_remote_address(self) -> tuple[str, int] | None:
        """The peer's host and port."""

    async def breathe(self, num_bytes: int) -> None:
        """Let other tasks run once in a while, though nothing has to be waited for."""
        self._unbreathed += num_bytes + self.BREATH_CALL
        if self._unbreathed >= self.BREATH_BYTES:
            self._unbreathed = 0
            await trio.lowlevel.cancel_shielded_checkpoint()

    def check_alive(self) -> None:
        """Raise if nothing can come or go any more.

        Raises:
            MuxedStreamReset: why.
        """
        if self.end_reason is not None:
            raise MuxedStreamReset(self.end_reason)


class MuxedStream(IMuxedStream):
    """A stream whose reader takes the bytes as they come, and whose writer lends its memory."""

    muxed_conn: MuxedConn

    @abstractmethod
    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return what arrived, at least a byte and at most `max_bytes`; `b""` at the end.

        Raises:
            MuxedStreamReset: either side has reset the stream, or the connection is gone.

        Cancellation is safe: bytes that were not returned stay for the next call.
        """

    @abstractmethod
    async def receive_into(self, destination: memoryview) -> int:
        """Receive into `destination` (format "B", writable); return how many bytes came, 0 at the end.

        Raises:
            MuxedStreamReset: either side has reset the stream, or the connection is gone.

        Cancellation is safe: nothing that arrived is lost, and the memory is not written to any more.
        """

    @abstractmethod
    async def receive_each(self, intake: Intake) -> bool:
        """Give `intake` what arrives until it wants no more; returns False at the end. What it raises is raised here.

        Raises:
            MuxedStreamReset: either side has reset the stream, or the connection is gone.

        Cancellation is safe: what `intake` was not told of stays for the next call.
        """

    @abstractmethod
    async def write(self, *data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`, contiguous buffers; return when their memory is free.

        It waits while the peer reads too slowly, however long.

        Raises:
            MuxedStreamClosed: this side has finished.
            MuxedStreamReset: either side has reset the stream, the peer reads no more, or the connection is gone.

        Cancelled, a part of `data` from its beginning is sent, and the stream goes on.
        """

    @abstractmethod
    def write_nowait(self, data: bytes) -> bool:
        """Send all of `data` if nothing has to be waited for; False, and nothing is sent, if something has.

        Raises:
            MuxedStreamClosed: this side has finished.
            MuxedStreamReset: either side has reset the stream, the peer reads no more, or the connection is gone.
        """

    @abstractmethod
    def check_open(self) -> None:
        """Raise if the stream was reset, or the connection is gone.

        Raises:
            MuxedStreamReset: which of them.
        """

    @abstractmethod
    async def close_write(self) -> None:
        """Tell the peer that nothing more will be sent; reading goes on. Does not wait."""

    @abstractmethod
    async def close(self) -> None:
        """Finish sending, and drop what arrives. What was written still gets there. Does not wait."""

    @abstractmethod
    async def reset(self) -> None:
        """Give the stream up in both directions: the peer sees a reset. Does not wait."""

    async def read(self, n: int | None = None) -> bytes:
        """As `receive_some`, but that the end is an exception, as py-libp2p has it.

        Raises:
            MuxedStreamEOF: the peer has finished, and all was read.
            MuxedStreamReset: either side has reset the stream, or the connection is gone.
        """
        if n == 0:
            return b""
        data = await self.receive_some(None if n is None or n < 0 else n)
        if not data:
            raise MuxedStreamEOF("the peer has finished sending")
        return data

    def set_deadline(self, ttl: int) -> None:
        """Refuse: callers set deadlines with cancel scopes.

        Raises:
            NotImplementedError: always, as in py-libp2p's own Yamux.
        """
        raise NotImplementedError("use trio's cancel scopes")

    def get_remote_address(self) -> tuple[str, int] | None:
        """The peer's host and port."""
        return self.muxed_conn.get_remote_address()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
