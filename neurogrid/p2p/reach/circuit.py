"""Addresses through a relay: `/ip4/../tcp/../p2p/RELAY/p2p-circuit/p2p/PEER`.

Source: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md ("Addresses").
"""

from __future__ import annotations

from typing import Final

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.hosts.host import is_loopback_address, parse_peer_address

__all__ = [
    "circuit_address",
    "is_loopback_address",
    "is_relayed_address",
    "parse_any_address",
    "split_circuit",
]

CIRCUIT: Final = "/p2p-circuit"


def is_relayed_address(address: str) -> bool:
    """Whether the way leads through a relay."""
    return f"{CIRCUIT}/" in f"{address}/"


def circuit_address(relay_address: str, peer_id: str) -> str:
    """The address of a peer through a relay that is at a full multiaddr."""
    return f"{relay_address}{CIRCUIT}/p2p/{peer_id}"


def split_circuit(address: str) -> tuple[str, str]:
    """The full multiaddr of the relay, and the id of the peer behind it.

    Raises:
        ConfigurationError: malformed, or through more than one relay.
    """
    relay_address, _, rest = address.partition(CIRCUIT)
    peer_id = rest.removeprefix("/p2p/")
    if not peer_id or "/" in peer_id or rest == peer_id:
        raise ConfigurationError(
            f"{address!r} is no address through a relay: expected /ip4/ADDRESS/tcp/PORT/p2p/RELAY{CIRCUIT}/p2p/PEER_ID"
        )
    if parse_peer_address(relay_address)[1] == peer_id:
        raise ConfigurationError(f"{address!r} names the relay itself behind the relay")
    parse_peer_address(f"{relay_address.rpartition('/p2p/')[0]}/p2p/{peer_id}")
    return relay_address, peer_id


def parse_any_address(address: str) -> tuple[str, str]:
    """A full multiaddr, direct or through a relay, and the id of the peer that it leads to.

    Raises:
        ConfigurationError: malformed.
    """
    if is_relayed_address(address):
        return address, split_circuit(address)[1]
    return address, parse_peer_address(address)[1]
