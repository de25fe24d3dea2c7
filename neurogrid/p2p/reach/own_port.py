"""Dials from the port that we listen on, so that a NAT shows all peers, and not one alone, the same port of ours.

Listening sockets of py-libp2p share their port (SO_REUSEPORT), so a dial can be bound to it as well. It fails where
the system remembers an old connection between the same four numbers; then any other port is used, and hole punching
has to wait for a better day.
"""

from __future__ import annotations

import logging

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID

from neurogrid.errors import PeerUnreachableError
from neurogrid.p2p.hosts.host import DIAL_TIMEOUT, ip_place, parse_peer_address
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost

__all__ = ["dial_from_own_port", "own_tcp_source"]

logger = logging.getLogger(__name__)


def own_tcp_source(host: Libp2pHost, address: str) -> tuple[str, int] | None:
    """The local address and port to dial `address` from; None if we do not listen where that would be of use."""
    target = ip_place(address)
    if target is None or target.is_quic:
        return None
    for own in map(ip_place, host.libp2p.get_transport_addrs()):
        if own is None or own.is_quic or own.ip.version != target.ip.version:
            continue
        if own.ip.is_loopback == target.ip.is_loopback or own.ip.is_unspecified:
            return str(own.ip), own.port
    return None


async def dial_from_own_port(host: Libp2pHost, address: str) -> bool:
    """Connect to a peer, from our listening port if that can be; returns whether it was.

    Raises:
        PeerUnreachableError: nobody answers there, or somebody else does.
    """
    multiaddr, peer_id = parse_peer_address(address)
    source = own_tcp_source(host, address)
    transport = host.swarm.transport_manager.transport_for_dialing(multiaddr)
    if source is None or not hasattr(transport, "dial_with_source"):
        await host.connect(address)
        return False
    try:
        with trio.fail_after(DIAL_TIMEOUT):
            raw = await transport.dial_with_source(multiaddr, source)
            try:
                connection = await host.swarm.upgrade_outbound_raw_conn(
                    raw, ID.from_base58(peer_id)
                )
                await connection.event_started.wait()
            except BaseException:  # also cancelled: nobody else has the connection
                await raw.close()
                raise
    except trio.TooSlowError as exc:
        raise PeerUnreachableError(f"no answer from {address} in {DIAL_TIMEOUT:g} s") from exc
    except (BaseLibp2pError, OSError, ValueError) as exc:
        await trio.lowlevel.checkpoint_if_cancelled()
        logger.debug("cannot dial %s from port %d: %s", address, source[1], exc)
        await host.connect(address)
        return False
    return True
