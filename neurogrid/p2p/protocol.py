"""The tensor protocol on a libp2p host: send, receive, dispatch, request and response.

Two versions are spoken, and multistream-select picks the newer that both sides have. With 1.1.0 a peer
has one long-lived stream; with 1.0.0 every message has a stream of its own, which the receiver ends
once it has dealt with the message: its end confirms, its reset refuses.

What messages mean belongs to the layers above. This one knows who sent what, who waits for which
answer, which peer is open under which version, and it counts. It imports no torch.

Source: protocol_spec/sessions.md, protocol_spec/versioning.md.
"""

from __future__ import annotations

import inspect
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import trio

from neurogrid.errors import (
    LocalProtocolError,
    NeuroGridError,
    PeerRefusedError,
    RemoteProtocolError,
    RequestRefusedError,
    StreamBrokenError,
    TransportError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.counters import Direction, TrafficCounters
from neurogrid.p2p.host import Host
from neurogrid.p2p.message_stream import MessageStream
from neurogrid.p2p.oneshot import receive_oneshot, send_oneshot
from neurogrid.p2p.pending import PendingRequests, Waiter
from neurogrid.p2p.stream import Stream
from neurogrid.p2p.wire import (
    DEFAULT_LIMITS,
    PROTOCOL_V10,
    PROTOCOL_V11,
    ErrorCode,
    ErrorPayload,
    Hello,
    Limits,
    MessageType,
    TensorMessage,
    header_bytes,
)

__all__ = ["Protocol", "new_request_id"]

logger = logging.getLogger(__name__)

MessageHandler = Callable[[TensorMessage], Awaitable[None] | None]
PeerOpenedHandler = Callable[[str, Hello], None]
PeerLostHandler = Callable[[str, NeuroGridError], None]

# Handlers that run at once for one peer; the reader waits beyond that, and so the peer does.
MAX_HANDLERS_PER_PEER = 64
# One is enough; a second comes about when both sides open at once. More is a peer that plays tricks.
MAX_STREAMS_PER_PEER = 4

_ANSWERS = frozenset(
    {
        MessageType.RESPONSE,
        MessageType.TRACED_RESPONSE,
        MessageType.WEIGHTS_ACK,
        MessageType.LAYER_STATUS,
        MessageType.GPU_INFO,
        MessageType.CONFIG_ACK,
        MessageType.ASSIGN_ACK,
        MessageType.TRANSFER_ACCEPT,
        MessageType.READY,
        MessageType.SESSION_ACK,
    }
)


def new_request_id() -> int:
    """A random, non-zero 64-bit request id: unguessable, and unique without a counter."""
    return secrets.randbits(64) or 1


class Protocol:
    """The tensor protocol of one host. Register handlers, then send and request.

    Attributes:
        host: the host underneath.
        counters: messages and bytes by peer, type and direction.

    A handler may be sync (runs in the reader: must be quick) or async (runs in a task of its own). It may
    raise `RequestRefusedError`: over 1.1.0 the peer gets an Error, over 1.0.0 a reset.
    """

    def __init__(
        self,
        host: Host,
        *,
        role: str = "peer",
        agent: str = "neurogrid",
        limits: Limits = DEFAULT_LIMITS,
        versions: Sequence[str] = (PROTOCOL_V11, PROTOCOL_V10),
    ) -> None:
        self.host = host
        self.counters = TrafficCounters()
        self._limits = limits
        self._versions = tuple(versions)
        self._hello = Hello(
            role=role, agent=agent, versions=self._versions, max_data=limits.max_data
        )
        self._streams: dict[str, MessageStream] = {}
        self._num_streams: Counter[str] = Counter()
        self._v10_peers: set[str] = set()
        self._opening: dict[str, trio.Lock] = {}
        self._pending = PendingRequests()
        self._handlers: dict[MessageType | None, MessageHandler] = {}
        self._opened_handlers: list[PeerOpenedHandler] = []
        self._lost_handlers: list[PeerLostHandler] = []
        self._limiters: dict[str, trio.CapacityLimiter] = {}
        host.on_disconnected(self._forget)
        if PROTOCOL_V11 in self._versions:
            host.set_stream_handler(PROTOCOL_V11, self._serve_v11)
        if PROTOCOL_V10 in self._versions:
            host.set_stream_handler(PROTOCOL_V10, self._serve_v10)

    # Peers

    def on_peer_opened(self, handler: PeerOpenedHandler) -> None:
        """Call `handler(peer_id, hello)` when a 1.1.0 stream with a peer is up. Must not block."""
        self._opened_handlers.append(handler)

    def on_peer_lost(self, handler: PeerLostHandler) -> None:
        """Call `handler(peer_id, reason)` when the 1.1.0 stream with a peer ends. Must not block."""
        self._lost_handlers.append(handler)

    async def open(self, peer_id: str) -> str:
        """Find out which version a connected peer speaks, and bring up its stream.

        Returns:
            The protocol id, `PROTOCOL_V11` or `PROTOCOL_V10`.

        Raises:
            TransportError: the peer speaks neither, or does not answer.
        """
        async with self._opening.setdefault(peer_id, trio.Lock()):
            stream = self._streams.get(peer_id)
            if stream is not None and stream.is_open:
                await stream.wait_hello()
                return PROTOCOL_V11
            if peer_id in self._v10_peers and peer_id in self.host.connected_peers:
                return PROTOCOL_V10
            opened = await self.host.open_stream(peer_id, self._versions)
            if opened.protocol_id == PROTOCOL_V10:
                self._v10_peers.add(peer_id)
                await opened.aclose()
                return PROTOCOL_V10
            stream = self._message_stream(opened)
            self.host.start_soon(self._run_stream, stream)
            await stream.wait_hello()
            return PROTOCOL_V11

    def hello_of(self, peer_id: str) -> Hello | None:
        """What a 1.1.0 peer said of itself; None for others."""
        stream = self._streams.get(peer_id)
        return stream.hello if stream is not None else None

    async def close_peer(self, peer_id: str) -> None:
        """End the stream and the connection to a peer."""
        stream = self._streams.pop(peer_id, None)
        if stream is not None:
            await stream.close()
        try:
            await self.host.disconnect(peer_id)
        except TransportError:
            logger.debug("the connection to %s was gone already", peer_id)

    # Sending

    async def send(self, peer_id: str, message: TensorMessage) -> None:
        """Send a message; returns when it is on the connection (1.1.0) or confirmed (1.0.0).

        Raises:
            TransportError: the peer cannot be reached, or the stream broke.
            PeerRefusedError: a 1.0.0 peer reset the stream of the message.

        Cancellation leaves the connection whole; the message may or may not have been sent.
        """
        if await self.open(peer_id) == PROTOCOL_V10:
            await self._send_v10(peer_id, message)
        else:
            await self._streams[peer_id].send(message)

    def expect(
        self, peer_id: str, answer: MessageType, *, request_id: int = 0
    ) -> AbstractContextManager[Waiter]:
        """Register for an answer before asking: `with expect(...) as waiter: send; waiter.wait`."""
        return self._pending.expect(peer_id, answer, request_id)

    async def request(
        self,
        peer_id: str,
        message: TensorMessage,
        answer: MessageType,
        *,
        timeout: float,
    ) -> TensorMessage:
        """Send `message` and wait for the `answer` that carries its request id.

        Raises:
            ResponseTimeout: no answer in `timeout` seconds.
            PeerRefusedError: the peer answered with an Error, or (1.0.0) with a reset.
            TransportError: the peer cannot be reached, or the stream broke.
        """
        with self.expect(peer_id, answer, request_id=message.request_id) as waiter, unwrap_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_for, waiter, message)
                result = await waiter.wait(timeout=timeout)
                nursery.cancel_scope.cancel()
        return result

    async def _send_for(self, waiter: Waiter, message: TensorMessage) -> None:
        try:
            await self.send(waiter.peer_id, message)
        except NeuroGridError as exc:
            waiter.resolve(exc)

    # Receiving

    def on_message(self, msg_type: MessageType | None, handler: MessageHandler) -> None:
        """Serve messages of a type (None: legacy). A second handler for a type is an error."""
        if msg_type in self._handlers:
            raise LocalProtocolError(f"{msg_type!r} has a handler already")
        self._handlers[msg_type] = handler

    async def refuse(self, message: TensorMessage, error: RequestRefusedError) -> None:
        """Answer a 1.1.0 request with an Error message."""
        payload = ErrorPayload(
            code=ErrorCode(error.code), text=str(error), retry_after=error.retry_after
        )
        reply = TensorMessage(
            msg_type=MessageType.ERROR,
            layer_id=message.layer_id,
            request_id=message.request_id,
            data=payload.encode(),
        )
        await self.send(_sender(message), reply)

    # 1.1.0

    def _message_stream(self, stream: Stream) -> MessageStream:
        def on_sent(message: TensorMessage, num_bytes: int) -> None:
            self.counters.add(stream.peer_id, message.msg_type, Direction.SENT, num_bytes)

        message_stream = MessageStream(
            stream,
            hello=self._hello,
            limits=self._limits,
            on_message=self._receive_v11,
            on_sent=on_sent,
        )
        self._streams[stream.peer_id] = message_stream
        return message_stream

    async def _serve_v11(self, stream: Stream) -> None:
        if self._num_streams[stream.peer_id] >= MAX_STREAMS_PER_PEER:
            logger.warning("%s opened more than %d streams", stream.peer_id, MAX_STREAMS_PER_PEER)
            await stream.reset()
            return
        # Where both sides opened at once, either stream serves: the older one is read until it ends,
        # the newer one is written to.
        await self._run_stream(self._message_stream(stream))

    async def _run_stream(self, stream: MessageStream) -> None:
        peer_id = stream.peer_id
        self._num_streams[peer_id] += 1
        await stream.run()
        self._num_streams[peer_id] -= 1
        reason = stream.end_reason or StreamBrokenError(f"the stream to {peer_id} ended")
        if self._streams.get(peer_id) is stream:
            del self._streams[peer_id]
            lost = StreamBrokenError(f"lost the stream to {peer_id}: {reason}")
            lost.__cause__ = reason
            self._pending.fail(peer_id, lost)
            for handler in self._lost_handlers:
                handler(peer_id, reason)

    async def _receive_v11(self, stream: MessageStream, message: TensorMessage) -> None:
        message = self._received(stream.peer_id, message)
        if message.msg_type is MessageType.HELLO:
            assert stream.hello is not None
            for opened in self._opened_handlers:
                opened(stream.peer_id, stream.hello)
            return
        if message.msg_type is MessageType.ERROR:
            self._receive_error(message)
            return
        if self._answered(message):
            return
        handler = self._handlers.get(message.msg_type)
        if handler is None:
            name = message.msg_type.name if message.msg_type is not None else "legacy"
            refusal = RequestRefusedError(
                f"{name} is not served here", code=ErrorCode.NOT_SUPPORTED
            )
            await self.refuse(message, refusal)
        elif inspect.iscoroutinefunction(handler):
            limiter = self._limiter(stream.peer_id)
            borrower = object()
            await limiter.acquire_on_behalf_of(borrower)

            async def run_handler() -> None:
                try:
                    await self._call_handler(stream, handler, message)
                except RemoteProtocolError as exc:
                    await stream.fail(exc)
                finally:
                    limiter.release_on_behalf_of(borrower)

            self.host.start_soon(run_handler)
        else:
            await self._call_handler(stream, handler, message)

    async def _call_handler(
        self, stream: MessageStream, handler: MessageHandler, message: TensorMessage
    ) -> None:
        try:
            try:
                await _call(handler, message)
            except RequestRefusedError as exc:
                logger.warning("refused %s of %s: %s", _name(message), stream.peer_id, exc)
                await self.refuse(message, exc)
            except RemoteProtocolError:
                raise
            except TransportError as exc:
                logger.debug("%s went away: %s", stream.peer_id, exc)
            except Exception:
                logger.exception("the handler of %s failed", _name(message))
                failure = RequestRefusedError("internal error", code=ErrorCode.COMPUTE_FAILED)
                await self.refuse(message, failure)
        except TransportError as exc:
            logger.debug("could not answer %s: %s", stream.peer_id, exc)

    def _receive_error(self, message: TensorMessage) -> None:
        payload = ErrorPayload.decode(message.data)
        peer_id = _sender(message)
        error = PeerRefusedError(
            f"{peer_id} refused: {payload.text}",
            code=payload.code,
            text=payload.text,
            retry_after=payload.retry_after,
        )
        correlation = message.request_id or None
        if not self._pending.fail(peer_id, error, correlation=correlation):
            logger.warning("%s reports: %s", peer_id, payload.text)

    # 1.0.0

    async def _send_v10(self, peer_id: str, message: TensorMessage) -> None:
        def on_sent(num_bytes: int) -> None:
            self.counters.add(peer_id, message.msg_type, Direction.SENT, num_bytes)

        await send_oneshot(self.host, peer_id, message, on_sent=on_sent)

    async def _serve_v10(self, stream: Stream) -> None:
        peer_id = stream.peer_id
        self._v10_peers.add(peer_id)
        try:
            async with self._limiter(peer_id):
                await receive_oneshot(
                    stream,
                    limits=self._limits,
                    on_message=lambda message: self._receive_v10(peer_id, message),
                )
        except (RemoteProtocolError, RequestRefusedError) as exc:
            logger.warning("reset a 1.0.0 stream of %s: %s", peer_id, exc)
            await stream.reset()
        except (TransportError, PeerRefusedError) as exc:
            # The stream broke, or the peer would not have our answer.
            logger.debug("a 1.0.0 stream of %s ended: %s", peer_id, exc)
            await stream.reset()
        else:
            await stream.aclose()

    async def _receive_v10(self, peer_id: str, message: TensorMessage) -> None:
        message = self._received(peer_id, message)
        if self._answered(message):
            return
        handler = self._handlers.get(message.msg_type)
        if handler is None:
            raise RequestRefusedError(
                f"{_name(message)} is not served here", code=ErrorCode.NOT_SUPPORTED
            )
        await _call(handler, message)

    def is_v10(self, peer_id: str) -> bool:
        """Whether a peer is known to speak 1.0.0 alone."""
        return peer_id in self._v10_peers and peer_id not in self._streams

    # Both

    def _forget(self, peer_id: str) -> None:
        """The last connection to a peer is gone: nobody need wait for it, and its tables go."""
        self._pending.fail(peer_id, StreamBrokenError(f"lost the connection to {peer_id}"))
        self._v10_peers.discard(peer_id)
        self._opening.pop(peer_id, None)
        self._limiters.pop(peer_id, None)
        if not self._num_streams[peer_id]:
            del self._num_streams[peer_id]

    def _received(self, peer_id: str, message: TensorMessage) -> TensorMessage:
        num_bytes = header_bytes(message.msg_type) + len(message.data)
        self.counters.add(peer_id, message.msg_type, Direction.RECEIVED, num_bytes)
        return replace(message, from_peer=peer_id)

    def _answered(self, message: TensorMessage) -> bool:
        """Whether `message` is an answer; one that nobody waits for any more is dropped."""
        if message.msg_type not in _ANSWERS:
            return False
        if not self._pending.resolve(message):
            logger.debug("nobody waits for %s of %s", _name(message), message.from_peer)
        return True

    def _limiter(self, peer_id: str) -> trio.CapacityLimiter:
        return self._limiters.setdefault(peer_id, trio.CapacityLimiter(MAX_HANDLERS_PER_PEER))


async def _call(handler: MessageHandler, message: TensorMessage) -> None:
    result = handler(message)
    if result is not None:
        await result


def _sender(message: TensorMessage) -> str:
    if message.from_peer is None:
        raise LocalProtocolError("the message has no sender to answer")
    return message.from_peer


def _name(message: TensorMessage) -> str:
    return message.msg_type.name if message.msg_type is not None else "legacy message"
