"""The frozen values that the codec takes and gives: a message, its trace context, its tensor.

They know nothing of layout and check nothing: `headers` and `envelope` do, in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, TypeVar, dataclass_transform

from neurogrid.p2p.wire.codes import MessageCode

__all__ = ["Data", "TraceContext", "TensorEnvelope", "TensorMessage", "record"]

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A dataclass that is frozen for the type checker alone.

    Each message makes six of them on its way, and one of eight fields that guards them takes 0.65 us to make instead
    of 0.12.
    """
    return dataclass(slots=True)(cls)


Data: TypeAlias = bytes | bytearray | memoryview
"""Bytes to send: any of these, contiguous. A memoryview counts by its bytes, not its items."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A W3C trace context: what a `traceparent` header holds, as bytes.

    Attributes:
        trace_id: 16 bytes, not all zero (all zero means no trace on the wire, and None here).
        span_id: 8 bytes.
        flags: one byte, 0 to 255; bit 0 is "sampled".
    """

    trace_id: bytes
    span_id: bytes
    flags: int


@record
class TensorEnvelope:
    """A tensor with the session, the position and the layers that it belongs to.

    Attributes:
        session_id: u64.
        position: u64, the absolute position of the tensor's first token in its session.
        start_layer, stop_layer: the range [start, stop) asked for; a response repeats it.
        dtype: a name from `DTYPES`.
        shape: at most `MAX_RANK` dimensions, each a u32; activations are [batch, tokens, hidden].
        data: the elements; decoded, a view into what was decoded.
        stage_nanos: nanoseconds, u64 each, that the stages which the tensor went through since the coordinator sent it
            took for it, in order; at most `MAX_STAGES`; empty where they are not told.
        batch: the number, u64, of the batch that the tensor is part of, and how many tensors are, 1 to
            `MAX_BATCH_SIZE`; empty where it is of none.
    """

    session_id: int
    position: int
    start_layer: int
    stop_layer: int
    dtype: str
    shape: tuple[int, ...]
    data: Data
    stage_nanos: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()


@record
class TensorMessage:
    """One message of the tensor protocol.

    Attributes:
        msg_type: the type, or None for a message with the legacy header of 1.0.0.
        layer_id: u32; below 2**24 in a legacy message.
        seq_id: u64; for an activation in 1.0.0 the absolute position of its first token.
        request_id: u64; an answer repeats that of its request. A legacy message has none (0).
        data: the payload. Of a decoded message: a writable memoryview ("B") over memory of its own,
            so it may be kept, wrapped by `torch.frombuffer`, and written to.
        trace_context: only with the two traced types, and even there it may be None.
        from_peer: the sender's peer id as text, or None while it was not received.
        envelope: set by the protocol layer on a tensor that came over 1.1.0; `data` is then the
            tensor's bytes alone. The decoders leave it None, and `data` whole.
    """

    msg_type: MessageCode | None
    layer_id: int = 0
    seq_id: int = 0
    request_id: int = 0
    data: Data = b""
    trace_context: TraceContext | None = None
    from_peer: str | None = None
    envelope: TensorEnvelope | None = None
