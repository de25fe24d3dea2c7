"""Every bound that the codec sets, with its unit and its reason.

A length is compared with its bound before anything is allocated for it. The specification repeats
the numbers (`protocol_spec/limits.md`). Bounds on time, on streams and on tables are the matter of
the layers above: this module knows messages only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from neurogrid.p2p.wire.codes import MessageCode

__all__ = [
    "CHUNK_BYTES",
    "MAX_CHUNKS",
    "MAX_BLOB_BYTES",
    "MAX_BITMAP_BYTES",
    "MAX_LAYERS",
    "MAX_SESSIONS",
    "MAX_RANK",
    "MAX_MAP_BYTES",
    "MAX_DEPTH",
    "MAX_SKIPPED_VALUES",
    "MAX_NAME_BYTES",
    "MAX_PEER_ID_CHARS",
    "MAX_ADDRESS_CHARS",
    "MAX_STAGES",
    "MAX_BATCH_SIZE",
    "MAX_SOURCES",
    "MAX_STAGE_ADDRESSES",
    "MAX_ROUTE_BYTES",
    "MAX_ADAPTER_BYTES",
    "MAX_ADAPTER_RANK",
    "MAX_IMAGE_SPAN_BYTES",
    "MAX_LAYER_ADAPTERS",
    "MAX_AGENT_CHARS",
    "MAX_DEVICE_KIND_CHARS",
    "MAX_MACHINE_CHARS",
    "MAX_VERSIONS",
    "MAX_ERROR_CHARS",
    "MAX_RETRY_AFTER",
    "MIN_PEER_DATA",
    "Limits",
    "DEFAULT_LIMITS",
]

KIB = 1024
MIB = 1024 * KIB

CHUNK_BYTES: Final = MIB
"""Bytes in every chunk of a blob but the last: what the Go implementation sends."""

MAX_CHUNKS: Final = 65_536
"""Chunks in a blob: 64 GiB, nearly twice one layer of a trillion-parameter mixture in bfloat16. A
peer's u32 would otherwise size our bitmap."""

MAX_BLOB_BYTES: Final = MAX_CHUNKS * CHUNK_BYTES
"""Bytes in a blob."""

MAX_BITMAP_BYTES: Final = MAX_CHUNKS // 8
"""Bytes in the bitmap of a resumed transfer: a bit a chunk."""

MAX_LAYERS: Final = 65_536
"""Layers in a model, and layer ids in one list: a hundred times the deepest model known."""

MAX_SESSIONS: Final = 65_536
"""Sessions that an assignment may ask a worker to allow at once."""

MAX_RANK: Final = 8
"""Dimensions of a tensor: activations have three; PyTorch's own kernels seldom go past eight."""

MAX_MAP_BYTES: Final = 64 * KIB
"""Bytes of the map that opens an envelope: today's keys need 80."""

MAX_DEPTH: Final = 32
"""Maps and arrays, or objects and arrays of JSON, within one another under one key: the deepest config known has
seven. Readers that recurse have a bound of their own, which another language's would not share."""

MAX_SKIPPED_VALUES: Final = 131_072
"""Values under keys of a map that are not known, each item and each key within counted: skipping takes time. Two
lists of as many layers as there may be."""

MAX_NAME_BYTES: Final = 1024
"""UTF-8 bytes in the name of a GPU and in the name of a model: product names have some tens."""

MAX_PEER_ID_CHARS: Final = 128
"""Characters of a peer id: those of Ed25519 keys have 52, of hashed RSA keys 46."""

MAX_ADDRESS_CHARS: Final = 512
"""Characters of a multiaddr in a route: one through a relay that has a long name has under 300."""

MAX_STAGES: Final = 256
"""Workers in a route: more than the deepest model known has layers."""

MAX_BATCH_SIZE: Final = 65536
"""Activations of a batch: as many as an assignment may have sessions."""

MAX_STAGE_ADDRESSES: Final = 8
"""Addresses of one worker in a route: some interfaces, each over TCP and QUIC; more are never dialled."""

MAX_SOURCES: Final = 16
"""Addresses in an offer of peers that have the blob: some peers with some addresses each; one of them is enough."""

MAX_ROUTE_BYTES: Final = 64 * KIB
"""Bytes of a signed route: 256 workers with two addresses each."""

MAX_ADAPTER_BYTES: Final = 16_384 * 32
"""Bytes of the blob ids of an adapter in a SessionOpen: 16,384 layers in one range."""

MAX_IMAGE_SPAN_BYTES: Final = 64 * 12
"""Bytes of the places of images in a SessionOpen: 64 of them, of 12 bytes each."""

MAX_ADAPTER_RANK: Final = 1024
"""Rank of the matrices of an adapter: sixteen times what is common."""

MAX_LAYER_ADAPTERS: Final = 64
"""Adapters of a layer that sessions have open at once: as many as rows that share a pass."""

MAX_AGENT_CHARS: Final = 256
"""Characters in the agent and in each version of a Hello."""

MAX_MACHINE_CHARS: Final = 32
"""Characters in the name of a machine: the first label of most host names, and room for a line of a table."""

MAX_DEVICE_KIND_CHARS: Final = 64
"""Characters in the kind of a device: today's have four."""

MAX_VERSIONS: Final = 16
"""Versions listed in a Hello."""

MAX_ERROR_CHARS: Final = 1024
"""Characters in the text of an Error: a sentence or two, meant for a terminal."""

MAX_RETRY_AFTER: Final = 86_400.0
"""Seconds, one day: a peer must not be able to put us off for ever."""

MIN_PEER_DATA: Final = 64 * KIB
"""Bytes. The smallest `max_data` that a Hello may announce: below it a peer could not be sent a
Hello."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest Data accepted, in bytes, for each kind of message.

    A bound of 0 means that the message has no Data. Both decoders and `encode_message` take one of
    these.
    """

    # 256 MiB: 8,192 tokens of hidden size 8,192 in float32, that is more than one chunk of a
    # prefill.
    tensor: int = 256 * MIB
    # The two numbers before a chunk, and the chunk.
    weights: int = 8 + CHUNK_BYTES
    weights_ack: int = 0
    # The count, and one u32 for each layer.
    layer_ids: int = 4 + 4 * MAX_LAYERS
    # 4 MiB: the largest config.json in circulation (vision towers, long label maps) has under 1
    # MiB.
    model_config: int = 4 * MIB
    # total, used, length of the name, and the name.
    gpu_info: int = 8 + 8 + 4 + MAX_NAME_BYTES
    gpu_info_request: int = 0
    # Sixteen versions of 256 characters and an agent need 17 KiB at four bytes a character.
    hello: int = 64 * KIB
    # A text of 1,024 characters needs 4 KiB; the rest is room for keys that come later.
    error: int = 64 * KIB
    # 32 bytes of digest for each of 65,536 chunks, and room for the other keys.
    transfer_offer: int = 2 * MIB + 64 * KIB
    # One u64.
    credit: int = 8
    # 1 MiB: a list of 65,536 layers needs 320 KiB as msgpack.
    control: int = MIB

    @property
    def max_data(self) -> int:
        """The largest of the bounds, in bytes: what a Hello announces."""
        return max(int(getattr(self, bound.name)) for bound in fields(self))

    def for_type(self, msg_type: MessageCode | None) -> int:
        """The bound in bytes for a message of this type; None is the legacy header."""
        return int(getattr(self, "tensor" if msg_type is None else msg_type.traits.limit))


DEFAULT_LIMITS: Final = Limits()
"""Limits that every peer of 1.0.0 must accept, and ours unless told otherwise."""
