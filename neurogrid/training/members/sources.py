"""Peers that a member gets slices from: data nodes and members that its orders name, and its leader."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import trio

from neurogrid.errors import NeuroGridError, ResponseTimeout
from neurogrid.p2p.hosts.host import Host, parse_peer_address
from neurogrid.p2p.transfer.passed_over import PassedOver

__all__ = ["reach_sources"]

logger = logging.getLogger(__name__)

_DIAL_TIMEOUT: Final = 10.0
# Seconds until one that could not be reached is dialled again.
_PAUSE: Final = 30.0


async def reach_sources(
    host: Host, addresses: Sequence[str], leader: str, seat: int, passed_over: PassedOver
) -> tuple[str, ...]:
    """Connect to those that can be reached.

    Args:
        addresses: multiaddrs of data nodes and members, as a leader has named them.
        leader: the peer id of the leader, which is asked last: it has the run to lead.
        seat: of this member: each begins with another source.
        passed_over: who is not dialled now; it is told who could not be reached.

    Returns:
        Peer ids, in the order in which they are to be asked.
    """
    by_peer: dict[str, list[str]] = {}
    for address in addresses:
        try:
            by_peer.setdefault(parse_peer_address(address)[1], []).append(address)
        except NeuroGridError as exc:
            logger.info("a source of slices is nowhere: %s", exc)
    named = [peer_id for peer_id in by_peer if peer_id not in (leader, host.peer_id)]
    async with trio.open_nursery() as nursery:
        for peer_id in named:
            if not host.is_connected(peer_id) and peer_id not in passed_over:
                nursery.start_soon(_dial, host, peer_id, by_peer[peer_id], passed_over)
    reached = [peer_id for peer_id in named if host.is_connected(peer_id)]
    first = seat % len(reached) if reached else 0
    return (*reached[first:], *reached[:first], leader)


async def _dial(
    host: Host, peer_id: str, addresses: Sequence[str], passed_over: PassedOver
) -> None:
    error: NeuroGridError = ResponseTimeout(f"it was not reached within {_DIAL_TIMEOUT:g} s")
    with trio.move_on_after(_DIAL_TIMEOUT):
        for address in addresses:
            try:
                await host.connect(address)
                return
            except NeuroGridError as exc:
                error = exc
                logger.info("the source %s is not at %s: %s", peer_id, address, exc)
    passed_over.blame(peer_id, error, pause=_PAUSE)
