"""The frames that wait to be sent on one connection, and whose turn it is.

In this order: answers that the peer caused, frames of the connection and resets, flags and credit of streams, and
then data. The streams that have data and the window for it take turns, a frame each.

Nothing is framed before there is room to send it. So a small write never stands behind more than one frame of each
other stream, a write can be withdrawn, and credit goes out as one frame however often it was given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.link.frames import ACK, DATA, FIN, SYN, WINDOW_UPDATE, pack_header
from neurogrid.p2p.link.stream_state import Outgoing, StreamState

__all__ = ["Frame", "Outflow"]

_NO_PAYLOAD = memoryview(b"")

Frame = tuple[bytes, memoryview]


class Outflow:
    """Queues of one connection.

    Args:
        max_owed: answers that may wait.
        on_fin_sent: called with a stream whose FIN has become a frame.
    """

    def __init__(self, *, max_owed: int, on_fin_sent: Callable[[StreamState], None]) -> None:
        self._max_owed = max_owed
        self._on_fin_sent = on_fin_sent
        self._owed: deque[bytes] = deque()
        self._control: deque[bytes] = deque()
        self._scheduled: deque[StreamState] = deque()  # flags or credit to send
        self._ready: deque[StreamState] = deque()  # data to send, and the window for it
        self._finished: list[Outgoing] = []

    @property
    def has_output(self) -> bool:
        """Whether there may be something to send."""
        return bool(self._ready or self._scheduled or self._owed or self._control)

    def owe(self, frame: bytes) -> None:
        """Queue an answer that the peer caused.

        Raises:
            RemoteProtocolError: it lets too many wait.
        """
        if len(self._owed) >= self._max_owed:
            raise RemoteProtocolError(f"the peer lets {self._max_owed} answers wait")
        self._owed.append(frame)

    def control(self, frame: bytes) -> None:
        """Queue a frame of our own will that carries no data."""
        self._control.append(frame)

    def schedule(self, stream: StreamState) -> None:
        """A stream has a flag or credit to send."""
        if not stream.is_scheduled:
            stream.is_scheduled = True
            self._scheduled.append(stream)

    def add(self, stream: StreamState, outgoing: Outgoing) -> None:
        """Queue a write."""
        stream.outbox.append(outgoing)
        self.window_opened(stream)

    def window_opened(self, stream: StreamState) -> None:
        """Let a stream take part in the turns if it has data and may send it."""
        if stream.outbox and stream.send_window and not stream.is_ready:
            stream.is_ready = True
            self._ready.append(stream)

    def drop(self, stream: StreamState) -> None:
        """Free the writes that wait on a stream: it was given up."""
        for outgoing in stream.outbox:
            outgoing.is_over = True
            self._finished.append(outgoing)
        stream.outbox.clear()

    def take_finished(self) -> list[Outgoing]:
        """The writes whose memory became free since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def next_frame(self, max_payload: int) -> Frame | None:
        """The next frame to send, as header and payload, or None. The payload is the writer's memory.

        It counts as sent: the caller copies or encrypts it before it does anything else.
        """
        if self._owed:
            return self._owed.popleft(), _NO_PAYLOAD
        if self._control:
            return self._control.popleft(), _NO_PAYLOAD
        while self._scheduled:
            stream = self._scheduled.popleft()
            stream.is_scheduled = False
            if not stream.was_reset and (frame := self._flag_frame(stream)) is not None:
                return frame
        while self._ready:
            stream = self._ready.popleft()
            stream.is_ready = False
            if stream.outbox and stream.send_window:
                return self._data_frame(stream, max_payload)
        return None

    def _flag_frame(self, stream: StreamState) -> Frame | None:
        """Make the frame of a stream's flags and credit without data; None if data has carried them meanwhile."""
        flags = _opening_flags(stream)
        if stream.fin_wanted and not stream.outbox and not stream.fin_sent:
            flags |= FIN
        credit, stream.credit = stream.credit, 0
        if not (flags or credit):
            return None
        stream.recv_window += credit
        frame = pack_header(WINDOW_UPDATE, flags, stream.stream_id, credit), _NO_PAYLOAD
        if flags & FIN:
            self._on_fin_sent(stream)
        return frame

    def _data_frame(self, stream: StreamState, max_payload: int) -> Frame:
        outgoing = stream.outbox[0]
        at = outgoing.at
        num_bytes = min(len(outgoing.data) - at, max_payload, stream.send_window)
        payload = outgoing.data[at : at + num_bytes]
        outgoing.at = at + num_bytes
        stream.send_window -= num_bytes
        flags = _opening_flags(stream)
        if outgoing.at == len(outgoing.data):
            stream.outbox.popleft()
            outgoing.is_over = outgoing.is_sent = True
            self._finished.append(outgoing)
            if stream.fin_wanted and not stream.outbox:
                flags |= FIN
        header = pack_header(DATA, flags, stream.stream_id, num_bytes)
        if flags & FIN:
            self._on_fin_sent(stream)
        else:
            self.window_opened(stream)
        return header, payload


def _opening_flags(stream: StreamState) -> int:
    flags = (SYN if stream.syn_pending else 0) | (ACK if stream.ack_pending else 0)
    stream.syn_pending = stream.ack_pending = False
    return flags
