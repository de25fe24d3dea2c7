"""One libp2p stream, with trio's manners.

py-libp2p 0.8.1 tells an end, a reset and a broken connection by a dozen exceptions of three layers.
Here is the one table that maps them, and the one place that knows that a write must not be cancelled:
a cancelled write cuts a Noise frame in two and the peer closes the whole connection. So `send_all`
is shielded; if it makes no headway until its own long deadline, the connection is closed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import IOException
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.network.stream.net_stream import NetStream

from neurogrid.errors import StreamBrokenError

__all__ = ["Stream"]

# How long a reset or a close may take: it is one frame of 12 B, but the connection may be stuck.
CLOSE_TIMEOUT = 2.0  # seconds
# For one write, of at most a few MiB: a link that takes longer than this is of no use. Seconds.
WRITE_TIMEOUT = 60.0


class Stream:
    """A negotiated, bidirectional byte stream to one peer.

    Attributes:
        peer_id: the remote peer, authenticated by the connection's handshake (base58).
        protocol_id: what was negotiated for this stream.
    """

    def __init__(self, net_stream: NetStream, *, peer_id: str, protocol_id: str) -> None:
        self._net_stream = net_stream
        self.peer_id = peer_id
        self.protocol_id = protocol_id

    async def receive_some(self, max_bytes: int = 256 * 1024) -> bytes:
        """Return between 1 and `max_bytes` bytes, or `b""` when the peer has finished sending.

        Raises:
            StreamBrokenError: the stream was reset or the connection is gone.

        Cancellation is safe: bytes that were not returned stay for the next call.
        """
        try:
            with self._map_exceptions():
                return bytes(await self._net_stream.read(max_bytes))
        except _EndOfStream:
            # Stock Yamux forgets a stream that was reset before its reader wakes up, and then reports
            # an orderly end; the flag on the stream itself tells the truth.
            if getattr(self._net_stream.muxed_stream, "reset_received", False):
                raise StreamBrokenError(f"{self.peer_id} reset the stream") from None
            return b""

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data`. Not cancelled half-way: see the module's docstring.

        Raises:
            StreamBrokenError: the stream was reset, the connection is gone, or was closed here because
                the bytes did not go out for `WRITE_TIMEOUT` seconds.
        """
        with trio.move_on_after(WRITE_TIMEOUT) as scope, self._map_exceptions():
            scope.shield = True
            await self._net_stream.write(data)  # type: ignore[arg-type]
        if scope.cancelled_caught:
            await self._break_connection()
            raise StreamBrokenError(
                f"{self.peer_id} took no bytes for {WRITE_TIMEOUT:g} s: the connection was closed"
            )

    async def send_eof(self) -> None:
        """Tell the peer that nothing more will be sent; receiving goes on."""
        with trio.CancelScope(shield=True), self._map_exceptions():
            await self._net_stream.close_write()

    async def aclose(self) -> None:
        """Close both directions; never raises."""
        with trio.move_on_after(CLOSE_TIMEOUT) as scope:
            scope.shield = True
            with suppress(StreamBrokenError, _EndOfStream), self._map_exceptions():
                await self._net_stream.close()

    async def reset(self) -> None:
        """Abandon the stream in both directions: the peer sees a reset. Never raises."""
        with trio.move_on_after(CLOSE_TIMEOUT) as scope:
            scope.shield = True
            with suppress(StreamBrokenError, _EndOfStream), self._map_exceptions():
                await self._net_stream.reset()

    async def _break_connection(self) -> None:
        """Close the whole connection: a frame was cut, so nothing that follows could be read."""
        with trio.move_on_after(CLOSE_TIMEOUT) as scope:
            scope.shield = True
            with suppress(StreamBrokenError, _EndOfStream), self._map_exceptions():
                await self._net_stream.muxed_conn.close()

    @contextmanager
    def _map_exceptions(self) -> Iterator[None]:
        try:
            yield
        except StreamEOF as exc:
            raise _EndOfStream from exc
        except (BaseLibp2pError, IOException, OSError, ValueError, trio.BrokenResourceError) as exc:
            raise StreamBrokenError(f"the stream to {self.peer_id} broke: {_reason(exc)}") from exc
        except trio.ClosedResourceError as exc:
            raise StreamBrokenError(f"the connection to {self.peer_id} is closed") from exc


class _EndOfStream(Exception):
    """The peer finished sending."""


def _reason(exc: BaseException) -> str:
    text = str(exc).strip() or type(exc).__name__
    return text.splitlines()[0][:200]
