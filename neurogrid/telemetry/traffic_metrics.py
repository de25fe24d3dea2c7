"""Traffic over the wire: messages and bytes by type, bytes by peer, and which peers are connected.

Peers come and go, and each would leave a series: only so many are told apart, the rest is one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from neurogrid.p2p.exchange.counters import OTHERS, Direction, TrafficCounters
from neurogrid.p2p.hosts.identity import short_peer_id
from neurogrid.telemetry.metric import MetricSpec, Reading

__all__ = ["MAX_PEERS", "PEERS", "TRAFFIC_METRICS", "PeerBytes", "TrafficSource"]

MESSAGES: Final = MetricSpec(
    "neurogrid_p2p_messages_total",
    "counter",
    "Messages of the tensor protocol.",
    ("type", "direction"),
)
BYTES: Final = MetricSpec(
    "neurogrid_p2p_bytes_total",
    "counter",
    "Bytes of messages, header and data, before encryption.",
    ("type", "direction"),
)
PEER_BYTES: Final = MetricSpec(
    "neurogrid_p2p_peer_bytes_total",
    "counter",
    "The same bytes by peer: the end of its peer id, or `others`.",
    ("peer", "direction"),
)
PEERS: Final = MetricSpec(
    "neurogrid_p2p_connected_peers", "gauge", "Peers that are connected, whatever they are."
)
TRAFFIC_METRICS: Final = (MESSAGES, BYTES, PEER_BYTES, PEERS)

MAX_PEERS: Final = 64


class TrafficSource:
    """Reads the counters of one `Protocol`.

    Args:
        counters: of the protocol; None while there is none.
        connected: peer ids that are connected.
        counts_peers: tells how many these are, too; False where others read of the same peers.
    """

    def __init__(
        self,
        counters: Callable[[], TrafficCounters | None],
        connected: Callable[[], Collection[str]],
        *,
        counts_peers: bool = True,
    ) -> None:
        self._counters = counters
        self._connected = connected
        self._counts_peers = counts_peers
        self._by_peer = {way: PeerBytes() for way in Direction}

    def __call__(self, reading: Reading) -> None:
        counters, connected = self._counters(), self._connected()
        if self._counts_peers:
            reading.add(PEERS, len(connected))
        if counters is None:
            return
        by_type: dict[tuple[str, str], tuple[int, int]] = {}
        by_peer: dict[Direction, dict[str, int]] = {way: {} for way in Direction}
        for peer_id, ways in counters.snapshot().items():
            for way, types in ways.items():
                for name, traffic in types.items():
                    messages, num_bytes = by_type.get((name, way), (0, 0))
                    by_type[name, way] = (
                        messages + traffic.num_messages,
                        num_bytes + traffic.num_bytes,
                    )
                total = sum(traffic.num_bytes for traffic in types.values())
                by_peer[Direction(way)][peer_id] = total
        for (name, way), (messages, num_bytes) in by_type.items():
            reading.add(MESSAGES, messages, name, way)
            reading.add(BYTES, num_bytes, name, way)
        for direction, totals in by_peer.items():
            labelled = self._by_peer[direction].update(totals, connected)
            for label, num_bytes in labelled.items():
                reading.add(PEER_BYTES, num_bytes, label, direction.value)


class PeerBytes:
    """Totals by peer, for `max_peers` of them; what the others have is one total, which never falls.

    A peer keeps its place until another needs it and it is not connected. From then on what it has more counts as
    the others': what it had before is not in the growth of that total again.
    """

    def __init__(self, *, max_peers: int = MAX_PEERS) -> None:
        self._max_peers = max_peers
        self._named: dict[str, None] = {}  # in the order in which they came
        self._last: dict[str, int] = {}
        self._others = 0

    def update(self, totals: Mapping[str, int], connected: Collection[str]) -> dict[str, int]:
        """Labels with their totals.

        Args:
            totals: by peer id; those that are gone may have been added up under `OTHERS`.
            connected: peers that keep a place.
        """
        for peer_id in set(self._last) - set(totals):
            self._others -= self._last[peer_id]  # and comes back with what OTHERS has more
            self._named.pop(peer_id, None)
        for peer_id in totals:
            is_new = peer_id not in self._last and peer_id != OTHERS
            if is_new and self._has_place(connected):
                self._named[peer_id] = None
        for peer_id, total in totals.items():
            if peer_id not in self._named:
                self._others += total - self._last.get(peer_id, 0)
        self._last = dict(totals)
        labelled: dict[str, int] = {OTHERS: self._others} if self._others else {}
        for peer_id in self._named:
            label = short_peer_id(peer_id)
            labelled[label] = labelled.get(label, 0) + totals[peer_id]
        return labelled

    def _has_place(self, connected: Collection[str]) -> bool:
        """Whether there is a place for one more, if need be that of one that is gone."""
        if len(self._named) < self._max_peers:
            return True
        gone = next((peer_id for peer_id in self._named if peer_id not in connected), None)
        if gone is None:
            return False
        del self._named[gone]
        return True
