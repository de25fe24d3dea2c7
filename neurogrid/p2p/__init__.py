"""The transport library: move tensors between peers over libp2p. Imports no torch and no NumPy.

    async with open_host() as host:
        protocol = Protocol(host)
        protocol.on_activation_received(handler)

Errors are in `neurogrid.errors`. Beside this package stand `blocking` (for programs that are not on trio), `transfer`
(blobs that are verified and resume), `transport` (one peer, or this process), `memory` (a network for tests) and
`wire` (the codec alone, and the payloads of every message). Names are
imported when they are first asked for, libp2p with the first that needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neurogrid.p2p.exchange.counters import Direction, Traffic, TrafficCounters
    from neurogrid.p2p.hosts.host import Host, parse_peer_address
    from neurogrid.p2p.hosts.identity import Identity
    from neurogrid.p2p.libp2p.libp2p_host import open_host
    from neurogrid.p2p.streams.bounds import DEFAULT_BOUNDS, Bounds
    from neurogrid.p2p.streams.buffers import Tensor
    from neurogrid.p2p.streams.intake import Intake
    from neurogrid.p2p.streams.stream import Stream
    from neurogrid.p2p.tensor.protocol import Protocol, new_request_id
    from neurogrid.p2p.wire import (
        DEFAULT_LIMITS,
        DTYPES,
        PROTOCOL_V10,
        PROTOCOL_V11,
        ErrorCode,
        GPUInfo,
        Hello,
        Limits,
        MessageDecoder,
        MessageType,
        ModelConfig,
        StreamDecoder,
        TensorEnvelope,
        TensorMessage,
        TraceContext,
        deserialize_config,
        encode_message,
        serialize_config,
    )

__all__ = [
    # Hosts
    "open_host",
    "Host",
    "Stream",
    "Intake",
    "Identity",
    "parse_peer_address",
    # The protocol
    "Protocol",
    "new_request_id",
    "Tensor",
    "TensorMessage",
    "TensorEnvelope",
    "TraceContext",
    "Hello",
    "GPUInfo",
    "ModelConfig",
    "serialize_config",
    "deserialize_config",
    "MessageType",
    "ErrorCode",
    "DTYPES",
    "PROTOCOL_V10",
    "PROTOCOL_V11",
    # Bounds
    "Limits",
    "DEFAULT_LIMITS",
    "Bounds",
    "DEFAULT_BOUNDS",
    # Counters
    "Direction",
    "Traffic",
    "TrafficCounters",
    # The codec
    "encode_message",
    "MessageDecoder",
    "StreamDecoder",
]

# The others are `wire`'s.
_HOMES = {
    "Direction": "neurogrid.p2p.exchange.counters",
    "Traffic": "neurogrid.p2p.exchange.counters",
    "TrafficCounters": "neurogrid.p2p.exchange.counters",
    "Protocol": "neurogrid.p2p.tensor.protocol",
    "new_request_id": "neurogrid.p2p.tensor.protocol",
    "Host": "neurogrid.p2p.hosts.host",
    "parse_peer_address": "neurogrid.p2p.hosts.host",
    "Identity": "neurogrid.p2p.hosts.identity",
    "open_host": "neurogrid.p2p.libp2p.libp2p_host",
    "DEFAULT_BOUNDS": "neurogrid.p2p.streams.bounds",
    "Bounds": "neurogrid.p2p.streams.bounds",
    "Tensor": "neurogrid.p2p.streams.buffers",
    "Intake": "neurogrid.p2p.streams.intake",
    "Stream": "neurogrid.p2p.streams.stream",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES.get(name, "neurogrid.p2p.wire")), name)
