"""The payloads of 1.1.0 by which a coordinator learns what a plan needs (`protocol_spec/messages.md`).

What a device's memory is, GPUInfo says. How speed is measured, and what is done with it, is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.limits import MAX_DEVICE_KIND_CHARS, MAX_LAYERS
from neurogrid.p2p.wire.maps import MAX_U64, Fields, printable_line
from neurogrid.p2p.wire.types import DTYPES

__all__ = ["MODEL_FINGERPRINT_BYTES", "DeviceInfo", "DeviceInfoRequest"]

MODEL_FINGERPRINT_BYTES: Final = 32
"""Bytes in the fingerprint of a model, a SHA-256."""


@dataclass(frozen=True, slots=True)
class DeviceInfoRequest(ControlPayload):
    """Ask how fast a worker computes, and which layers of a model it has.

    Attributes:
        dtype: what the model is to be computed in, a name from `DTYPES`.
        model: 32 bytes, the fingerprint of the model; empty for none.
    """

    dtype: str
    model: bytes = b""

    _name = "DeviceInfoRequest"
    _keys = frozenset({"dtype", "model"})

    def _entries(self) -> dict[str, object]:
        entries: dict[str, object] = {"dtype": self.dtype}
        if self.model:
            entries["model"] = self.model
        return entries

    @classmethod
    def _read(cls, fields: Fields) -> DeviceInfoRequest:
        size = MODEL_FINGERPRINT_BYTES
        return cls(_dtype(fields, cls._name), fields.optional_binary("model", size, smallest=size))


@dataclass(frozen=True, slots=True)
class DeviceInfo(ControlPayload):
    """How fast the sender computes in one dtype, and what it has of one model.

    Attributes:
        kind: of the device, `cpu`, `cuda` or another; at most `MAX_DEVICE_KIND_CHARS` characters; decoded,
            printable.
        dtype: that of the request.
        held: layers of the model that need not be sent, in any order. A hint: what counts is the answer to the
            offer of each.
        read_rate: bytes a second, u64, at which a matrix-vector product goes through its matrix; 0 for not known.
        compute_rate: floating point operations a second, u64, of a product of large matrices; 0 for not known.
        layer_nanos: nanoseconds, u64, that one token through one layer costs besides; 0 for not known.
    """

    kind: str
    dtype: str
    held: tuple[int, ...] = ()
    read_rate: int = 0
    compute_rate: int = 0
    layer_nanos: int = 0

    _name = "DeviceInfo"
    _keys = frozenset({"kind", "dtype", "held", "read_rate", "compute_rate", "layer_nanos"})
    _arrays: ClassVar[Mapping[str, int]] = {"held": MAX_LAYERS}

    def _entries(self) -> dict[str, object]:
        entries: dict[str, object] = {
            "kind": self.kind,
            "dtype": self.dtype,
            "held": list(self.held),
        }
        for key in ("read_rate", "compute_rate", "layer_nanos"):
            if getattr(self, key):
                entries[key] = getattr(self, key)
        return entries

    @classmethod
    def _read(cls, fields: Fields) -> DeviceInfo:
        return cls(
            kind=printable_line(fields.text("kind", MAX_DEVICE_KIND_CHARS)),
            dtype=_dtype(fields, cls._name),
            held=fields.uints("held", MAX_LAYERS - 1),
            read_rate=fields.optional_uint("read_rate", MAX_U64),
            compute_rate=fields.optional_uint("compute_rate", MAX_U64),
            layer_nanos=fields.optional_uint("layer_nanos", MAX_U64),
        )


def _dtype(fields: Fields, what: str) -> str:
    dtype = fields.text("dtype", 16)
    if dtype not in DTYPES:
        raise violation(f"unknown dtype {dtype!r} in {what}")
    return dtype
