"""A layer's blob as it arrives: chunks in any order, each once, in memory that grows with what came.

Knows bytes; neither torch nor the network. A chunk is checked against the transfer before it is kept: index,
total, length. A duplicate with the same bytes is ignored, with other bytes it is an error.

Source: protocol_spec/messages.md, Weights.
"""

from __future__ import annotations

import mmap

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.wire import CHUNK_BYTES, BlobHasher, ErrorCode, WeightsChunk

__all__ = ["IncomingBlob"]


class IncomingBlob:
    """The chunks of one layer from one peer.

    Attributes:
        layer_id: the layer.
        total_chunks: how many chunks the blob has.
        blob_id: the announced content id, or None (1.0.0 announces none).
        request_id: of the offer; 0 in 1.0.0.
        last_progress: when the last chunk came, on the clock that the owner passes in; seconds.
    """

    def __init__(
        self,
        *,
        layer_id: int,
        total_chunks: int,
        num_bytes: int | None,
        blob_id: bytes | None,
        request_id: int,
        now: float,
    ) -> None:
        self.layer_id = layer_id
        self.total_chunks = total_chunks
        self.blob_id = blob_id
        self.request_id = request_id
        self.last_progress = now
        self._num_bytes = num_bytes
        self._pages: mmap.mmap | None = None
        self._received = bytearray(total_chunks)
        self._num_received = 0
        self._last_length: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is there."""
        return self._num_received == self.total_chunks

    @property
    def min_bytes(self) -> int:
        """The fewest bytes that a blob as announced has."""
        if self._num_bytes is not None:
            return self._num_bytes
        return (self.total_chunks - 1) * CHUNK_BYTES

    @property
    def num_received(self) -> int:
        """How many distinct chunks are there."""
        return self._num_received

    def add(self, chunk: WeightsChunk, *, now: float) -> None:
        """Keep one chunk.

        Raises:
            RequestRefusedError: it does not belong to this transfer (code TRANSFER_INVALID), or there is
                no memory for it (OUT_OF_MEMORY).
        """
        index, length = chunk.chunk_index, len(chunk.data)
        if chunk.total_chunks != self.total_chunks:
            raise self._invalid(
                f"the total changed from {self.total_chunks} to {chunk.total_chunks}"
            )
        if index >= self.total_chunks:
            raise self._invalid(f"chunk {index} of {self.total_chunks} is out of range")
        expected = self._expected_length(index)
        if expected is not None and length != expected:
            raise self._invalid(f"chunk {index} has {length} B instead of {expected}")
        place = self._buffer()[index * CHUNK_BYTES :][:length]
        if self._received[index]:
            if place != chunk.data:
                raise self._invalid(f"chunk {index} came twice with different bytes")
            return
        place[:] = chunk.data
        self._received[index] = 1
        self._num_received += 1
        self.last_progress = now
        if index == self.total_chunks - 1:
            self._last_length = length

    def verified(self) -> tuple[memoryview, bytes]:
        """The whole blob and its content id.

        Raises:
            RequestRefusedError: the content is not what was announced (code HASH_MISMATCH).
        """
        assert self.is_complete
        assert self._last_length is not None
        num_bytes = (self.total_chunks - 1) * CHUNK_BYTES + self._last_length
        view = self._buffer()[:num_bytes]
        hasher = BlobHasher()
        hasher.update(view)
        actual = hasher.digest()
        if self.blob_id is not None and actual != self.blob_id:
            raise RequestRefusedError(
                f"the weights of layer {self.layer_id} have another hash than announced",
                code=ErrorCode.HASH_MISMATCH,
            )
        return view, actual

    def _buffer(self) -> memoryview:
        """Room for all chunks. Its pages come from the kernel when they are written to, so that a
        transfer that was announced and never sent costs address space at most.
        """
        if self._pages is None:
            try:
                self._pages = mmap.mmap(-1, self.total_chunks * CHUNK_BYTES)
            except (OSError, MemoryError) as exc:
                raise RequestRefusedError(
                    f"no memory for the {self.total_chunks} MiB of layer {self.layer_id}",
                    code=ErrorCode.OUT_OF_MEMORY,
                ) from exc
        return memoryview(self._pages)

    def _expected_length(self, index: int) -> int | None:
        """The length that chunk `index` must have; None for a last one of unknown size."""
        if index < self.total_chunks - 1:
            return CHUNK_BYTES
        if self._num_bytes is not None:
            return self._num_bytes - (self.total_chunks - 1) * CHUNK_BYTES
        return self._last_length

    def _invalid(self, reason: str) -> RequestRefusedError:
        return RequestRefusedError(
            f"weights of layer {self.layer_id}: {reason}", code=ErrorCode.TRANSFER_INVALID
        )
