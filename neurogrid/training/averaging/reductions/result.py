"""The result of a reduction, and the digest that two members compare to know that they have the same.

The digest covers what decides the values: their number, how they are cut, the codec, and the bytes of every chunk.

Source: protocol_spec/training/reductions.md.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from blake3 import blake3
from torch import Tensor

from neurogrid.p2p.wire import DIGEST_BYTES, Data, chunk_digest
from neurogrid.training.averaging.codecs import Codec, parse_codec

__all__ = ["EncodedResult", "Result", "ResultBuilder", "result_digest"]

DIGEST_CONTEXT: Final = "neurogrid 2026-11-25 training result digest"
"""Context of BLAKE3 in its mode for deriving keys: no digest of a result is that of anything else."""

PLAIN: Final = "f32"
"""The codec whose bytes are those of the decoded values."""

_LAYOUT = struct.Struct(">QQB")


def result_digest(
    chunk_digests: Sequence[bytes], *, num_elements: int, chunk_elements: int, codec: str
) -> bytes:
    """The 32 bytes that name a result: see the specification.

    Args:
        chunk_digests: BLAKE3 of each encoded chunk, in order.
        codec: the name of the codec, at most 255 characters of ASCII.
    """
    name = codec.encode("ascii")
    hasher = blake3(derive_key_context=DIGEST_CONTEXT)
    hasher.update(_LAYOUT.pack(num_elements, chunk_elements, len(name)) + name)
    for digest in chunk_digests:
        hasher.update(digest)
    return hasher.digest()


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The aggregate of a reduction, as all its members have it.

    Attributes:
        digest: 32 bytes; equal digests are equal values.
        values: float32 [num_elements], decoded: what is applied. Not to be written to while the result is held: of
            the codec f32 peers are sent these bytes.
        chunk_elements: elements of each chunk but the last.
        codec: the form in which the chunks travel.
        chunk_digests: BLAKE3 of each encoded chunk.
        chunks: the encoded chunks.
    """

    digest: bytes
    values: Tensor
    chunk_elements: int
    codec: str
    chunk_digests: tuple[bytes, ...]
    chunks: tuple[Data, ...]

    @property
    def encoded(self) -> EncodedResult:
        """The same, without the values."""
        return EncodedResult(
            self.digest,
            len(self.values),
            self.chunk_elements,
            self.codec,
            self.chunk_digests,
            self.chunks,
        )


@dataclass(frozen=True, slots=True, eq=False)
class EncodedResult:
    """A result as peers are given it: of most codecs a fraction of the values.

    Attributes:
        digest, chunk_elements, codec, chunk_digests, chunks: of the result.
        num_elements: of its values.
    """

    digest: bytes
    num_elements: int
    chunk_elements: int
    codec: str
    chunk_digests: tuple[bytes, ...]
    chunks: tuple[Data, ...]

    def decode(self) -> Result:
        """The result, its values decoded anew."""
        builder = ResultBuilder(
            num_elements=self.num_elements,
            chunk_elements=self.chunk_elements,
            codec=parse_codec(self.codec),
        )
        for chunk, data in enumerate(self.chunks):
            builder.set_chunk(chunk, data, digest=self.chunk_digests[chunk])
        return builder.finish()


class ResultBuilder:
    """A result whose chunks come one by one, in any order.

    Args:
        codec: the form of the chunks.
        out: memory for the values, contiguous float32 [num_elements] on the CPU; new if None.
    """

    def __init__(
        self,
        *,
        num_elements: int,
        chunk_elements: int,
        codec: Codec,
        out: Tensor | None = None,
    ) -> None:
        self._chunk_elements = chunk_elements
        self._codec = codec
        self._values = torch.empty(num_elements, dtype=torch.float32) if out is None else out
        num_chunks = -(-num_elements // chunk_elements)
        self._chunks: list[Data] = [b""] * num_chunks
        self._digests = [b""] * num_chunks
        self._bytes = self._values.view(torch.uint8).numpy().data

    def memory_of(self, chunk: int) -> Tensor:
        """The memory of a chunk's values, float32, where they may be made."""
        start = chunk * self._chunk_elements
        return self._values[start : start + self._chunk_elements]

    def set_chunk(self, chunk: int, data: Data, *, digest: bytes | None = None) -> None:
        """Take an encoded chunk.

        Args:
            data: of f32 it may be the bytes of `memory_of`: values that were made there, and found to be finite.
            digest: its BLAKE3 where that is known already.

        Raises:
            RemoteProtocolError: it is none of the codec, has another length than it must, or is not finite.
        """
        values = self.memory_of(chunk)
        is_plain = self._codec.name == PLAIN
        if not (
            is_plain and torch.frombuffer(data, dtype=torch.uint8).data_ptr() == values.data_ptr()
        ):
            self._codec.decode(data, len(values), out=values)
        if is_plain:
            start = 4 * chunk * self._chunk_elements
            data = self._bytes[start : start + values.nbytes]
        self._chunks[chunk] = data
        self._digests[chunk] = chunk_digest(data) if digest is None else digest

    def finish(self) -> Result:
        """The result, of which every chunk was set."""
        assert all(len(digest) == DIGEST_BYTES for digest in self._digests)
        digest = result_digest(
            self._digests,
            num_elements=len(self._values),
            chunk_elements=self._chunk_elements,
            codec=self._codec.name,
        )
        return Result(
            digest,
            self._values,
            self._chunk_elements,
            self._codec.name,
            tuple(self._digests),
            tuple(self._chunks),
        )
