"""Messages of `/neurogrid/tensor/1.0.0` and the bytes that the Go implementation of NeuroGrid writes for them.

The bytes were taken from running it, not from our encoder; protocol_spec/messages.md explains them.
"""

from __future__ import annotations

from dataclasses import dataclass

from neurogrid.p2p import MessageType, TensorMessage
from neurogrid.p2p.wire import TraceContext

__all__ = ["GOLDEN", "Golden"]

ZEROS = "0000000000000000"


@dataclass(frozen=True)
class Golden:
    """A message, and its bytes on the wire."""

    message: TensorMessage
    encoded: bytes


def _tensor(msg_type: MessageType, trace: TraceContext | None = None) -> TensorMessage:
    return TensorMessage(
        msg_type=msg_type,
        layer_id=5,
        seq_id=100,
        request_id=12345,
        data=bytes.fromhex("aabb"),
        trace_context=trace,
    )


def _control(msg_type: MessageType, data: str = "", layer_id: int = 0) -> TensorMessage:
    return TensorMessage(msg_type=msg_type, layer_id=layer_id, data=bytes.fromhex(data))


def _golden(message: TensorMessage, encoded: str) -> Golden:
    return Golden(message, bytes.fromhex(encoded))


GOLDEN = {
    "legacy": _golden(
        TensorMessage(msg_type=None, layer_id=5, seq_id=100, data=bytes.fromhex("0102030405")),
        "00000005 0000000000000064 00000005 0102030405",
    ),
    "activation": _golden(
        _tensor(MessageType.ACTIVATION),
        "01 00000005 0000000000000064 0000000000003039 00000002 aabb",
    ),
    "response": _golden(
        _tensor(MessageType.RESPONSE),
        "02 00000005 0000000000000064 0000000000003039 00000002 aabb",
    ),
    "traced activation": _golden(
        _tensor(
            MessageType.TRACED_ACTIVATION,
            TraceContext(
                trace_id=bytes(range(0x01, 0x11)), span_id=bytes(range(0x11, 0x19)), flags=1
            ),
        ),
        "11 00000005 0000000000000064 0000000000003039 00000002"
        "0102030405060708090a0b0c0d0e0f10 1112131415161718 01 aabb",
    ),
    "weights": _golden(
        _control(MessageType.WEIGHTS, "00000000 00000001 010203", layer_id=7),
        f"03 00000007 {ZEROS} {ZEROS} 0000000b 00000000 00000001 010203",
    ),
    "weights ack": _golden(
        _control(MessageType.WEIGHTS_ACK, layer_id=7),
        f"04 00000007 {ZEROS} {ZEROS} 00000000",
    ),
    "layer status": _golden(
        _control(MessageType.LAYER_STATUS, "00000003 00000001 00000002 0000000b"),
        f"05 00000000 {ZEROS} {ZEROS} 00000010 00000003 00000001 00000002 0000000b",
    ),
    "layer request": _golden(
        _control(MessageType.LAYER_REQUEST, "00000000"),
        f"06 00000000 {ZEROS} {ZEROS} 00000004 00000000",
    ),
    "model config": _golden(
        _control(MessageType.MODEL_CONFIG, "7b7d"),
        f"07 00000000 {ZEROS} {ZEROS} 00000002 7b7d",
    ),
    "gpu info": _golden(
        _control(MessageType.GPU_INFO, "0000000200000000 0000000040000000 00000003 525458"),
        f"08 00000000 {ZEROS} {ZEROS} 000000170000000200000000 0000000040000000 00000003 525458",
    ),
    "gpu info request": _golden(
        _control(MessageType.GPU_INFO_REQUEST), f"09 00000000 {ZEROS} {ZEROS} 00000000"
    ),
}
