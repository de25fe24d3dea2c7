"""The payloads of 1.1.0 that assign layers to a worker (`protocol_spec/messages.md`).

What a worker holds and what its answers should be is not known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.limits import MAX_LAYERS, MAX_SESSIONS
from neurogrid.p2p.wire.maps import MAX_U32, Fields
from neurogrid.p2p.wire.messages import Data
from neurogrid.p2p.wire.types import DTYPES

__all__ = [
    "FINGERPRINT_BYTES",
    "config_fingerprint",
    "ConfigAck",
    "Assign",
    "AssignAck",
    "Ready",
]

FINGERPRINT_BYTES: Final = 32
"""Bytes in the fingerprint of a model config, a SHA-256."""

_MAX_LAYER_ID: Final = MAX_LAYERS - 1


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

    _name = "ConfigAck"
    _keys = frozenset({"fingerprint"})

    def _entries(self) -> dict[str, object]:
        return {"fingerprint": self.fingerprint}

    @classmethod
    def _read(cls, fields: Fields) -> ConfigAck:
        return cls(fields.binary("fingerprint", FINGERPRINT_BYTES))


@dataclass(frozen=True, slots=True)
class Assign(ControlPayload):
    """The layers [start_layer, stop_layer) that a worker is to hold.

    Attributes:
        start_layer, stop_layer: 0 <= start < stop <= `MAX_LAYERS`.
        max_length: tokens in a session, 1 to 2**32 - 1.
        max_sessions: sessions open at once, 1 to `MAX_SESSIONS`.
        dtype: what the stage computes in, a name from `DTYPES`.
    """

    start_layer: int
    stop_layer: int
    max_length: int
    max_sessions: int
    dtype: str

    _name = "Assign"
    _keys = frozenset({"start", "stop", "max_length", "max_sessions", "dtype"})

    def _entries(self) -> dict[str, object]:
        return {
            "start": self.start_layer,
            "stop": self.stop_layer,
            "max_length": self.max_length,
            "max_sessions": self.max_sessions,
            "dtype": self.dtype,
        }

    @classmethod
    def _read(cls, fields: Fields) -> Assign:
        start, stop = fields.span("start", "stop", MAX_LAYERS)
        dtype = fields.text("dtype", 16)
        if dtype not in DTYPES:
            raise violation(f"unknown dtype {dtype!r} in Assign")
        return cls(
            start,
            stop,
            max_length=fields.uint("max_length", MAX_U32, smallest=1),
            max_sessions=fields.uint("max_sessions", MAX_SESSIONS, smallest=1),
            dtype=dtype,
        )


@dataclass(frozen=True, slots=True)
class AssignAck(ControlPayload):
    """The assignment was taken.

    Attributes:
        held: layers of the range that the worker has under this config, in any order. A hint: what
            counts is the answer to the offer of each.
    """

    held: tuple[int, ...]

    _name = "AssignAck"
    _keys = frozenset({"held"})
    _arrays: ClassVar[Mapping[str, int]] = {"held": MAX_LAYERS}

    def _entries(self) -> dict[str, object]:
        return {"held": list(self.held)}

    @classmethod
    def _read(cls, fields: Fields) -> AssignAck:
        return cls(fields.uints("held", _MAX_LAYER_ID))


@dataclass(frozen=True, slots=True)
class Ready(ControlPayload):
    """All layers of the assignment are loaded. The header repeats the request id of its Assign."""

    start_layer: int
    stop_layer: int

    _name = "Ready"
    _keys = frozenset({"start", "stop"})

    def _entries(self) -> dict[str, object]:
        return {"start": self.start_layer, "stop": self.stop_layer}

    @classmethod
    def _read(cls, fields: Fields) -> Ready:
        return cls(*fields.span("start", "stop", MAX_LAYERS))
