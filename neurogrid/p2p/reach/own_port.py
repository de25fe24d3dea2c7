"""To dial from the port that we listen on: so that a NAT shows all peers, and not one alone, the same port of ours.

Listening sockets of py-libp2p share their port (SO_REUSEPORT), so a dial can be bound to it as well. It fails where
the system remembers an old connection between the same four numbers; then any other port is used, and hole punching
has to wait for a better day.
"""

from __future__ import annotations

import ipaddress
import logging
from typing import Any

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from neurogrid.errors import PeerUnreachableError
from neurogrid.p2p.hosts.host import DIAL_TIMEOUT, parse_peer_address
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost

__all__ = ["dial_from_own_port", "own_tcp_source"]

logger = logging.getLogger(__name__)


def own_tcp_source(host: Libp2pHost, address: str) -> tuple[str, int] | None:
    """The local address and port to dial `address` from; None if we do not listen where that would be of use."""
    target = _ip_and_port(address)
    if target is None:
        return None
    for listening in host.libp2p.get_transport_addrs():
        own = _ip_and_port(str(listening))
        if own is not None and own[0].version == target[0].version:
            ip, port = own
            if ip.is_loopback == target[0].is_loopback or ip.is_unspecified:
                return str(ip), port
    return None


async def dial_from_own_port(host: Libp2pHost, address: str) -> bool:
    """Connect to a peer, from our listening port if that can be; returns whether it was.

    Raises:
        PeerUnreachableError: nobody answers there, or somebody else does.
    """
    multiaddr, peer_id = parse_peer_address(address)
    source = own_tcp_source(host, address)
    swarm: Any = host.libp2p.get_network()
    transport = swarm.transport_manager.transport_for_dialing(multiaddr)
    if source is None or not hasattr(transport, "dial_with_source"):
        await host.connect(address)
        return False
    try:
        with trio.fail_after(DIAL_TIMEOUT):
            raw = await transport.dial_with_source(multiaddr, source)
            try:
                connection = await swarm.upgrade_outbound_raw_conn(raw, ID.from_base58(peer_id))
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


def _ip_and_port(
    address: str,
) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int] | None:
    multiaddr = Multiaddr(address)
    names = [protocol.name for protocol in multiaddr.protocols()][:3]
    if names[:2] not in (["ip4", "tcp"], ["ip6", "tcp"]) or names[2:] not in ([], ["p2p"]):
        return None
    host = str(multiaddr.value_for_protocol(names[0]))
    return ipaddress.ip_address(host), int(str(multiaddr.value_for_protocol("tcp")))
