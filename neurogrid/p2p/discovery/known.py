"""The known peers, from all sources together: a peer is there for as long as one source has it.

Pure: sightings in, changes out. A source that says again what it said changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias

from neurogrid.p2p.discovery.sighting import Sighting

__all__ = ["KnownPeers", "PeerChange", "PeerFound", "PeerLost"]

# Clusters have some dozens of peers. What a network full of strangers announces beyond it is left out.
MAX_PEERS = 4096
MAX_ADDRESSES_FROM_SOURCE = 16
# The local network first: its addresses are the nearest.
_NEAREST = "mdns"


@dataclass(frozen=True, slots=True)
class PeerFound:
    """A peer that is known, where to dial it, and which sources say so. Nothing proves it until it is connected.

    Attributes:
        peer_id: whom (base58).
        addresses: full multiaddrs, the nearest first; at least one.
        sources: those that have it now: "mdns", "dht", "bootstrap", "ticket".
        role: what the peer says that it is: "worker", "coordinator" or "peer"; empty where no source knows.
    """

    peer_id: str
    addresses: tuple[str, ...]
    sources: frozenset[str]
    role: str = ""


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A peer that no source has any more; a connection to it may still be there."""

    peer_id: str


PeerChange: TypeAlias = PeerFound | PeerLost
"""A change that `Discovery.peers` yields."""


class KnownPeers:
    """All peers that are known, except the host itself.

    Args:
        own_peer_id: the host's.
    """

    def __init__(self, own_peer_id: str) -> None:
        self._own_peer_id = own_peer_id
        self._by_source: dict[str, dict[str, Sighting]] = {}
        self._known: dict[str, PeerFound] = {}
        self.num_left_out = 0

    @property
    def peers(self) -> Mapping[str, PeerFound]:
        """Known peers by peer id, as they are now: later changes show."""
        return MappingProxyType(self._known)

    def take(self, sighting: Sighting) -> PeerChange | None:
        """Note what a source says; returns what that changes."""
        peer_id = sighting.peer_id
        if peer_id == self._own_peer_id:
            return None
        if sighting.is_lost or not sighting.addresses:
            return self._lose(peer_id, sighting.source)
        if peer_id not in self._known and len(self._known) >= MAX_PEERS:
            self.num_left_out += 1
            return None
        kept = replace(sighting, addresses=sighting.addresses[:MAX_ADDRESSES_FROM_SOURCE])
        self._by_source.setdefault(peer_id, {})[sighting.source] = kept
        return self._update(peer_id)

    def _lose(self, peer_id: str, source: str) -> PeerChange | None:
        sources = self._by_source.get(peer_id, {})
        if sources.pop(source, None) is None:
            return None
        if sources:
            return self._update(peer_id)
        del self._by_source[peer_id]
        del self._known[peer_id]
        return PeerLost(peer_id)

    def _update(self, peer_id: str) -> PeerFound | None:
        sources = self._by_source[peer_id]
        ordered = sorted(sources, key=lambda source: source != _NEAREST)
        unique = dict.fromkeys(
            address for source in ordered for address in sources[source].addresses
        )
        role = next((said.role for said in sources.values() if said.role), "")
        found = PeerFound(peer_id, tuple(unique), frozenset(sources), role)
        if self._known.get(peer_id) == found:
            return None
        self._known[peer_id] = found
        return found
