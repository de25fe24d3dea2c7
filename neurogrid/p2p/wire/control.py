"""The payloads of 1.1.0 that concern the stream itself, Hello and Error, and what all share.

Source: `protocol_spec/messages.md`.

Such a payload is a msgpack map. Its class has `encode() -> bytes`, which raises LocalProtocolError
for a value out of its range, and `decode(data)`, which raises RemoteProtocolError for anything that
the specification forbids: a missing or double key, another type, a value out of its range, bytes
after the map. Unknown keys are ignored. When a message may be sent is not known here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Self

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.limits import (
    DEFAULT_LIMITS,
    MAX_AGENT_CHARS,
    MAX_ERROR_CHARS,
    MAX_MACHINE_CHARS,
    MAX_RETRY_AFTER,
    MAX_VERSIONS,
    MIN_PEER_DATA,
)
from neurogrid.p2p.wire.maps import (
    MAX_SCALAR_BYTES,
    MAX_U32,
    MAX_U64,
    Fields,
    decode_map,
    encode_map,
    printable_line,
)
from neurogrid.p2p.wire.messages import Data

__all__ = [
    "ROLES",
    "ControlPayload",
    "Hello",
    "ErrorPayload",
]

ROLES: Final = frozenset({"worker", "coordinator", "peer"})
"""What a Hello may call its sender."""


class ControlPayload(ABC):
    """The base of the payloads below. `_entries` and `_read` are each other's inverse."""

    __slots__ = ()

    _name: ClassVar[str]
    _keys: ClassVar[frozenset[str]]
    _arrays: ClassVar[Mapping[str, int]] = {}
    _max_bytes: ClassVar[int] = DEFAULT_LIMITS.control
    _max_binary: ClassVar[int] = MAX_SCALAR_BYTES

    def encode(self) -> bytes:
        """The map, keys in the order of the specification's table."""
        entries = self._entries()
        data = encode_map(entries)
        # One set of rules: what we would refuse to read we do not send.
        try:
            self.decode(data)
        except RemoteProtocolError as error:
            raise LocalProtocolError(str(error)) from error
        return data

    @classmethod
    def decode(cls, data: Data) -> Self:
        """Read the map, which must fill `data`."""
        fields, taken = decode_map(
            data,
            what=cls._name,
            max_bytes=cls._max_bytes,
            arrays=cls._arrays,
            known=cls._keys,
            max_binary=cls._max_binary,
        )
        if taken != len(data):
            raise violation(f"{len(data) - taken} bytes follow {cls._name}")
        return cls._read(fields)

    @abstractmethod
    def _entries(self) -> dict[str, object]: ...

    @classmethod
    @abstractmethod
    def _read(cls, fields: Fields) -> Self: ...


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

    _name = "Hello"
    _keys = frozenset({"role", "agent", "versions", "max_data", "credit", "name"})
    _arrays: ClassVar[Mapping[str, int]] = {"versions": MAX_VERSIONS}
    _max_bytes = DEFAULT_LIMITS.hello

    def _entries(self) -> dict[str, object]:
        entries: dict[str, object] = {
            "role": self.role,
            "agent": self.agent,
            "versions": list(self.versions),
            "max_data": self.max_data,
            "credit": self.credit,
        }
        if self.name:
            entries["name"] = self.name
        return entries

    @classmethod
    def _read(cls, fields: Fields) -> Hello:
        role = fields.text("role", 16)
        if role not in ROLES:
            raise violation(f"unknown role {role!r} in Hello")
        versions = fields.texts("versions", MAX_AGENT_CHARS)
        if not versions or not all(version.isprintable() for version in versions):
            raise violation("Hello names no version, or one that is not printable")
        agent = printable_line(fields.text("agent", MAX_AGENT_CHARS))
        return cls(
            role,
            agent,
            versions,
            max_data=fields.uint("max_data", MAX_U32, smallest=MIN_PEER_DATA),
            credit=fields.uint("credit", MAX_U64),
            name=printable_line(fields.optional_text("name", MAX_MACHINE_CHARS)).strip(),
        )


@dataclass(frozen=True, slots=True)
class ErrorPayload(ControlPayload):
    """Why a request was refused, or a stream is about to end.

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

    _name = "Error"
    _keys = frozenset({"code", "text", "retry_after"})
    _max_bytes = DEFAULT_LIMITS.error

    def _entries(self) -> dict[str, object]:
        text = printable_line(self.text)
        if len(text) > MAX_ERROR_CHARS:
            text = text[: MAX_ERROR_CHARS - 1] + "…"
        entries: dict[str, object] = {"code": int(self.code), "text": text}
        if self.retry_after is not None:
            entries["retry_after"] = float(self.retry_after)
        return entries

    @classmethod
    def _read(cls, fields: Fields) -> ErrorPayload:
        return cls(
            code=fields.uint("code", 0xFFFF, smallest=1),
            text=printable_line(fields.text("text", MAX_ERROR_CHARS)),
            retry_after=fields.optional_seconds("retry_after", MAX_RETRY_AFTER),
        )
