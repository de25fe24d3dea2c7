"""One planning problem, prepared: how far each peer gets from each layer, within memory and within a time.

Everything is a prefix sum, so that "how far" is one bisection. A stage that fits goes on fitting when layers are
taken from either end of it, and never gets slower by that: the searches rest on these two facts.

Where no peer's speed is known, memory decides: the "seconds" of a stage are then the fraction of its peer's
memory that it fills.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from statistics import median

from neurogrid.planner.world import (
    KeptLayers,
    LayerSize,
    Links,
    ModelSize,
    PeerCapacity,
    PeerSpeed,
)

__all__ = ["Order", "Problem"]

# Peers by their index in `Problem.peers`, first stage first.
Order = tuple[int, ...]

# Sums of floats differ in the last places by the order in which they are made.
ROUNDING = 1 + 1e-9


class Problem:
    """The model, the peers in an order that depends on no input order, and the tables of both.

    Attributes:
        peers: the roomiest first, equal ones by peer id.
        index_of: peer id to index.
        usable: bytes that each peer can give to weights and caches.
        num_layers: of the model.
        has_seconds: whether the times are seconds; False if they are fractions of memory.
        has_links: whether the way from one peer to another counts.
        is_even: whether all layers are the same and the place of a peer in the order makes no difference.
    """

    def __init__(self, model: ModelSize, peers: Sequence[PeerCapacity], links: Links) -> None:
        workspace = model.workspace_bytes
        self.model = model
        self.peers = sorted(peers, key=lambda peer: (-peer.usable_bytes(workspace), peer.peer_id))
        self.index_of = {peer.peer_id: index for index, peer in enumerate(self.peers)}
        self.usable = [peer.usable_bytes(workspace) for peer in self.peers]
        self.num_layers = len(model.layers)
        self.has_seconds = any(peer.speed for peer in self.peers)
        self._weights = _sums(layer.weight_bytes for layer in model.layers)
        self._totals = _sums(layer.total_bytes for layer in model.layers)
        self._links = links if self.has_seconds else Links()
        self._missing = [self._missing_of(peer) for peer in self.peers]
        self._elapsed = self._elapsed_tables()
        self._memory_reach = self._memory_tables()
        self._hops: dict[tuple[int | None, int], float] = {}
        self.has_links = bool(self._links)
        self.is_even = (
            len(set(model.layers)) == 1
            and not self.has_links
            and not any(peer.kept for peer in self.peers)
        )

    @property
    def total_bytes(self) -> int:
        """Bytes that all layers of the model take."""
        return self._totals[-1]

    def num_bytes(self, start: int, stop: int) -> int:
        """Return the bytes that layers [start, stop) take."""
        return self._totals[stop] - self._totals[start]

    def missing_bytes(self, peer: int, start: int, stop: int) -> int:
        """Bytes of weights of [start, stop) that have to be sent to the peer."""
        return self._missing[peer][stop] - self._missing[peer][start]

    def holds_something(self) -> bool:
        """Whether any peer has a layer already."""
        return any(peer.held for peer in self.peers)

    def fits(self, peer: int, start: int, stop: int) -> bool:
        """Whether the peer has memory for [start, stop), beside what it must keep."""
        return self._memory_reach[peer][start] >= stop

    def hop(self, previous: int | None, peer: int) -> float:
        """Seconds that an activation takes to the peer; from the coordinator if `previous` is None."""
        if not self.has_links:
            return 0.0
        key = (previous, peer)
        if key not in self._hops:
            source = None if previous is None else self.peers[previous].peer_id
            self._hops[key] = self._links.seconds(
                source, self.peers[peer].peer_id, self.model.activation_bytes
            )
        return self._hops[key]

    def way_back(self, peer: int) -> float:
        """Seconds from the last stage's peer to the coordinator."""
        return self._links.seconds(self.peers[peer].peer_id, None, self.model.activation_bytes)

    def seconds(self, previous: int | None, peer: int, start: int, stop: int) -> float:
        """Return the seconds that one step takes: the way to the peer, and [start, stop) on it."""
        elapsed = self._elapsed[peer]
        return self.hop(previous, peer) + elapsed[stop] - elapsed[start]

    def reach(self, previous: int | None, peer: int, start: int, limit: float) -> int:
        """The last `stop` that the peer can hold from `start`, within `limit` seconds; `start` if none."""
        stop = self._memory_reach[peer][start]
        if limit == float("inf"):
            return stop
        elapsed = self._elapsed[peer]
        latest = elapsed[start] + (limit * ROUNDING - self.hop(previous, peer))
        return max(min(stop, bisect_right(elapsed, latest) - 1), start)

    def _elapsed_tables(self) -> list[list[float]]:
        """Return for each peer the seconds from layer 0 to each layer."""
        layers = self.model.layers
        if not self.has_seconds:
            return [[total / max(usable, 1) for total in self._totals] for usable in self.usable]
        known = [peer.speed for peer in self.peers if peer.speed]
        typical = PeerSpeed(
            median(speed.bytes_per_second for speed in known),
            median(speed.layer_seconds for speed in known),
        )
        tables: dict[PeerSpeed, list[float]] = {}
        for speed in {peer.speed or typical for peer in self.peers}:
            tables[speed] = [0.0, *accumulate(_layer_seconds(layer, speed) for layer in layers)]
        return [tables[peer.speed or typical] for peer in self.peers]

    def _missing_of(self, peer: PeerCapacity) -> list[int]:
        if not peer.held:
            return self._weights
        return _sums(
            0 if index in peer.held else layer.weight_bytes
            for index, layer in enumerate(self.model.layers)
        )

    def _memory_tables(self) -> list[list[int]]:
        """Return for each peer and start the last `stop` that its memory allows."""
        tables: dict[tuple[int, KeptLayers | None], list[int]] = {}
        for peer, usable in zip(self.peers, self.usable, strict=True):
            key = (usable, peer.kept)
            if key in tables:
                continue
            if peer.kept is None:
                totals = self._totals
                tables[key] = [bisect_right(totals, taken + usable) - 1 for taken in totals]
            else:
                tables[key] = self._reach_beside(peer.kept, usable)
        return [
            tables[usable, peer.kept] for peer, usable in zip(self.peers, self.usable, strict=True)
        ]

    def _reach_beside(self, kept: KeptLayers, usable: int) -> list[int]:
        """Return the last `stop` for each start beside layers kept for older sessions; shared ones count once."""
        stops = range(self.num_layers + 1)
        kept_bytes = self.num_bytes(kept.start, kept.stop)

        def needed(stop: int, start: int) -> int:
            first, last = max(start, kept.start), min(stop, kept.stop)
            shared = self.num_bytes(first, last) if first < last else 0
            return kept_bytes - shared + self.num_bytes(start, stop)

        return [
            max(bisect_right(stops, usable, lo=start, key=partial(needed, start=start)) - 1, start)
            for start in stops
        ]


def _layer_seconds(layer: LayerSize, speed: PeerSpeed) -> float:
    return layer.read_bytes / speed.bytes_per_second + speed.layer_seconds


def _sums(sizes: Iterable[int]) -> list[int]:
    return [0, *accumulate(sizes)]
