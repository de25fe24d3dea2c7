"""Yamux, sans I/O: the peer's bytes in, events out; writes in, frames out.

Streams, windows and flags of `/yamux/1.0.0` as hashicorp's specification and libp2p's say. What breaks the rules
ends the connection: a window exceeded, a stream id of the wrong parity or never opened, an unknown type. What may
cross on the way is forgiven: frames for a stream that was reset or closed here meanwhile.

What it refuses to know: Noise, sockets, tasks and clocks. The driver feeds `receive_data`, takes frames from
`outflow` as often as there is room to send, and wakes the tasks that the events and `outflow.take_finished` name.

Strategy:
- A write is queued by reference and cut into frames when there is room to send them. The streams that have
  something take turns, a frame each, so that a small write overtakes other streams' bulk; pings, resets and
  credit go before all data.
- What a reader takes is credited at half a window. A window doubles, up to a limit, while its reader keeps up (one
  that is slow is given no more) and as far as the round trip needs it.
- Payload can be decrypted straight into a reader's memory: `payload_target` names the place while one is due.

Sources: https://github.com/hashicorp/yamux/blob/master/spec.md;
https://github.com/libp2p/specs/blob/master/yamux/README.md.
"""

from __future__ import annotations

from collections.abc import Callable

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.link import events, frames
from neurogrid.p2p.link.events import Event
from neurogrid.p2p.link.inflow import Inflow
from neurogrid.p2p.link.limits import ConnectionBuffers, LinkLimits
from neurogrid.p2p.link.outflow import Outflow
from neurogrid.p2p.link.stream_state import Loan, Outgoing, StreamState
from neurogrid.p2p.link.windows import Windows

__all__ = ["Yamux"]

_MAX_UINT32 = 2**32 - 1


