"""The payloads of 1.1.0 that open and close a session (`protocol_spec/messages.md`).

A session's caches, and its life, are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.limits import MAX_LAYERS
from neurogrid.p2p.wire.maps import MAX_U32, MAX_U64, Fields

__all__ = ["SessionOpen", "SessionClose", "SessionAck"]


@dataclass(frozen=True, slots=True)
class SessionOpen(ControlPayload):
    """Open a session over the layers [start_layer, stop_layer).

    Attributes:
        session_id: u64, chosen at random by the sender.
        start_layer, stop_layer: 0 <= start < stop <= `MAX_LAYERS`.
        max_length: tokens that the session may come to hold, 1 to 2**32 - 1.
    """

    session_id: int
    start_layer: int
    stop_layer: int
    max_length: int

    _name = "SessionOpen"
    _keys = frozenset({"sid", "start", "stop", "max_length"})

    def _entries(self) -> dict[str, object]:
        return {
            "sid": self.session_id,
            "start": self.start_layer,
            "stop": self.stop_layer,
            "max_length": self.max_length,
        }

    @classmethod
    def _read(cls, fields: Fields) -> SessionOpen:
        start, stop = fields.span("start", "stop", MAX_LAYERS)
        return cls(
            fields.uint("sid", MAX_U64), start, stop, fields.uint("max_length", MAX_U32, smallest=1)
        )


@dataclass(frozen=True, slots=True)
class _SessionId(ControlPayload):
    """What SessionClose and SessionAck share: the session that they speak of, u64."""

    session_id: int

    _keys = frozenset({"sid"})

    def _entries(self) -> dict[str, object]:
        return {"sid": self.session_id}

    @classmethod
    def _read(cls, fields: Fields) -> Self:
        return cls(fields.uint("sid", MAX_U64))


@dataclass(frozen=True, slots=True)
class SessionClose(_SessionId):
    """The session is over and its caches may go."""

    _name = "SessionClose"


@dataclass(frozen=True, slots=True)
class SessionAck(_SessionId):
    """The session was opened, or closed, as asked."""

    _name = "SessionAck"
