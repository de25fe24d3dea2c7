"""The peers heard on the local network, on which interface, and until when.

An entry belongs to its sender: only the same IP address can renew it or say goodbye for it. A peer is there for as
long as one of its entries is, and has the addresses of all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TypeVar

from neurogrid.p2p.discovery.mdns.limits import (
    MAX_ADDRESSES,
    MAX_ENTRIES,
    MAX_ENTRIES_FROM_SOURCE,
    REFRESH_AT,
)

__all__ = ["Entry", "Key", "SeenPeers"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Key:
    """The key of one entry.

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
    """An instance as it was last heard. Times are trio's, in seconds."""

    service: str
    peer_id: str
    addresses: tuple[str, ...]
    heard_at: float
    lifetime: float
    jitter: float
    num_refreshes: int = field(default=0)

    @property
    def expires_at(self) -> float:
        """Time at which the entry ends unless it is heard again."""
        return self.heard_at + self.lifetime

    @property
    def refresh_at(self) -> float:
        """Time at which to ask for the instance again; infinity once it was asked for often enough."""
        if self.num_refreshes >= len(REFRESH_AT):
            return math.inf
        return self.heard_at + self.lifetime * (REFRESH_AT[self.num_refreshes] + self.jitter)

    def renew(self, now: float, lifetime: float, jitter: float) -> None:
        """Note that it was heard again."""
        self.heard_at, self.lifetime, self.jitter, self.num_refreshes = now, lifetime, jitter, 0


class SeenPeers:
    """All entries. A bounded number, and a bounded number from one source: the first to come stay.

    When the next entry ends or is to be asked for is known as a lower bound, which is made exact when it is reached: a
    packet costs the same however many peers there are.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}
        self._on_interface: dict[int, dict[Key, Entry]] = {}
        self._keys_of_peer: dict[str, list[Key]] = {}
        self._num_from_source: Counter[tuple[int, str]] = Counter()
        self._num_of_peer: dict[int, Counter[str]] = {}
        self._next_refresh: dict[int, float] = {}
        self._next_expiry = math.inf

    def get(self, key: Key) -> Entry | None:
        """The entry, if it is there."""
        return self._entries.get(key)

    def has_room(self, key: Key) -> bool:
        """Whether one more entry from this source is taken."""
        num_from_source = self._num_from_source[key.index, key.source]
        return len(self._entries) < MAX_ENTRIES and num_from_source < MAX_ENTRIES_FROM_SOURCE

    def put(self, key: Key, entry: Entry) -> None:
        """Keep an entry, in place of what the same peer said from there under another name: it was restarted."""
        for other in list(self._keys_of_peer.get(entry.peer_id, ())):
            is_same_place = (other.index, other.source) == (key.index, key.source)
            if is_same_place and self._entries[other].service == entry.service:
                self.remove(other)
        if key in self._entries:
            self.remove(key)
        self._entries[key] = entry
        self._on_interface.setdefault(key.index, {})[key] = entry
        self._keys_of_peer.setdefault(entry.peer_id, []).append(key)
        self._num_from_source[key.index, key.source] += 1
        self._num_of_peer.setdefault(key.index, Counter())[entry.peer_id] += 1
        self._note_times(key, entry)

    def renew(self, key: Key, now: float, lifetime: float, jitter: float) -> None:
        """Note that an entry that is there was heard again; it may end sooner than it was to."""
        entry = self._entries[key]
        entry.renew(now, lifetime, jitter)
        self._note_times(key, entry)

    def remove(self, key: Key) -> Entry:
        """Drop an entry that is there."""
        entry = self._entries.pop(key)
        del self._on_interface[key.index][key]
        keys = self._keys_of_peer[entry.peer_id]
        keys.remove(key)
        if not keys:
            del self._keys_of_peer[entry.peer_id]
        _decrease(self._num_from_source, (key.index, key.source))
        _decrease(self._num_of_peer[key.index], entry.peer_id)
        return entry

    def addresses(self, peer_id: str) -> tuple[str, ...]:
        """All addresses that a peer has announced; none if it is not there."""
        keys = self._keys_of_peer.get(peer_id, ())
        unique = dict.fromkeys(item for key in keys for item in self._entries[key].addresses)
        return tuple(unique)[:MAX_ADDRESSES]

    def on_interface(self, index: int) -> list[tuple[Key, Entry]]:
        """The entries from one interface."""
        return list(self._on_interface.get(index, {}).items())

    def num_peers(self, index: int) -> int:
        """Return the number of peers that were heard on an interface and are still there."""
        return len(self._num_of_peer.get(index, ()))

    def next_refresh(self, index: int, now: float) -> float:
        """Return when to ask on an interface for entries about to end: exact if due by `now`, else maybe too early."""
        if self._next_refresh.get(index, math.inf) <= now:
            entries = self._on_interface.get(index, {}).values()
            exact = min((entry.refresh_at for entry in entries), default=math.inf)
            self._next_refresh[index] = exact
        return self._next_refresh.get(index, math.inf)

    def expired(self, now: float) -> list[Key]:
        """The entries whose time is over, which have to be removed."""
        if self._next_expiry > now:
            return []
        over = [key for key, entry in self._entries.items() if entry.expires_at <= now]
        later = (entry.expires_at for entry in self._entries.values() if entry.expires_at > now)
        self._next_expiry = min(later, default=math.inf)
        return over

    def next_expiry(self) -> float:
        """Return when to call `expired` next: at the latest when the first entry ends; infinity if none does."""
        return self._next_expiry

    def _note_times(self, key: Key, entry: Entry) -> None:
        next_refresh = self._next_refresh.get(key.index, math.inf)
        self._next_refresh[key.index] = min(next_refresh, entry.refresh_at)
        self._next_expiry = min(self._next_expiry, entry.expires_at)


def _decrease(counter: Counter[T], item: T) -> None:
    counter[item] -= 1
    if not counter[item]:
        del counter[item]
