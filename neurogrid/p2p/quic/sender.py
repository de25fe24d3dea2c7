"""The sending half of a stream: qh3's, but it is over when its end has arrived, and silent when it was reset.

qh3's takes a stream for finished once all bytes before the end are acknowledged, be the end itself sent or not: a peer
may then wait for it for ever. And after a reset it sends what it had kept as soon as anything is acknowledged, beyond
the final size that the reset told, for which the peer closes the connection.
"""

from __future__ import annotations

from typing import Final

from qh3._hazmat import QuicStreamSender

__all__ = ["StreamSender"]

_ACKNOWLEDGED: Final = 0  # qh3's QuicDeliveryState
_FIN: Final = 0x01  # in the type of a frame

# Bytes, type, offset, end, the highest offset before, and what the header takes.
Frame = tuple[bytes, int, int, int, int, int]


class StreamSender:
    """Sender in place of the `sender` of qh3's stream."""

    __slots__ = ("_ends", "_inner", "_is_end_known", "_is_over", "_is_reset")

    def __init__(self, inner: QuicStreamSender) -> None:
        self._inner = inner
        self._ends: set[tuple[int, int]] = set()  # where frames that told the end began and ended
        self._is_over = inner.is_finished  # from the start, on a stream for receiving
        self._is_end_known = False
        self._is_reset = False

    @property
    def is_finished(self) -> bool:
        """Whether the peer knows the end, or the reset."""
        return self._is_over

    @property
    def buffer_is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return self._is_reset or self._inner.buffer_is_empty

    @property
    def highest_offset(self) -> int:
        """Bytes that were sent at least once."""
        return self._inner.highest_offset

    @property
    def reset_pending(self) -> bool:
        """Whether a reset is to be sent."""
        return self._inner.reset_pending

    def write(self, data: bytes, end_stream: bool = False) -> None:
        """Take bytes to send, and with `end_stream` the end."""
        self._inner.write(data, end_stream)

    def prepare_stream_frame(self, flight_space: int, max_offset: int) -> Frame | None:
        """The next frame; None if nothing fits or nothing is there."""
        frame = self._inner.prepare_stream_frame(flight_space, max_offset)
        if frame is not None and frame[1] & _FIN:
            self._ends.add((frame[2], frame[3]))
        return frame

    def on_data_delivery(self, delivery: int, start: int, stop: int) -> None:
        """A frame was acknowledged or lost."""
        self._inner.on_data_delivery(delivery, start, stop)
        if self._ends and delivery == _ACKNOWLEDGED:
            self._is_end_known = self._is_end_known or (start, stop) in self._ends
            # The end may be known before all that comes before it.
            self._is_over = self._is_over or (self._is_end_known and self._inner.is_finished)

    def reset(self, error_code: int) -> None:
        """Send nothing more but a reset."""
        self._is_reset = True
        self._inner.reset(error_code)

    def get_reset_frame(self) -> tuple[int, int, int]:
        """Code, final size, and number of the stream."""
        return self._inner.get_reset_frame()

    def on_reset_delivery(self, delivery: int) -> None:
        """The reset was acknowledged or lost."""
        self._inner.on_reset_delivery(delivery)
        if delivery == _ACKNOWLEDGED:
            self._is_over = True
