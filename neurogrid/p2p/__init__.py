"""The transport library: move tensors between peers over libp2p. Imports no torch.

async with open_host() as host:
    protocol = Protocol(host)
    protocol.on_message(MessageType.ACTIVATION, handler)
"""

from neurogrid.p2p.counters import Direction, Traffic, TrafficCounters
from neurogrid.p2p.host import Host, open_host, parse_peer_address
from neurogrid.p2p.identity import Identity
from neurogrid.p2p.protocol import Protocol, new_request_id
from neurogrid.p2p.stream import Stream
from neurogrid.p2p.wire import (
    PROTOCOL_V10,
    PROTOCOL_V11,
    MessageDecoder,
    MessageType,
    StreamDecoder,
    TensorMessage,
    TraceContext,
    encode_message,
)

__all__ = [
    "PROTOCOL_V10",
    "PROTOCOL_V11",
    "Direction",
    "Host",
    "Identity",
    "MessageDecoder",
    "MessageType",
    "Protocol",
    "Stream",
    "StreamDecoder",
    "TensorMessage",
    "TraceContext",
    "Traffic",
    "TrafficCounters",
    "encode_message",
    "new_request_id",
    "open_host",
    "parse_peer_address",
]
