"""Protobuf messages on a stream, each behind its length as an unsigned varint, bounded on both sides.

How libp2p's own protocols (relay, hole punching, AutoNAT, identify) write.
"""

from __future__ import annotations

from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message
from libp2p.utils.varint import encode_varint_prefixed

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.streams.stream import Stream, receive_prefixed

__all__ = ["MAX_MESSAGE", "receive_message", "send_message"]

# Bytes. A peer id, a few addresses, a signed voucher; the specification of DCUtR asks for this bound.
MAX_MESSAGE: Final = 4096

M = TypeVar("M", bound=Message)


async def send_message(stream: Stream, message: Message) -> None:
    """Send one message; the caller sets the deadline.

    Raises:
        LocalProtocolError: it is larger than `MAX_MESSAGE`.
        StreamBrokenError: the stream or its connection ended.
    """
    body = message.SerializeToString()
    if len(body) > MAX_MESSAGE:
        raise LocalProtocolError(f"a message of {len(body)} B is larger than {MAX_MESSAGE} B")
    await stream.send_all(encode_varint_prefixed(body))


async def receive_message(stream: Stream, kind: type[M], *, max_bytes: int = MAX_MESSAGE) -> M:
    """Receive one message of at most `max_bytes`; the caller sets the deadline.

    Raises:
        RemoteProtocolError: it is malformed or too large.
        StreamBrokenError: the stream ended before the message did.
    """
    body = await receive_prefixed(stream, max_bytes)
    message = kind()
    try:
        message.ParseFromString(body)
    except DecodeError as exc:
        raise RemoteProtocolError(
            f"{stream.peer_id} sent what is no {kind.__name__} on {stream.protocol_id}"
        ) from exc
    return message
