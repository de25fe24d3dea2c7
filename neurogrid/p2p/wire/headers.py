"""The three headers, to bytes and back (`protocol_spec/framing.md`).

Ranges are checked when encoding (`LocalProtocolError`) and the first byte and the length when
decoding (`RemoteProtocolError`). What Data holds is not looked at.
"""

from __future__ import annotations

import struct
from typing import Final

from neurogrid.errors import LocalProtocolError
from neurogrid.p2p.wire.codes import MessageCode
from neurogrid.p2p.wire.faults import over_limit
from neurogrid.p2p.wire.limits import DEFAULT_LIMITS, Limits
from neurogrid.p2p.wire.messages import Data, TensorMessage, TraceContext, record

__all__ = [
    "LEGACY_HEADER_BYTES",
    "EXTENDED_HEADER_BYTES",
    "TRACED_HEADER_BYTES",
    "Header",
    "header_bytes",
    "decode_header",
    "encode_header",
    "encode_message",
    "encode_message_parts",
    "encode_parts",
]

_LEGACY: Final = struct.Struct(">IQI")
_EXTENDED: Final = struct.Struct(">BIQQI")
_TRACE: Final = struct.Struct(">16s8sB")

LEGACY_HEADER_BYTES: Final = _LEGACY.size
"""16: layer, seq id, length of the data."""

EXTENDED_HEADER_BYTES: Final = _EXTENDED.size
"""25: type, layer, seq id, request id, length of the data."""

TRACED_HEADER_BYTES: Final = _EXTENDED.size + _TRACE.size
"""50: the extended header, trace id, span id, flags."""

_NO_TRACE: Final = bytes(16)
_MAX_U32: Final = 2**32 - 1
_MAX_U64: Final = 2**64 - 1
_MAX_LEGACY_LAYER: Final = 2**24 - 1


@record
class Header:
    """A decoded header: the message without its Data, and how many bytes of Data follow."""

    msg_type: MessageCode | None
    layer_id: int
    seq_id: int
    request_id: int
    data_bytes: int
    trace_context: TraceContext | None


def header_bytes(msg_type: MessageCode | None) -> int:
    """The size in bytes of the header that a message of this type has; None is legacy."""
    if msg_type is None:
        return LEGACY_HEADER_BYTES
    return EXTENDED_HEADER_BYTES if msg_type.traits.traces is None else TRACED_HEADER_BYTES


def decode_header(msg_type: MessageCode | None, data: Data, *, max_data: int) -> Header:
    """Read a header of exactly `header_bytes(msg_type)` bytes, whose first byte named `msg_type`.

    Raises:
        RemoteProtocolError: it announces more than `max_data` bytes of Data (LIMIT_EXCEEDED).
    """
    trace: TraceContext | None = None
    if msg_type is None:
        layer_id, seq_id, data_bytes = _LEGACY.unpack(data)
        request_id = 0
    else:
        _, layer_id, seq_id, request_id, data_bytes = _EXTENDED.unpack_from(data)
        if msg_type.traits.traces is not None:
            trace_id, span_id, flags = _TRACE.unpack_from(data, _EXTENDED.size)
            if trace_id != _NO_TRACE:
                trace = TraceContext(trace_id, span_id, flags)
    if data_bytes > max_data:
        raise over_limit(
            f"{_name(msg_type)} message announces {data_bytes} bytes; the limit is {max_data}"
        )
    return Header(msg_type, layer_id, seq_id, request_id, data_bytes, trace)


