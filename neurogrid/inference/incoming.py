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
        # Anonymous pages come from the kernel when they are written to: a transfer that was
        # announced and never sent costs address space, no memory.
        self._buffer = mmap.mmap(-1, total_chunks * CHUNK_BYTES)
        self._received = bytearray(total_chunks)
        self._num_received = 0
        self._last_length: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is there."""
        return self._num_received == self.total_chunks

    @property
    def num_received(self) -> int:
        """How many distinct chunks are there."""
        return self._num_received

    def add(self, chunk: WeightsChunk, *, now: float) -> None:
        """Keep one chunk.

        Raises:
            RequestRefusedError: it does not belong to this transfer (code TRANSFER_INVALID).
        """
        index, length = chunk.chunk_index, len(chunk.data)
        if chunk.total_chunks != self.total_chunks:
            raise self._invalid(
                f"the total changed from {self.total_chunks} to {chunk.total_chunks}"
            )
        if index >= self.total_chunks:
            raise self._invalid(f"chunk {index} of {self.total_chunks} is out of range")
        expected = self._expected_length(index)
        if (expected is not None and length != expected) or length > CHUNK_BYTES:
            raise self._invalid(f"chunk {index} has {length} B instead of {expected}")
        start = index * CHUNK_BYTES
        if self._received[index]:
            if self._buffer[start : start + length] != bytes(chunk.data):
                raise self._invalid(f"chunk {index} came twice with different bytes")
            return
        self._buffer[start : start + length] = bytes(chunk.data)
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
        view = memoryview(self._buffer)[:num_bytes]
        hasher = BlobHasher()
        hasher.update(view)
        actual = hasher.digest()
        if self.blob_id is not None and actual != self.blob_id:
            raise RequestRefusedError(
                f"the weights of layer {self.layer_id} have another hash than announced",
                code=ErrorCode.HASH_MISMATCH,
            )
        return view, actual

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
