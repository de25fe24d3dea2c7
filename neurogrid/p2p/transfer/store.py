"""Interface of stores, which keep a blob's bytes while they come and when they are all there.

`MemoryStore` and `DirectoryStore` are the two that there are. A store knows files and memory; neither peers nor
messages. Its methods block: they are called in threads, for one blob one at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from neurogrid.p2p.transfer.chunks import BlobInfo, ChunkSet
from neurogrid.p2p.wire import CHUNK_BYTES, Data

__all__ = ["BlobStore", "PartialBlob", "StoredBlob"]


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """A whole blob, verified. It is a `BlobSource`, so it can be served on.

    Attributes:
        info: its id, length and digests.
        data: its bytes, contiguous; the view keeps them alive. Read-only where they are a file's.
        path: the file, or None for a blob in memory.
    """

    info: BlobInfo
    data: memoryview
    path: Path | None = None

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return self.info.num_bytes

    def digests(self) -> bytes:
        """The digest of every chunk."""
        return self.info.digests

    def chunk(self, index: int) -> memoryview:
        """The bytes of chunk `index`; a view."""
        return self.data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


class PartialBlob(ABC):
    """A blob of which some chunks are there.

    Attributes:
        info: what it is to be.
        chunks: those that are there; each was compared with its digest before it was written, or when the
            blob was opened again.
    """

    # Whether what is there stays when this object goes.
    is_durable: ClassVar[bool]

    def __init__(self, info: BlobInfo, chunks: ChunkSet) -> None:
        self.info = info
        self.chunks = chunks

    @property
    def kept_bytes(self) -> int:
        """Bytes that are there, rounded up to chunks."""
        return len(self.chunks) * CHUNK_BYTES

    @abstractmethod
    def write(self, index: int, data: Data) -> None:
        """Keep a verified chunk. The caller adds it to `chunks` afterwards.

        Raises:
            RequestRefusedError: there is no room for it (OUT_OF_MEMORY).
        """

    @abstractmethod
    def finish(self) -> StoredBlob:
        """The whole blob, once all chunks are there; this object is of no use any more.

        Raises:
            RequestRefusedError: there is no room for it (OUT_OF_MEMORY).
        """

    @abstractmethod
    def suspend(self) -> None:
        """Nobody writes for the time being: give back what only writing needs. Quick."""

    @abstractmethod
    def discard(self) -> None:
        """Drop what is there. Quick."""


class BlobStore(ABC):
    """Gives room to blobs. Two equal stores are one place."""

    @abstractmethod
    def open(self, info: BlobInfo) -> PartialBlob:
        """Room for a blob, with the chunks that are there from an earlier time, verified again.

        Raises:
            RequestRefusedError: there is no room (OUT_OF_MEMORY).
        """
