"""The envelope: Data of activations and responses in 1.1.0 (`protocol_spec/messages.md`).

A msgpack map, zero bytes up to the next multiple of 16 counted from the start of Data, then the
tensor's bytes, little-endian, in C order. The decoders put Data at an aligned address, so the
tensor can be used where it lies. Nothing of the tensor is copied or looked at.
"""

from __future__ import annotations

import math
from typing import Final

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.wire.limits import MAX_LAYERS, MAX_MAP_BYTES, MAX_RANK
from neurogrid.p2p.wire.maps import MAX_U32, MAX_U64, decode_map, encode_map
from neurogrid.p2p.wire.messages import Data, TensorEnvelope
from neurogrid.p2p.wire.types import DTYPES, ErrorCode

__all__ = ["TENSOR_ALIGNMENT", "encode_envelope_parts", "decode_envelope"]

TENSOR_ALIGNMENT: Final = 16
"""Bytes: what malloc gives and what vector loads of 128 bits want."""

_KEYS: Final = frozenset({"sid", "pos", "start", "stop", "dtype", "shape"})


def encode_envelope_parts(envelope: TensorEnvelope) -> tuple[bytes, Data]:
    """The map with its padding, and the tensor's bytes, not copied.

    Raises:
        LocalProtocolError: a field is out of its range, or dtype and shape do not give the number
            of bytes.
    """
    e = envelope
    fits = (
        0 <= e.session_id <= MAX_U64
        and 0 <= e.position <= MAX_U64
        and 0 <= e.start_layer < e.stop_layer <= MAX_LAYERS
        and len(e.shape) <= MAX_RANK
        and all(0 <= size <= MAX_U32 for size in e.shape)
    )
    if not fits:
        raise LocalProtocolError(
            f"no envelope for session {e.session_id}, position {e.position}, "
            f"layers {e.start_layer} to {e.stop_layer}, shape {e.shape}"
        )
    num_bytes = memoryview(e.data).nbytes
    if e.dtype not in DTYPES or math.prod(e.shape) * DTYPES[e.dtype] != num_bytes:
        raise LocalProtocolError(f"{num_bytes} bytes are no {e.dtype} tensor of shape {e.shape}")
    entries = encode_map(
        {
            "sid": e.session_id,
            "pos": e.position,
            "start": e.start_layer,
            "stop": e.stop_layer,
            "dtype": e.dtype,
            "shape": list(e.shape),
        }
    )
    return entries + bytes(-len(entries) % TENSOR_ALIGNMENT), e.data


def decode_envelope(data: Data) -> TensorEnvelope:
    """Read an envelope; its `data` is a view into the argument.

    Raises:
        RemoteProtocolError: the map is malformed, lacks a key, has one twice or of another type,
            names an unknown dtype, or the padding is cut or not zero (PROTOCOL_VIOLATION); the map
            is over `MAX_MAP_BYTES` or the shape over `MAX_RANK` (LIMIT_EXCEEDED); dtype and shape
            do not give the number of bytes that follow (SHAPE_MISMATCH).
    """
    view = memoryview(data).cast("B")
    fields, map_bytes = decode_map(
        view, what="the envelope", max_bytes=MAX_MAP_BYTES, arrays={"shape": MAX_RANK}, known=_KEYS
    )
    start, stop = fields.span("start", "stop", MAX_LAYERS)
    dtype = fields.text("dtype", 16)
    if dtype not in DTYPES:
        raise RemoteProtocolError(
            f"unknown dtype {dtype!r} in the envelope", code=ErrorCode.PROTOCOL_VIOLATION
        )
    shape = fields.uints("shape", MAX_U32)
    tensor_at = map_bytes + -map_bytes % TENSOR_ALIGNMENT
    if tensor_at > len(view) or any(view[map_bytes:tensor_at]):
        raise RemoteProtocolError(
            "the padding of the envelope is cut or not zero", code=ErrorCode.PROTOCOL_VIOLATION
        )
    tensor = view[tensor_at:]
    if math.prod(shape) * DTYPES[dtype] != len(tensor):
        raise RemoteProtocolError(
            f"{len(tensor)} bytes are no {dtype} tensor of shape {list(shape)}",
            code=ErrorCode.SHAPE_MISMATCH,
        )
    return TensorEnvelope(
        session_id=fields.uint("sid", MAX_U64),
        position=fields.uint("pos", MAX_U64),
        start_layer=start,
        stop_layer=stop,
        dtype=dtype,
        shape=shape,
        data=tensor,
    )
