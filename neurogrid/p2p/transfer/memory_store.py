"""Blobs in memory, whose pages come from the kernel just before they are written to.

So a transfer that was announced and never sent costs address space at most, and nothing grows by copying.
"""

from __future__ import annotations

import errno
import mmap
import sys
from dataclasses import dataclass
from typing import Final

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.transfer.chunks import BlobInfo, ChunkSet
from neurogrid.p2p.transfer.store import BlobStore, PartialBlob, StoredBlob
from neurogrid.p2p.wire import CHUNK_BYTES, Data, ErrorCode

__all__ = ["MemoryStore", "populate_pages", "reserve_pages"]

# MADV_POPULATE_WRITE of Linux 5.14, which the mmap module does not name.
_POPULATE_WRITE: Final = 23


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
        populate_pages(self._pages, start, len(data), f"blob {self.info.short_id}")
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
        raise _no_memory(num_bytes, what) from exc
    # Huge pages were tried: where the memory is a virtual machine's, they cost four times as much as small ones.
    return memoryview(pages)[:num_bytes]


def populate_pages(view: memoryview, start: int, num_bytes: int, what: str) -> None:
    """Let the kernel map the pages of a range of `reserve_pages` at once, just before they are written to.

    That and writing takes 0.30 s a GB, where a fault for each page makes it 0.43 s. Does nothing where the kernel
    cannot.

    Raises:
        RequestRefusedError: there is no memory for them (OUT_OF_MEMORY); `what` says for what.
    """
    if sys.platform != "linux" or not num_bytes:
        return
    pages = view.obj
    assert isinstance(pages, mmap.mmap)
    try:
        pages.madvise(_POPULATE_WRITE, start, num_bytes)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # of a kernel that does not know it
            raise _no_memory(num_bytes, what) from exc


def _no_memory(num_bytes: int, what: str) -> RequestRefusedError:
    return RequestRefusedError(
        f"no memory for the {-(-num_bytes // (1024 * 1024))} MiB of {what}",
        code=ErrorCode.OUT_OF_MEMORY,
    )
