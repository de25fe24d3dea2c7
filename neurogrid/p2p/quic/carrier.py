"""The socket of a connection, shared with others, as the connection uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from neurogrid.p2p.quic.core import Datagram

if TYPE_CHECKING:
    from neurogrid.p2p.quic.connection import QuicMuxedConn

__all__ = ["Carrier"]


class Carrier(Protocol):
    """A socket that carries a connection's datagrams."""

    def send(self, datagrams: list[Datagram]) -> None:
        """Send, or keep until that is possible."""

    def wait_sendable(self, connection: QuicMuxedConn) -> bool:
        """Whether sending must wait; then the connection's `flush` is called when it need not any more."""

    def call_by(self, cid: bytes, connection: QuicMuxedConn) -> None:
        """Datagrams to `cid` are for `connection`."""

    def forget(self, cid: bytes) -> None:
        """Datagrams to `cid` are for no connection any more."""
