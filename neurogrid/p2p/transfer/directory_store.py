"""Blobs in a directory: unfinished ones as a sparse file with a bitmap, whole ones under their content id.

    9f86d0...b8-1048577.part    the chunks in their places
    9f86d0...b8-1048577.have    one bit a chunk, as in a TransferAccept
    9f86d0...b8.blob            a whole blob

All of it survives this process, and none of it is believed: what is found is hashed before it counts. So nothing
need be synced to the disk, a torn write costs the chunk that it tore, and a whole blob that has rotted is mended
by the chunks that are wrong. Processes may share a directory: what they write is the same. POSIX only.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from pathlib import Path

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.transfer.chunks import BlobInfo, ChunkSet
from neurogrid.p2p.transfer.limits import DEFAULT_TRANSFER_LIMITS, TransferLimits
from neurogrid.p2p.transfer.store import BlobStore, PartialBlob, StoredBlob
from neurogrid.p2p.wire import CHUNK_BYTES, BlobHasher, Data, ErrorCode, chunk_digest

__all__ = ["DirectoryStore"]

logger = logging.getLogger(__name__)

# Files of st_blocks, whatever the file system's own block is (POSIX, stat).
_BLOCK_BYTES = 512


class DirectoryStore(BlobStore):
    """Blobs in the files of one directory, which is made if need be.

    Args:
        path: the directory.
        limits: how many unfinished blobs may lie there, how large and how old; the oldest go first. Whole
            blobs are their owner's affair.

    Raises:
        OSError: the directory cannot be made.
    """

    def __init__(self, path: Path, *, limits: TransferLimits = DEFAULT_TRANSFER_LIMITS) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path.resolve()
        self._limits = limits
        self._open: set[Path] = set()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DirectoryStore) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def open(self, info: BlobInfo) -> PartialBlob:
        """See `BlobStore.open`. Reads and hashes what is there already."""
        self.prune()
        part = self.path / f"{info.blob_id.hex()}-{info.num_bytes}.part"
        try:
            return _FileBlob(info, part, whole=self._whole(info.blob_id), opened=self._open)
        except OSError as exc:
            raise _no_room(info, exc) from exc

    def load(self, blob_id: bytes) -> StoredBlob | None:
        """A whole blob, hashed again; None if it is not here, or is not what its name says."""
        path = self._whole(blob_id)
        try:
            data = _map(path)
        except FileNotFoundError:
            return None
        info = BlobInfo.of_digests(_digests(data), data.nbytes)
        if info.blob_id != blob_id:
            logger.warning("%s has changed since it was written", path)
            return None
        return StoredBlob(info, data, path)

    def prune(self) -> None:
        """Delete the oldest unfinished blobs beyond the limits; never those that are open here."""
        found = []
        for part in self.path.glob("*.part"):
            try:
                status = part.stat()
            except FileNotFoundError:
                continue  # another process finished it
            # Holes take no room.
            found.append((status.st_mtime, status.st_blocks * _BLOCK_BYTES, part))
        found.sort(reverse=True)
        num_bytes = 0
        oldest = time.time() - self._limits.partial_file_age
        for num_files, (changed, size, part) in enumerate(found, start=1):
            num_bytes += size
            if part not in self._open and (
                num_files > self._limits.max_partial_files
                or num_bytes > self._limits.max_partial_file_bytes
                or changed < oldest
            ):
                logger.info("dropped the unfinished blob %s", part.name)
                _delete(part)

    def _whole(self, blob_id: bytes) -> Path:
        return self.path / f"{blob_id.hex()}.blob"


class _FileBlob(PartialBlob):
    is_durable = True

    def __init__(self, info: BlobInfo, part: Path, *, whole: Path, opened: set[Path]) -> None:
        super().__init__(info, ChunkSet(info.num_chunks))
        self._part = part
        self._whole = whole
        self._opened = opened
        # The chunks, and the bitmap; none when it is whole or suspended.
        self._files: list[int] = []
        self._bits = bytearray(-(-info.num_chunks // 8))  # as they are in its file
        if self._find_whole():
            return
        opened.add(part)
        try:
            self._open_files()
        except OSError:
            self.suspend()
            raise

    def write(self, index: int, data: Data) -> None:
        try:
            _write_at(self._files[0], data, index * CHUNK_BYTES)
            self._mark(index)
        except OSError as exc:
            raise _no_room(self.info, exc) from exc

    def finish(self) -> StoredBlob:
        if self._files:
            self.suspend()
            try:
                os.replace(self._part, self._whole)
                self._part.with_suffix(".have").unlink(missing_ok=True)
            except FileNotFoundError:
                # Another process that shares the directory was first.
                if not self._whole.exists():
                    raise _no_room(self.info, FileNotFoundError(self._part)) from None
            except OSError as exc:
                raise _no_room(self.info, exc) from exc
        return StoredBlob(self.info, _map(self._whole), self._whole)

    def suspend(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []
        self._opened.discard(self._part)

    def discard(self) -> None:
        self.suspend()
        _delete(self._part)

    def _find_whole(self) -> bool:
        """Take the whole blob if it is there and good; make it a partial one if it is not.

        One of another length may be good as well: the id does not tell the length, and what is wanted is a lie.
        """
        try:
            data = _map(self._whole)
        except FileNotFoundError:
            return False
        if data.nbytes == self.info.num_bytes:
            good = [index for index in range(self.info.num_chunks) if self._is_good(data, index)]
            if len(good) == self.info.num_chunks:
                for index in good:
                    self.chunks.add(index)
                return True
        elif _digests(data) == self.info.digests:
            return False
        logger.warning("%s is not what its name says; it is mended", self._whole)
        os.replace(self._whole, self._part)
        all_bits = b"\xff" * -(-self.info.num_chunks // 8)
        self._part.with_suffix(".have").write_bytes(all_bits)
        return False

    def _is_good(self, data: memoryview, index: int) -> bool:
        chunk = data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        return chunk_digest(chunk) == self.info.chunk_digest(index)

    def _open_files(self) -> None:
        had = self._part.exists()
        for path in (self._part, self._part.with_suffix(".have")):
            self._files.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        data, bits = self._files
        os.truncate(data, self.info.num_bytes)
        os.truncate(bits, -(-self.info.num_chunks // 8))
        if had:
            self._find_chunks(data, bits)

    def _find_chunks(self, data: int, bits: int) -> None:
        """Keep those chunks of the bitmap that have their digests, and clear the bits of the others."""
        bitmap = os.pread(bits, -(-self.info.num_chunks // 8), 0)
        for index in range(self.info.num_chunks):
            if not bitmap[index >> 3] & 0x80 >> (index & 7):
                continue
            chunk = os.pread(data, self.info.chunk_bytes(index), index * CHUNK_BYTES)
            if chunk_digest(chunk) == self.info.chunk_digest(index):
                self.chunks.add(index)
        self._bits = bytearray(self.chunks.bitmap() or bytes(len(bitmap)))
        os.pwrite(bits, self._bits, 0)

    def _mark(self, index: int) -> None:
        """Set the bit of a chunk. Those of its byte that were written with it are not in `chunks` yet."""
        at = index >> 3
        self._bits[at] |= 0x80 >> (index & 7)
        os.pwrite(self._files[1], self._bits[at : at + 1], at)


def _write_at(file: int, data: Data, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _map(path: Path) -> memoryview:
    """The bytes of a file, which are read when they are used."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _digests(data: memoryview) -> bytes:
    hasher = BlobHasher()
    hasher.update(data)
    return hasher.digests()


def _delete(part: Path) -> None:
    part.unlink(missing_ok=True)
    part.with_suffix(".have").unlink(missing_ok=True)


def _no_room(info: BlobInfo, error: OSError) -> RequestRefusedError:
    # The peer is told what, not where: paths are ours.
    reason = error.strerror or type(error).__name__
    logger.error("cannot keep blob %s: %s", info.short_id, error)
    return RequestRefusedError(
        f"cannot keep blob {info.short_id} on disk: {reason}", code=ErrorCode.OUT_OF_MEMORY
    )
