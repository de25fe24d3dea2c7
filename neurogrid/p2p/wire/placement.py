"""The payloads of 1.1.0 that assign layers to a worker (`protocol_spec/messages.md`).

What a worker holds and what its answers should be is not known here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.forms import BOOLEAN, Map, array, fixed, one_of, optional, uint
from neurogrid.p2p.wire.limits import MAX_LAYERS, MAX_SESSIONS
from neurogrid.p2p.wire.maps import MAX_U32, check_span
from neurogrid.p2p.wire.messages import Data
from neurogrid.p2p.wire.types import DTYPES

__all__ = [
    "CACHE_DTYPES",
    "FINGERPRINT_BYTES",
    "config_fingerprint",
    "ConfigAck",
    "Assign",
    "AssignAck",
    "Ready",
]

CACHE_DTYPES: Final = frozenset({"I8"})
"""Dtypes that keys and values may be kept as, besides the one that a stage computes in."""

FINGERPRINT_BYTES: Final = 32
"""Bytes in the fingerprint of a model config, a SHA-256."""


def config_fingerprint(data: Data) -> bytes:
    """SHA-256 of the Data of a ModelConfig message, over the bytes as they travelled."""
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True)
class ConfigAck(ControlPayload):
    """The worker took the config.

    Attributes:
        fingerprint: 32 bytes, `config_fingerprint` of the Data that it took.
    """

    fingerprint: bytes

    _map = Map("ConfigAck", {"fingerprint": fixed(FINGERPRINT_BYTES)})


@dataclass(frozen=True, slots=True)
class Assign(ControlPayload):
    """The layers [start_layer, stop_layer) that a worker is to hold.

    Attributes:
        start_layer, stop_layer: 0 <= start < stop <= `MAX_LAYERS`.
        max_length: tokens in a session, 1 to 2**32 - 1.
        max_sessions: sessions open at once, 1 to `MAX_SESSIONS`.
        dtype: what the stage computes in, a name from `DTYPES`.
        cache: one of `CACHE_DTYPES`: what the keys and values of sessions are kept as; empty for `dtype`.
    """

    start_layer: int
    stop_layer: int
    max_length: int
    max_sessions: int
    dtype: str
    cache: str = ""

    _map = Map(
        "Assign",
        {
            "start": uint(MAX_LAYERS),
            "stop": uint(MAX_LAYERS),
            "max_length": uint(MAX_U32, smallest=1),
            "max_sessions": uint(MAX_SESSIONS, smallest=1),
            "dtype": one_of(DTYPES),
            "cache": optional(one_of(CACHE_DTYPES)),
        },
    )

    def _check(self) -> None:
        check_span("Assign", self.start_layer, self.stop_layer)


@dataclass(frozen=True, slots=True)
class AssignAck(ControlPayload):
    """The assignment was taken.

    Attributes:
        held: layers of the range that the worker has under this config, in any order. A hint: what
            counts is the answer to the offer of each.
        has_cache: keys and values are kept as the Assign says.
        stores_prefixes: what a session has can be written to disk, and another begin with it.
    """

    held: tuple[int, ...]
    has_cache: bool = False
    stores_prefixes: bool = False

    _map = Map(
        "AssignAck",
        {
            "held": array(uint(MAX_LAYERS - 1), MAX_LAYERS),
            "cache": optional(BOOLEAN),
            "prefixes": optional(BOOLEAN),
        },
    )


@dataclass(frozen=True, slots=True)
class Ready(ControlPayload):
    """All layers of the assignment are loaded. The header repeats the request id of its Assign.

    Attributes:
        start_layer, stop_layer: those of the Assign.
        same_bits: whether a token gets the same bits in these layers, whatever it is computed with.
    """

    start_layer: int
    stop_layer: int
    same_bits: bool = False

    _map = Map(
        "Ready",
        {
            "start": uint(MAX_LAYERS),
            "stop": uint(MAX_LAYERS),
            "same_bits": optional(BOOLEAN),
        },
    )

    def _check(self) -> None:
        check_span("Ready", self.start_layer, self.stop_layer)
