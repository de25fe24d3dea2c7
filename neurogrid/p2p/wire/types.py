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

from neurogrid.p2p.wire.codes import Answers, MessageCode, MessageTable, Traits
from neurogrid.p2p.wire.limits import DEFAULT_LIMITS, Limits

__all__ = [
    "PROTOCOL_V10",
    "PROTOCOL_V11",
    "MessageType",
    "OF_THE_STREAM",
    "v10_table",
    "v11_table",
    "ErrorCode",
    "DTYPES",
    "CONFIG_DTYPES",
]

PROTOCOL_V10: Final = "/neurogrid/tensor/1.0.0"
"""The protocol id of one message a stream, as the Go implementation speaks it."""

PROTOCOL_V11: Final = "/neurogrid/tensor/1.1.0"
"""The protocol id of many messages on one long-lived stream."""


class MessageType(MessageCode, limits=DEFAULT_LIMITS):
    """The first byte of an extended or traced header (`protocol_spec/messages.md`)."""

    ACTIVATION = 0x01, Traits("tensor", is_request=True, is_credited=True, is_tensor=True)
    RESPONSE = 0x02, Traits("tensor", answers=Answers.REQUEST, is_tensor=True)
    # Without a request id it is a plain chunk.
    WEIGHTS = 0x03, Traits("weights", is_credited=True, is_last=True)
    WEIGHTS_ACK = 0x04, Traits("weights_ack", answers=Answers.LAYER)
    LAYER_STATUS = 0x05, Traits("layer_ids", answers=Answers.PEER)
    LAYER_REQUEST = 0x06, Traits("layer_ids", is_request=True)
    MODEL_CONFIG = 0x07, Traits("model_config", is_request=True)
    GPU_INFO = 0x08, Traits("gpu_info", answers=Answers.PEER)
    GPU_INFO_REQUEST = 0x09, Traits("gpu_info_request", is_request=True)
    TRACED_ACTIVATION = (
        0x11,
        Traits("tensor", is_request=True, is_credited=True, is_tensor=True, traces=0x01),
    )
    TRACED_RESPONSE = (
        0x12,
        Traits("tensor", answers=Answers.REQUEST, is_tensor=True, traces=0x02),
    )
    # From here on 1.1.0 only.
    HELLO = 0x20, Traits("hello")
    ERROR = 0x21, Traits("error")
    CONFIG_ACK = 0x22, Traits(answers=Answers.REQUEST)
    ASSIGN = 0x23, Traits(is_request=True)
    ASSIGN_ACK = 0x24, Traits(answers=Answers.REQUEST)
    TRANSFER_OFFER = 0x25, Traits("transfer_offer", is_request=True)
    TRANSFER_ACCEPT = 0x26, Traits(answers=Answers.REQUEST)
    READY = 0x27, Traits(answers=Answers.REQUEST)
    SESSION_OPEN = 0x28, Traits(is_request=True)
    SESSION_CLOSE = 0x29, Traits(is_request=True)
    SESSION_ACK = 0x2A, Traits(answers=Answers.REQUEST)
    CREDIT = 0x2B, Traits("credit")
    TRANSFER_REQUEST = 0x2C, Traits(is_request=True)
    DEVICE_INFO_REQUEST = 0x2D, Traits(is_request=True)
    DEVICE_INFO = 0x2E, Traits(answers=Answers.REQUEST)
    SESSION_QUERY = 0x2F, Traits(is_request=True)


OF_THE_STREAM: Final = frozenset({MessageType.HELLO, MessageType.ERROR, MessageType.CREDIT})
"""The messages about the stream itself. Every protocol of long-lived streams has them, under these codes."""


def v10_table(limits: Limits = DEFAULT_LIMITS) -> MessageTable:
    """The messages that may stand on a 1.0.0 stream."""
    codes = (code for code in MessageType if code < 0x20)
    return MessageTable(PROTOCOL_V10, codes, limits, max_legacy=limits.tensor)


def v11_table(limits: Limits = DEFAULT_LIMITS) -> MessageTable:
    """The messages that may stand on a 1.1.0 stream."""
    return MessageTable(PROTOCOL_V11, MessageType, limits)


class ErrorCode(IntEnum):
    """Reason for which a request was refused or a stream closed (`protocol_spec/errors.md`)."""

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
"""Dtypes that the ModelConfig message may name, and their names in `DTYPES`."""
