"""A connection between two hosts of the network in memory, and the streams on it.

Each way of a connection is a queue of frames in order, and one task that hands them over when they are
due by the delay and the bandwidth of the link. A frame is a function to call at the other end, with the
bytes of the stream that it carries. Nothing but that task calls across, so that either end sees the other
only as it would through a wire: later, in order, and not at all once the connection is lost.

A stream has a window, as in Yamux: the writer waits when the other side has not read for long.
Which host dials which, and which protocols a host serves, is not known here (`memory`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import trio

from neurogrid.errors import PeerUnreachableError, StreamBrokenError
from neurogrid.p2p.streams.stream import Stream
from neurogrid.renewed_event import RenewedEvent

__all__ = ["Connection", "ConnectionEnd", "Link", "MemoryStream"]

# Bytes that a writer may be ahead of the reader, as in Yamux.
WINDOW = 256 * 1024
# Bytes of a stream that one frame carries at most, so that streams take turns on a slow link.
MAX_FRAME = 64 * 1024
# How long a peer may be silent before the connection counts as lost, as on libp2p. Seconds.
SILENCE_TIMEOUT = 40.0
# Streams that one end may have open. libp2p has bounds of the same order.
MAX_STREAMS = 1024


@dataclass(frozen=True)
class Link:
    """Properties of the link between two hosts; the same in both directions.

    Attributes:
        delay: from one host to the other, seconds. `math.inf`: nothing arrives and nobody is told, as with
            a host that hangs or a cable that is out; what was sent meanwhile arrives when it ends. A
            connection on which it takes 40 s is lost, as on libp2p.
        bandwidth: bytes of streams per second, each way of each connection.
        is_reachable: whether a host can be dialled; connections that are there stay.

    Raises:
        ValueError: a negative delay, or a bandwidth that is not above 0.
    """

    delay: float = 0.0
    bandwidth: float = math.inf
    is_reachable: bool = True

    def __post_init__(self) -> None:
        if not self.delay >= 0:
            raise ValueError(f"the delay of a link is at least 0 s, not {self.delay}")
        if not self.bandwidth > 0:
            raise ValueError(f"the bandwidth of a link is above 0 B/s, not {self.bandwidth}")


Deliver = Callable[[bytes], None]


class _Way:
    """One direction of a connection."""

    def __init__(self, link: Callable[[], Link], on_cut: Callable[[], None]) -> None:
        self._link = link
        self._on_cut = on_cut
        self._frames: deque[tuple[float, bytes, Deliver]] = deque()
        self._is_free_at = -math.inf  # when the last frame had left, seconds of trio's clock
        self._changed = RenewedEvent()
        self.bytes_until_cut: int | None = None

    def put(self, payload: bytes, deliver: Deliver) -> None:
        self._frames.append((trio.current_time(), payload, deliver))
        self.wake()

    def wake(self) -> None:
        """Look again: there is a frame, or the link has changed."""
        self._changed.set()

    def drop(self) -> None:
        """Lose what is under way."""
        self._frames.clear()

    async def run(self) -> None:
        while True:
            if not self._frames:
                await self._changed.wait()
                continue
            sent_at, payload, deliver = self._frames[0]
            link = self._link()
            left_at = max(sent_at, self._is_free_at) + len(payload) / link.bandwidth
            due = left_at + link.delay
            if trio.current_time() < due:
                with trio.move_on_at(due):
                    await self._changed.wait()
                continue
            self._frames.popleft()
            self._is_free_at = left_at
            if self.bytes_until_cut is not None:
                if len(payload) > self.bytes_until_cut:
                    deliver(payload[: self.bytes_until_cut])
                    self._on_cut()
                    return
                self.bytes_until_cut -= len(payload)
            deliver(payload)


class ConnectionEnd:
    """One host's end of a connection.

    Attributes:
        peer_id: the host at the other end.
        is_open: whether streams can be opened; never true again once it is false.
    """

    def __init__(
        self,
        peer_id: str,
        way: _Way,
        *,
        on_stream: Callable[[MemoryStream, tuple[str, ...]], bool],
        on_closed: Callable[[ConnectionEnd], None],
    ) -> None:
        self.peer_id = peer_id
        self.is_open = True
        self.way = way
        self.other: ConnectionEnd
        self._on_stream = on_stream
        self._on_closed = on_closed
        self._streams: set[MemoryStream] = set()

    def send(self, deliver: Deliver, payload: bytes = b"") -> None:
        if self.is_open:
            self.way.put(payload, deliver)

    async def open_stream(self, protocol_ids: tuple[str, ...]) -> MemoryStream:
        """Open a stream and let the other end choose; see `Host.open_stream`."""
        if len(self._streams) >= MAX_STREAMS:
            raise PeerUnreachableError(f"{MAX_STREAMS} streams to {self.peer_id} are open already")
        near, far = MemoryStream(self), MemoryStream(self.other)
        near.far, far.far = far, near
        self._streams.add(near)
        self.send(lambda _: self.other._accept(far, protocol_ids))
        try:
            await near.negotiated.wait()
        except trio.Cancelled:
            near.abandon()
            raise
        if near.protocol_id:
            return near
        near.abandon()
        raise PeerUnreachableError(
            f"cannot open a stream to {self.peer_id} for {' or '.join(protocol_ids)}"
        )

    def _accept(self, stream: MemoryStream, protocol_ids: tuple[str, ...]) -> None:
        if not self.is_open:
            return
        self._streams.add(stream)
        if not self._on_stream(stream, protocol_ids):
            self.forget(stream)
        chosen = stream.protocol_id
        self.send(lambda _: stream.far.take_protocol(chosen))

    def forget(self, stream: MemoryStream) -> None:
        self._streams.discard(stream)

    def say_goodbye(self) -> None:
        """Close this end in order: what was sent before arrives, then the other end closes too."""
        self.send(lambda _: self.other.close("the peer closed the connection"))
        self.close("the connection was closed here")

    def close(self, reason: str) -> None:
        """Break all streams of this end, and tell the host."""
        if self.is_open:
            self.is_open = False
            for stream in tuple(self._streams):
                stream.break_off(reason)
            self._on_closed(self)


class Connection:
    """Two ends and the two ways between them. `run` drives it until both ends are closed."""

    def __init__(self, link: Callable[[], Link]) -> None:
        def cut() -> None:
            self.cut("the connection was lost")

        self.ways = (_Way(link, cut), _Way(link, cut))
        self.ends: tuple[ConnectionEnd, ConnectionEnd]
        self._link = link
        self._changed = RenewedEvent()
        self._scope = trio.CancelScope()

    def join(self, dialler: ConnectionEnd, listener: ConnectionEnd) -> None:
        self.ends = (dialler, listener)
        dialler.other, listener.other = listener, dialler

    async def run(self) -> None:
        with self._scope:
            async with trio.open_nursery() as nursery:
                for way in self.ways:
                    nursery.start_soon(way.run)
                nursery.start_soon(self._watch)

    def wake(self) -> None:
        """The link has changed."""
        self._changed.set()
        for way in self.ways:
            way.wake()

    async def _watch(self) -> None:
        """Lose the connection when neither end has had a sign of life from the other for long."""
        while True:
            if self._is_silent():
                with trio.move_on_after(SILENCE_TIMEOUT) as scope:
                    while self._is_silent():
                        await self._changed.wait()
                if scope.cancelled_caught:
                    self.cut(f"no sign of life from the peer for {SILENCE_TIMEOUT:g} s")
            await self._changed.wait()

    def _is_silent(self) -> bool:
        """Whether a question would be answered too late."""
        return 2 * self._link().delay > SILENCE_TIMEOUT

    def cut(self, reason: str) -> None:
        """Lose the connection at both ends at once, with all that is under way."""
        for way in self.ways:
            way.drop()
        for end in self.ends:
            end.close(reason)

    @property
    def is_open(self) -> bool:
        """Whether either end is: the other may not know yet that it has been closed."""
        return any(end.is_open for end in self.ends)

    def end_if_closed(self) -> None:
        if not self.is_open:
            self._scope.cancel()


class MemoryStream(Stream):
    """One end of a stream of the network in memory. Made by `MemoryHost`."""

    def __init__(self, end: ConnectionEnd) -> None:
        super().__init__(peer_id=end.peer_id, protocol_id="")
        self.far: MemoryStream
        self.negotiated = trio.Event()
        self._end = end
        self._inbox = bytearray()
        self._num_uncredited = 0  # bytes read here that the writer does not know of
        self._window = WINDOW
        self._is_eof_received = False
        self._is_eof_sent = False
        self._is_closed = False
        self._broken: str | None = None
        self._is_reset_by_peer = False
        self._changed = RenewedEvent()

    @property
    def is_reset_by_peer(self) -> bool:
        return self._is_reset_by_peer

    async def receive_some(self, max_bytes: int = 256 * 1024) -> bytes:
        await trio.lowlevel.checkpoint()
        while not self._inbox:
            if self._is_closed:
                raise StreamBrokenError(f"the stream to {self.peer_id} was closed here")
            if self._is_eof_received:
                return b""
            if self._broken is not None:
                raise StreamBrokenError(f"the stream to {self.peer_id} broke: {self._broken}")
            await self._changed.wait()
        data = bytes(memoryview(self._inbox)[:max_bytes])
        del self._inbox[: len(data)]
        self._take_up(len(data))
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await trio.lowlevel.checkpoint()
        await self._send(memoryview(data).cast("B"))

    def send_nowait(self, data: bytes) -> bool:
        self.check_sending()
        if len(data) > self._window:
            return False
        for at in range(0, len(data), MAX_FRAME):
            frame = data[at : at + MAX_FRAME]
            self._window -= len(frame)
            self._end.send(self.far._take_data, frame)
        return True

    async def _send(self, data: memoryview) -> None:
        self.check_sending()
        sent = 0
        while sent < len(data):
            if not self._window:
                await self._changed.wait()
                self.check_sending()
                continue
            frame = bytes(data[sent : sent + min(self._window, MAX_FRAME)])
            self._window -= len(frame)
            sent += len(frame)
            self._end.send(self.far._take_data, frame)

    async def send_eof(self) -> None:
        await trio.lowlevel.cancel_shielded_checkpoint()
        if self._is_eof_sent and self._broken is None:
            return
        self.check_sending()
        self._is_eof_sent = True
        self._end.send(self.far._take_eof)

    async def aclose(self) -> None:
        await trio.lowlevel.cancel_shielded_checkpoint()
        if self._is_closed:
            return
        self._is_closed = True
        if self._broken is None and not self._is_eof_sent:
            self._is_eof_sent = True
            self._end.send(self.far._take_eof)
        self._take_up(len(self._inbox))
        self._inbox.clear()
        self._end.forget(self)
        self._changed.set()

    async def reset(self) -> None:
        await trio.lowlevel.cancel_shielded_checkpoint()
        self.abandon()

    # For the connection

    def check_sending(self) -> None:
        """Raise `StreamBrokenError` if nothing can be sent any more."""
        if self._is_eof_sent:
            raise StreamBrokenError(f"the sending side of the stream to {self.peer_id} is closed")
        if self._broken is not None:
            raise StreamBrokenError(f"the stream to {self.peer_id} broke: {self._broken}")

    def abandon(self) -> None:
        """Reset, at once."""
        if self._broken is None:
            self._end.send(self.far._take_reset)
            self._inbox.clear()
            self.break_off("it was reset here")

    def break_off(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
            self.negotiated.set()
            self._end.forget(self)
            self._changed.set()

    def take_protocol(self, protocol_id: str) -> None:
        self.protocol_id = protocol_id
        self.negotiated.set()

    def _take_data(self, data: bytes) -> None:
        if self._is_closed:
            self._take_up(len(data))
        elif self._broken is None:
            self._inbox += data
            self._changed.set()

    def _take_up(self, num_bytes: int) -> None:
        """Let the writer send as many bytes as were taken here; it is told at half a window."""
        self._num_uncredited += num_bytes
        if self._num_uncredited >= WINDOW // 2:
            credit, self._num_uncredited = self._num_uncredited, 0
            self._end.send(lambda _: self.far._take_credit(credit))

    def _take_credit(self, num_bytes: int) -> None:
        self._window += num_bytes
        self._changed.set()

    def _take_eof(self, _: bytes) -> None:
        if self._broken is None:
            self._is_eof_received = True
            self._changed.set()

    def _take_reset(self, _: bytes) -> None:
        self._is_reset_by_peer = self._broken is None
        self.break_off("the other side has reset it")
