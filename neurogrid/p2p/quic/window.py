"""Windows: the bytes that a peer may send before they are read, on one stream and on all of a connection.

Credit is given when half a window was read, for a whole window from there. A stream whose reader keeps up gets twice
the window each time, to a bound, and the connection as much more: a stream that nobody reads then takes its window
from the connection and leaves the others theirs.
"""

from __future__ import annotations

from neurogrid.p2p.quic.core import Core
from neurogrid.p2p.quic.credit import StreamGrant
from neurogrid.p2p.quic.limits import WindowPool

__all__ = ["ConnectionWindow", "StreamWindow"]


class ConnectionWindow:
    """The bytes that all streams of a connection may hold unread."""

    def __init__(self, core: Core, pool: WindowPool) -> None:
        self._core = core
        self._pool = pool
        self._size = pool.limits.first_window
        self._consumed = 0

    def open(self, stream_id: int) -> StreamWindow:
        """The window of a stream that is there."""
        return StreamWindow(
            self, self._core.grant(stream_id), self._pool.limits.first_stream_window
        )

    def consume(self, num_bytes: int) -> None:
        """Bytes were read, or will never come."""
        self._consumed += num_bytes
        allowed = self._core.allowed_bytes
        if 2 * (allowed.value - self._consumed) <= self._size:
            allowed.raise_to(self._consumed + self._size)

    def tell(self, grant: StreamGrant) -> None:
        """Let the peer know of a stream's credit."""
        self._core.pending_grants.add(grant)

    def grow(self, num_bytes: int, stream_size: int) -> bool:
        """Grow with a stream, from `stream_size` by `num_bytes`; False if the bounds do not allow it."""
        limits = self._pool.limits
        if (
            stream_size + num_bytes > limits.max_stream_window
            or self._size + num_bytes > limits.max_window
            or not self._pool.grant(num_bytes)
        ):
            return False
        self._size += num_bytes
        return True

    def shrink(self, num_bytes: int) -> None:
        """A stream that has grown is over."""
        self._size -= num_bytes
        self._pool.revoke(num_bytes)


class StreamWindow:
    """The bytes that one stream may hold unread.

    Attributes:
        has_ended: whether no more will come. The bytes that had not come by then count as read.
    """

    def __init__(self, connection: ConnectionWindow, grant: StreamGrant, size: int) -> None:
        self._connection = connection
        self._grant = grant
        self._size = size
        self._grown = 0
        self._consumed = 0
        self.has_ended = False

    def consume(self, num_bytes: int) -> None:
        """Bytes were read or dropped."""
        self._consumed += num_bytes
        self._connection.consume(num_bytes)
        grant = self._grant
        if grant.is_finished or 2 * (grant.max_stream_data_local - self._consumed) > self._size:
            return
        if self._connection.grow(self._size, self._size):
            self._grown += self._size
            self._size *= 2
        grant.raise_to(self._consumed + self._size)
        self._connection.tell(grant)

    def end(self, num_unread: int, num_received: int) -> None:
        """No more will come: bytes that were lost with the stream count as read, those that wait will be.

        Args:
            num_unread: bytes that can still be read.
            num_received: bytes that the peer has used up in all.
        """
        self.has_ended = True
        self._connection.consume(max(0, num_received - self._consumed - num_unread))

    def close(self) -> None:
        """The stream is over."""
        self._connection.shrink(self._grown)
        self._grown = 0
