"""Windows of each stream: credit to the peer for what was read, and growth where it helps.

Credit is given at half a window. A window doubles while its reader keeps up: one that is slow is given no more.
Beyond a small size it doubles only if half of it was used up within four round trips, so that it is the window that
holds the peer up: else a peer that is faster than this side would fill the kernel's buffers.
"""

from __future__ import annotations

from collections.abc import Callable

from neurogrid.p2p.link.frames import INITIAL_WINDOW
from neurogrid.p2p.link.limits import ConnectionBuffers, LinkLimits
from neurogrid.p2p.link.stream_state import StreamState

__all__ = ["Windows"]


class Windows:
    """The receive windows of one connection's streams.

    Args:
        limits: how large a window may be.
        buffers: where growth is accounted for.
        clock: seconds; any clock that does not go back.
        schedule: called with a stream that has credit to send.

    Attributes:
        round_trip: seconds, as the driver has measured it; 0 while it is unknown.
    """

    def __init__(
        self,
        *,
        limits: LinkLimits,
        buffers: ConnectionBuffers,
        clock: Callable[[], float],
        schedule: Callable[[StreamState], None],
    ) -> None:
        self.round_trip = 0.0
        self._limits = limits
        self._buffers = buffers
        self._clock = clock
        self._schedule = schedule

    def credit(self, stream: StreamState, num_bytes: int) -> None:
        """Count bytes that were taken off a stream, and let the peer know at half a window."""
        stream.consumed += num_bytes
        if 2 * stream.consumed < stream.window or stream.fin_received or stream.was_reset:
            return
        credit, stream.consumed = stream.consumed, 0
        now = self._clock()
        if self._is_too_small(stream, now) and self._buffers.grant(stream.window):
            credit += stream.window
            stream.window *= 2
        stream.credited_at = now
        stream.credit += credit
        self._schedule(stream)

    def close(self, stream: StreamState) -> None:
        """A stream is over: its growth is for others."""
        self._buffers.revoke(stream.window - INITIAL_WINDOW)

    def _is_too_small(self, stream: StreamState, now: float) -> bool:
        """Whether a window, of which half was just read, should be doubled."""
        if 4 * stream.inbox.size > stream.window or stream.is_discarding:
            return False  # it is the reader that is slow
        doubled = 2 * stream.window
        if doubled <= self._limits.small_window:
            return True
        is_used_up_at_once = now - stream.credited_at < 4 * self.round_trip
        return doubled <= self._limits.max_window and is_used_up_at_once
