"""Messages and bytes on the wire, counted by peer, message type and direction.

Bytes are those of the tensor protocol (header and data), before encryption and multiplexing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import Enum

from neurogrid.p2p.wire import MessageType

__all__ = ["Direction", "Traffic", "TrafficCounters"]


class Direction(Enum):
    """Which way a message went, seen from this host."""

    SENT = "sent"
    RECEIVED = "received"


@dataclass
class Traffic:
    """A count of messages and of their bytes."""

    num_messages: int = 0
    num_bytes: int = 0


class TrafficCounters:
    """Counts every message of one `Protocol`; legacy messages count under type None."""

    def __init__(self) -> None:
        self._traffic: defaultdict[tuple[str, MessageType | None, Direction], Traffic]
        self._traffic = defaultdict(Traffic)

    def add(
        self, peer_id: str, msg_type: MessageType | None, direction: Direction, num_bytes: int
    ) -> None:
        """Count one message of `num_bytes` bytes."""
        traffic = self._traffic[peer_id, msg_type, direction]
        traffic.num_messages += 1
        traffic.num_bytes += num_bytes

    def total(
        self,
        direction: Direction,
        *,
        peer_id: str | None = None,
        msg_type: MessageType | None = None,
    ) -> Traffic:
        """Sum over all peers, or one, and over all types, or one."""
        result = Traffic()
        for (peer, kind, way), traffic in self._traffic.items():
            if way is direction and peer_id in (None, peer) and msg_type in (None, kind):
                result.num_messages += traffic.num_messages
                result.num_bytes += traffic.num_bytes
        return result

    def snapshot(self) -> dict[str, dict[str, dict[str, Traffic]]]:
        """All counts as data: peer id, then direction, then the message type's name."""
        result: dict[str, dict[str, dict[str, Traffic]]] = {}
        for (peer, kind, way), traffic in self._traffic.items():
            name = "legacy" if kind is None else kind.name.lower()
            by_type = result.setdefault(peer, {}).setdefault(way.value, {})
            by_type[name] = Traffic(traffic.num_messages, traffic.num_bytes)
        return result
