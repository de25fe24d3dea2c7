"""Options of reach, by which this peer is reached, for both commands; and what `--diagnose` says of them."""

from __future__ import annotations

import argparse
import logging
import math
from typing import TYPE_CHECKING

import trio

from neurogrid.cli.options.trust import is_checked, is_loopback
from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from neurogrid.node.reach_settings import ReachSettings
    from neurogrid.p2p.discovery import Discovery
    from neurogrid.p2p.reach.reach import Reach

__all__ = ["add_reach_options", "explain_reach", "reaching"]

logger = logging.getLogger(__name__)

# Seconds that --diagnose gives peers to dial this host, and holes to be punched: three attempts of nine.
ASK_WAIT = 10.0
PUNCH_WAIT = 40.0


def add_reach_options(group: argparse._ArgumentGroup) -> None:
    """The options of both commands."""
    group.add_argument(
        "--quic",
        action=argparse.BooleanOptionalAction,
        help="listen for QUIC too, on the same port number (default: beyond loopback, yes); TCP is dialled first",
    )
    group.add_argument(
        "--relay",
        action="append",
        default=[],
        metavar="MULTIADDR",
        help="be reached through the relay at this address, and try it for others who cannot be dialled; "
        "connections over it become direct where the NATs let them; may be given again",
    )
    group.add_argument(
        "--relay-service",
        action="store_true",
        help="relay for others of those who are admitted here; for a peer that all can reach",
    )
    group.add_argument(
        "--announce",
        action="append",
        default=[],
        metavar="MULTIADDR",
        help="tell others that this address leads here too, e.g. /ip4/203.0.113.7/tcp/9000 where a router "
        "forwards that port; may be given again",
    )
    group.add_argument(
        "--port-mapping",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="ask the router by UPnP to let peers in from outside (default: off)",
    )
    group.add_argument(
        "--keep-alive",
        type=float,
        metavar="SECONDS",
        help="take a peer for lost, and dial it again, that is silent for so long (default: 40, over QUIC 30)",
    )


def reaching(options: argparse.Namespace, listen: tuple[str, ...]) -> ReachSettings:
    """Return the settings of reach that the options come to.

    Args:
        options: as parsed.
        listen: the multiaddrs that are listened at.

    Raises:
        ConfigurationError: an address is malformed, or a port is to be mapped to which nobody outside can come.
    """
    from neurogrid.node.reach_settings import ReachSettings
    from neurogrid.p2p.hosts.host import parse_peer_address
    from neurogrid.p2p.libp2p.patience import MIN_KEEP_ALIVE
    from neurogrid.p2p.reach.circuit import is_relayed_address

    for relay in options.relay:
        parse_peer_address(relay)
        if is_relayed_address(relay):
            raise ConfigurationError(
                f"--relay {relay} leads through a relay itself: name the relay's own address"
            )
    if options.keep_alive is not None and not MIN_KEEP_ALIVE <= options.keep_alive < math.inf:
        raise ConfigurationError(
            f"--keep-alive {options.keep_alive:g}: at least {MIN_KEEP_ALIVE:g} seconds"
        )
    for address in options.announce:
        _check_place(address)
    if options.port_mapping:
        if all(map(is_loopback, listen)):
            raise ConfigurationError(
                "--port-mapping has nothing to map: this peer listens on loopback only"
            )
        if not is_checked(options):
            logger.warning(
                "--port-mapping with --insecure lets anybody on the internet use this peer"
            )
    return ReachSettings(
        relays=tuple(options.relay),
        relay_service=options.relay_service,
        announce=tuple(options.announce),
        port_mapping=options.port_mapping,
        keep_alive=options.keep_alive,
    )


def _check_place(address: str) -> None:
    from multiaddr import Multiaddr
    from multiaddr.exceptions import Error as MultiaddrError

    try:
        names = [protocol.name for protocol in Multiaddr(address).protocols()]
    except (MultiaddrError, ValueError) as exc:
        raise ConfigurationError(
            f"--announce {address} is not a multiaddr: expected /ip4/ADDRESS/tcp/PORT"
        ) from exc
    is_place = names[1:2] == ["tcp"] or names[1:3] == ["udp", "quic-v1"]
    if not is_place:
        raise ConfigurationError(
            f"--announce {address}: expected /ip4/ADDRESS/tcp/PORT, or /ip4/ADDRESS/udp/PORT/quic-v1"
        )


async def explain_reach(reach: Reach, discovery: Discovery) -> None:
    """Put how this peer is reached into what `discovery` explains; waits for what is still being found out."""
    from neurogrid.p2p.discovery import Attempt
    from neurogrid.p2p.reach.hole_punching import Path

    with trio.move_on_after(PUNCH_WAIT):
        while any(path.path is Path.PUNCHING for path in reach.state().paths):
            await trio.sleep(0.1)
    with trio.move_on_after(ASK_WAIT):
        await reach.check_reachability()
    for row in reach.state().rows():
        discovery.note(Attempt(*row))
