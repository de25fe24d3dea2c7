"""The driver of a Yamux connection: py-libp2p's `IMuxedConn` over our state machine.

One task reads and one writes. A write is queued and pushed to the socket at once, in the writer's own task, if the
socket takes it; what it does not take is the writing task's. So no frame is ever cut by a cancellation: what was
sealed lies in a buffer of the connection and is sent, whatever became of the task that wrote it.

Nothing here waits without an end that the peer cannot put off, but for what a caller asked to wait for: a silent peer
is asked for a sign of life, and given up when none comes.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import trio
from libp2p.abc import ISecureConn
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.link.events import (
    DataReceived,
    Event,
    GoAwayReceived,
    PongReceived,
    StreamAcknowledged,
    StreamFinished,
    StreamOpened,
    StreamReset,
)
from neurogrid.p2p.link.frames import GO_AWAY_NORMAL, GO_AWAY_PROTOCOL_ERROR
from neurogrid.p2p.link.keepalive import KeepAlive
from neurogrid.p2p.link.limits import BufferPool, ConnectionBuffers
from neurogrid.p2p.link.link_stream import LinkStream
from neurogrid.p2p.link.muxed_stream import MuxedConn
from neurogrid.p2p.link.pipe import Pipe, Pushed, open_pipe
from neurogrid.p2p.link.stream_state import StreamState
from neurogrid.p2p.link.yamux import Yamux

if TYPE_CHECKING:
    from libp2p.connection_types import ConnectionType
    from multiaddr import Multiaddr

__all__ = ["LinkConnection"]

logger = logging.getLogger(__name__)

# What a pipe raises when the connection breaks, be it a socket or one of py-libp2p's.
_BROKEN = (OSError, BaseLibp2pError, trio.BrokenResourceError, trio.ClosedResourceError)


class LinkConnection(MuxedConn):
    """One connection to one peer. py-libp2p's swarm makes, starts and closes it.

    Args:
        conn: the secured connection; from `start` on it is this object's alone.
        peer_id: the peer at its other end.
        pool: the account of unread bytes of all connections of this host.

    Attributes:
        core: the state machine, for the streams.
        is_idle: whether nothing waits to be sent, so that what comes now goes out at once.
    """

    BREATH_BYTES = 1024 * 1024
    BREATH_CALL = 16 * 1024

    def __init__(self, conn: ISecureConn, peer_id: ID, *, pool: BufferPool) -> None:
        super().__init__(is_initiator=bool(conn.is_initiator))
        self.peer_id = peer_id
        self.secured_conn = conn
        self._limits = pool.limits
        self._buffers = ConnectionBuffers(pool)
        self.core = Yamux(
            is_initiator=self._is_initiator,
            limits=pool.limits,
            buffers=self._buffers,
            clock=time.monotonic,
        )
        self._pipe: Pipe | None = None
        self._scope = trio.CancelScope()  # of all tasks

        self._is_closing = False  # in order: what is sealed is still sent
        self._said_goodbye = trio.Event()
        self._backlog: deque[LinkStream] = deque()
        self._stream_came = trio.Event()
        self._acknowledged = trio.Event()
        self._work = trio.Event()
        self.is_idle = False
        self._keep_alive = KeepAlive(self.core, pool.limits, kick=self.kick, give_up=self._break)

    # ------------------------------------------------------------------ what the swarm asks for

    @property
    def is_established(self) -> bool:
        """Whether streams can be opened."""
        return self.event_started.is_set() and not self.event_shutting_down.is_set()

    def get_remote_address(self) -> tuple[str, int] | None:
        """The peer's host and port."""
        return self.secured_conn.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        """The addresses that the connection goes over."""
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        """Direct or relayed."""
        return self.secured_conn.get_connection_type()

    async def start(self) -> None:
        """Drive the connection until it is over; raises nothing that the peer or the network caused."""
        if self.end_reason is not None:
            self.event_started.set()
            return
        self._pipe, plaintext = open_pipe(self.secured_conn)
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._write)
                    nursery.start_soon(self._keep_alive.run)
                    self.event_started.set()
                    await self._read(plaintext)
                    nursery.cancel_scope.cancel()
        finally:
            if self.end_reason is None:
                self._end("the connection was closed here")
                self.core.go_away(GO_AWAY_NORMAL)
                self._push()  # as far as it goes: this task is cancelled
            self._buffers.close()
            with trio.move_on_after(self._limits.close_timeout) as scope:
                scope.shield = True
                with suppress(*_BROKEN):  # it is over either way
                    await self._pipe.close()
            self._said_goodbye.set()
            self.event_started.set()
            self.event_closed.set()

    async def close(self, error_code: int = GO_AWAY_NORMAL) -> None:
        """Say goodbye, and close: what was written before is sent, as far as the peer takes it in time."""
        if self._pipe is None:
            self._end("the connection was closed before it began")
            await self.secured_conn.close()
            self.event_closed.set()
            return
        self._say_goodbye(error_code)
        await self._said_goodbye.wait()

    async def open_stream(self) -> LinkStream:
        """Open a stream. Waits while the peer has acknowledged too few of the others.

        Raises:
            MuxedConnUnavailable: the connection is closing or gone, or has too many streams.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.is_established and not self.core.can_open:
            if self._acknowledged.is_set():
                self._acknowledged = trio.Event()
            await self._acknowledged.wait()
        if not self.is_established:
            raise MuxedConnUnavailable(self.end_reason or "the connection is closing")
        try:
            stream = LinkStream(self, self.core.open_stream())
        except LocalProtocolError as exc:
            raise MuxedConnUnavailable(str(exc)) from exc
        self.kick_soon()
        return stream

    async def accept_stream(self) -> LinkStream:
        """Wait for a stream of the peer.

        Raises:
            MuxedConnUnavailable: there will be none any more.
        """
        while True:
            while self._backlog:
                stream = self._backlog.popleft()
                if not stream.state.was_reset:
                    self.core.accept(stream.state)
                    self.kick_soon()
                    return stream
            if self.end_reason is not None:
                raise MuxedConnUnavailable(self.end_reason or "the connection is closing")
            if self._stream_came.is_set():
                self._stream_came = trio.Event()
            await self._stream_came.wait()

    # ------------------------------------------------------------------ what its streams ask for

    def consumed(self, state: StreamState, num_bytes: int) -> None:
        """A reader took bytes out of a stream's inbox."""
        self.core.consumed(state, num_bytes)
        if self.core.outflow.has_output:
            self.kick()

    def kick(self) -> None:
        """Send now what can be sent without waiting; leave the rest to the writing task."""
        if self.is_idle and self._push() is not Pushed.IDLE:
            self.kick_soon()

    def kick_soon(self) -> None:
        """Let the writing task look."""
        if self.is_idle:
            self.is_idle = False
            self._work.set()

    # ------------------------------------------------------------------ the tasks

    async def _write(self) -> None:
        assert self._pipe is not None
        try:
            while True:
                pushed = self._push()
                if pushed is Pushed.BLOCKED:
                    await self._pipe.wait_writable()
                elif pushed is Pushed.MORE:
                    await trio.lowlevel.checkpoint()
                elif self._is_closing:
                    self._pipe.end()
                    break
                else:
                    self._work = trio.Event()
                    self.is_idle = True
                    await self._work.wait()
        except _BROKEN as exc:
            self._break(f"the connection broke: {_describe(exc)}")
        finally:
            self._said_goodbye.set()

    def _push(self) -> Pushed:
        """Send a batch, and wake the tasks whose writes are over."""
        assert self._pipe is not None
        try:
            pushed = self._pipe.push(self.core.outflow)
        except _BROKEN as exc:
            self._break(f"the connection broke: {_describe(exc)}")
            return Pushed.IDLE
        self._wake_writers()
        if self.core.go_away_received:
            self._go_when_done()
        return pushed

    def _wake_writers(self) -> None:
        for outgoing in self.core.outflow.take_finished():
            if outgoing.owner is not None:
                trio.lowlevel.reschedule(outgoing.owner)

    async def _read(self, plaintext: bytes) -> None:
        assert self._pipe is not None
        try:
            for event in self.core.receive_data(plaintext):
                self._dispatch(event)
            while self.end_reason is None:
                self._keep_alive.heard()
                if self.core.outflow.has_output:
                    self.kick()
                if not await self._pipe.receive(self.core, self._dispatch):
                    break
        except RemoteProtocolError as exc:
            logger.warning("closing the connection to %s: %s", self.peer_id, exc)
            self._say_goodbye(GO_AWAY_PROTOCOL_ERROR, f"the peer broke the protocol: {exc}")
        except _BROKEN as exc:
            self._end(f"the connection broke: {_describe(exc)}")
        if self._is_closing:
            # To close with bytes unread would make the kernel reset the connection, and our last bytes with it.
            with suppress(RemoteProtocolError, *_BROKEN):  # whatever came is not read any more
                await self._pipe.drain()
        self._end("the peer closed the connection")

    def _dispatch(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            event.stream.owner.wake()
        elif isinstance(event, StreamOpened):
            self._offer(LinkStream(self, event.stream))
        elif isinstance(event, StreamFinished | StreamReset):
            event.stream.owner.wake()
            self._wake_writers()
            self._acknowledged.set()  # a stream that was refused waits for no acknowledgement
        elif isinstance(event, StreamAcknowledged):
            self._acknowledged.set()
        elif isinstance(event, PongReceived):
            self._keep_alive.pong_received(event.value)
        elif isinstance(event, GoAwayReceived):
            self._peer_goes_away(event.code)
        if self.core.go_away_received:
            self._go_when_done()

    def _offer(self, stream: LinkStream) -> None:
        if len(self._backlog) < self._limits.max_unaccepted:
            self._backlog.append(stream)
            self._stream_came.set()
        elif not stream.state.was_reset:  # by the peer, behind its opening
            self.core.refuse(stream.state)

    # ------------------------------------------------------------------ the end

    def _peer_goes_away(self, code: int) -> None:
        if code != GO_AWAY_NORMAL:
            self._break(f"the peer gave up the connection with code {code}")
            return
        self._end_within(self._limits.drain_timeout)

    def _go_when_done(self) -> None:
        """The peer goes away, and nothing is left to be done."""
        if not self.core.streams:
            self._say_goodbye(GO_AWAY_NORMAL, "the peer went away")

    def _say_goodbye(self, code: int, reason: str = "the connection was closed here") -> None:
        """Stop in order: send what is sealed and a GO_AWAY, then end."""
        if self.end_reason is not None:
            return
        self._is_closing = True
        self._end(reason)
        self.core.give_up_all()
        self.core.go_away(code)
        self.kick_soon()
        limits = self._limits
        self._end_within(limits.close_timeout + limits.linger_timeout)

    def _end_within(self, seconds: float) -> None:
        self._scope.deadline = min(self._scope.deadline, trio.current_time() + seconds)

    def _break(self, reason: str) -> None:
        """Stop at once: nothing can be sent or received any more."""
        self._end(reason)
        self._scope.cancel()

    def _end(self, reason: str) -> None:
        """Let no task wait for this connection any more. What has arrived can still be read."""
        if self.end_reason is not None:
            return
        self.end_reason = reason
        logger.debug("the connection to %s ends: %s", self.peer_id, reason)
        self.event_shutting_down.set()
        self.core.drop_writes()
        self._wake_writers()
        for state in self.core.streams.values():
            state.owner.wake()
        self._stream_came.set()
        self._acknowledged.set()


def _describe(exc: BaseException) -> str:
    return str(exc).strip() or type(exc).__name__
