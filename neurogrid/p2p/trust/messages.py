"""The messages of `/neurogrid/trust/1`, and how they are read from and written to a stream.

Each is a msgpack map, after its length (u32, big-endian). The side that opens the stream sends Credentials; the other
answers with a Verdict and, unless it refuses, its own Credentials; the first ends with its Verdict.

Source: protocol_spec/trust.md.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final

import trio

from neurogrid.errors import RemoteProtocolError, TransportError
from neurogrid.p2p.streams.stream import Stream, receive_exactly
from neurogrid.p2p.trust.limits import (
    GOODBYE_TIMEOUT,
    MAX_CERTIFICATE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_REVOCATION_BYTES,
    MAX_TEXT_CHARS,
    MAX_TOKEN_BYTES,
)
from neurogrid.p2p.trust.refusal import RefusedError
from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.forms import BOOLEAN, Map, binary, line, optional, uint
from neurogrid.p2p.wire.maps import printable_line

__all__ = ["Credentials", "TRUST_PROTOCOL", "Verdict", "read_frame", "say_no", "write_frames"]

TRUST_PROTOCOL: Final = "/neurogrid/trust/1"
"""Protocol under which credentials are shown and judged."""

_LENGTH_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class Credentials(ControlPayload):
    """The credentials of a host; a host without a cluster shows nothing.

    Attributes:
        certificate: the signed form, or nothing.
        token: the signed form of a join token, for the issuer that its ticket names, or nothing.
        revocations: the signed form of the newest list that it knows, or nothing.
        is_issuer: whether it gives certificates: it has the cluster's key.
        asks_renewal: whether it asks for a certificate that is valid longer than the one it shows.
    """

    certificate: bytes = b""
    token: bytes = field(default=b"", repr=False)
    revocations: bytes = field(default=b"", repr=False)
    is_issuer: bool = False
    asks_renewal: bool = False

    _map = Map(
        "Credentials",
        {
            "certificate": optional(binary(MAX_CERTIFICATE_BYTES)),
            "token": optional(binary(MAX_TOKEN_BYTES)),
            "revocations": optional(binary(MAX_REVOCATION_BYTES)),
            "issuer": BOOLEAN,
            "renew": BOOLEAN,
        },
        max_bytes=MAX_MESSAGE_BYTES,
    )


@dataclass(frozen=True, slots=True)
class Verdict(ControlPayload):
    """Whether the sender admits the other side.

    Attributes:
        reason: 0 is yes; else a `Refusal`, or a number up to 65,535 that a newer peer may send.
        text: for people, one printable line of at most 256 characters.
        issued: a certificate for the other side, or nothing.
    """

    reason: int = 0
    text: str = ""
    issued: bytes = b""

    _map = Map(
        "Verdict",
        {
            "reason": uint(0xFFFF),
            "text": replace(
                line(MAX_TEXT_CHARS), write=lambda text: printable_line(text)[:MAX_TEXT_CHARS]
            ),
            "issued": optional(binary(MAX_CERTIFICATE_BYTES)),
        },
        max_bytes=MAX_MESSAGE_BYTES,
    )


async def write_frames(stream: Stream, *payloads: ControlPayload) -> None:
    """Send messages, each after its length; the caller sets the deadline.

    Raises:
        StreamBrokenError: as `Stream.send_all`.
    """
    frames = bytearray()
    for payload in payloads:
        data = payload.encode()
        frames += len(data).to_bytes(_LENGTH_BYTES, "big") + data
    await stream.send_all(frames)


async def read_frame(stream: Stream) -> bytes:
    """Receive one message; the caller sets the deadline.

    Raises:
        RemoteProtocolError: its length is none of a message.
        StreamBrokenError: the stream broke or ended before its last byte.
    """
    num_bytes = int.from_bytes(await receive_exactly(stream, _LENGTH_BYTES), "big")
    if not 0 < num_bytes <= MAX_MESSAGE_BYTES:
        raise RemoteProtocolError(f"a message of {TRUST_PROTOCOL} cannot have {num_bytes} B")
    return await receive_exactly(stream, num_bytes)


async def say_no(stream: Stream, refused: RefusedError) -> None:
    """Say why a peer is refused, and give it time to arrive before the connection is closed."""
    with trio.move_on_after(GOODBYE_TIMEOUT), suppress(TransportError):  # it need not listen
        await write_frames(stream, Verdict(refused.reason, str(refused)))
        await stream.send_eof()
        while await stream.receive_some():
            pass
