"""Bounds of a connection, a listener and a host: how much each may hold and for how long, with the reasons."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["QuicLimits", "WindowPool"]

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class QuicLimits:
    """Bounds of one connection, and of a listener or a host where it says so. Bytes and seconds.

    Attributes:
        max_streams: streams that either side may have open. The peer is told, and kept to it.
        max_unaccepted: streams of the peer that wait for a task of ours; what comes beyond is reset.
        first_stream_window: what a peer may send on a new stream before any of it was read.
        max_stream_window: what that grows to while the reader keeps up: 8 MiB are 67 ms at 1 Gbit/s.
        first_window: the same for all streams of a connection together.
        max_window: a connection never holds more unread bytes than this.
        total_bytes: windows of all connections of a host together do not grow beyond this.
        send_buffer: what a stream's writer may be ahead of what was sent; then it waits.
        max_connections: connections of a listener, handshakes included. Above the swarm's own bound.
        max_handshakes: handshakes in progress at a listener. Datagrams that would begin another are ignored.
        free_handshakes: of these, as many need not prove their address first; then a Retry makes them.
        max_handshakes_per_address: of those that did, so many from one IPv4 address, or /64 of IPv6: machines behind
            one NAT that start together begin again within a second.
        handshake_timeout: for one handshake, and how long a Retry's token is good.
        idle_timeout: a peer that is silent for so long is gone. Peers may ask for less.
        ping_interval: after so many seconds without a datagram from the peer it is asked for one. Often enough to
            hold mappings in a NAT (30 s in the shortest common ones), and three times in an idle timeout.
        close_timeout: to get what was written to the peer before a connection closes.
        half_closed_timeout: a stream that was closed here and not there is stopped after this.
    """

    max_streams: int = 512
    max_unaccepted: int = 256
    first_stream_window: int = 512 * KIB
    max_stream_window: int = 8 * MIB
    first_window: int = 2 * MIB
    max_window: int = 16 * MIB
    total_bytes: int = 256 * MIB
    send_buffer: int = 256 * KIB
    max_connections: int = 512
    max_handshakes: int = 128
    free_handshakes: int = 32
    max_handshakes_per_address: int = 32
    handshake_timeout: float = 10.0
    idle_timeout: float = 30.0
    ping_interval: float = 10.0
    close_timeout: float = 2.0
    half_closed_timeout: float = 60.0


class WindowPool:
    """Counts what the windows of all connections of a host have grown by.

    Attributes:
        limits: of the host.
        granted: bytes beyond the first windows.
    """

    def __init__(self, limits: QuicLimits) -> None:
        self.limits = limits
        self.granted = 0

    def grant(self, num_bytes: int) -> bool:
        """Count a growth; False, and nothing counted, if it would be too much."""
        if self.granted + num_bytes > self.limits.total_bytes:
            return False
        self.granted += num_bytes
        return True

    def revoke(self, num_bytes: int) -> None:
        """Count a growth that is undone."""
        self.granted -= num_bytes
