"""Messages and bytes on the wire, counted by peer, message type and direction.

Bytes are those of the tensor protocol (header and data), before encryption and multiplexing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeAlias

from neurogrid.p2p.wire import MessageCode

__all__ = ["OTHERS", "Direction", "Traffic", "TrafficCounters"]

OTHERS: Final = "others"
"""Stands for the peer id of all peers that are not counted on their own any more."""

# Four times the connections that a host may have at once.
MAX_PEERS: Final = 1024


class Direction(StrEnum):
    """Direction of a message, seen from this host."""

    SENT = "sent"
    RECEIVED = "received"


@dataclass
class Traffic:
    """A count of messages and of their bytes."""

    num_messages: int = 0
    num_bytes: int = 0

    def add(self, num_messages: int, num_bytes: int) -> None:
        """Count more."""
        self.num_messages += num_messages
        self.num_bytes += num_bytes


_Rows: TypeAlias = dict[tuple[MessageCode | None, Direction], Traffic]


class TrafficCounters:
    """Counts every message of one `Protocol`; legacy messages count under type None.

    Peers come and go, and each could leave a row: of those that were silent for longest, what is over
    `max_peers` is added up under the peer id `OTHERS`.
    """

    def __init__(self, *, max_peers: int = MAX_PEERS) -> None:
        self._max_peers = max_peers
        # The peer that was heard of last stands last.
        self._peers: dict[str, _Rows] = {}
        self._last = ""

    def add(
        self, direction: Direction, peer_id: str, msg_type: MessageCode | None, num_bytes: int
    ) -> None:
        """Count one message of `num_bytes` bytes."""
        if peer_id != self._last:
            self._last = peer_id
            self._peers[peer_id] = self._peers.pop(peer_id, {})
            if len(self._peers) > self._max_peers + 1:
                self._fold_oldest()
        rows = self._peers[peer_id]
        traffic = rows.get((msg_type, direction))
        if traffic is None:
            traffic = rows[msg_type, direction] = Traffic()
        traffic.num_messages += 1
        traffic.num_bytes += num_bytes

    def total(
        self,
        direction: Direction,
        *,
        peer_id: str | None = None,
        msg_type: MessageCode | None = None,
    ) -> Traffic:
        """Sum over all peers, or one, and over all types, or one."""
        result = Traffic()
        for peer, rows in self._peers.items():
            for (kind, way), traffic in rows.items():
                if way is direction and peer_id in (None, peer) and msg_type in (None, kind):
                    result.add(traffic.num_messages, traffic.num_bytes)
        return result

    def snapshot(self) -> dict[str, dict[str, dict[str, Traffic]]]:
        """All counts as data: peer id, then direction, then the message type's name."""
        result: dict[str, dict[str, dict[str, Traffic]]] = {}
        for peer, rows in self._peers.items():
            for (kind, way), traffic in rows.items():
                name = "legacy" if kind is None else kind.name.lower()
                by_type = result.setdefault(peer, {}).setdefault(way.value, {})
                by_type[name] = Traffic(traffic.num_messages, traffic.num_bytes)
        return result

    def _fold_oldest(self) -> None:
        oldest = next(peer_id for peer_id in self._peers if peer_id != OTHERS)
        others = self._peers.setdefault(OTHERS, {})
        for key, traffic in self._peers.pop(oldest).items():
            others.setdefault(key, Traffic()).add(traffic.num_messages, traffic.num_bytes)
