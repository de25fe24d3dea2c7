"""The payloads of fixed layout: chunks of weights, lists of layers, memory of a GPU, credit.

`protocol_spec/messages.md` has their tables. The ModelConfig message has a module of its own.
Whether a chunk belongs to a transfer that was offered is not known here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.wire.blob_id import num_chunks
from neurogrid.p2p.wire.faults import over_limit, violation
from neurogrid.p2p.wire.limits import (
    CHUNK_BYTES,
    MAX_BLOB_BYTES,
    MAX_CHUNKS,
    MAX_LAYERS,
    MAX_NAME_BYTES,
)
from neurogrid.p2p.wire.maps import MAX_U32, MAX_U64, printable_line
from neurogrid.p2p.wire.messages import Data
from neurogrid.p2p.wire.types import ErrorCode

__all__ = ["WeightsChunk", "iter_weights_chunks", "LayerIds", "GPUInfo", "Credit"]

_CHUNK: Final = struct.Struct(">II")
_U32: Final = struct.Struct(">I")
_U64: Final = struct.Struct(">Q")
_GPU: Final = struct.Struct(">QQI")


@dataclass(frozen=True, slots=True)
class WeightsChunk:
    """One chunk of a layer's bytes: Data of Weights.

    Attributes:
        chunk_index: from 0 to `total_chunks` - 1.
        total_chunks: from 1 to `MAX_CHUNKS`.
        data: at most `CHUNK_BYTES` bytes; decoded, a view into what was decoded.
    """

    chunk_index: int
    total_chunks: int
    data: Data

    def encode_parts(self) -> tuple[bytes, Data]:
        """The eight bytes before the chunk, and the chunk itself, not copied.

        Raises:
            LocalProtocolError: a number is out of its range.
        """
        if not 0 <= self.chunk_index < self.total_chunks <= MAX_CHUNKS:
            raise LocalProtocolError(f"no chunk {self.chunk_index} of {self.total_chunks}")
        if memoryview(self.data).nbytes > CHUNK_BYTES:
            raise LocalProtocolError(f"a chunk has at most {CHUNK_BYTES} bytes")
        return _CHUNK.pack(self.chunk_index, self.total_chunks), self.data

    def encode(self) -> bytes:
        """Encode as one bytes object, which copies the chunk."""
        return b"".join(self.encode_parts())

    @classmethod
    def decode(cls, data: Data) -> WeightsChunk:
        """Read Data of a Weights message.

        Raises:
            RemoteProtocolError: shorter than eight bytes (PROTOCOL_VIOLATION), index not below
                total (TRANSFER_INVALID), more chunks or a larger one than allowed (LIMIT_EXCEEDED).
        """
        cls.require_numbers(data)
        index, total = _CHUNK.unpack_from(data)
        if index >= total:
            raise RemoteProtocolError(
                f"chunk {index} of {total} is out of range", code=ErrorCode.TRANSFER_INVALID
            )
        if total > MAX_CHUNKS or len(data) - _CHUNK.size > CHUNK_BYTES:
            raise over_limit(f"a transfer has at most {MAX_CHUNKS} chunks of {CHUNK_BYTES} bytes")
        return cls(index, total, memoryview(data)[_CHUNK.size :])

    @staticmethod
    def require_numbers(data: Data) -> None:
        """Check what can be checked of any Weights, whatever they belong to.

        Raises:
            RemoteProtocolError: shorter than eight bytes (PROTOCOL_VIOLATION).
        """
        if len(data) < _CHUNK.size:
            raise violation(f"weights of {len(data)} bytes have no chunk numbers")


def iter_weights_chunks(data: Data) -> Iterator[WeightsChunk]:
    """Slice a layer's bytes into chunks, uncopied; no bytes are one empty chunk.

    Raises:
        LocalProtocolError: more than `MAX_BLOB_BYTES`.
    """
    view = memoryview(data).cast("B")
    if len(view) > MAX_BLOB_BYTES:
        raise LocalProtocolError(
            f"{len(view)} bytes are more than a transfer carries ({MAX_BLOB_BYTES})"
        )
    total = num_chunks(len(view))
    for index in range(total):
        yield WeightsChunk(index, total, view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])


@dataclass(frozen=True, slots=True)
class LayerIds:
    """Layer ids in any order: Data of LayerStatus and LayerRequest.

    A request without ids asks for the status.
    """

    ids: tuple[int, ...]

    def encode(self) -> bytes:
        """Raises LocalProtocolError for more than `MAX_LAYERS` ids, or one that is no u32."""
        if len(self.ids) > MAX_LAYERS or not all(0 <= i <= MAX_U32 for i in self.ids):
            raise LocalProtocolError(f"layer ids are u32, at most {MAX_LAYERS} of them")
        return struct.pack(f">I{len(self.ids)}I", len(self.ids), *self.ids)

    @classmethod
    def decode(cls, data: Data) -> LayerIds:
        """Read the count and the ids; duplicates and any order are accepted.

        Raises:
            RemoteProtocolError: the count does not match the length (PROTOCOL_VIOLATION) or is over
                `MAX_LAYERS` (LIMIT_EXCEEDED).
        """
        if len(data) < _U32.size:
            raise violation(f"a list of layers in {len(data)} bytes has no count")
        (count,) = _U32.unpack_from(data)
        if count > MAX_LAYERS:
            raise over_limit(f"a list of {count} layers; the limit is {MAX_LAYERS}")
        if len(data) != _U32.size * (1 + count):
            raise violation(f"a list of {count} layers in {len(data)} bytes")
        return cls(struct.unpack_from(f">{count}I", data, _U32.size))


@dataclass(frozen=True, slots=True)
class GPUInfo:
    """The memory that a worker computes in: Data of GPUInfo.

    Attributes:
        total_bytes: u64.
        used_bytes: u64; not compared with the total, drivers report what they report.
        name: at most `MAX_NAME_BYTES` bytes of UTF-8; decoded, one printable line.
    """

    total_bytes: int
    used_bytes: int
    name: str

    def encode(self) -> bytes:
        """Raises LocalProtocolError when a number is no u64 or the name is too long."""
        name = self.name.encode("utf-8", errors="replace")
        if len(name) > MAX_NAME_BYTES:
            raise LocalProtocolError(f"the name of a GPU has at most {MAX_NAME_BYTES} bytes")
        if not (0 <= self.total_bytes <= MAX_U64 and 0 <= self.used_bytes <= MAX_U64):
            raise LocalProtocolError("memory sizes are u64")
        return _GPU.pack(self.total_bytes, self.used_bytes, len(name)) + name

    @classmethod
    def decode(cls, data: Data) -> GPUInfo:
        """Read the sizes and the name.

        Raises:
            RemoteProtocolError: the length of the name does not match, the name is no UTF-8
                (PROTOCOL_VIOLATION) or is over `MAX_NAME_BYTES` (LIMIT_EXCEEDED).
        """
        if len(data) < _GPU.size:
            raise violation(f"GPU info of {len(data)} bytes is too short")
        total, used, name_bytes = _GPU.unpack_from(data)
        if name_bytes > MAX_NAME_BYTES:
            raise over_limit(f"a GPU's name of {name_bytes} bytes; the limit is {MAX_NAME_BYTES}")
        if len(data) != _GPU.size + name_bytes:
            raise violation(f"GPU info of {len(data)} bytes with a name of {name_bytes}")
        try:
            name = bytes(memoryview(data)[_GPU.size :]).decode("utf-8")
        except UnicodeDecodeError as error:
            raise violation("the name of a GPU is not UTF-8") from error
        return cls(total, used, printable_line(name))


@dataclass(frozen=True, slots=True)
class Credit:
    """Limit of the bytes that the receiver of this message may send on its stream: Data of Credit, 1.1.0 only.

    Attributes:
        max_total: u64, the Data bytes of credited messages (`CREDITED_TYPES`) that the receiver of
            this message may have begun to send since the start of the stream. It never shrinks;
            whether it did is for the reader of the stream to say.
    """

    max_total: int

    def encode(self) -> bytes:
        """Raises LocalProtocolError when the number is no u64."""
        if not 0 <= self.max_total <= MAX_U64:
            raise LocalProtocolError(f"credit is a u64, not {self.max_total}")
        return _U64.pack(self.max_total)

    @classmethod
    def decode(cls, data: Data) -> Credit:
        """Read the number.

        Raises:
            RemoteProtocolError: fewer than 8 bytes (PROTOCOL_VIOLATION), or more (LIMIT_EXCEEDED).
        """
        if len(data) < _U64.size:
            raise violation(f"credit of {len(data)} bytes; it has {_U64.size}")
        if len(data) > _U64.size:
            raise over_limit(f"credit of {len(data)} bytes; it has {_U64.size}")
        return cls(*_U64.unpack(data))
