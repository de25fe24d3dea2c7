"""The envelope: Data of activations and responses in 1.1.0 (`protocol_spec/messages.md`).

A msgpack map, zero bytes up to the next multiple of 16 counted from the start of Data, then the
tensor's bytes, little-endian, in C order. The decoders put Data at an aligned address, so the
tensor can be used where it lies. Nothing of the tensor is copied or looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import msgpack

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.wire.limits import (
    MAX_BATCH_SIZE,
    MAX_LAYERS,
    MAX_MAP_BYTES,
    MAX_RANK,
    MAX_STAGES,
)
from neurogrid.p2p.wire.maps import MAX_U32, MAX_U64, decode_map
from neurogrid.p2p.wire.messages import Data, TensorEnvelope
from neurogrid.p2p.wire.types import DTYPES, ErrorCode

__all__ = ["TENSOR_ALIGNMENT", "encode_envelope_parts", "decode_envelope"]

TENSOR_ALIGNMENT: Final = 16
"""Bytes: what malloc gives and what vector loads of 128 bits want."""

_KEYS: Final = frozenset({"sid", "pos", "start", "stop", "dtype", "shape", "nanos", "batch"})
# A map of six to eight of these keys, and no other, as all peers write it that have nothing else to add; and the bytes
# that it takes at most, with the times of a few stages.
_PLAIN_MAPS: Final = (0x86, 0x87, 0x88)
_PLAIN_MAP_BYTES: Final = 256
_PLAIN_STAGES: Final = 8


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
        and _are_uints(e.shape, MAX_U32)
        and len(e.stage_nanos) <= MAX_STAGES
        and _are_uints(e.stage_nanos, MAX_U64)
        and _is_batch(e.batch)
    )
    if not fits:
        raise LocalProtocolError(
            f"no envelope for session {e.session_id}, position {e.position}, "
            f"layers {e.start_layer} to {e.stop_layer}, shape {e.shape}, batch {e.batch}"
        )
    num_bytes = memoryview(e.data).nbytes
    if e.dtype not in DTYPES or math.prod(e.shape) * DTYPES[e.dtype] != num_bytes:
        raise LocalProtocolError(f"{num_bytes} bytes are no {e.dtype} tensor of shape {e.shape}")
    fields: dict[str, object] = {
        "sid": e.session_id,
        "pos": e.position,
        "start": e.start_layer,
        "stop": e.stop_layer,
        "dtype": e.dtype,
        "shape": list(e.shape),
    }
    if e.stage_nanos:
        fields["nanos"] = list(e.stage_nanos)
    if e.batch:
        fields["batch"] = list(e.batch)
    entries: bytes = msgpack.packb(fields)  # nothing in them that could fail: see above
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
    found, map_bytes = _plain_map(view) or _any_map(view)
    session_id, position, start, stop, dtype, shape, nanos, batch = found
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
    return TensorEnvelope(session_id, position, start, stop, dtype, shape, tensor, nanos, batch)


def _are_uints(values: Sequence[int], largest: int) -> bool:
    # A boolean is an int in Python, and not on the wire.
    for value in values:  # noqa: SIM110  a generator takes twice as long
        if type(value) is not int or not 0 <= value <= largest:
            return False
    return True


def _is_batch(batch: Sequence[int]) -> bool:
    return not batch or (
        len(batch) == 2 and _are_uints(batch, MAX_U64) and 1 <= batch[1] <= MAX_BATCH_SIZE
    )


_Entries = tuple[int, int, int, int, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _any_map(view: memoryview) -> tuple[_Entries, int]:
    """The entries of a map, whatever else stands in it, and the bytes that it took; strict."""
    fields, map_bytes = decode_map(
        view,
        what="the envelope",
        max_bytes=MAX_MAP_BYTES,
        arrays={"shape": MAX_RANK, "nanos": MAX_STAGES, "batch": 2},
        known=_KEYS,
    )
    start, stop = fields.span("start", "stop", MAX_LAYERS)
    dtype = fields.text("dtype", 16)
    if dtype not in DTYPES:
        raise RemoteProtocolError(
            f"unknown dtype {dtype!r} in the envelope", code=ErrorCode.PROTOCOL_VIOLATION
        )
    session_id, position = fields.uint("sid", MAX_U64), fields.uint("pos", MAX_U64)
    shape, nanos = fields.uints("shape", MAX_U32), fields.optional_uints("nanos", MAX_U64)
    batch = fields.optional_uints("batch", MAX_U64)
    if not _is_batch(batch):
        raise RemoteProtocolError(
            f"batch {list(batch)} in the envelope is no number with a size of 1 to {MAX_BATCH_SIZE}",
            code=ErrorCode.PROTOCOL_VIOLATION,
        )
    return (session_id, position, start, stop, dtype, shape, nanos, batch), map_bytes


def _plain_map(view: memoryview) -> tuple[_Entries, int] | None:
    """As `_any_map`, in a third of the time, for a map that is plain; None for one that is not, or is wrong.

    Every activation has one. msgpack builds it in one go: the bytes are too few to build much.
    """
    if not view or view[0] not in _PLAIN_MAPS:
        return None
    unpacker = msgpack.Unpacker(
        raw=False,
        max_buffer_size=_PLAIN_MAP_BYTES,
        max_array_len=_PLAIN_STAGES,
        max_map_len=len(_KEYS),
        max_ext_len=0,
    )
    unpacker.feed(view[:_PLAIN_MAP_BYTES])
    try:
        entries: dict[str, Any] = unpacker.unpack()
        sid, pos, start, stop = entries["sid"], entries["pos"], entries["start"], entries["stop"]
        dtype, shape = entries["dtype"], entries["shape"]
        nanos, batch = entries.get("nanos", []), entries.get("batch", [])
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        return None
    # As many keys found as announced, and no others: none is there twice.
    if (
        len(entries) == view[0] & 0x0F == 6 + ("nanos" in entries) + ("batch" in entries)
        and type(sid) is type(pos) is type(start) is type(stop) is int
        and type(dtype) is str
        and type(shape) is list
        and len(shape) <= MAX_RANK
        and type(nanos) is list
        and sid >= 0
        and pos >= 0
        and 0 <= start < stop <= MAX_LAYERS
        and dtype in DTYPES
        and _are_uints(shape, MAX_U32)
        and type(batch) is list
        and _are_uints(nanos, MAX_U64)
        and _is_batch(batch)
    ):
        found = (sid, pos, start, stop, dtype, tuple(shape), tuple(nanos), tuple(batch))
        return found, int(unpacker.tell())
    return None
