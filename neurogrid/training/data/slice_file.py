"""The file of a slice as a blob: hashed once, and again where it is another file than was hashed."""

from __future__ import annotations

import os
from pathlib import Path

from neurogrid.p2p.transfer import BlobInfo
from neurogrid.p2p.wire import CHUNK_BYTES, BlobHasher

__all__ = ["SliceFile"]


class SliceFile:
    """A file as a blob, hashed when this is made.

    Attributes:
        path: of the file.
        info: of what was hashed.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = self._find_state()
        hasher = BlobHasher()
        with path.open("rb") as file:
            while data := file.read(CHUNK_BYTES):
                hasher.update(data)
        self.info = BlobInfo.of_digests(hasher.digests(), self._state[0])

    def has_changed(self) -> bool:
        """Whether it is another file than was hashed."""
        return self._find_state() != self._state

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return self.info.num_bytes

    def digests(self) -> bytes:
        """Return the digests of its chunks, one after the other."""
        return self.info.digests

    def chunk(self, index: int) -> bytes:
        """Read one of its chunks; the receiver verifies it."""
        with self.path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), self.info.chunk_bytes(index), index * CHUNK_BYTES)

    def _find_state(self) -> tuple[int, int, int, int]:
        status = self.path.stat()
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
