"""Bounds of a connection: how much it may hold and how long it may take, each with its reason.

And the account of unread bytes that makes the bounds of a connection and of a whole host hold together.
"""

from __future__ import annotations

from dataclasses import dataclass

from neurogrid.p2p.link.frames import INITIAL_WINDOW

__all__ = ["BufferPool", "ConnectionBuffers", "LinkLimits"]

MIB = 1024 * 1024


@dataclass(frozen=True)
class LinkLimits:
    """Bounds of one connection, and of all connections of a host where it says so. Bytes and seconds.

    Attributes:
        max_streams: streams that the peer may have open. Ours use one or two; a DHT and identify some dozens. What
            the peer opens beyond is reset, the others live on.
        max_unaccepted: streams of the peer that wait for a task of ours; the specification's backlog.
        max_unacknowledged: streams of ours that the peer has not acknowledged; go-libp2p and rust-libp2p reset what
            goes beyond, so that opening waits.
        max_owed_frames: answers to pings and refusals that wait to be sent. A peer that asks for more while it reads
            none of them is not one of good will: the connection is closed.
        small_window: what a stream's window grows to while its reader keeps up: 5 ms of what one core can open. On
            loopback 4 MiB made both sides wait for each other's turns, and halved the throughput of 8 MiB.
        max_window: what it grows to if moreover half of it is used up within four round trips, so that it is the
            window that holds the peer up: a round trip of 13 ms at 10 Gbit/s. Without that condition a peer that is
            faster than we are would fill the kernel's buffers, and an activation would wait behind megabytes.
        connection_bytes: unread bytes of one connection. Windows do not grow beyond it, and a stream whose unread
            bytes take the connection beyond it is reset.
        total_bytes: the same for all connections of a host.
        assured_bytes: what a connection may hold even while the others have taken `total_bytes`.
        ping_interval: seconds from one ping to the next. Often enough to hold mappings in a NAT (30 s in the shortest
            common ones), and 12 bytes.
        ping_timeout: how long the peer may be silent after an interval without a byte. A Python peer that loads a
            model holds its interpreter for seconds; 30 s of silence is no answer any more.
        drain_timeout: how long streams may go on after the peer said that it goes away.
        close_timeout: to send what is sealed and a GO_AWAY; a peer that takes nothing for so long gets no goodbye.
        linger_timeout: to read until the peer's end after ours, so that the kernel does not reset the
            connection before the peer has read our last bytes.
        half_closed_timeout: a stream that was closed here and not there is reset after this.
    """

    max_streams: int = 2048
    max_unaccepted: int = 256
    max_unacknowledged: int = 256
    max_owed_frames: int = 1024
    small_window: int = 8 * MIB
    max_window: int = 16 * MIB
    connection_bytes: int = 64 * MIB
    total_bytes: int = 256 * MIB
    assured_bytes: int = 1 * MIB
    ping_interval: float = 10.0
    ping_timeout: float = 30.0
    drain_timeout: float = 30.0
    close_timeout: float = 2.0
    linger_timeout: float = 1.0
    half_closed_timeout: float = 60.0


class BufferPool:
    """Counts what all connections of a host hold unread, and what they have promised to take.

    Attributes:
        used: bytes held unread.
        granted: bytes of credit beyond the initial windows.
    """

    def __init__(self, limits: LinkLimits) -> None:
        self.limits = limits
        self.used = 0
        self.granted = 0


class ConnectionBuffers:
    """One connection's part of a pool.

    Attributes:
        used: bytes that the connection holds unread.
        granted: bytes of credit beyond the initial windows that its streams have.
    """

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._limits = pool.limits
        self._is_closed = False
        self.used = 0
        self.granted = 0

    def take(self, num_bytes: int) -> bool:
        """Count bytes that arrived; False, and nothing counted, if they are too many."""
        used = self.used + num_bytes
        limits = self._limits
        if used > limits.connection_bytes or (
            used > limits.assured_bytes and self._pool.used + num_bytes > limits.total_bytes
        ):
            return False
        self.used = used
        self._pool.used += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Count bytes that were read or dropped."""
        if not self._is_closed:
            self.used -= num_bytes
            self._pool.used -= num_bytes

    def grant(self, window: int) -> bool:
        """Let a window grow by as much as it has; False if the bounds do not allow it."""
        limits = self._limits
        if (
            self.granted + window > limits.connection_bytes - INITIAL_WINDOW
            or self._pool.granted + window > limits.total_bytes - INITIAL_WINDOW
        ):
            return False
        self.granted += window
        self._pool.granted += window
        return True

    def revoke(self, num_bytes: int) -> None:
        """Count credit beyond the initial window that ended with its stream."""
        if not self._is_closed:
            self.granted -= num_bytes
            self._pool.granted -= num_bytes

    def close(self) -> None:
        """Leave the pool: the connection is gone. What its streams hold still is their readers' affair."""
        if not self._is_closed:
            self._is_closed = True
            self._pool.used -= self.used
            self._pool.granted -= self.granted
