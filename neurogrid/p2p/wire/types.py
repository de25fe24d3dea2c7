"""Numbers and names of the protocol: protocol ids, message types, error codes, element types.

The registries in `protocol_spec/registry/` hold the same as data, and a test keeps the two equal.
This module knows no layout: which bytes follow a type is the matter of `headers` and of the payload
modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Final

__all__ = [
    "PROTOCOL_V10",
    "PROTOCOL_V11",
    "MessageType",
    "V10_TYPES",
    "V11_TYPES",
    "TRACED_TYPES",
    "CREDITED_TYPES",
    "REQUEST_TYPES",
    "ErrorCode",
    "DTYPES",
    "CONFIG_DTYPES",
]

PROTOCOL_V10: Final = "/neurogrid/tensor/1.0.0"
"""The protocol id of one message a stream, as the Go implementation speaks it."""

PROTOCOL_V11: Final = "/neurogrid/tensor/1.1.0"
"""The protocol id of many messages on one long-lived stream."""


class MessageType(IntEnum):
    """The first byte of an extended or traced header (`protocol_spec/messages.md`)."""

    ACTIVATION = 0x01
    RESPONSE = 0x02
    WEIGHTS = 0x03
    WEIGHTS_ACK = 0x04
    LAYER_STATUS = 0x05
    LAYER_REQUEST = 0x06
    MODEL_CONFIG = 0x07
    GPU_INFO = 0x08
    GPU_INFO_REQUEST = 0x09
    TRACED_ACTIVATION = 0x11
    TRACED_RESPONSE = 0x12
    # From here on 1.1.0 only.
    HELLO = 0x20
    ERROR = 0x21
    CONFIG_ACK = 0x22
    ASSIGN = 0x23
    ASSIGN_ACK = 0x24
    TRANSFER_OFFER = 0x25
    TRANSFER_ACCEPT = 0x26
    READY = 0x27
    SESSION_OPEN = 0x28
    SESSION_CLOSE = 0x29
    SESSION_ACK = 0x2A
    CREDIT = 0x2B
    TRANSFER_REQUEST = 0x2C
    DEVICE_INFO_REQUEST = 0x2D
    DEVICE_INFO = 0x2E
    SESSION_QUERY = 0x2F


V10_TYPES: Final[frozenset[MessageType]] = frozenset(t for t in MessageType if t < 0x20)
"""What may stand on a 1.0.0 stream, besides the legacy header, which has no type."""

V11_TYPES: Final[frozenset[MessageType]] = frozenset(MessageType)
"""What may stand on a 1.1.0 stream."""

TRACED_TYPES: Final[frozenset[MessageType]] = frozenset(
    {MessageType.TRACED_ACTIVATION, MessageType.TRACED_RESPONSE}
)
"""What has the traced header, with room for a trace context."""

CREDITED_TYPES: Final[frozenset[MessageType]] = frozenset(
    {MessageType.ACTIVATION, MessageType.TRACED_ACTIVATION, MessageType.WEIGHTS}
)
"""What needs credit on a 1.1.0 stream: bulk that waits for a handler. Answers never do."""


REQUEST_TYPES: Final[frozenset[MessageType]] = frozenset(
    {
        MessageType.ACTIVATION,
        MessageType.TRACED_ACTIVATION,
        MessageType.LAYER_REQUEST,
        MessageType.MODEL_CONFIG,
        MessageType.GPU_INFO_REQUEST,
        MessageType.ASSIGN,
        MessageType.TRANSFER_OFFER,
        MessageType.SESSION_OPEN,
        MessageType.SESSION_CLOSE,
        MessageType.TRANSFER_REQUEST,
        MessageType.DEVICE_INFO_REQUEST,
        MessageType.SESSION_QUERY,
    }
)
"""What asks for an answer: on a 1.1.0 stream its request id is never 0. Weights alone may have 0 (plain weights)."""


class ErrorCode(IntEnum):
    """Why a request was refused or a stream closed (`protocol_spec/errors.md`)."""

    PROTOCOL_VIOLATION = 1
    UNSUPPORTED_VERSION = 2
    LIMIT_EXCEEDED = 3
    UNAUTHORIZED = 4
    BUSY = 5
    CONFIG_REQUIRED = 6
    CONFIG_INVALID = 7
    MODEL_UNSUPPORTED = 8
    OUT_OF_MEMORY = 9
    LAYER_NOT_HELD = 10
    SESSION_UNKNOWN = 11
    SESSION_LIMIT = 12
    POSITION_MISMATCH = 13
    SHAPE_MISMATCH = 14
    TRANSFER_INVALID = 15
    HASH_MISMATCH = 16
    COMPUTE_FAILED = 17
    SHUTTING_DOWN = 18
    DEADLINE_EXCEEDED = 19
    NOT_SUPPORTED = 20
    BLOB_UNKNOWN = 21
    PEER_UNREACHABLE = 22
    NOT_FINITE = 23


DTYPES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E5M2": 1,
        "F8_E4M3": 1,
        "U16": 2,
        "I16": 2,
        "F16": 2,
        "BF16": 2,
        "U32": 4,
        "I32": 4,
        "F32": 4,
        "U64": 8,
        "I64": 8,
        "F64": 8,
    }
)
"""Element types by their safetensors name, with the size of one element in bytes."""

CONFIG_DTYPES: Final[Mapping[str, str]] = MappingProxyType(
    {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
)
"""What the ModelConfig message may name as `dtype`, and its name in `DTYPES`."""
