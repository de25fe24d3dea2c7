"""Whether to serve the DHT, or only to ask, and at which addresses: a server that cannot be reached costs all others
their time.

Source: the Kademlia specification of libp2p, "Client and server mode".
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from neurogrid.p2p.hosts.host import is_loopback_address

__all__ = ["Mode", "elsewhere", "serves"]

Mode: TypeAlias = Literal["auto", "server", "client"]


def serves(
    mode: Mode, *, is_reachable: bool | None, own: Iterable[str], bootstrap: Iterable[str]
) -> bool:
    """Whether a peer serves.

    In "auto" what is known of its reachability decides. While nothing is known, a peer that has only private addresses
    and bootstraps from a public one is taken to be behind a NAT; any other serves.

    Args:
        mode: what was asked for.
        is_reachable: what the peers that tried found, if any did.
        own: our addresses.
        bootstrap: the addresses of the bootstrap peers.
    """
    if mode != "auto":
        return mode == "server"
    addresses = list(own)
    if not addresses:
        return False
    if is_reachable is not None:
        return is_reachable
    return any(map(_is_public, addresses)) or not any(map(_is_public, bootstrap))


def elsewhere(addresses: Sequence[str]) -> tuple[str, ...]:
    """The addresses without those on loopback, at which everybody else finds somebody else; all, if all are."""
    return tuple(a for a in addresses if not is_loopback_address(a)) or tuple(addresses)


def _is_public(address: str) -> bool:
    parts = address.split("/")
    if len(parts) < 3 or "p2p-circuit" in parts:
        return False
    if parts[1].startswith("dns"):
        return True
    try:
        return ipaddress.ip_address(parts[2]).is_global
    except ValueError:
        return False