def encode_header(
    message: TensorMessage, data_bytes: int, *, limits: Limits | None = None
) -> bytes:
    """The header of `message`, announcing `data_bytes` bytes of Data whatever `message.data` holds.

    Data is bounded by `limits`, or by those that every peer has at least.

    Raises:
        LocalProtocolError: a field is out of its range, a trace context stands with an untraced type or
            is malformed, or the Data is over the limit of its type.
    """
    code = message.msg_type
    of_code = DEFAULT_LIMITS.tensor if code is None else code.max_data
    allowed = of_code if limits is None else limits.for_type(code)
    if not 0 <= data_bytes <= min(allowed, _MAX_U32):
        raise LocalProtocolError(
            f"{_name(message.msg_type)} message cannot carry {data_bytes} bytes; "
            f"the limit is {allowed}"
        )
    is_traced = code is not None and code.traits.traces is not None
    if message.trace_context is not None and not is_traced:
        raise LocalProtocolError(
            f"{_name(message.msg_type)} message carries no trace context; send the traced type"
        )
    if code is None:
        _check_range("seq_id", message.seq_id, _MAX_U64)
        _check_range("layer_id of a legacy message", message.layer_id, _MAX_LEGACY_LAYER)
        _check_range("request_id of a legacy message", message.request_id, 0)
        return _LEGACY.pack(message.layer_id, message.seq_id, data_bytes)
    try:
        header = _EXTENDED.pack(
            code, message.layer_id, message.seq_id, message.request_id, data_bytes
        )
    except struct.error as error:
        _check_range("layer_id", message.layer_id, _MAX_U32)
        _check_range("seq_id", message.seq_id, _MAX_U64)
        _check_range("request_id", message.request_id, _MAX_U64)
        raise LocalProtocolError(f"{_name(message.msg_type)} message: {error}") from error
    return header + _encode_trace(message.trace_context) if is_traced else header


def encode_message_parts(
    message: TensorMessage, *more: Data, limits: Limits | None = None
) -> tuple[Data, ...]:
    """The message as buffers to be written one after the other: the header, its data, then `more`.

    `more` belongs to the same Data and lets a sender put a prefix before a large buffer (an
    envelope, the numbers of a chunk) without a copy. Nothing but the header is new memory.

    Raises:
        LocalProtocolError: as `encode_header`, or a buffer is not contiguous.
    """
    return encode_parts(message, message.data, *more, limits=limits)


def encode_parts(
    message: TensorMessage, *data: Data, limits: Limits | None = None
) -> tuple[Data, ...]:
    """As `encode_message_parts`, with this Data in place of what the message has.

    Raises:
        LocalProtocolError: as `encode_header`, or a buffer is not contiguous.
    """
    parts = [_flat(part) for part in data]
    return (encode_header(message, sum(map(len, parts)), limits=limits), *parts)


def encode_message(message: TensorMessage, *, limits: Limits | None = None) -> bytes:
    """The message as one bytes object (which copies its data; see `encode_message_parts`).

    Raises:
        LocalProtocolError: as `encode_header`.
    """
    return b"".join(encode_message_parts(message, limits=limits))


def _encode_trace(trace: TraceContext | None) -> bytes:
    if trace is None:
        return bytes(_TRACE.size)
    if len(trace.trace_id) != 16 or trace.trace_id == _NO_TRACE or len(trace.span_id) != 8:
        raise LocalProtocolError(
            "a trace context needs 16 bytes of trace id, not all zero, and 8 of span id"
        )
    _check_range("trace flags", trace.flags, 0xFF)
    return _TRACE.pack(trace.trace_id, trace.span_id, trace.flags)


def _flat(data: Data) -> Data:
    """The same memory, so that `len` counts bytes."""
    if not isinstance(data, memoryview):
        return data
    if not data.c_contiguous:
        raise LocalProtocolError("only contiguous buffers can be sent")
    return data if data.format == "B" and data.ndim == 1 else data.cast("B")


def _check_range(name: str, value: int, largest: int) -> None:
    if not 0 <= value <= largest:
        raise LocalProtocolError(f"{name} is {value}; it must be from 0 to {largest}")


def _name(msg_type: MessageCode | None) -> str:
    name = "legacy" if msg_type is None else msg_type.name.lower()
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
