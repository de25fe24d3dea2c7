"""The payloads of 1.1.0 that open and close a session (`protocol_spec/messages.md`).

A session's caches, and its life, are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.limits import MAX_LAYERS, MAX_ROUTE_BYTES
from neurogrid.p2p.wire.maps import MAX_U32, MAX_U64, Fields

__all__ = ["SESSION_DTYPES", "SessionAck", "SessionClose", "SessionOpen", "SessionQuery"]

SESSION_DTYPES: Final = frozenset({"F32", "F16", "BF16", "I8"})
"""In what the activations of a session may travel."""

# A signature and at least one byte.
_MIN_ROUTE_BYTES: Final = 65


@dataclass(frozen=True, slots=True)
class SessionOpen(ControlPayload):
    """Open a session over the layers [start_layer, stop_layer).

    Attributes:
        session_id: u64, not 0, chosen at random by the sender.
        start_layer, stop_layer: 0 <= start < stop <= `MAX_LAYERS`.
        max_length: tokens that the session may come to hold, 1 to 2**32 - 1.
        route: the signed form of a `Route`, at most `MAX_ROUTE_BYTES`; empty for activations that come from this
            peer and go back to it.
        wire: one of `SESSION_DTYPES`: in what activations and responses travel; empty for what the stage
            computes in.
        prior: a session over the same layers, of which this one begins with the first tokens; 0 for none.
        prior_length: how many of them, 1 to `max_length`; 0 without a prior.
        keep_prior: the prior stays open, and what it has is copied; otherwise it is over.
    """

    session_id: int
    start_layer: int
    stop_layer: int
    max_length: int
    route: bytes = b""
    wire: str = ""
    prior: int = 0
    prior_length: int = 0
    keep_prior: bool = False

    _name = "SessionOpen"
    _keys = frozenset(
        {"sid", "start", "stop", "max_length", "route", "wire"}
        | {"prior", "prior_length", "keep_prior"}
    )
    _max_binary = MAX_ROUTE_BYTES

    def _entries(self) -> dict[str, object]:
        entries: dict[str, object] = {
            "sid": self.session_id,
            "start": self.start_layer,
            "stop": self.stop_layer,
            "max_length": self.max_length,
        }
        if self.route:
            entries["route"] = self.route
        if self.wire:
            entries["wire"] = self.wire
        if self.prior:
            entries["prior"] = self.prior
        if self.prior_length:
            entries["prior_length"] = self.prior_length
        if self.keep_prior:
            entries["keep_prior"] = True
        return entries

    @classmethod
    def _read(cls, fields: Fields) -> SessionOpen:
        start, stop = fields.span("start", "stop", MAX_LAYERS)
        opened = cls(
            fields.uint("sid", MAX_U64, smallest=1),
            start,
            stop,
            fields.uint("max_length", MAX_U32, smallest=1),
            route=fields.optional_binary("route", MAX_ROUTE_BYTES, smallest=_MIN_ROUTE_BYTES),
            wire=fields.optional_text("wire", 16),
            prior=fields.optional_uint("prior", MAX_U64),
            prior_length=fields.optional_uint("prior_length", MAX_U32),
            keep_prior=fields.optional_boolean("keep_prior"),
        )
        if opened.wire and opened.wire not in SESSION_DTYPES:
            raise violation(f"activations do not travel in {opened.wire!r}")
        if bool(opened.prior) != bool(opened.prior_length) or (
            opened.keep_prior and not opened.prior
        ):
            raise violation("a prior session and its length go together")
        if opened.prior and (
            opened.prior_length > opened.max_length or opened.prior == opened.session_id
        ):
            raise violation(
                f"no session of {opened.max_length} tokens begins with {opened.prior_length} of session "
                f"{opened.prior}"
            )
        return opened


@dataclass(frozen=True, slots=True)
class _SessionId(ControlPayload):
    """The id of the session that a SessionClose or a SessionQuery speaks of, u64."""

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
class SessionQuery(_SessionId):
    """How far is the session?"""

    _name = "SessionQuery"


@dataclass(frozen=True, slots=True)
class SessionAck(ControlPayload):
    """The session was opened, or closed, as asked; or it is as far as was asked about.

    Attributes:
        session_id: u64.
        length: tokens, u32, that the session has taken and computed; None where that is not told.
    """

    session_id: int
    length: int | None = None

    _name = "SessionAck"
    _keys = frozenset({"sid", "length"})

    def _entries(self) -> dict[str, object]:
        entries: dict[str, object] = {"sid": self.session_id}
        if self.length is not None:
            entries["length"] = self.length
        return entries

    @classmethod
    def _read(cls, fields: Fields) -> Self:
        has_length = fields.has("length")
        return cls(
            fields.uint("sid", MAX_U64), fields.uint("length", MAX_U32) if has_length else None
        )
