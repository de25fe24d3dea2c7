"""The codec of the tensor protocol, sans-I/O: bytes in, frozen messages out, and back.

It knows the bytes of `/neurogrid/tensor/1.0.0` and `/neurogrid/tensor/1.1.0` (`protocol_spec/`) and
their bounds. It knows neither sockets nor peers nor tensors, and imports the standard library and
msgpack only.
"""

from neurogrid.p2p.wire.blob_id import BLOB_ID_BYTES, DIGEST_BYTES, BlobHasher, blob_id, num_chunks
from neurogrid.p2p.wire.control import ROLES, ControlPayload, ErrorPayload, Hello
from neurogrid.p2p.wire.decoder import MessageDecoder, StreamDecoder
from neurogrid.p2p.wire.device_info import MODEL_FINGERPRINT_BYTES, DeviceInfo, DeviceInfoRequest
from neurogrid.p2p.wire.envelope import (
    TENSOR_ALIGNMENT,
    decode_envelope,
    encode_envelope_parts,
)
from neurogrid.p2p.wire.headers import (
    EXTENDED_HEADER_BYTES,
    LEGACY_HEADER_BYTES,
    TRACED_HEADER_BYTES,
    encode_header,
    encode_message,
    encode_message_parts,
    encode_parts,
    header_bytes,
)
from neurogrid.p2p.wire.limits import (
    CHUNK_BYTES,
    DEFAULT_LIMITS,
    MAX_ADDRESS_CHARS,
    MAX_BITMAP_BYTES,
    MAX_BLOB_BYTES,
    MAX_CHUNKS,
    MAX_ERROR_CHARS,
    MAX_LAYERS,
    MAX_RANK,
    MAX_ROUTE_BYTES,
    MAX_SESSIONS,
    MAX_SOURCES,
    MAX_STAGE_ADDRESSES,
    MAX_STAGES,
    Limits,
)
from neurogrid.p2p.wire.messages import Data, TensorEnvelope, TensorMessage, TraceContext
from neurogrid.p2p.wire.model_config import ModelConfig, deserialize_config, serialize_config
from neurogrid.p2p.wire.payloads import Credit, GPUInfo, LayerIds, WeightsChunk, iter_weights_chunks
from neurogrid.p2p.wire.placement import (
    FINGERPRINT_BYTES,
    Assign,
    AssignAck,
    ConfigAck,
    Ready,
    config_fingerprint,
)
from neurogrid.p2p.wire.route import Route
from neurogrid.p2p.wire.session_control import (
    SESSION_DTYPES,
    SessionAck,
    SessionClose,
    SessionOpen,
    SessionQuery,
)
from neurogrid.p2p.wire.transfers import (
    TransferAccept,
    TransferOffer,
    TransferRequest,
    decode_bitmap,
    encode_bitmap,
)
from neurogrid.p2p.wire.types import (
    CONFIG_DTYPES,
    CREDITED_TYPES,
    DTYPES,
    PROTOCOL_V10,
    PROTOCOL_V11,
    TRACED_TYPES,
    V10_TYPES,
    V11_TYPES,
    ErrorCode,
    MessageType,
)

__all__ = [
    "PROTOCOL_V10",
    "PROTOCOL_V11",
    "MessageType",
    "V10_TYPES",
    "V11_TYPES",
    "TRACED_TYPES",
    "CREDITED_TYPES",
    "ErrorCode",
    "DTYPES",
    "CONFIG_DTYPES",
    "Data",
    "TraceContext",
    "TensorMessage",
    "LEGACY_HEADER_BYTES",
    "EXTENDED_HEADER_BYTES",
    "TRACED_HEADER_BYTES",
    "header_bytes",
    "encode_header",
    "encode_message",
    "encode_message_parts",
    "encode_parts",
    "MessageDecoder",
    "StreamDecoder",
    "Limits",
    "DEFAULT_LIMITS",
    "CHUNK_BYTES",
    "MAX_CHUNKS",
    "MAX_ADDRESS_CHARS",
    "MAX_BLOB_BYTES",
    "MAX_BITMAP_BYTES",
    "MAX_LAYERS",
    "MAX_SESSIONS",
    "MAX_STAGES",
    "MAX_SOURCES",
    "MAX_STAGE_ADDRESSES",
    "MAX_ROUTE_BYTES",
    "MAX_RANK",
    "MAX_ERROR_CHARS",
    "WeightsChunk",
    "iter_weights_chunks",
    "LayerIds",
    "GPUInfo",
    "Credit",
    "ModelConfig",
    "serialize_config",
    "deserialize_config",
    "BLOB_ID_BYTES",
    "DIGEST_BYTES",
    "blob_id",
    "BlobHasher",
    "num_chunks",
    "TENSOR_ALIGNMENT",
    "TensorEnvelope",
    "encode_envelope_parts",
    "decode_envelope",
    "ROLES",
    "FINGERPRINT_BYTES",
    "config_fingerprint",
    "ControlPayload",
    "Hello",
    "ErrorPayload",
    "ConfigAck",
    "Assign",
    "AssignAck",
    "MODEL_FINGERPRINT_BYTES",
    "DeviceInfo",
    "DeviceInfoRequest",
    "TransferRequest",
    "TransferOffer",
    "TransferAccept",
    "encode_bitmap",
    "decode_bitmap",
    "Ready",
    "Route",
    "SESSION_DTYPES",
    "SessionOpen",
    "SessionClose",
    "SessionAck",
    "SessionQuery",
]
