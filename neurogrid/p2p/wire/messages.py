"""The frozen values that the codec takes and gives: a message, and its trace context.

They know nothing of layout and check nothing: `headers` does, in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from neurogrid.p2p.wire.types import MessageType

__all__ = ["Data", "TraceContext", "TensorMessage"]

Data: TypeAlias = bytes | bytearray | memoryview
"""What may be sent: any of these, contiguous. A memoryview counts by its bytes, not its items."""


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


@dataclass(frozen=True, slots=True)
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
        from_peer: who sent it: the peer id as text, or None while it was not received.
    """

    msg_type: MessageType | None
    layer_id: int = 0
    seq_id: int = 0
    request_id: int = 0
    data: Data = b""
    trace_context: TraceContext | None = None
    from_peer: str | None = None
