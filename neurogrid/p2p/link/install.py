"""Put the link into a py-libp2p swarm: our Noise session and our Yamux in place of the stock ones.

py-libp2p 0.8.1 offers two ways in. The security transports are a public table. The muxer is chosen by name in
`MuxerMultistream.new_conn`, whatever the table of muxers says, so that object is replaced by one of a subclass.
tests/unit/test_link_install.py names every attribute that we rely on, and fails when one moves.
"""

from __future__ import annotations

from typing import Any

from libp2p.abc import IMuxedConn, ISecureConn
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectError
from libp2p.security.noise.transport import Transport as StockNoiseTransport
from libp2p.security.security_multistream import SecurityMultistream
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL_ID

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.link.connection import LinkConnection
from neurogrid.p2p.link.limits import BufferPool, LinkLimits
from neurogrid.p2p.link.session import NoiseTransport

__all__ = ["install_link"]


def install_link(swarm: Any, limits: LinkLimits | None = None) -> None:
    """Let a swarm make its TCP connections with our data path. Before it listens or dials."""
    upgrader = swarm.upgrader
    security = upgrader.security_multistream
    # A new table, not the old one changed: to replace an entry in it would move it to the end of the order.
    upgrader.security_multistream = SecurityMultistream(
        {
            protocol: NoiseTransport(transport)
            if isinstance(transport, StockNoiseTransport)
            else transport
            for protocol, transport in security.transports.items()
        }
    )
    muxer = _LinkMuxerMultistream({}, upgrader.muxer_multistream.negotiate_timeout)
    muxer.pool = BufferPool(limits or LinkLimits())
    for protocol, transport in upgrader.muxer_multistream.transports.items():
        muxer.add_transport(protocol, transport)
    upgrader.muxer_multistream = muxer


class _LinkMuxerMultistream(MuxerMultistream):
    """Negotiates as stock does, and makes our connection where stock would make its own Yamux."""

    pool: BufferPool

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        try:
            protocol, transport_class = await self._selector.select(
                conn, conn.is_initiator, self.negotiate_timeout
            )
        except RemoteProtocolError as exc:
            # Of our session: the stock upgrade knows libp2p's errors alone.
            raise MultiselectError(f"the peer broke the protocol: {exc}") from exc
        muxed: IMuxedConn
        if protocol == YAMUX_PROTOCOL_ID:
            muxed = LinkConnection(conn, peer_id, pool=self.pool)
        else:
            muxed = transport_class(conn, peer_id)
        return self._annotate_connection(muxed, conn, protocol)
