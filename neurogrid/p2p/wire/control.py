"""The payloads of 1.1.0 that concern the stream itself, Hello and Error, and what all share.

Source: `protocol_spec/messages.md`.

Such a payload is a msgpack map. Its class has `encode() -> bytes`, which raises LocalProtocolError
for a value out of its range, and `decode(data)`, which raises RemoteProtocolError for anything that
the specification forbids: a missing or double key, another type, a value out of its range, bytes
after the map. Unknown keys are ignored. When a message may be sent is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Self, cast

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.forms import Map, array, line, one_of, optional, seconds, text, uint
from neurogrid.p2p.wire.limits import (
    DEFAULT_LIMITS,
    MAX_AGENT_CHARS,
    MAX_ERROR_CHARS,
    MAX_MACHINE_CHARS,
    MAX_RETRY_AFTER,
    MAX_VERSIONS,
    MIN_PEER_DATA,
)
from neurogrid.p2p.wire.maps import MAX_U32, MAX_U64, printable_line
from neurogrid.p2p.wire.messages import Data

__all__ = [
    "ROLES",
    "ControlPayload",
    "Hello",
    "ErrorPayload",
]

ROLES: Final = frozenset({"worker", "coordinator", "peer"})
"""Roles that a Hello may give its sender."""


class ControlPayload:
    """The base of the payloads below, which are dataclasses."""

    __slots__ = ()

    # With a form for each field, in their order.
    _map: ClassVar[Map]
    # The names of the fields, as every dataclass has them.
    __match_args__: ClassVar[tuple[str, ...]]

    def encode(self) -> bytes:
        """The map, keys in the order of the specification's table."""
        data = self._map.encode([getattr(self, name) for name in self.__match_args__])
        # One set of rules: what we would refuse to read we do not send.
        try:
            self.decode(data)
        except RemoteProtocolError as error:
            raise LocalProtocolError(str(error)) from error
        return data

    @classmethod
    def decode(cls, data: Data) -> Self:
        """Read the map, which must fill `data`."""
        payload: Self = cast(Any, cls)(*cls._map.decode(data))
        payload._check()
        return payload

    def _check(self) -> None:
        """Check what no field says alone.

        Raises:
            RemoteProtocolError: values do not go together.
        """


@dataclass(frozen=True, slots=True)
class Hello(ControlPayload):
    """The first message in each direction of a 1.1.0 stream.

    Attributes:
        role: one of `ROLES`.
        agent: name and version of the software, at most `MAX_AGENT_CHARS` characters; decoded,
            printable.
        versions: the protocol ids that the sender speaks, 1 to `MAX_VERSIONS`.
        max_data: the largest Data in bytes that it accepts, u32, at least `MIN_PEER_DATA`.
        credit: u64, the Data bytes of credited messages that may be begun towards the sender before
            it gives more; see `Credit`.
        name: what people call its machine, at most `MAX_MACHINE_CHARS` characters, empty for nothing; decoded,
            printable, without spaces at its ends. It proves nothing.
    """

    role: str
    agent: str
    versions: tuple[str, ...]
    max_data: int
    credit: int
    name: str = ""

    _map = Map(
        "Hello",
        {
            "role": one_of(ROLES),
            "agent": line(MAX_AGENT_CHARS),
            "versions": array(text(MAX_AGENT_CHARS), MAX_VERSIONS),
            "max_data": uint(MAX_U32, smallest=MIN_PEER_DATA),
            "credit": uint(MAX_U64),
            "name": replace(
                optional(text(MAX_MACHINE_CHARS, smallest=1)),
                read=lambda name: printable_line(name).strip(),
            ),
        },
        max_bytes=DEFAULT_LIMITS.hello,
    )

    def _check(self) -> None:
        if not self.versions or not all(version.isprintable() for version in self.versions):
            raise violation("Hello names no version, or one that is not printable")


def _cut(said: str) -> str:
    said = printable_line(said)
    return said if len(said) <= MAX_ERROR_CHARS else said[: MAX_ERROR_CHARS - 1] + "…"


@dataclass(frozen=True, slots=True)
class ErrorPayload(ControlPayload):
    """Reason for which a request was refused, or a stream is about to end.

    The header repeats the id of the request; an id of 0 speaks of the stream.

    Attributes:
        code: an `ErrorCode`, or another number from 1 to 65,535 that a newer peer may send.
        text: one printable line of at most `MAX_ERROR_CHARS` characters. Encoding makes it one, and
            cuts it there: an error about a long text must not be the next error.
        retry_after: seconds from 0 to `MAX_RETRY_AFTER` after which to try again, or None.
    """

    code: int
    text: str
    retry_after: float | None = None

    _map = Map(
        "Error",
        {
            "code": uint(0xFFFF, smallest=1),
            "text": replace(line(MAX_ERROR_CHARS), write=_cut),
            "retry_after": optional(seconds(MAX_RETRY_AFTER)),
        },
        max_bytes=DEFAULT_LIMITS.error,
    )
