"""The bandwidth of a member: the most that it has sent and received in a moment of a round.

In a round everybody waits for the slowest, so the mean of a round says nothing of the others; between two fast members
there are moments in which both show what they can do.
"""

from __future__ import annotations

from typing import Final

__all__ = ["BandwidthMeter"]

# Of the old estimate, what is kept when no moment of a round has reached it.
_KEPT: Final = 0.9
# Bytes: a moment in which less has gone says nothing.
_MIN_BYTES: Final = 64 * 1024


class BandwidthMeter:
    """An estimate from a count of bytes that is looked at now and then.

    Attributes:
        bandwidth: bytes a second, sent and received together; None before anything was measured.
    """

    def __init__(self) -> None:
        self.bandwidth: float | None = None
        self._at = 0.0
        self._num_bytes = 0
        self._most = 0.0

    def look(self, now: float, num_bytes: int) -> None:
        """So many bytes have gone by since the beginning."""
        passed, gone = now - self._at, num_bytes - self._num_bytes
        self._at, self._num_bytes = now, num_bytes
        if passed > 0 and gone >= _MIN_BYTES:
            self._most = max(self._most, gone / passed)

    def end_round(self) -> None:
        """A round is over: what it has shown becomes the estimate, at once where it is more, else by and by."""
        if self._most:
            kept = _KEPT * (self.bandwidth or 0.0)
            self.bandwidth = max(self._most, kept)
            self._most = 0.0
