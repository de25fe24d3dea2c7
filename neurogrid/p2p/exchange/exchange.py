"""Messages between a host and its peers: send, receive, request and answer.

A table says which messages there are (`wire.codes`); a host has one exchange for each protocol id. A peer has one
long-lived stream.

What messages mean belongs to the layers above. This one knows which peer is open, and which sent what, and it counts;
`Dispatcher` knows the waiters and the handlers.

Source: protocol_spec/sessions.md, protocol_spec/streams.md.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import trio

from neurogrid.errors import (
    HeaderWriteError,
    LocalProtocolError,
    NeuroGridError,
    PeerUnreachableError,
    RemoteProtocolError,
    RequestRefusedError,
    StreamBrokenError,
    TransportError,
)
from neurogrid.p2p.exchange.counters import Direction, TrafficCounters
from neurogrid.p2p.exchange.dispatcher import Dispatcher
from neurogrid.p2p.exchange.pending import Waiter
from neurogrid.p2p.exchange.subscribers import MessageHandler
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.streams.bounds import DEFAULT_BOUNDS, Bounds
from neurogrid.p2p.streams.budget import ByteBudget
from neurogrid.p2p.streams.message_forms import (
    enveloped,
    is_traced,
    message_parts,
    refusal,
    sender_of,
    traced,
)
from neurogrid.p2p.streams.message_stream import MessageStream
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.streams.succession import StreamMovedError
from neurogrid.p2p.streams.tracing import sending
from neurogrid.p2p.wire import (
    OF_THE_STREAM,
    Data,
    Hello,
    MessageCode,
    MessageTable,
    MessageType,
    TensorMessage,
    header_bytes,
)

__all__ = ["Exchange", "new_request_id"]

logger = logging.getLogger(__name__)

# To get a stream on a connection that has just become direct: how often, and seconds between.
MOVE_ATTEMPTS = 5
MOVE_DELAY = 1.0

PeerOpenedHandler = Callable[[str, Hello], None]
PeerLostHandler = Callable[[str, NeuroGridError], None]


def new_request_id() -> int:
    """A random, non-zero 64-bit request id: unguessable, and unique without a counter."""
    return secrets.randbits(64) or 1


class Exchange:
    """One protocol of one host, by message. Register handlers, then send and request.

    Args:
        table: its messages.
        role: what peers are told that this one is.
        agent: what program this is, for people; at most 256 characters.
        name: what people call this machine (`machine_name`); at most 32 characters, empty to tell nothing.
        bounds: what peers may have under way here, and for how long.
        versions: the protocol ids that peers are told are spoken, and offered, the preferred one first; that of `table`
            by default. What others than that of `table` bring is dealt with by whoever adds them.

    Attributes:
        host: the host underneath.
        counters: messages and bytes by peer, type and direction.

    Several handlers may serve a type. A handler may be sync (runs in the reader: must be quick) or async (runs
    in a task of its own). It may raise `RequestRefusedError`: the peer gets an Error. What is sent to the host's own
    peer id is served here, without a stream.

    Raises:
        LocalProtocolError: the host has a protocol of this kind already.
    """

    def __init__(
        self,
        host: Host,
        table: MessageTable,
        *,
        role: str = "peer",
        agent: str = "neurogrid",
        name: str = "",
        bounds: Bounds = DEFAULT_BOUNDS,
        versions: Sequence[str] = (),
    ) -> None:
        self.host = host
        self.counters = TrafficCounters()
        self._table = table
        self._bounds = bounds
        self._versions = tuple(versions) or (table.protocol_id,)
        self._hello = Hello(
            role=role,
            agent=agent,
            versions=self._versions,
            max_data=table.largest_data,
            credit=bounds.credit_window,
            name=name,
        )
        self._streams: dict[str, MessageStream] = {}
        self._running: dict[str, list[MessageStream]] = {}  # in the order in which they were opened
        self._opening: dict[str, trio.Lock] = {}
        self._is_closed = False
        self._dispatcher = Dispatcher(host.start_soon, bounds)
        self._budget = ByteBudget(per_peer=bounds.max_bytes_per_peer, total=bounds.max_bytes)
        self._opened_handlers: list[PeerOpenedHandler] = []
        self._lost_handlers: list[PeerLostHandler] = []
        self._broken_handlers: list[PeerLostHandler] = []
        if table.protocol_id in self._versions:
            host.set_stream_handler(table.protocol_id, self._serve_stream)
        host.on_disconnected(self._forget)
        host.on_direct(self._has_become_direct)

    # Peers

    def on_peer_opened(self, handler: PeerOpenedHandler) -> None:
        """Call `handler(peer_id, hello)` when a stream with a peer is up. Must not block."""
        self._opened_handlers.append(handler)

    def on_peer_lost(self, handler: PeerLostHandler) -> None:
        """Call `handler(peer_id, reason)` when the last stream with a peer ends. Must not block."""
        self._lost_handlers.append(handler)

    def on_stream_broken(self, handler: PeerLostHandler) -> None:
        """Call `handler(peer_id, reason)` when messages to or from a peer may have been lost. Must not block.

        That is when its last stream ends, or another one breaks: requests that were under way have failed.
        """
        self._broken_handlers.append(handler)

    async def open(self, peer_id: str) -> str:
        """Bring up the stream of a connected peer.

        Returns:
            The protocol id that it has in common with us: that of the table, or another of the versions, of which
            there is no stream to be brought up.

        Raises:
            TransportError: the peer speaks none, does not answer, or is not connected.

        Cancellation leaves the connection whole, and perhaps the stream up.
        """
        stream = self._streams.get(peer_id)
        if stream is not None and stream.is_open and stream.hello is not None:
            return self._table.protocol_id
        if not self.host.is_connected(peer_id):
            # No lock for a peer that has gone: nobody would take it away again.
            raise PeerUnreachableError(f"there is no connection to {peer_id}")
        async with self._opening.setdefault(peer_id, trio.Lock()):
            stream = self._streams.get(peer_id)
            if stream is not None and stream.is_open:
                await stream.wait_hello()
                return self._table.protocol_id
            opened = await self.host.open_stream(peer_id, self._versions)
            if opened.protocol_id != self._table.protocol_id:
                await opened.aclose()
                return opened.protocol_id
            stream = self._message_stream(opened)
            self.host.start_soon(self._run_stream, stream)
            await stream.wait_hello()
            return self._table.protocol_id

    def hello_of(self, peer_id: str) -> Hello | None:
        """Return the Hello of a peer that has a stream; None for others."""
        stream = self._streams.get(peer_id)
        return stream.hello if stream is not None else None

    def opened_peers(self) -> dict[str, Hello]:
        """The Hello of each peer that has a stream, by peer id: whoever came before `on_peer_opened` was called."""
        return {
            peer_id: stream.hello
            for peer_id, stream in self._streams.items()
            if stream.hello is not None
        }

    async def close_peer(self, peer_id: str) -> None:
        """End the stream and the connection to a peer."""
        stream = self._streams.pop(peer_id, None)
        if stream is not None:
            await stream.close()
        try:
            await self.host.disconnect(peer_id)
        except TransportError:
            logger.debug("the connection to %s was gone already", peer_id)

    async def aclose(self) -> None:
        """End all streams, and serve no more of them; connections stay. The host may have another exchange after it.

        Requests that are under way end with a `StreamBrokenError`.
        """
        self._is_closed = True
        if self._table.protocol_id in self._versions:
            self.host.remove_stream_handler(self._table.protocol_id)
        streams = [stream for running in self._running.values() for stream in running]
        for peer_id in {*self._running, *self._streams}:
            # Now: a stream that ends below is none of this exchange any more, so nobody is told of it.
            self._dispatcher.forget(
                peer_id, StreamBrokenError(f"the exchange with {peer_id} was closed here")
            )
        self._streams.clear()
        for stream in streams:
            await stream.close()

    # Sending

    async def send(self, peer_id: str, message: TensorMessage, *more: Data) -> None:
        """Send a message; returns when it is on the connection, or confirmed where the peer has no stream (1.0.0).

        `more` belongs to its Data, behind what the message has: a large buffer is not copied to stand there
        (a tensor has its envelope for that). A tensor goes traced when an OpenTelemetry context is active.
        Tensors and weights wait for the peer's credit without a deadline: the caller sets one.

        Raises:
            PeerUnreachableError: there is no connection, or no stream to be had.
            HeaderWriteError, DataWriteError: the stream broke, before or while the message went out.
            PeerRefusedError: a 1.0.0 peer reset the stream of the message.
            LocalProtocolError: the message has a field out of range, or is larger than the peer accepts.

        Cancellation leaves the connection whole; the message was sent whole, or not at all.
        """
        if not more and (stream := self._streams.get(peer_id)) is not None:
            await stream.breathe()
            if self.send_nowait(peer_id, message):
                return
        with sending(peer_id, message):
            message = traced(message)
            if peer_id == self.host.peer_id:
                self._loop_back(_joined(message, more))
                await trio.lowlevel.checkpoint()
            else:
                await self._send_to(peer_id, message, *more)

    async def _send_to(self, peer_id: str, message: TensorMessage, *more: Data) -> None:
        """Send a message to a peer, whose stream is brought up if there is none."""
        if message.msg_type is None:
            raise LocalProtocolError(f"{self._table.protocol_id} has no messages without a type")
        message = enveloped(message)
        await self.open(peer_id)
        for attempt in range(MOVE_ATTEMPTS):
            stream = self._streams.get(peer_id)
            if stream is None:
                raise HeaderWriteError(f"the stream to {peer_id} ended before the message went out")
            try:
                await stream.send(message, *more)
                return
            except StreamMovedError:
                if attempt == MOVE_ATTEMPTS - 1:
                    raise
                await self.open(peer_id)  # the one that has taken its place

    def send_nowait(self, peer_id: str, message: TensorMessage) -> bool:
        """Send a small message on a stream if nothing has to be waited for; else False, and nothing is sent.

        `send` does what this does not, and says what is wrong, if anything is.

        Raises:
            DataWriteError: the stream broke in it.
            LocalProtocolError: the message has a field out of range.
        """
        stream = self._streams.get(peer_id)
        # A legacy message is 1.0.0's, and a trace wants a span around the sending.
        if stream is None or message.msg_type is None or is_traced(message):
            return False
        return stream.send_nowait(enveloped(message))

    def expect(
        self, peer_id: str, answer: MessageCode, *, request_id: int = 0
    ) -> AbstractContextManager[Waiter]:
        """Register for an answer before asking: `with expect(...) as waiter: await send(...)`, and then
        `await waiter.wait(timeout=seconds)`, which raises as `request` does.

        Raises:
            LocalProtocolError: as many answers are awaited as may be (`Bounds`).
        """
        return self._dispatcher.pending.expect(peer_id, answer, request_id)

    def expect_through(
        self, peer_ids: Sequence[str], answer: MessageCode, *, request_id: int
    ) -> AbstractContextManager[Waiter]:
        """As `expect` of the last of `peer_ids`, for a request that is handed from each to the next.

        An Error of any of them, or the loss of its stream, ends the wait: `Waiter.ended_by` says whose.
        """
        return self._dispatcher.pending.expect_through(peer_ids, answer, request_id)

    def announce(self, peer_id: str, answer: MessageCode, *, request_id: int = 0) -> None:
        """Keep this answer, or the error in its place, for an `expect` that comes later.

        An announcement is forgotten at the bound, the oldest first, and with the connection.
        """
        self._dispatcher.pending.announce(peer_id, answer, request_id)

    async def request(
        self,
        peer_id: str,
        message: TensorMessage,
        answer: MessageCode,
        *,
        timeout: float,
    ) -> TensorMessage:
        """Send `message` and wait for the `answer` that carries its request id.

        Raises:
            ResponseTimeout: no answer in `timeout` seconds.
            PeerRefusedError: the peer answered with an Error, or refused the message.
            TransportError: the peer cannot be reached, or the stream broke.
        """
        with self.expect(peer_id, answer, request_id=message.request_id) as waiter:
            return await waiter.send_and_wait(
                partial(self.send, peer_id, message),
                send_nowait=partial(self.send_nowait, peer_id, message),
                timeout=timeout,
            )

    async def refuse(self, message: TensorMessage, error: RequestRefusedError) -> None:
        """Answer a request with an Error message."""
        await self.send(sender_of(message), refusal(message, error))

    # Receiving

    def on_message(
        self,
        msg_type: MessageCode | None,
        handler: MessageHandler,
        *,
        when: Callable[[TensorMessage], bool] | None = None,
    ) -> None:
        """Serve messages of a type for which `when(message)` holds.

        A traced message counts as its untraced type; its trace is active while the handler runs. Handlers are
        called in the order in which they were registered. A sync handler may return an awaitable, which runs
        in a task. Of a type that is an answer, handlers get those that no request waits for.
        """
        self._dispatcher.subscribers.add(msg_type, handler, when)

    def authorise_by(self, check: Callable[[TensorMessage], None]) -> None:
        """Call `check(message)` before each message that handlers are to get; `message.from_peer` has sent it.

        It must not block. It raises `RequestRefusedError` (UNAUTHORIZED) for what the peer may not send. What a
        request waits for is not checked: it counts from the peer that was asked alone.
        """
        self._dispatcher.authorise = check

    # Long-lived streams

    def _message_stream(self, stream: Stream) -> MessageStream:
        relayed = [old for old in self._running.get(stream.peer_id, ()) if old.is_relayed]
        message_stream = MessageStream(
            stream,
            hello=self._hello,
            table=self._table,
            on_message=self._receive,
            on_sent=partial(self.counters.add, Direction.SENT, stream.peer_id),
            budget=self._budget,
            bounds=self._bounds,
            follows=() if stream.is_relayed else relayed,
            succeed=self._succeed,
        )
        current = self._streams.get(stream.peer_id)
        if current is None or not current.is_open or current.hello is None:
            self._streams[stream.peer_id] = message_stream
        # Else its Hello decides: the peer that opened it may have thought better of it, and never say one.
        return message_stream

    async def _serve_stream(self, stream: Stream) -> None:
        if len(self._running.get(stream.peer_id, ())) >= self._bounds.max_streams_per_peer:
            # No warning: they may come by the thousand.
            logger.debug("%s opened one more stream than it may", stream.peer_id)
            await stream.reset()
            return
        # Where both sides opened at once, either stream serves: the older one is read until it ends,
        # the newer one is written to.
        await self._run_stream(self._message_stream(stream))

    async def _run_stream(self, stream: MessageStream) -> None:
        peer_id = stream.peer_id
        if self._is_closed:
            # It was on its way when this exchange ended; what goes by it would be lost to the one after this.
            await stream.close()
            return
        running = self._running.setdefault(peer_id, [])
        running.append(stream)
        try:
            await stream.run()
        finally:
            running.remove(stream)
            if not running:
                del self._running[peer_id]
        if stream.is_complete and self._succeed(stream):
            return
        reason = stream.end_reason or StreamBrokenError(f"the stream to {peer_id} ended")
        lost = StreamBrokenError(f"lost the stream to {peer_id}: {reason}")
        lost.__cause__ = reason
        is_current = self._streams.get(peer_id) is stream
        if stream.hello is None and not is_current and not stream.is_retired:
            return  # nothing has gone by it
        if other := self._other_stream(stream):
            # Requests that are served here are the peer's, not the stream's; messages on their way may be lost.
            if is_current:
                self._streams[peer_id] = other
            self._dispatcher.pending.fail(peer_id, lost)
            for handler in self._broken_handlers:
                handler(peer_id, reason)
            return
        if is_current:
            del self._streams[peer_id]
        if is_current or stream.is_retired:
            self._dispatcher.forget(peer_id, lost)
            for handler in (*self._broken_handlers, *self._lost_handlers):
                handler(peer_id, reason)

    def _other_stream(self, stream: MessageStream) -> MessageStream | None:
        """The stream that was opened last of those, besides this one, that its peer can be spoken to on."""
        for other in reversed(self._running.get(stream.peer_id, ())):
            stands = other.is_open and other.hello is not None and not other.is_retired
            if stands and other is not stream:
                return other
        return None

    def _receive(self, stream: MessageStream, message: TensorMessage) -> None:
        self._count_received(stream.peer_id, message)
        if message.msg_type in OF_THE_STREAM:
            self._receive_of_stream(stream, message)
            return
        num_bytes = len(message.data)
        is_large = num_bytes > self._bounds.small_message
        is_credited = message.msg_type is not None and message.msg_type.traits.is_credited

        def on_done() -> None:
            if is_large:
                self._budget.remove(stream.peer_id, num_bytes)
            if is_credited:
                stream.served(num_bytes)

        if is_large:
            self._budget.add(stream.peer_id, num_bytes)
        self._dispatcher.serve(
            message,
            refuse=partial(self._owe, stream),
            on_violation=lambda error: self.host.start_soon(stream.fail, error),
            on_done=on_done,
        )

    def _receive_of_stream(self, stream: MessageStream, message: TensorMessage) -> None:
        """Take a message about the stream itself, or that ends a request; the stream has taken credit already."""
        if message.msg_type is MessageType.HELLO:
            assert stream.hello is not None
            self._streams[stream.peer_id] = stream
            for old in stream.follows:
                old.retire()
            for opened in self._opened_handlers:
                opened(stream.peer_id, stream.hello)
        elif message.msg_type is MessageType.ERROR and not self._dispatcher.take_error(message):
            stream.ignored_error()

    def _owe(self, stream: MessageStream, message: TensorMessage) -> None:
        """Owe a message on the stream that asked for it, or on another if that one has ended or a successor."""
        stands = stream.is_open and not stream.is_retired
        target = stream if stands else self._streams.get(stream.peer_id, stream)
        target.owe(message)

    # From a relay to a direct connection

    def _succeed(self, stream: MessageStream) -> bool:
        """Put another stream in the place of this one, that which follows it, be its Hello late; False if none is."""
        followers = (
            other
            for other in self._running.get(stream.peer_id, ())
            if stream in other.follows and other.is_open
        )
        other = next(followers, None) or self._other_stream(stream)
        if other is not None and self._streams.get(stream.peer_id) is stream:
            self._streams[stream.peer_id] = other
        return other is not None

    def _has_become_direct(self, peer_id: str) -> None:
        # One side is enough; both at once would make two streams.
        if self._table.protocol_id in self._versions and self.host.peer_id < peer_id:
            self.host.start_soon(self._move, peer_id)

    async def _move(self, peer_id: str) -> None:
        """Open a stream on the direct connection, whose Hello takes the place of what goes through the relay."""
        for _ in range(MOVE_ATTEMPTS):
            stream = self._streams.get(peer_id)
            if stream is None or not stream.is_relayed or not stream.is_open:
                return
            try:
                async with self._opening.setdefault(peer_id, trio.Lock()):
                    opened = await self.host.open_stream(peer_id, [self._table.protocol_id])
                if not opened.is_relayed:
                    fresh = self._message_stream(opened)
                    self.host.start_soon(self._run_stream, fresh)
                    await fresh.wait_hello()
                    return
                await opened.reset()
            except TransportError as exc:
                logger.debug("%s is still reached through a relay: %s", peer_id, exc)
            await trio.sleep(MOVE_DELAY)

    # Ourselves

    def _loop_back(self, message: TensorMessage) -> None:
        """Serve a message of ours here. Its data is copied: a handler may write to it."""
        message = replace(enveloped(message), from_peer=self.host.peer_id)
        message_parts(message)  # what could not be sent is an error here too
        envelope = message.envelope
        data = memoryview(bytearray(message.data if envelope is None else envelope.data))
        if envelope is not None:
            envelope = replace(envelope, data=data)
        message = replace(message, data=data, envelope=envelope)
        if message.msg_type is MessageType.ERROR:
            self._dispatcher.take_error(message)
            return

        def violated(error: RemoteProtocolError) -> None:
            self._loop_back(refusal(message, RequestRefusedError(str(error), code=error.code)))

        self._dispatcher.serve(
            message, refuse=self._loop_back, on_violation=violated, on_done=lambda: None
        )

    # All

    def _forget(self, peer_id: str) -> None:
        """The last connection to a peer is gone: nobody need wait for it, and its tables go."""
        error = StreamBrokenError(f"lost the connection to {peer_id}")
        current = self._streams.get(peer_id)  # which may not run yet
        for stream in {*self._running.get(peer_id, ()), *([current] if current else ())}:
            stream.lose(error)
        self._dispatcher.forget(peer_id, error)
        self._opening.pop(peer_id, None)

    def _count_received(self, peer_id: str, message: TensorMessage) -> None:
        num_bytes = header_bytes(message.msg_type) + len(message.data)
        self.counters.add(Direction.RECEIVED, peer_id, message.msg_type, num_bytes)


def _joined(message: TensorMessage, more: tuple[Data, ...]) -> TensorMessage:
    return replace(message, data=b"".join((message.data, *more))) if more else message
