"""The bandwidth of a member: the most that it has sent and received in a moment of a round.

In a round everybody waits for the slowest, so the mean of a round says nothing of the others; between two fast members
there are moments in which both show what they can do. What is sent counts when it goes into buffers, which take much at
once whatever the line does; what is received has come, but counts when a message is whole: of each peer one may have
come for the most part before. So the lesser of the two counts, for both directions, and of each peer one message less.

An estimate by which a member is given little may leave no moment that would show more. So one of which some rounds in
turn have said nothing is forgotten: a member that was not measured is given as much as the others, and is measured.
"""

from __future__ import annotations

from typing import Final, TypeAlias

__all__ = ["BandwidthMeter"]

Count: TypeAlias = tuple[int, int]
"""Messages, and bytes in them."""

_NOTHING: Final = (0, 0)
# Of the old estimate, what is kept when no moment of a round has reached it.
_KEPT: Final = 0.9
# Bytes: a moment in which less has gone says nothing.
_MIN_BYTES: Final = 64 * 1024
# Rounds in turn that say nothing, after which an estimate is forgotten.
_SILENT_ROUNDS: Final = 8


class BandwidthMeter:
    """An estimate from counts that are looked at now and then.

    Attributes:
        bandwidth: bytes a second, sent and received together; None where it is not known.
    """

    def __init__(self) -> None:
        self.bandwidth: float | None = None
        self._at = 0.0
        self._before = (_NOTHING, _NOTHING)
        self._most = [0.0, 0.0]
        self._num_silent = 0

    def look(self, now: float, sent: Count, received: Count, *, num_peers: int) -> None:
        """So much has gone by in each direction since the beginning, to or from so many peers."""
        passed, self._at = now - self._at, now
        for direction, (count, before) in enumerate(
            zip((sent, received), self._before, strict=True)
        ):
            messages, num_bytes = count[0] - before[0], count[1] - before[1]
            if passed > 0 and num_bytes >= _MIN_BYTES and messages > num_peers:
                whole = num_bytes * (messages - num_peers) / messages
                self._most[direction] = max(self._most[direction], whole / passed)
        self._before = sent, received

    def end_round(self) -> None:
        """A round is over: what it has shown becomes the estimate, at once where it is more, else by and by."""
        if most := 2 * min(self._most):
            kept = _KEPT * (self.bandwidth or 0.0)
            self.bandwidth = max(most, kept)
            self._most, self._num_silent = [0.0, 0.0], 0
            return
        self._num_silent += 1
        if self._num_silent >= _SILENT_ROUNDS:
            self.bandwidth = None
