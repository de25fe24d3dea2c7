"""TCP before QUIC, where a peer is known by both.

py-libp2p's swarm dials QUIC first. Ours is right but not as fast as TCP on a network that lets both pass, so QUIC is
for where nothing else gets through, and for a caller that asks for it by its address.
"""

from __future__ import annotations

import logging
from typing import Any

from libp2p.abc import INetConn
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from multiaddr import Multiaddr

__all__ = ["prefer_tcp"]

logger = logging.getLogger(__name__)


def prefer_tcp(swarm: Any) -> None:
    """Let a swarm that dials a peer by its id try TCP first. Before it dials."""
    dial_peer = swarm.dial_peer

    async def dial_tcp_first(peer_id: ID) -> list[INetConn]:
        addresses = _known_addresses(swarm, peer_id)
        ordered = [a for a in addresses if not _is_quic(a)] + [a for a in addresses if _is_quic(a)]
        has_both = len({_is_quic(address) for address in addresses}) == 2
        if not has_both or any(not conn.is_closed for conn in swarm.get_connections(peer_id)):
            connections: list[INetConn] = await dial_peer(peer_id)  # there is nothing to choose
            return connections
        for address in ordered:
            try:
                return [await swarm.dial_addr(address, peer_id)]
            except SwarmException as exc:
                logger.debug("cannot reach %s at %s: %s", peer_id, address, exc)
        raise SwarmException(f"{peer_id} cannot be reached at any of {len(ordered)} addresses")

    swarm.dial_peer = dial_tcp_first


def _known_addresses(swarm: Any, peer_id: ID) -> list[Multiaddr]:
    try:
        return [
            address
            for address in swarm.peerstore.addrs(peer_id)
            if swarm.transport_manager.transport_for_dialing(address) is not None
        ]
    except PeerStoreError:
        return []


def _is_quic(address: Multiaddr) -> bool:
    return any(protocol.name == "quic-v1" for protocol in address.protocols())
