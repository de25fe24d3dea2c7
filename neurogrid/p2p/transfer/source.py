"""Sources of blobs: anything that has a length, digests and chunks.

`LayerBlob` of `neurogrid.model` is one that lies in the files of a checkpoint, `StoredBlob` one that came from
a peer, and bytes in memory become one by `as_source`.
"""

from __future__ import annotations

import typing

from neurogrid.p2p.streams.buffers import Tensor, tensor_buffer
from neurogrid.p2p.wire import CHUNK_BYTES, BlobHasher, Data

__all__ = ["BlobSource", "BytesSource", "as_source"]


@typing.runtime_checkable
class BlobSource(typing.Protocol):
    """The bytes of a blob, read where they lie. The methods may block: they are called in threads."""

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""

    def digests(self) -> bytes:
        """The digest of every chunk in order, 32 bytes each. The first call may read every byte."""

    def chunk(self, index: int) -> Data:
        """The bytes of chunk `index`: CHUNK_BYTES of them, in the last one the rest."""


class BytesSource:
    """Bytes that lie in memory, or in a file that is mapped; arrays, too, and tensors on the CPU.

    They are not copied, and must not change until the last transfer has ended.

    Raises:
        LocalProtocolError: the data are not contiguous, or not bytes at all.
    """

    def __init__(self, data: Tensor) -> None:
        self._data = memoryview(tensor_buffer(data).data)
        self._digests: bytes | None = None

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return self._data.nbytes

    def digests(self) -> bytes:
        """See `BlobSource`."""
        if self._digests is None:
            hasher = BlobHasher()
            hasher.update(self._data)
            self._digests = hasher.digests()
        return self._digests

    def chunk(self, index: int) -> memoryview:
        """See `BlobSource`."""
        return self._data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def as_source(source: BlobSource | Tensor) -> BlobSource:
    """A source as it is; bytes and the like as a source."""
    return source if isinstance(source, BlobSource) else BytesSource(source)
