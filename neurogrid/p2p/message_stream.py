"""A long-lived `/neurogrid/tensor/1.1.0` stream: Hello first, then many messages each way.

One task reads and one writes. The writer is never cancelled in mid-message while the host runs, so a
caller may give up waiting for `send` at any time and the stream stays whole. What the messages mean is
not known here: they go to a callback, in the order in which they arrived.

Source: protocol_spec/sessions.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from neurogrid.errors import (
    LocalProtocolError,
    NeuroGridError,
    RemoteProtocolError,
    ResponseTimeout,
    StreamBrokenError,
)
from neurogrid.p2p.stream import Stream
from neurogrid.p2p.wire import (
    ErrorCode,
    ErrorPayload,
    Hello,
    Limits,
    MessageType,
    StreamDecoder,
    TensorMessage,
    encode_message_parts,
)

__all__ = ["MessageStream"]

MessageCallback = Callable[["MessageStream", TensorMessage], Awaitable[None]]
SentCallback = Callable[[TensorMessage, int], None]

# Messages that wait for the writer. Callers wait for theirs to be written, so that this bounds what
# concurrent callers may have queued, not what one caller can pile up.
MAX_QUEUED_MESSAGES = 64
# A message goes out as one write up to this size: a copy is cheaper than a second encrypted frame.
JOIN_BYTES = 64 * 1024
HELLO_TIMEOUT = 15.0  # seconds


class _Outgoing:
    def __init__(self, message: TensorMessage) -> None:
        self.message = message
        self.done = trio.Event()
        self.error: NeuroGridError | None = None


class MessageStream:
    """One 1.1.0 stream to one peer. `run` drives it; until then nothing happens.

    Attributes:
        peer_id: the remote peer (base58).
        hello: what the peer said of itself; None until its Hello has arrived.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        hello: Hello,
        limits: Limits,
        on_message: MessageCallback,
        on_sent: SentCallback,
    ) -> None:
        self.peer_id = stream.peer_id
        self.hello: Hello | None = None
        self._stream = stream
        self._own_hello = hello
        self._decoder = StreamDecoder(limits)
        self._on_message = on_message
        self._on_sent = on_sent
        self._queue_in, self._queue_out = trio.open_memory_channel[_Outgoing](MAX_QUEUED_MESSAGES)
        self._hello_received = trio.Event()
        self._closed: NeuroGridError | None = None

    @property
    def is_open(self) -> bool:
        """Whether messages can still be sent."""
        return self._closed is None

    async def run(self) -> None:
        """Read and write until the stream ends; raises nothing that the peer or network caused."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._write)
            self._queue_in.send_nowait(_Outgoing(_message(MessageType.HELLO, self._own_hello)))
            await self._read()
            nursery.cancel_scope.cancel()
        await self._stream.aclose()

    async def send(self, message: TensorMessage) -> None:
        """Send one message and return when it is written to the connection.

        Raises:
            StreamBrokenError: the stream ended first.
            LocalProtocolError: more Data than the peer said it accepts, or than any may have.

        After cancellation the message may or may not be sent; the stream stays usable.
        """
        if self._closed is not None:
            raise StreamBrokenError(str(self._closed)) from self._closed
        if self.hello is not None and len(message.data) > self.hello.max_data:
            raise LocalProtocolError(
                f"{len(message.data)} B are more than the {self.hello.max_data} B that "
                f"{self.peer_id} accepts in one message"
            )
        outgoing = _Outgoing(message)
        try:
            await self._queue_in.send(outgoing)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as exc:
            raise StreamBrokenError(str(self._closed)) from exc
        await outgoing.done.wait()
        if outgoing.error is not None:
            raise StreamBrokenError(str(outgoing.error)) from outgoing.error

    async def wait_hello(self) -> Hello:
        """Wait for the peer's Hello.

        Raises:
            ResponseTimeout: none came in time.
            StreamBrokenError: the stream ended first.
        """
        with trio.move_on_after(HELLO_TIMEOUT):
            await self._hello_received.wait()
        if self.hello is not None:
            return self.hello
        if self._closed is not None:
            raise StreamBrokenError(str(self._closed)) from self._closed
        raise ResponseTimeout(f"{self.peer_id} sent no Hello within {HELLO_TIMEOUT:g} s")

    async def fail(self, error: RemoteProtocolError) -> None:
        """Tell the peer which rule it broke, then reset the stream."""
        if self._closed is None:
            with trio.move_on_after(HELLO_TIMEOUT):
                payload = ErrorPayload(code=ErrorCode(error.code), text=str(error))
                # A peer that is gone already is what we are after.
                with suppress(StreamBrokenError):
                    await self.send(_message(MessageType.ERROR, payload))
        await self._end(error)
        await self._stream.reset()

    async def close(self) -> None:
        """End the stream in order; the peer sees the end of it."""
        await self._end(StreamBrokenError(f"the stream to {self.peer_id} was closed"))
        await self._stream.aclose()

    async def _read(self) -> None:
        try:
            while data := await self._stream.receive_some():
                for message in self._decoder.receive_data(data):
                    await self._receive(message)
                if self._decoder.error is not None:
                    raise self._decoder.error
            self._decoder.receive_eof()
            await self._end(StreamBrokenError(f"{self.peer_id} closed the stream"))
        except RemoteProtocolError as exc:
            await self.fail(exc)
        except NeuroGridError as exc:
            await self._end(exc)

    async def _receive(self, message: TensorMessage) -> None:
        if message.msg_type is MessageType.HELLO:
            if self.hello is not None:
                raise RemoteProtocolError("a second Hello", code=ErrorCode.PROTOCOL_VIOLATION)
            self.hello = Hello.decode(message.data)
            self._hello_received.set()
        elif self.hello is None and message.msg_type is not MessageType.ERROR:
            raise RemoteProtocolError(
                "the first message was no Hello", code=ErrorCode.PROTOCOL_VIOLATION
            )
        await self._on_message(self, message)

    async def _write(self) -> None:
        async for outgoing in self._queue_out:
            try:
                await self._write_message(outgoing.message)
            except NeuroGridError as exc:
                outgoing.error = exc
                await self._end(exc)
            finally:
                outgoing.done.set()

    async def _write_message(self, message: TensorMessage) -> None:
        parts = encode_message_parts(message)
        num_bytes = sum(len(part) for part in parts)
        if num_bytes <= JOIN_BYTES:
            await self._stream.send_all(b"".join(parts))
        else:
            for part in parts:
                await self._stream.send_all(part)
        self._on_sent(message, num_bytes)

    async def _end(self, error: NeuroGridError) -> None:
        """Let nobody send any more, and free those who wait."""
        if self._closed is not None:
            return
        self._closed = error
        self._hello_received.set()
        await self._queue_in.aclose()
        while True:
            try:
                outgoing = self._queue_out.receive_nowait()
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                break
            outgoing.error = error
            outgoing.done.set()

    @property
    def end_reason(self) -> NeuroGridError | None:
        """Why the stream ended; None while it is open."""
        return self._closed


def _message(msg_type: MessageType, payload: Hello | ErrorPayload) -> TensorMessage:
    return TensorMessage(msg_type=msg_type, data=payload.encode())
