"""A blob that comes without an offer, as 1.0.0 sends it: chunks in any order, each once, nothing announced.

There is no digest to compare with, so what can be checked is that the chunks agree with each other. Memory grows
with what came, whatever the number of chunks says.

Source: protocol_spec/messages.md, Weights.
"""

from __future__ import annotations

from neurogrid.p2p.transfer.chunks import ChunkSet, require_fit, transfer_invalid
from neurogrid.p2p.transfer.memory_store import reserve_pages
from neurogrid.p2p.wire import CHUNK_BYTES, BlobHasher, WeightsChunk

__all__ = ["PlainBlob"]


class PlainBlob:
    """The chunks of one layer from one peer.

    Attributes:
        layer_id: the layer.
        total_chunks: how many chunks the blob has, as its first chunk said.
        last_progress: when the last chunk came, on the clock that the owner passes in; seconds.
    """

    def __init__(self, *, layer_id: int, total_chunks: int, now: float) -> None:
        self.layer_id = layer_id
        self.total_chunks = total_chunks
        self.last_progress = now
        self._chunks = ChunkSet(total_chunks)
        self._pages: memoryview | None = None
        self._last_length: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is there."""
        return self._chunks.is_full

    @property
    def num_received(self) -> int:
        """Number of distinct chunks that have come."""
        return len(self._chunks)

    @property
    def min_bytes(self) -> int:
        """The fewest bytes that a blob of so many chunks has."""
        return (self.total_chunks - 1) * CHUNK_BYTES

    def add(self, chunk: WeightsChunk, *, now: float) -> None:
        """Keep one chunk.

        Raises:
            RequestRefusedError: it does not fit those before it (TRANSFER_INVALID), or there is no memory
                for it (OUT_OF_MEMORY).
        """
        index = chunk.chunk_index
        is_last = index == self.total_chunks - 1
        require_fit(
            chunk,
            layer_id=self.layer_id,
            total_chunks=self.total_chunks,
            expected_bytes=self._last_length if is_last else CHUNK_BYTES,
        )
        if self._pages is None:
            self._pages = reserve_pages(self.total_chunks * CHUNK_BYTES, f"layer {self.layer_id}")
        place = self._pages[index * CHUNK_BYTES :][: len(chunk.data)]
        if index in self._chunks:
            # Bytes compare at memory speed, views element by element.
            if bytes(place) != bytes(chunk.data):
                raise transfer_invalid(
                    self.layer_id, f"chunk {index} came twice with different bytes"
                )
            return
        place[:] = chunk.data
        self._chunks.add(index)
        self.last_progress = now
        if is_last:
            self._last_length = len(chunk.data)

    def finish(self) -> tuple[memoryview, bytes]:
        """The whole blob, complete, and the id of its content. Hashes it: for a thread."""
        assert self.is_complete
        assert self._pages is not None
        assert self._last_length is not None
        view = self._pages[: self.min_bytes + self._last_length]
        hasher = BlobHasher()
        hasher.update(view)
        return view, hasher.digest()
