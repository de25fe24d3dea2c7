"""Choice of the peer to ask next on the way to a key. Pure: answers in, peers to ask out.

Kademlia: of the peers heard of, those closest to the key are asked; each names some that are closer still; it ends
when the closest `enough` that did not fail have all answered. py-libp2p 0.8.1 ends its own walk after the first
round that finds nothing better, with peers left unasked that may hold what is looked for, and returns peers that
never answered.

Source: the Kademlia specification of libp2p, "Peer routing"; Maymounkov and Mazières, 2002, section 2.3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from libp2p.peer.id import ID

__all__ = ["MAX_ASKED", "Lookup", "distance"]

MAX_ASKED: Final = 128
"""Peers that one walk asks at most, so that peers that name ever closer ones that do not exist cannot prolong it."""

# Names taken from one answer: what an honest server gives, k and the peer itself.
_MAX_CLOSER: Final = 21


def distance(key: bytes, peer_id: ID) -> int:
    """Return the distance of a peer from a key: the exclusive or of their SHA-256."""
    hashed = hashlib.sha256(key).digest(), hashlib.sha256(peer_id.to_bytes()).digest()
    return int.from_bytes(hashed[0], "big") ^ int.from_bytes(hashed[1], "big")


class Lookup:
    """One walk. Its driver asks `next_peer()` and reports `answered` or `failed` for each.

    Args:
        key: what is looked for.
        own_id: never asked.
        seeds: peers to begin with.
        enough: how many of the closest have to answer.
    """

    def __init__(self, key: bytes, own_id: ID, seeds: Iterable[ID], *, enough: int) -> None:
        self._key = key
        self._own_id = own_id
        self._enough = enough
        self._distances: dict[ID, int] = {}  # all heard of
        self._asked: set[ID] = set()
        self._answered: set[ID] = set()
        self._failed: set[ID] = set()
        self._hear_of(seeds)

    @property
    def num_asked(self) -> int:
        """Number of peers that were asked."""
        return len(self._asked)

    @property
    def closest(self) -> list[ID]:
        """Peers that answered, the closest first, at most `enough`."""
        return [peer for peer in self._ordered() if peer in self._answered][: self._enough]

    def next_peer(self) -> ID | None:
        """A peer to ask now; None if there is none unless one under way names it."""
        if len(self._asked) >= MAX_ASKED:
            return None
        hopeful = [peer for peer in self._ordered() if peer not in self._failed][: self._enough]
        for peer in hopeful:
            if peer not in self._asked:
                self._asked.add(peer)
                return peer
        return None

    def answered(self, peer: ID, closer: Iterable[ID]) -> None:
        """The peer has answered, and named others."""
        self._answered.add(peer)
        self._hear_of(list(closer)[:_MAX_CLOSER])

    def failed(self, peer: ID) -> None:
        """The peer has not answered, or not as it should."""
        self._failed.add(peer)

    def _hear_of(self, peers: Iterable[ID]) -> None:
        for peer in peers:
            if peer != self._own_id and peer not in self._distances:
                self._distances[peer] = distance(self._key, peer)

    def _ordered(self) -> list[ID]:
        return sorted(self._distances, key=self._distances.__getitem__)