class Yamux:
    """The state of one connection.

    Args:
        is_initiator: whether we dialled; the dialler's streams have odd ids.
        limits: bounds.
        buffers: this connection's account of unread bytes.
        clock: seconds; any clock that does not go back.

    Attributes:
        outflow: what is to be sent, as frames.
        windows: what the peer may send; the driver tells it the round trip.
        streams: by id, those that are not over.
        go_away_sent: we accept no further streams.
        go_away_received: the peer accepts none.
    """

    def __init__(
        self,
        *,
        is_initiator: bool,
        limits: LinkLimits,
        buffers: ConnectionBuffers,
        clock: Callable[[], float],
    ) -> None:
        self.streams: dict[int, StreamState] = {}
        self.go_away_sent = False
        self.go_away_received = False
        self._limits = limits
        self._buffers = buffers

        self._next_id = 1 if is_initiator else 2
        self._their_parity = 0 if is_initiator else 1
        self._highest_id = 0  # that the peer has opened
        self._num_theirs = 0
        self._num_ours = 0
        self._num_unacknowledged = 0

        self.outflow = Outflow(max_owed=limits.max_owed_frames, on_fin_sent=self._fin_sent)
        self.windows = Windows(
            limits=limits, buffers=buffers, clock=clock, schedule=self.outflow.schedule
        )
        self._inflow = Inflow(
            buffers=buffers,
            windows=self.windows,
            on_header=self._take_header,
            on_data=lambda stream: self._tell(events.DataReceived(stream)),
            on_too_much=self._reset_for_room,
            on_end=self._payload_ended,
        )
        self._events: list[Event] = []

    # ------------------------------------------------------------------ the peer's bytes

    def receive_data(self, data: bytes) -> list[Event]:
        """Take the next bytes of the connection; pieces of `data` may be kept, so it is bytes.

        Raises:
            RemoteProtocolError: the peer broke the protocol; the connection is over.
        """
        self._inflow.receive(data)
        return self._take_events()

    def payload_target(self, num_bytes: int) -> memoryview | None:
        """Return memory that a reader lent for the next `num_bytes`, if these are one frame's payload; else None."""
        return self._inflow.target(num_bytes)

    def payload_placed(self, num_bytes: int) -> list[Event]:
        """Say that the bytes are where `payload_target` has pointed; in place of `receive_data`."""
        self._inflow.placed(num_bytes)
        return self._take_events()

    def _take_events(self) -> list[Event]:
        taken, self._events = self._events, []
        return taken

    def _tell(self, event: Event) -> None:
        if not self._events or self._events[-1] != event:
            self._events.append(event)

    def _payload_ended(self, stream: StreamState, flags: int) -> None:
        if flags & frames.FIN:
            self._finish_received(stream)

    def _reset_for_room(self, stream: StreamState) -> None:
        self.reset(stream)
        self._tell(events.StreamReset(stream))

    def _take_header(self, data: bytes | bytearray, at: int) -> None:
        version, frame_type, flags, stream_id, length = frames.unpack_header_from(data, at)
        if version != 0:
            raise RemoteProtocolError(f"Yamux version {version}")
        if frame_type <= frames.WINDOW_UPDATE:
            self._take_stream_frame(frame_type, flags, stream_id, length)
        elif stream_id != 0:
            raise RemoteProtocolError(f"stream {stream_id} on a frame of the connection")
        elif frame_type == frames.PING:
            self._take_ping(flags, length)
        elif frame_type == frames.GO_AWAY:
            self.go_away_received = True
            self._tell(events.GoAwayReceived(length))
        else:
            raise RemoteProtocolError(f"Yamux frame of type {frame_type}")

    def _take_ping(self, flags: int, value: int) -> None:
        if flags & frames.SYN:
            self.outflow.owe(frames.pack_header(frames.PING, frames.ACK, 0, value))
        elif flags & frames.ACK:
            self._tell(events.PongReceived(value))
        else:
            raise RemoteProtocolError("a ping that neither asks nor answers")

    def _take_stream_frame(self, frame_type: int, flags: int, stream_id: int, length: int) -> None:
        stream = self.streams.get(stream_id)
        if flags & frames.SYN:
            if stream is not None:
                raise RemoteProtocolError(f"stream {stream_id} opened twice")
            stream = self._open_theirs(stream_id)
        elif stream is None:
            self._check_past(stream_id)
        if stream is not None:
            if flags & frames.ACK and stream.is_ours and not stream.is_acknowledged:
                self._acknowledge(stream)
            if flags & frames.RST:
                self._reset_received(stream)
                stream = None
        if frame_type == frames.DATA:
            self._begin_payload(stream, flags, length)
        elif stream is not None:
            if length:
                self._open_window(stream, length)
            if flags & frames.FIN:
                self._finish_received(stream)

    def _check_past(self, stream_id: int) -> None:
        """A frame of a stream that we do not have: late for one that is over, or an error."""
        if stream_id & 1 == self._their_parity:
            was_opened = 0 < stream_id <= self._highest_id
        else:
            was_opened = 0 < stream_id < self._next_id
        if not was_opened:
            raise RemoteProtocolError(f"a frame of stream {stream_id}, which nobody opened")

    def _open_theirs(self, stream_id: int) -> StreamState | None:
        # Not in order: go-libp2p numbers its streams before it sends their first frames, in several goroutines.
        if stream_id == 0 or stream_id & 1 != self._their_parity:
            raise RemoteProtocolError(f"the peer opened stream {stream_id}, which is ours to open")
        self._highest_id = max(self._highest_id, stream_id)
        if self.go_away_sent or self._num_theirs >= self._limits.max_streams:
            self._owe_reset(stream_id)
            return None
        stream = StreamState(stream_id, is_ours=False)
        self.streams[stream_id] = stream
        self._num_theirs += 1
        self._tell(events.StreamOpened(stream))
        return stream

    def _owe_reset(self, stream_id: int) -> None:
        self.outflow.owe(frames.pack_header(frames.WINDOW_UPDATE, frames.RST, stream_id, 0))

    def _begin_payload(self, stream: StreamState | None, flags: int, length: int) -> None:
        if stream is not None:
            if length > stream.recv_window:
                raise RemoteProtocolError(
                    f"{length} B on stream {stream.stream_id}, with a window of {stream.recv_window} B"
                )
            if length and stream.fin_received:
                raise RemoteProtocolError(f"data on stream {stream.stream_id} after its end")
            stream.recv_window -= length
        if length:
            self._inflow.expect_payload(stream, length, flags)
        elif stream is not None and flags & frames.FIN:
            self._finish_received(stream)

    def _open_window(self, stream: StreamState, credit: int) -> None:
        stream.send_window += credit
        if stream.send_window > _MAX_UINT32:
            raise RemoteProtocolError(f"a window of {stream.send_window} B")
        self.outflow.window_opened(stream)

    def _acknowledge(self, stream: StreamState) -> None:
        stream.is_acknowledged = True
        self._num_unacknowledged -= 1
        self._tell(events.StreamAcknowledged(stream))

    def _finish_received(self, stream: StreamState) -> None:
        if stream.fin_received:
            return
        stream.fin_received = True
        self._tell(events.StreamFinished(stream))
        if stream.fin_sent:
            self._forget(stream)

    def _reset_received(self, stream: StreamState) -> None:
        stream.reset_by_peer = True
        # What came before can still be read: it may say why.
        self._give_up(stream)
        self._tell(events.StreamReset(stream))

    # ------------------------------------------------------------------ our own doing

    @property
    def can_open(self) -> bool:
        """Whether the peer has acknowledged enough of our streams for another."""
        return self._num_unacknowledged < self._limits.max_unacknowledged

    def open_stream(self) -> StreamState:
        """Begin a stream; its first frame says so to the peer.

        Raises:
            LocalProtocolError: the peer goes away, or we have too many.
        """
        if self.go_away_received or self.go_away_sent:
            raise LocalProtocolError("this connection takes no further streams")
        if self._num_ours >= self._limits.max_streams or self._next_id > _MAX_UINT32:
            raise LocalProtocolError(f"{self._num_ours} streams of ours on one connection")
        stream = StreamState(self._next_id, is_ours=True)
        self.streams[self._next_id] = stream
        self._next_id += 2
        self._num_ours += 1
        self._num_unacknowledged += 1
        self.outflow.schedule(stream)
        return stream

    def accept(self, stream: StreamState) -> None:
        """Acknowledge a stream of the peer, with the next frame that goes to it."""
        if not stream.was_reset:
            stream.ack_pending = True
            self.outflow.schedule(stream)

    def refuse(self, stream: StreamState) -> None:
        """Give up a stream that the peer has just opened: nobody here will take it.

        Raises:
            RemoteProtocolError: the peer lets too many answers wait.
        """
        self.discard(stream)
        self._give_up(stream)
        self._owe_reset(stream.stream_id)

    def queue(self, stream: StreamState, data: memoryview) -> Outgoing:
        """Send `data` (bytes, format "B") after what is queued; it is not copied, so must stay as it is.

        Raises:
            LocalProtocolError: the stream was finished or reset here or there; ask before.
        """
        if stream.was_reset or stream.fin_wanted:
            raise LocalProtocolError(f"stream {stream.stream_id} takes no more data")
        outgoing = Outgoing(data)
        if not data:
            outgoing.is_over = outgoing.is_sent = True
            return outgoing
        self.outflow.add(stream, outgoing)
        return outgoing

    def withdraw(self, stream: StreamState, outgoing: Outgoing) -> None:
        """Do not send the rest of a write: what became frames is sent, the memory is free."""
        if not outgoing.is_over:
            outgoing.is_over = True
            stream.outbox.remove(outgoing)
            if stream.fin_wanted and not stream.outbox:
                self.outflow.schedule(stream)

    def finish(self, stream: StreamState) -> None:
        """Send nothing more after what is queued. Doing it twice is no error."""
        if not (stream.was_reset or stream.fin_wanted):
            stream.fin_wanted = True
            if not stream.outbox:
                self.outflow.schedule(stream)

    def discard(self, stream: StreamState) -> None:
        """Read nothing more: drop what is there and what comes."""
        stream.is_discarding = True
        stream.loan = None
        dropped = stream.inbox.clear()
        self._buffers.give_back(dropped)
        self.windows.credit(stream, dropped)

    def reset(self, stream: StreamState) -> None:
        """Give a stream up, in both directions."""
        self.discard(stream)
        if stream.was_reset:
            return
        if stream.stream_id in self.streams and not stream.syn_pending:
            self.outflow.control(
                frames.pack_header(frames.WINDOW_UPDATE, frames.RST, stream.stream_id, 0)
            )
        self._give_up(stream)

    def give_up_all(self) -> None:
        """Give up every stream without a word: the connection ends."""
        for stream in list(self.streams.values()):
            self.discard(stream)
            self._give_up(stream)

    def drop_writes(self) -> None:
        """Free the memory of all writes: nothing can be sent any more. What has arrived stays."""
        for stream in self.streams.values():
            self.outflow.drop(stream)

    def consumed(self, stream: StreamState, num_bytes: int) -> None:
        """The reader took bytes out of the inbox: the peer may send as many again."""
        self._buffers.give_back(num_bytes)
        self.windows.credit(stream, num_bytes)

    def lend(self, stream: StreamState, memory: memoryview, *, wants_all: bool = False) -> Loan:
        """Let what arrives next be written to a reader's memory, until it is full or reclaimed.

        DataReceived tells of each piece of it, or only that it is full.
        """
        if stream.inbox.size:
            raise LocalProtocolError("there are bytes to be read before")
        stream.loan = Loan(memory, wants_all=wants_all)
        return stream.loan

    def reclaim(self, stream: StreamState) -> None:
        """The memory lent is not to be written to any more."""
        stream.loan = None

    def ping(self, value: int) -> None:
        """Ask for a sign of life; `value` comes back."""
        self.outflow.control(frames.pack_header(frames.PING, frames.SYN, 0, value))

    def go_away(self, code: int) -> None:
        """Accept no further streams, and say so."""
        if not self.go_away_sent:
            self.go_away_sent = True
            self.outflow.control(frames.pack_header(frames.GO_AWAY, 0, 0, code))

    def sweep(self, max_age: int) -> list[StreamState]:
        """Reset the streams that were closed here `max_age` sweeps ago and not by the peer; return them."""
        stale = []
        for stream in list(self.streams.values()):
            if stream.is_discarding and stream.fin_sent:
                stream.age += 1
                if stream.age > max_age:
                    self.reset(stream)
                    stale.append(stream)
        return stale

    # ------------------------------------------------------------------ what follows from it

    def _fin_sent(self, stream: StreamState) -> None:
        stream.fin_sent = True
        if stream.fin_received:
            self._forget(stream)

    def _give_up(self, stream: StreamState) -> None:
        stream.was_reset = True
        stream.loan = None
        self._inflow.forget(stream)
        self.outflow.drop(stream)
        self._forget(stream)

    def _forget(self, stream: StreamState) -> None:
        if self.streams.pop(stream.stream_id, None) is None:
            return
        self.windows.close(stream)
        if stream.is_ours:
            self._num_ours -= 1
            if not stream.is_acknowledged:  # refused, or given up before
                self._num_unacknowledged -= 1
        else:
            self._num_theirs -= 1
