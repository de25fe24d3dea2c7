"""The part of py-libp2p's stream beside reading and writing, the same over TCP and QUIC."""

from __future__ import annotations

from abc import abstractmethod
from typing import Self

from libp2p.abc import IMuxedStream
from libp2p.stream_muxer.exceptions import MuxedStreamEOF

__all__ = ["MuxedStream"]


class MuxedStream(IMuxedStream):
    """A stream that is read by `receive_some`."""

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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
