"""A peer that writes bytes of its own making on streams, and reads what comes back message by message."""

from __future__ import annotations

from collections import deque
from contextlib import suppress

import trio

from neurogrid.errors import StreamBrokenError, TransportError
from neurogrid.p2p import (
    PROTOCOL_V10,
    PROTOCOL_V11,
    Host,
    MessageDecoder,
    MessageType,
    Stream,
    StreamDecoder,
    TensorMessage,
    encode_message,
)
from neurogrid.p2p.wire import (
    Data,
    ErrorCode,
    ErrorPayload,
    Hello,
    TensorEnvelope,
    encode_envelope_parts,
)

__all__ = [
    "HELLO",
    "UNLIMITED",
    "RawPeer",
    "RawStream",
    "activation",
    "header",
    "message",
    "response",
    "tensor",
]

UNLIMITED = 2**64 - 1
HELLO = Hello(
    role="peer",
    agent="hostile",
    versions=(PROTOCOL_V11, PROTOCOL_V10),
    max_data=256 * 1024**2,
    credit=UNLIMITED,
)


class RawStream:
    """One stream, of either version."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._decoder = StreamDecoder()
        self._received: deque[TensorMessage] = deque()

    async def say(self, *data: Data) -> None:
        await self.stream.send_all(b"".join(data))

    async def say_hello(self, *, credit: int = UNLIMITED) -> Hello:
        """Say Hello as is due; returns the victim's."""
        hello = Hello(HELLO.role, HELLO.agent, HELLO.versions, HELLO.max_data, credit)
        await self.say(message(MessageType.HELLO, hello.encode()))
        answer = await self.receive()
        assert answer.msg_type is MessageType.HELLO
        return Hello.decode(answer.data)

    async def receive(self, msg_type: MessageType | None = None) -> TensorMessage:
        """The next message of 1.1.0; with a type, the next of that type."""
        while True:
            while not self._received:
                data = await self.stream.receive_some()
                if not data:
                    raise StreamBrokenError("the victim ended the stream")
                self._received.extend(self._decoder.receive_data(data))
            received = self._received.popleft()
            if msg_type in (None, received.msg_type):
                return received

    async def refused(self, code: ErrorCode, *, request_id: int) -> ErrorPayload:
        """Wait for the Error that answers a request."""
        error = await self.receive(MessageType.ERROR)
        payload = ErrorPayload.decode(error.data)
        assert (payload.code, error.request_id) == (code, request_id), payload
        return payload

    async def ended(self, code: ErrorCode | None = None) -> None:
        """Wait until the victim ends the stream; over 1.1.0 after an Error with this code."""
        errors = []
        try:
            while True:
                received = await self.receive()
                if received.msg_type is MessageType.ERROR and received.request_id == 0:
                    errors.append(ErrorPayload.decode(received.data))
        except StreamBrokenError:
            pass
        told = {code} if code is not None and self.stream.protocol_id == PROTOCOL_V11 else set()
        assert {error.code for error in errors} == told, errors

    async def end_in_any_way(self) -> None:
        """Read what comes until there is no more."""
        try:
            while await self.stream.receive_some():
                pass
        except StreamBrokenError:
            pass


class RawPeer:
    """A host connected to its victim. It takes 1.0.0 streams from it once `serve_v10` was called, 1.1.0 never."""

    def __init__(self, host: Host, victim_id: str) -> None:
        self.host = host
        self.victim_id = victim_id
        self._asked, self.asked_v10 = trio.open_memory_channel[TensorMessage](16)

    def serve_v10(self) -> None:
        """Take what the victim says over 1.0.0: it is to be had from `asked_v10`, and always confirmed."""

        async def serve(stream: Stream) -> None:
            decoder = MessageDecoder()
            while data := await stream.receive_some():
                for received in decoder.receive_data(data):
                    await self._asked.send(received)
            await stream.aclose()

        self.host.set_stream_handler(PROTOCOL_V10, serve)

    async def say_v10(self, *data: Data) -> RawStream:
        """Say something on a 1.0.0 stream of its own, as is due."""
        stream = await self.open(PROTOCOL_V10)
        await stream.say(*data)
        await stream.stream.send_eof()
        return stream

    async def open(self, version: str = PROTOCOL_V11) -> RawStream:
        return RawStream(await self.host.open_stream(self.victim_id, [version]))

    async def open_v11(self, *, credit: int = UNLIMITED) -> RawStream:
        """A 1.1.0 stream with both Hellos said."""
        stream = await self.open(PROTOCOL_V11)
        await stream.say_hello(credit=credit)
        return stream

    async def leave(self) -> None:
        with suppress(TransportError):  # the victim may have been quicker
            await self.host.disconnect(self.victim_id)
        await self.host.wait_disconnected(self.victim_id)


def message(msg_type: MessageType | None, data: Data = b"", **header: int) -> bytes:
    return encode_message(TensorMessage(msg_type=msg_type, data=data, **header))


def header(msg_type: int, num_bytes: int, *, layer_id: int = 0, request_id: int = 1) -> bytes:
    """An extended header that may say what `encode_message` would not."""
    return b"".join(
        (
            bytes([msg_type]),
            layer_id.to_bytes(4, "big"),
            bytes(8),
            request_id.to_bytes(8, "big"),
            num_bytes.to_bytes(4, "big"),
        )
    )


def tensor(data: bytes) -> bytes:
    """An envelope around a tensor of bytes."""
    envelope = TensorEnvelope(
        session_id=0,
        position=0,
        start_layer=0,
        stop_layer=1,
        dtype="U8",
        shape=(len(data),),
        data=data,
    )
    return b"".join(encode_envelope_parts(envelope))


def activation(
    data: bytes = b"xyz", *, layer_id: int = 3, request_id: int = 1, version: str = PROTOCOL_V11
) -> bytes:
    """A good activation."""
    return message(
        MessageType.ACTIVATION,
        data if version == PROTOCOL_V10 else tensor(data),
        layer_id=layer_id,
        request_id=request_id,
    )


def response(data: bytes = b"xyz", *, request_id: int, version: str = PROTOCOL_V11) -> bytes:
    """A good response."""
    return message(
        MessageType.RESPONSE,
        data if version == PROTOCOL_V10 else tensor(data),
        request_id=request_id,
    )
