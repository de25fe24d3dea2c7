"""Whom we have heard on the local network, on which interface, and until when.

An entry belongs to who sent it: only the same IP address can renew it or say goodbye for it. A peer is there for as
long as one of its entries is, and has the addresses of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from neurogrid.p2p.discovery.mdns.limits import (
    MAX_ADDRESSES,
    MAX_ENTRIES,
    MAX_ENTRIES_FROM_SOURCE,
    REFRESH_AT,
)

__all__ = ["Entry", "Key", "SeenPeers"]


@dataclass(frozen=True, slots=True)
class Key:
    """What one entry is about.

    Attributes:
        index: of the interface that it came in on.
        source: the IP address that it came from.
        name: of the instance.
    """

    index: int
    source: str
    name: str


@dataclass(slots=True)
class Entry:
    """What was last heard of it. Times are trio's, in seconds."""

    service: str
    peer_id: str
    addresses: tuple[str, ...]
    heard_at: float
    lifetime: float
    jitter: float
    num_refreshes: int = field(default=0)

    @property
    def expires_at(self) -> float:
        """When it ends unless it is heard again."""
        return self.heard_at + self.lifetime

    @property
    def refresh_at(self) -> float:
        """When to ask for it again."""
        if self.num_refreshes >= len(REFRESH_AT):
            return float("inf")
        return self.heard_at + self.lifetime * (REFRESH_AT[self.num_refreshes] + self.jitter)

    def renew(self, now: float, lifetime: float, jitter: float) -> None:
        """Note that it was heard again."""
        self.heard_at, self.lifetime, self.jitter, self.num_refreshes = now, lifetime, jitter, 0


class SeenPeers:
    """All entries. A bounded number, and a bounded number from one source: the first to come stay."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._keys_of_peer: dict[str, list[Key]] = {}
        self._num_from_source: dict[tuple[int, str], int] = {}

    def get(self, key: Key) -> Entry | None:
        """The entry, if it is there."""
        return self._entries.get(key)

    def has_room(self, key: Key) -> bool:
        """Whether one more entry from this source is taken."""
        source = self._num_from_source.get((key.index, key.source), 0)
        return len(self._entries) < MAX_ENTRIES and source < MAX_ENTRIES_FROM_SOURCE

    def put(self, key: Key, entry: Entry) -> None:
        """Keep an entry, in place of what the same peer said from there under another name: it was restarted."""
        for other in list(self._keys_of_peer.get(entry.peer_id, ())):
            is_same_place = (other.index, other.source) == (key.index, key.source)
            if is_same_place and self._entries[other].service == entry.service:
                self.remove(other)
        if key in self._entries:
            self.remove(key)
        self._entries[key] = entry
        self._keys_of_peer.setdefault(entry.peer_id, []).append(key)
        place = (key.index, key.source)
        self._num_from_source[place] = self._num_from_source.get(place, 0) + 1

    def remove(self, key: Key) -> Entry:
        """Drop an entry that is there."""
        entry = self._entries.pop(key)
        keys = self._keys_of_peer[entry.peer_id]
        keys.remove(key)
        if not keys:
            del self._keys_of_peer[entry.peer_id]
        place = (key.index, key.source)
        self._num_from_source[place] -= 1
        if not self._num_from_source[place]:
            del self._num_from_source[place]
        return entry

    def addresses(self, peer_id: str) -> tuple[str, ...]:
        """All addresses that a peer has announced; none if it is not there."""
        keys = self._keys_of_peer.get(peer_id, ())
        unique = dict.fromkeys(item for key in keys for item in self._entries[key].addresses)
        return tuple(unique)[:MAX_ADDRESSES]

    def on_interface(self, index: int) -> Iterator[tuple[Key, Entry]]:
        """The entries from one interface; they may be removed meanwhile."""
        return iter([item for item in self._entries.items() if item[0].index == index])

    def num_peers(self, index: int) -> int:
        """How many peers were heard on an interface and are still there."""
        return len({entry.peer_id for _, entry in self.on_interface(index)})

    def expired(self, now: float) -> list[Key]:
        """The entries whose time is over."""
        return [key for key, entry in self._entries.items() if entry.expires_at <= now]

    def next_expiry(self) -> float:
        """When the first entry ends."""
        return min((entry.expires_at for entry in self._entries.values()), default=float("inf"))
