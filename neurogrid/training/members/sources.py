"""Peers that a member gets slices from: the data nodes that its orders name, and its leader."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import trio

from neurogrid.errors import NeuroGridError
from neurogrid.p2p.hosts.host import Host, parse_peer_address

__all__ = ["reach_sources"]

logger = logging.getLogger(__name__)

_DIAL_TIMEOUT: Final = 10.0


async def reach_sources(
    host: Host, addresses: Sequence[str], leader: str, seat: int
) -> tuple[str, ...]:
    """Connect to those that can be reached.

    Args:
        addresses: multiaddrs of data nodes, as a leader has named them.
        leader: the peer id of the leader, which is asked last: it has the run to lead.
        seat: of this member: each begins with another node.

    Returns:
        Peer ids, in the order in which they are to be asked.
    """
    by_peer: dict[str, list[str]] = {}
    for address in addresses:
        try:
            by_peer.setdefault(parse_peer_address(address)[1], []).append(address)
        except NeuroGridError as exc:
            logger.info("a data node is nowhere: %s", exc)
    reached = [peer_id for peer_id in by_peer if peer_id not in (leader, host.peer_id)]
    async with trio.open_nursery() as nursery:
        for peer_id in list(reached):
            if not host.is_connected(peer_id):
                nursery.start_soon(_dial, host, peer_id, by_peer[peer_id], reached)
    first = seat % len(reached) if reached else 0
    return (*reached[first:], *reached[:first], leader)


async def _dial(host: Host, peer_id: str, addresses: Sequence[str], reached: list[str]) -> None:
    with trio.move_on_after(_DIAL_TIMEOUT):
        for address in addresses:
            try:
                await host.connect(address)
                return
            except NeuroGridError as exc:
                logger.info("the data node %s is not at %s: %s", peer_id, address, exc)
    reached.remove(peer_id)
