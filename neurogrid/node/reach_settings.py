"""Settings by which a worker or a coordinator is reached, and reaches others, where neither can simply be dialled."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import trio

from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from neurogrid.p2p.reach.reach import Reach, ReachOptions
from neurogrid.p2p.reach.relay_service import RelayLimits

__all__ = ["ReachSettings", "open_reach"]

logger = logging.getLogger(__name__)

# Seconds that a relay has to give a slot before others are told where we are. It is asked again if it does not.
RELAY_WAIT = 15.0


@dataclass(frozen=True)
class ReachSettings:
    """Settings of how a command is reached. Hole punching is always on: only relayed connections have a use for it.

    Attributes:
        relays: full multiaddrs of relays to be reached through, and to try for peers that are not reached otherwise.
        relay_service: relay for others, as many as `RelayLimits` allows, of peers that are admitted here.
        announce: multiaddrs that are known to lead here, with or without our peer id.
        keep_alive: seconds of silence after which a peer is lost; None for the links' own.
        port_mapping: ask the router, by UPnP, to let peers in.
    """

    relays: tuple[str, ...] = ()
    relay_service: bool = False
    announce: tuple[str, ...] = ()
    port_mapping: bool = False
    keep_alive: float | None = None


async def open_reach(host: Libp2pHost, settings: ReachSettings) -> Reach:
    """Start what was asked for; it runs until the host ends. Returns when each relay has given its first answer.

    Raises:
        ConfigurationError: an address is malformed, or not one of its kind.
    """
    reach = Reach(
        host,
        ReachOptions(
            announce=settings.announce,
            relays=settings.relays,
            relay_service=RelayLimits() if settings.relay_service else None,
            port_mapping=settings.port_mapping,
        ),
    )
    with trio.move_on_after(RELAY_WAIT) as scope:
        await reach.wait_relays()
    if scope.cancelled_caught:
        logger.warning("a relay has not answered in %g s; it is asked again", RELAY_WAIT)
    return reach
