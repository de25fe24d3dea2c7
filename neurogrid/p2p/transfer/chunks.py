"""Blobs and chunks as numbers: which chunks there are, how long each must be, which ones have come. Sans-I/O.

Source: protocol_spec/transfers.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.wire import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    ErrorCode,
    TransferOffer,
    WeightsChunk,
    blob_id,
    encode_bitmap,
    num_chunks,
)

__all__ = ["BlobInfo", "ChunkSet", "require_fit", "transfer_invalid"]

_SHORT_ID_CHARS: Final = 12


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A blob as it is known before its bytes.

    Attributes:
        blob_id: 32 bytes, the BLAKE3 of `digests`. It does not tell the length: the last digest does.
        num_bytes: the announced length.
        digests: the BLAKE3 of every chunk in order, 32 bytes each.
    """

    blob_id: bytes
    num_bytes: int
    digests: bytes

    @classmethod
    def of_offer(cls, offer: TransferOffer) -> BlobInfo:
        """The blob of an offer, which was checked when it was decoded."""
        return cls(offer.blob_id, offer.num_bytes, offer.digests)

    @classmethod
    def of_digests(cls, digests: bytes, num_bytes: int) -> BlobInfo:
        """A blob of ours, from the digests of its chunks."""
        return cls(blob_id((digests,)), num_bytes, digests)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the blob; at least one."""
        return num_chunks(self.num_bytes)

    @property
    def short_id(self) -> str:
        """Enough of the id for a log or an error's text."""
        return self.blob_id.hex()[:_SHORT_ID_CHARS]

    def chunk_bytes(self, index: int) -> int:
        """The length of chunk `index`."""
        return min(CHUNK_BYTES, self.num_bytes - index * CHUNK_BYTES)

    def chunk_digest(self, index: int) -> bytes:
        """The digest that chunk `index` must have, 32 bytes."""
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


class ChunkSet:
    """Some of the chunks of one blob. One byte each: at most 64 KiB."""

    def __init__(self, total_chunks: int, chunks: Iterable[int] = ()) -> None:
        self.total_chunks = total_chunks
        self._is_in = bytearray(total_chunks)
        self._num_in = 0
        for index in chunks:
            self.add(index)

    def __len__(self) -> int:
        return self._num_in

    def __contains__(self, index: int) -> bool:
        return bool(self._is_in[index])

    def __iter__(self) -> Iterator[int]:
        return (index for index, is_in in enumerate(self._is_in) if is_in)

    @property
    def is_full(self) -> bool:
        """Whether every chunk is in."""
        return self._num_in == self.total_chunks

    def add(self, index: int) -> None:
        """Put a chunk in; again is no matter."""
        if not self._is_in[index]:
            self._is_in[index] = 1
            self._num_in += 1

    def bitmap(self) -> bytes:
        """Encode these chunks as a TransferAccept has them; empty for none."""
        return encode_bitmap(self, self.total_chunks)


def require_fit(
    chunk: WeightsChunk, *, layer_id: int, total_chunks: int, expected_bytes: int | None
) -> None:
    """Compare a chunk's numbers with those of its transfer.

    Args:
        expected_bytes: how long chunk `chunk.chunk_index` must be; None where nobody knows.

    Raises:
        RequestRefusedError: another total, out of range, another length (TRANSFER_INVALID).
    """
    index, length = chunk.chunk_index, len(chunk.data)
    if chunk.total_chunks != total_chunks:
        raise transfer_invalid(
            layer_id, f"the total changed from {total_chunks} to {chunk.total_chunks}"
        )
    if index >= total_chunks:
        raise transfer_invalid(layer_id, f"chunk {index} of {total_chunks} is out of range")
    if expected_bytes is not None and length != expected_bytes:
        raise transfer_invalid(
            layer_id, f"chunk {index} has {length} B instead of {expected_bytes}"
        )


def transfer_invalid(layer_id: int, reason: str) -> RequestRefusedError:
    """The refusal of a transfer for `reason`."""
    return RequestRefusedError(
        f"weights of layer {layer_id}: {reason}", code=ErrorCode.TRANSFER_INVALID
    )
