"""Protobuf messages on a stream, each behind its length as an unsigned varint, bounded on both sides.

How libp2p's own protocols (relay, hole punching, AutoNAT, identify) write. Reads byte by byte until the length is
known, so that nothing of what follows the message is taken: a relayed connection begins right behind one.

Source: https://github.com/multiformats/unsigned-varint
"""

from __future__ import annotations

from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.streams.stream import Stream, receive_exactly

__all__ = ["MAX_MESSAGE", "receive_message", "send_message"]

# Bytes. A peer id, a few addresses, a signed voucher; the specification of DCUtR asks for this bound.
MAX_MESSAGE: Final = 4096
_MAX_LENGTH_BYTES: Final = 4  # of any bound that is asked for here

M = TypeVar("M", bound=Message)


async def send_message(stream: Stream, message: Message) -> None:
    """Send one message.

    Raises:
        LocalProtocolError: it is larger than `MAX_MESSAGE`.
        StreamBrokenError: the stream or its connection ended.
    """
    body = message.SerializeToString()
    if len(body) > MAX_MESSAGE:
        raise LocalProtocolError(f"a message of {len(body)} B is larger than {MAX_MESSAGE} B")
    await stream.send_all(_varint(len(body)) + body)


async def receive_message(stream: Stream, kind: type[M], *, max_bytes: int = MAX_MESSAGE) -> M:
    """Receive one message of at most `max_bytes`; the caller sets the deadline.

    Raises:
        RemoteProtocolError: it is malformed or too large.
        StreamBrokenError: the stream ended before the message did.
    """
    length = shift = 0
    for _ in range(_MAX_LENGTH_BYTES):
        (byte,) = await receive_exactly(stream, 1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
    else:
        raise RemoteProtocolError(f"{stream.peer_id} announces a message without an end")
    if length > max_bytes:
        raise RemoteProtocolError(
            f"{stream.peer_id} announces a message of {length} B, and {max_bytes} B are the most"
        )
    body = await receive_exactly(stream, length)
    message = kind()
    try:
        message.ParseFromString(body)
    except DecodeError as exc:
        raise RemoteProtocolError(
            f"{stream.peer_id} sent what is no {kind.__name__} on {stream.protocol_id}"
        ) from exc
    return message


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
