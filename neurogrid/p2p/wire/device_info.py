"""The payloads of 1.1.0 by which a coordinator learns what a plan needs (`protocol_spec/messages.md`).

What a device's memory is, GPUInfo says. How speed is measured, and what is done with it, is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.forms import Map, array, fixed, line, one_of, optional, uint
from neurogrid.p2p.wire.limits import MAX_DEVICE_KIND_CHARS, MAX_LAYERS
from neurogrid.p2p.wire.maps import MAX_U64
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

    _map = Map(
        "DeviceInfoRequest",
        {
            "dtype": one_of(DTYPES),
            "model": optional(fixed(MODEL_FINGERPRINT_BYTES)),
        },
    )


@dataclass(frozen=True, slots=True)
class DeviceInfo(ControlPayload):
    """The device of the sender: its speed in one dtype, and the layers of one model that are there already.

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

    _map = Map(
        "DeviceInfo",
        {
            "kind": line(MAX_DEVICE_KIND_CHARS),
            "dtype": one_of(DTYPES),
            "held": array(uint(MAX_LAYERS - 1), MAX_LAYERS),
            "read_rate": optional(uint(MAX_U64)),
            "compute_rate": optional(uint(MAX_U64)),
            "layer_nanos": optional(uint(MAX_U64)),
        },
    )
