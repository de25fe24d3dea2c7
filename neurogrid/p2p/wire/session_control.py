"""The payloads of 1.1.0 that open and close a session (`protocol_spec/messages.md`).

A session's caches, and its life, are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from neurogrid.p2p.wire.blob_id import BLOB_ID_BYTES
from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.forms import BOOLEAN, Map, binary, nullable, one_of, optional, uint
from neurogrid.p2p.wire.image_spans import IMAGE_SPAN_BYTES, decode_image_spans
from neurogrid.p2p.wire.limits import (
    MAX_ADAPTER_BYTES,
    MAX_IMAGE_SPAN_BYTES,
    MAX_LAYERS,
    MAX_ROUTE_BYTES,
)
from neurogrid.p2p.wire.maps import MAX_U32, MAX_U64, check_span

__all__ = [
    "PREFIX_BYTES",
    "SESSION_DTYPES",
    "SessionAck",
    "SessionClose",
    "SessionOpen",
    "SessionQuery",
]

SESSION_DTYPES: Final = frozenset({"F32", "F16", "BF16", "I8"})
"""Dtypes in which the activations of a session may travel."""

PREFIX_BYTES: Final = 32
"""Bytes of what a coordinator calls a prefix on disk."""

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
        stored: a prefix on the worker's disk, of which this one begins with the first tokens, `PREFIX_BYTES`; empty for
            none.
        prior_length: how many of them, 1 to `max_length`; 0 without a prior or a prefix.
        keep_prior: the prior stays open, and what it has is copied; otherwise it is over.
        adapter: for each layer the id of the blob of its part, 32 zero bytes for a layer without one; empty for no
            adapter.
        cuts: its activations may begin before its end.
        images: where among its tokens images are (`encode_image_spans`), for models whose layers have to know; empty
            for none.
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
    adapter: bytes = b""
    cuts: bool = False
    images: bytes = b""
    stored: bytes = b""

    _map = Map(
        "SessionOpen",
        {
            "sid": uint(MAX_U64, smallest=1),
            "start": uint(MAX_LAYERS),
            "stop": uint(MAX_LAYERS),
            "max_length": uint(MAX_U32, smallest=1),
            "route": optional(binary(MAX_ROUTE_BYTES, smallest=_MIN_ROUTE_BYTES)),
            "wire": optional(one_of(SESSION_DTYPES)),
            "prior": optional(uint(MAX_U64)),
            "prior_length": optional(uint(MAX_U32)),
            "keep_prior": optional(BOOLEAN),
            "adapter": optional(binary(MAX_ADAPTER_BYTES, smallest=BLOB_ID_BYTES)),
            "cuts": optional(BOOLEAN),
            "images": optional(binary(MAX_IMAGE_SPAN_BYTES, smallest=IMAGE_SPAN_BYTES)),
            "stored": optional(binary(PREFIX_BYTES, smallest=PREFIX_BYTES)),
        },
    )

    def _check(self) -> None:
        check_span("SessionOpen", self.start_layer, self.stop_layer)
        has_prior = bool(self.prior or self.stored)
        if has_prior != bool(self.prior_length) or (self.keep_prior and not self.prior):
            raise violation("a prior session, or a prefix on disk, and its length go together")
        if self.prior and self.stored:
            raise violation("a session begins with a prior session or with a prefix on disk")
        if self.stored and self.prior_length > self.max_length:
            raise violation(
                f"no session of {self.max_length} tokens begins with {self.prior_length} of a prefix"
            )
        if self.prior and (self.prior_length > self.max_length or self.prior == self.session_id):
            raise violation(
                f"no session of {self.max_length} tokens begins with {self.prior_length} of session "
                f"{self.prior}"
            )
        if self.adapter and not (
            len(self.adapter) == BLOB_ID_BYTES * (self.stop_layer - self.start_layer)
            and any(self.adapter)
        ):
            raise violation(
                f"an adapter is {BLOB_ID_BYTES} bytes for each layer, and not all of them zero"
            )
        if self.images:
            decode_image_spans(self.images, max_length=self.max_length)


_SESSION_ID: Final = {"sid": uint(MAX_U64)}


@dataclass(frozen=True, slots=True)
class SessionClose(ControlPayload):
    """The session is over and its caches may go.

    Attributes:
        session_id: u64.
        store: write them to disk first, as the prefix that is called so, `PREFIX_BYTES`; empty for no such thing.
    """

    session_id: int
    store: bytes = b""

    _map = Map(
        "SessionClose",
        {**_SESSION_ID, "store": optional(binary(PREFIX_BYTES, smallest=PREFIX_BYTES))},
    )


@dataclass(frozen=True, slots=True)
class SessionQuery(ControlPayload):
    """Request for the length of a session, which a SessionAck answers."""

    session_id: int

    _map = Map("SessionQuery", _SESSION_ID)


@dataclass(frozen=True, slots=True)
class SessionAck(ControlPayload):
    """The session was opened, or closed, as asked; or it is as far as was asked about.

    Attributes:
        session_id: u64.
        length: tokens, u32, that the session has taken and computed; None where that is not told.
        adapter: the session has the adapter that it was opened with.
        cuts: its activations may begin before its end, as was asked for.
        stored: its caches were written to disk, as was asked for.
        last_position: where the activation began that it took last, u32; None where there was none, or it is not told.
        images: its layers know where its images are.
    """

    session_id: int
    length: int | None = None
    adapter: bool = False
    cuts: bool = False
    last_position: int | None = None
    images: bool = False
    stored: bool = False

    _map = Map(
        "SessionAck",
        {
            "sid": uint(MAX_U64),
            "length": nullable(uint(MAX_U32)),
            "adapter": optional(BOOLEAN),
            "cuts": optional(BOOLEAN),
            "pos": nullable(uint(MAX_U32)),
            "images": optional(BOOLEAN),
            "stored": optional(BOOLEAN),
        },
    )
