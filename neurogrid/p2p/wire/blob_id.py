"""The id of a blob: the BLAKE3 of the list of its chunks' BLAKE3 (`protocol_spec/transfers.md`).

A hash of hashes names the chunk that is wrong, so one liar among several sources can be told from
the others. A blob of no bytes has one chunk, of no bytes. It is BLAKE3 because the receiver of a model
hashes all of it: at 5 GB/s a core, where SHA-256 does 1.2 and takes as long as the cipher.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from blake3 import blake3

from neurogrid.p2p.wire.limits import CHUNK_BYTES
from neurogrid.p2p.wire.messages import Data

__all__ = ["BLOB_ID_BYTES", "DIGEST_BYTES", "BlobHasher", "blob_id", "chunk_digest", "num_chunks"]

BLOB_ID_BYTES: Final = 32
"""Bytes in the id of a blob, a BLAKE3."""

DIGEST_BYTES: Final = 32
"""Bytes in the digest of a chunk, a BLAKE3."""


def chunk_digest(chunk: Data) -> bytes:
    """The 32 bytes that a chunk is verified by. Other threads run meanwhile."""
    return blake3(chunk).digest()


def blob_id(chunk_digests: Iterable[bytes]) -> bytes:
    """The 32 bytes that name a blob, from the digest of each of its chunks in order."""
    whole = blake3()
    for digest in chunk_digests:
        whole.update(digest)
    return whole.digest()


def num_chunks(num_bytes: int) -> int:
    """Return the number of chunks of a blob of `num_bytes` bytes: at least one."""
    return max(1, -(-num_bytes // CHUNK_BYTES))


class BlobHasher:
    """Takes a blob in pieces of any size and gives its id; holds the digests of the finished chunks
    (32 bytes a MiB) and one hash state, not the pieces.
    """

    def __init__(self) -> None:
        self._finished = bytearray()  # digests of the chunks before this one
        self._chunk = blake3()
        self._in_chunk = 0

    def update(self, data: Data) -> None:
        """Take the next bytes of the blob."""
        view = memoryview(data).cast("B")
        while view:
            if self._in_chunk == CHUNK_BYTES:
                self._finished += self._chunk.digest()
                self._chunk, self._in_chunk = blake3(), 0
            piece = view[: CHUNK_BYTES - self._in_chunk]
            self._chunk.update(piece)
            self._in_chunk += len(piece)
            view = view[len(piece) :]

    def digests(self) -> bytes:
        """The digest of every chunk of what was taken so far, in order; more may follow."""
        return bytes(self._finished) + self._chunk.digest()

    def digest(self) -> bytes:
        """The id of what was taken so far; more may follow."""
        return blob_id((self.digests(),))
