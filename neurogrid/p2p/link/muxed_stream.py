"""The part of py-libp2p's connection and stream beside reading and writing, the same over TCP and QUIC."""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

import trio
from libp2p.abc import IMuxedConn, IMuxedStream
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamReset

__all__ = ["MuxedConn", "MuxedStream"]


class MuxedConn(IMuxedConn):
    """A connection as py-libp2p's swarm has it.

    Attributes:
        event_started: set once streams can be opened.
        event_shutting_down: set when no more can be.
        event_closed: set when it is over.
        end_reason: why nothing can come or go any more; None while it can.
    """

    def __init__(self, *, is_initiator: bool) -> None:
        self.event_started = trio.Event()
        self.event_shutting_down = trio.Event()
        self.event_closed = trio.Event()
        self.end_reason: str | None = None
        self._is_initiator = is_initiator

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

    def check_alive(self) -> None:
        """Raise if nothing can come or go any more.

        Raises:
            MuxedStreamReset: why.
        """
        if self.end_reason is not None:
            raise MuxedStreamReset(self.end_reason)


class MuxedStream(IMuxedStream):
    """A stream that is read by `receive_some`."""

    muxed_conn: MuxedConn

    @abstractmethod
    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        """Return what arrived, at least a byte and at most `max_bytes`; `b""` at the end.

        Raises:
            MuxedStreamReset: either side has reset the stream, or the connection is gone.

        Cancellation is safe: bytes that were not returned stay for the next call.
        """

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
        """Not offered: callers set deadlines with cancel scopes.

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
