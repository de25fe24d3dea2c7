"""The driver of one connection: py-libp2p's `IMuxedConn` over the state machine.

Each task does at once what it causes: the socket's reader takes datagrams and sends what follows from
them, a writer sends what it wrote. One task per connection is left for what no other does: timers, signs of
life, and the end. So no frame is ever cut by a cancellation; what was handed over is sent, whatever becomes of the
task that wrote it.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import count
from typing import TYPE_CHECKING, Any

import trio
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from multiaddr import Multiaddr
from qh3.quic.events import (
    ConnectionIdIssued,
    ConnectionIdRetired,
    QuicEvent,
    StopSendingReceived,
    StreamDataReceived,
    StreamReset,
)

from neurogrid.p2p.link.muxed_stream import MuxedConn
from neurogrid.p2p.quic.core import Core
from neurogrid.p2p.quic.limits import WindowPool
from neurogrid.p2p.quic.quic_stream import QuicMuxedStream
from neurogrid.p2p.quic.turns import Alarm
from neurogrid.p2p.quic.window import ConnectionWindow

if TYPE_CHECKING:
    from qh3.quic.configuration import QuicConfiguration

    from neurogrid.p2p.quic.endpoint import UdpEndpoint

__all__ = ["QuicMuxedConn"]

logger = logging.getLogger(__name__)

LINGER = 1.0  # seconds that a connection is kept when it is over, to tell a peer that has not heard of it
MIN_INTERVAL = 0.1  # seconds between two looks at whether a peer is alive
BLOCKED_INTERVAL = 0.05  # seconds between two looks at the time while the system takes no datagrams


class QuicMuxedConn(MuxedConn):
    """One connection to one peer. A `UdpEndpoint` makes it, py-libp2p's swarm starts and closes it.

    Attributes:
        core: the state machine, for the streams.
        limits: its bounds.
        peer_id: the peer at its other end; to be read once the handshake is complete.
        handshake_over: set when the handshake is complete, or has failed.
    """

    BREATH_BYTES = 256 * 1024
    BREATH_CALL = 8 * 1024

    def __init__(
        self,
        carrier: UdpEndpoint,
        configuration: QuicConfiguration,
        pool: WindowPool,
        address: tuple[Any, ...],
        *,
        expected: ID | None = None,
        original_cid: bytes | None = None,
        retry_cid: bytes | None = None,
    ) -> None:
        super().__init__(is_initiator=bool(configuration.is_client))
        self.handshake_over = trio.Event()
        self.limits = pool.limits
        self.core = Core(
            configuration,
            pool.limits,
            forget=self._stream_over,
            expected=expected,
            original_destination_connection_id=original_cid,
            retry_source_connection_id=retry_cid,
        )
        self._carrier = carrier
        self._address = address
        self._window = ConnectionWindow(self.core, pool)
        self._cids: set[bytes] = set()
        self._is_complete = False
        self._is_dispatching = False

        self._streams: dict[int, QuicMuxedStream] = {}
        self._num_opened = 0  # streams of ours that are not over
        self._blocked: set[QuicMuxedStream] = set()
        self._half_closed: dict[QuicMuxedStream, float] = {}
        self._backlog: deque[QuicMuxedStream] = deque()
        self._stream_came = trio.Event()
        self._can_open = trio.Event()
        self._sent = trio.Event()
        self._alarm = Alarm()
        self._heard_at = trio.current_time()
        self._given_up_at = 0.0
        for cid in self.core.cids:
            self.be_called(cid)

    # ------------------------------------------------------------------ what the swarm asks for

    @property
    def peer_id(self) -> ID:  # type: ignore[override]  # libp2p has a variable; the handshake tells it
        """The peer at its other end."""
        peer_id = self.core.peer_id
        assert peer_id is not None, "the handshake is not complete"
        return peer_id

    @property
    def is_established(self) -> bool:
        """Whether streams can be opened."""
        return self._is_complete and self.end_reason is None

    def get_remote_address(self) -> tuple[str, int] | None:
        """The peer's host and port."""
        return self._address[0], self._address[1]

    def get_transport_addresses(self) -> list[Multiaddr]:
        """The address that the connection goes to."""
        host, port = self._address[:2]
        return [Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/udp/{port}/quic-v1")]

    def get_connection_type(self) -> ConnectionType:
        """Type of the connection, which is never relayed."""
        return ConnectionType.DIRECT

    async def start(self) -> None:
        """Live until the connection is over; its carrier drives it."""
        self.event_started.set()
        await self.event_closed.wait()

    async def close(self) -> None:
        """Close: what was written before gets to the peer, as far as that takes it in time."""
        await self._drain()
        self.abort("the connection was closed here")

    async def open_stream(self) -> QuicMuxedStream:
        """Open a stream. Waits while the peer allows no more.

        Raises:
            MuxedConnUnavailable: the connection is closing or gone, or has too many streams.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.end_reason is None and not self.core.can_open:
            self._can_open = trio.Event()
            await self._can_open.wait()
        if self.end_reason is not None:
            raise MuxedConnUnavailable(self.end_reason)
        if self._num_opened >= self.limits.max_streams:
            raise MuxedConnUnavailable(f"the connection has {self._num_opened} streams of ours")
        self._num_opened += 1
        return self._add(self.core.open())

    async def accept_stream(self) -> QuicMuxedStream:
        """Wait for a stream of the peer.

        Raises:
            MuxedConnUnavailable: there will be none any more.
        """
        while True:
            while self._backlog:
                stream = self._backlog.popleft()
                if stream.was_reset is None:
                    return stream
            if self.end_reason is not None:
                raise MuxedConnUnavailable(self.end_reason)
            self._stream_came = trio.Event()
            await self._stream_came.wait()

    # ------------------------------------------------------------------ what its streams ask for

    def consumed(self, window: Any, num_bytes: int) -> None:
        """Bytes of a stream were read or dropped."""
        if num_bytes and self.end_reason is None:
            window.consume(num_bytes)
            # What is dropped as it comes is told once, however many events there are: `flush` is under way.
            if self.core.has_news and not self._is_dispatching:
                self.flush()

    def wait_writable(self, stream: QuicMuxedStream) -> None:
        """Wake a stream's writer when there is room."""
        self._blocked.add(stream)

    def note_closed(self, stream: QuicMuxedStream) -> None:
        """Nobody reads a stream any more; the peer has some time to finish it."""
        if not stream.fin_received and stream.stream_id in self._streams:
            self._half_closed[stream] = trio.current_time() + self.limits.half_closed_timeout

    # ------------------------------------------------------------------ what its carrier asks for

    def dial(self) -> None:
        """Begin a handshake."""
        self.core.connect(self._address, trio.current_time())
        self.flush()

    def take(self, datagrams: list[bytes], address: tuple[Any, ...]) -> None:
        """Take datagrams that came from `address`; `flush` answers them."""
        now = trio.current_time()
        self._heard_at = now
        self.core.take(datagrams, address, now)

    def flush(self) -> None:
        """Tell the streams what happened, and send what can be sent."""
        self._dispatch()
        if not self._carrier.wait_sendable(self):
            self._carrier.send(self.core.produce(trio.current_time()))
        if self.core.is_over:
            self._end(self.core.reason)
        if self._blocked:
            self._blocked = {stream for stream in self._blocked if not stream.wake_writer()}
        self._sent.set()
        self._alarm.move(self.core.get_timer())

    def abort(self, reason: str, code: int = 0) -> None:
        """Close at once; the peer is told if that is possible without waiting."""
        self.core.fail(code, reason)
        self._end(reason)
        self.flush()

    async def drive(self) -> None:
        """Keep time until the state machine needs none any more."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._limit_handshake)
                nursery.start_soon(self._keep_alive)
                await self._keep_time()
                nursery.cancel_scope.cancel()
        finally:
            self.abort("this host is closing")
            for cid in self._cids:
                self._carrier.forget(cid)

    # ------------------------------------------------------------------ events

    def _dispatch(self) -> None:
        self._is_dispatching = True
        try:
            for event in self.core.events():
                self._handle(event)
        finally:
            self._is_dispatching = False
        if self.core.is_confirmed and not self._is_complete:
            self._is_complete = True
            self.handshake_over.set()
        if not self._can_open.is_set() and self.core.can_open:
            self._can_open.set()

    def _handle(self, event: QuicEvent) -> None:
        if isinstance(event, StreamDataReceived):
            stream = self._find(event.stream_id)
            # What comes behind a reset was counted with it.
            if stream is not None and not stream.window.has_ended:
                stream.deliver(event.data, is_end=event.end_stream)
                if event.end_stream:
                    self._half_closed.pop(stream, None)
        elif isinstance(event, StreamReset):
            stream = self._find(event.stream_id)
            if stream is not None and not stream.window.has_ended:  # a peer may repeat it
                raw = self.core.find(event.stream_id)
                if raw is not None:
                    stream.window.end(stream.inbox.size, raw.receiver.highest_offset)
                self._half_closed.pop(stream, None)
                stream.peer_reset()
        elif isinstance(event, StopSendingReceived):
            stream = self._find(event.stream_id)
            if stream is not None:
                stream.peer_stopped()
        elif isinstance(event, ConnectionIdIssued):
            self.be_called(event.connection_id)
        elif isinstance(event, ConnectionIdRetired):
            self._cids.discard(event.connection_id)
            self._carrier.forget(event.connection_id)

    def be_called(self, cid: bytes) -> None:
        """Take datagrams to `cid`, which is a number of ours, or of the peer's choice to begin with."""
        self._cids.add(cid)
        self._carrier.call_by(cid, self)

    def _find(self, stream_id: int) -> QuicMuxedStream | None:
        """The stream of a number, which may be new; None if it is over."""
        stream = self._streams.get(stream_id)
        if stream is None and self.core.find(stream_id) is not None and self.end_reason is None:
            stream = self._add(stream_id)
            if len(self._backlog) >= self.limits.max_unaccepted:
                stream.give_up("too many streams wait to be accepted")
            else:
                self._backlog.append(stream)
                self._stream_came.set()
        return stream

    def _add(self, stream_id: int) -> QuicMuxedStream:
        stream = QuicMuxedStream(self, stream_id, self._window.open(stream_id))
        self._streams[stream_id] = stream
        return stream

    def _stream_over(self, stream_id: int) -> None:
        """Both directions of a stream have ended: the peer may open another, or we may."""
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.window.close()
            self._half_closed.pop(stream, None)
            self._blocked.discard(stream)
        if stream_id & 1 == (not self._is_initiator):
            self._num_opened -= 1
        else:
            allowed = self.core.allowed_streams
            allowed.raise_to(allowed.value + 1)

    # ------------------------------------------------------------------ time

    async def _keep_time(self) -> None:
        while (deadline := self.core.get_timer()) is not None:
            if self.end_reason is not None:
                # For a while, what the peer still sends is answered with our end of the connection.
                self._given_up_at = self._given_up_at or trio.current_time() + LINGER
                if trio.current_time() >= self._given_up_at:
                    return
                deadline = min(deadline, self._given_up_at)
            if self._carrier.wait_sendable(self):
                # What is due is mostly to be sent, and stays due until it is; `flush` is called when it can be.
                deadline = max(deadline, trio.current_time() + BLOCKED_INTERVAL)
            await self._alarm.wait(deadline)
            self.core.fire(trio.current_time())
            self.flush()

    async def _limit_handshake(self) -> None:
        with trio.move_on_after(self.limits.handshake_timeout):
            await self.handshake_over.wait()
        if not self.handshake_over.is_set():
            self.abort("the handshake takes too long")

    async def _keep_alive(self) -> None:
        """Ask a silent peer for a sign of life; stop streams that only we have closed."""
        await self.handshake_over.wait()
        for number in count():
            # A peer may ask for an idle timeout as short as it likes, but not for all of our time.
            interval = max(MIN_INTERVAL, min(self.limits.ping_interval, self.core.idle_timeout / 3))
            await trio.sleep(interval)
            now = trio.current_time()
            if now - self._heard_at >= interval * 0.9:
                self.core.send_ping(number)
            for stream in [s for s, until in self._half_closed.items() if until <= now]:
                del self._half_closed[stream]
                self.core.stop(stream.stream_id)
            self.flush()

    # ------------------------------------------------------------------ the end

    async def _drain(self) -> None:
        """Wait until what was written has reached the peer, or it is clear that it will not."""
        with trio.move_on_after(self.limits.close_timeout) as scope:
            scope.shield = True
            while self.end_reason is None and not self.core.is_drained:
                self._sent = trio.Event()
                await self._sent.wait()

    def _end(self, reason: str) -> None:
        """Let no task wait for this connection any more. What has arrived can still be read."""
        if self.end_reason is not None:
            return
        self.end_reason = reason
        logger.debug("the connection to %s ends: %s", self._address, reason)
        self.event_shutting_down.set()
        self.event_started.set()
        self.event_closed.set()
        self.handshake_over.set()
        for stream in self._streams.values():
            stream.window.close()
            stream.wake()
        self._streams.clear()
        self._blocked.clear()
        self._half_closed.clear()
        self._stream_came.set()
        self._can_open.set()
        self._sent.set()
