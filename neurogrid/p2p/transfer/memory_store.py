"""Blobs in memory, whose pages come from the kernel when they are written to.

So a transfer that was announced and never sent costs address space at most, and nothing grows by copying.
"""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.transfer.chunks import BlobInfo, ChunkSet
from neurogrid.p2p.transfer.store import BlobStore, PartialBlob, StoredBlob
from neurogrid.p2p.wire import CHUNK_BYTES, Data, ErrorCode

__all__ = ["MemoryStore", "reserve_pages"]


@dataclass(frozen=True, slots=True)
class MemoryStore(BlobStore):
    """Blobs in the memory of this process."""

    def open(self, info: BlobInfo) -> PartialBlob:
        """See `BlobStore.open`."""
        return _PagesBlob(info, ChunkSet(info.num_chunks))


class _PagesBlob(PartialBlob):
    is_durable = False

    def __init__(self, info: BlobInfo, chunks: ChunkSet) -> None:
        super().__init__(info, chunks)
        self._pages = reserve_pages(info.num_bytes, f"blob {info.short_id}")

    def write(self, index: int, data: Data) -> None:
        start = index * CHUNK_BYTES
        self._pages[start : start + len(data)] = data

    def finish(self) -> StoredBlob:
        return StoredBlob(self.info, self._pages)

    def suspend(self) -> None:
        pass

    def discard(self) -> None:
        self._pages = memoryview(b"")


def reserve_pages(num_bytes: int, what: str) -> memoryview:
    """A writable view of `num_bytes` bytes, zero until written, that keeps its pages alive.

    Raises:
        RequestRefusedError: the system will not give so much (OUT_OF_MEMORY); `what` says for what.
    """
    try:
        if sys.platform == "win32":
            pages = mmap.mmap(-1, max(num_bytes, 1))
        else:
            # Private pages: writing to fresh ones takes half as long as to shared ones (0.5 ms a MiB).
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            pages = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
    except (OSError, MemoryError, OverflowError) as exc:
        raise RequestRefusedError(
            f"no memory for the {-(-num_bytes // (1024 * 1024))} MiB of {what}",
            code=ErrorCode.OUT_OF_MEMORY,
        ) from exc
    # Huge pages were tried: where the memory is a virtual machine's, they cost four times as much as small ones.
    return memoryview(pages)[:num_bytes]
