"""Whole blobs on disk, by their ids, within a limit: what a peer has had once it need not be sent again.

    9f86d0...b8.blob            a whole blob
    9f86d0...b8-x2k9.tmp        one that is being written

Notes, small files in a directory beside it which say what the blobs are, count like blobs and go like them.

A blob is written beside its place and renamed into it, so nobody sees half of one, and nothing that is read is
believed before it is hashed: so nothing need be synced, and a file that a crash has torn or a disk has lost is
dropped, said, and fetched anew. The least recently used goes first, and never one in use: a process that uses a blob
holds a shared lock on its file, so several may share a directory. POSIX only.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.transfer.chunks import BlobInfo
from neurogrid.p2p.transfer.memory_store import populate_pages, reserve_pages
from neurogrid.p2p.transfer.source import BlobSource
from neurogrid.p2p.transfer.store import StoredBlob
from neurogrid.p2p.wire import CHUNK_BYTES, chunk_digest

__all__ = ["BlobCache"]

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"([0-9a-f]{64})\.blob")
_NOTE: Final = re.compile(r"[0-9A-Za-z_-]{1,128}\.json")
# Of a disk, in bytes: a note takes whole ones.
_BLOCK_BYTES: Final = 4096
# Of a file system's free room, what a cache may take unless told otherwise: a model or two, and the disk is still
# its owner's.
DEFAULT_SHARE: Final = 0.2
# Seconds: several processes that write layers of gigabytes have their turns in it. And between two looks.
TURN_TIMEOUT: Final = 60.0
TURN_AGAIN: Final = 0.02


class BlobCache:
    """The blobs in one directory, which is made if need be, readable by its owner alone.

    The methods block: they are called in threads. Several may run at once.

    Args:
        path: the directory.
        max_bytes: what all blobs in it may take; None for a fifth of what the file system has free, what the cache
            holds already counted as free.
        notes: the directory of the notes, which is there; None for none.

    Raises:
        ConfigurationError: the directory cannot be made or written to.
    """

    def __init__(
        self, path: Path, *, max_bytes: int | None = None, notes: Path | None = None
    ) -> None:
        self.path = path
        self._notes = notes
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path = path.resolve()
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(0, "it is not writable")
            self._drop_unfinished()
            self.max_bytes = self._default_limit() if max_bytes is None else max_bytes
        except OSError as exc:
            raise ConfigurationError(
                f"the cache directory {path} cannot be used: {exc.strerror or exc}; give another with "
                "--cache-dir, or --no-cache"
            ) from exc
        self._in_use: dict[bytes, int] = {}
        self._said: int | None = None  # why the last blob could not be written

    def __contains__(self, blob_id: bytes) -> bool:
        """Whether there is a file for the blob. What is in it, `load` tells."""
        return self._file(blob_id).exists()

    @property
    def num_bytes(self) -> int:
        """Bytes that all blobs and notes take."""
        return sum(size for _, size, _ in self._files())

    @property
    def in_use(self) -> set[bytes]:
        """Ids of the blobs that `use` keeps here."""
        return set(self._in_use)

    def load(self, blob_id: bytes, *, max_bytes: int | None = None) -> StoredBlob | None:
        """Read a blob into memory and verify it; None if it is not here, too large, or damaged.

        A damaged file is dropped, with a warning. One that is good counts as just used.

        Raises:
            RequestRefusedError: there is no memory for it (OUT_OF_MEMORY).
        """
        path = self._file(blob_id)
        try:
            file = _open(path)
        except FileNotFoundError:
            return None
        except OSError as exc:
            logger.warning("the cached %s cannot be read: %s", path, exc.strerror)
            return None
        try:
            num_bytes = os.fstat(file).st_size
            if max_bytes is not None and num_bytes > max_bytes:
                return None
            data, digests = _read(file, num_bytes, path)
            info = BlobInfo.of_digests(digests, num_bytes)
            if info.blob_id == blob_id:
                self._touch(path)
                return StoredBlob(info, data)
            logger.warning(
                "the cached %s is damaged: it is dropped, and made or fetched anew", path
            )
        except OSError as exc:
            logger.warning(
                "the cached %s cannot be read (%s): it is dropped, and made or fetched anew",
                path,
                exc.strerror,
            )
        finally:
            os.close(file)
        path.unlink(missing_ok=True)
        return None

    def store(self, blob: StoredBlob) -> bool:
        """Keep a verified blob; False where there is no room for it; why is logged, once while it stays so."""
        path = self._file(blob.info.blob_id)
        try:
            with self._turn():
                if path.exists():
                    self._touch(path)
                elif not self._make_room(blob.num_bytes):
                    logger.warning(
                        "blob %s (%s B) is not cached: %s may have %s B, and the rest is in use",
                        blob.info.short_id,
                        f"{blob.num_bytes:,}",
                        self.path,
                        f"{self.max_bytes:,}",
                    )
                    return False
                else:
                    self._write(path, map(blob.chunk, range(blob.info.num_chunks)))
        except OSError as exc:
            # A model has dozens of layers, and one full disk.
            is_news, self._said = exc.errno != self._said, exc.errno
            logger.log(
                logging.WARNING if is_news else logging.DEBUG,
                "blob %s cannot be cached in %s: %s",
                blob.info.short_id,
                self.path,
                exc.strerror,
            )
            return False
        self._said = None
        return True

    def note(self, name: str, data: bytes) -> bool:
        """Keep a note in place of the one of that name; False, with the reason logged, where it cannot be."""
        if self._notes is None:
            return False
        path = self._notes / f"{name}.json"
        try:
            with self._turn():
                taken = _in_blocks(path.stat().st_size) if path.exists() else 0
                if not self._make_room(_in_blocks(len(data)) - taken):
                    logger.debug("no room for the note %s", path.name)
                    return False
                self._write(path, [memoryview(data)])
        except OSError as exc:
            logger.debug("cannot note %s: %s", path, exc.strerror)
            return False
        return True

    def noted(self, name: str) -> bytes | None:
        """A note, which counts as just used; None if there is none. Anybody may have written it."""
        if self._notes is None:
            return None
        path = self._notes / f"{name}.json"
        try:
            data = path.read_bytes()
        except OSError:
            return None
        self._touch(path)
        return data

    def use(self, blob_id: bytes) -> None:
        """Keep a blob that is here until `release`, whatever else needs the room; nothing if it is not here."""
        if blob_id in self._in_use:
            return
        if (file := _lock(self._file(blob_id), fcntl.LOCK_SH)) is not None:
            self._in_use[blob_id] = file

    def release(self, blob_id: bytes) -> None:
        """A blob is not needed any more: it may go when the room is needed."""
        file = self._in_use.pop(blob_id, None)
        if file is not None:
            self._touch(self._file(blob_id))
            os.close(file)

    def source(self, info: BlobInfo) -> BlobSource | None:
        """A blob that `load` or `store` has seen, to be served from its file; None if it is not here."""
        try:
            if self._file(info.blob_id).stat().st_size == info.num_bytes:
                return _FileSource(info, self._file(info.blob_id))
        except FileNotFoundError:
            pass
        return None

    def file(self, blob_id: bytes) -> Path | None:
        """The file of a blob; None if it is not here. In use, it stays where it is."""
        path = self._file(blob_id)
        return path if path.exists() else None

    def close(self) -> None:
        """Release all."""
        for blob_id in list(self._in_use):
            self.release(blob_id)

    def _file(self, blob_id: bytes) -> Path:
        return self.path / f"{blob_id.hex()}.blob"

    def _touch(self, path: Path) -> None:
        """Make it the most recently used; access times are often not kept by the system."""
        try:
            os.utime(path)
        except OSError as exc:
            logger.debug("cannot touch %s: %s", path, exc)

    def _files(self) -> list[tuple[float, int, Path]]:
        """Time of last use, bytes, and path of every blob and note, the least recently used first."""
        found = [(at, size, path) for at, size, path in _files_in(self.path, _NAME)]
        if self._notes is not None:
            notes = _files_in(self._notes, _NOTE)
            found += [(at, _in_blocks(size), path) for at, size, path in notes]
        return sorted(found)

    def _make_room(self, num_bytes: int) -> bool:
        """Drop what was used least recently until `num_bytes` more fit; whether they do."""
        files = self._files()
        excess = sum(size for _, size, _ in files) + num_bytes - self.max_bytes
        chosen = []
        for _, size, path in files if num_bytes <= self.max_bytes else ():
            if excess <= 0:
                break
            if (file := _lock(path, fcntl.LOCK_EX)) is not None:
                chosen.append((file, size, path))
                excess -= size
        # Nothing is dropped in vain.
        for file, size, path in chosen:
            if excess <= 0:
                logger.info("dropped %s (%s B) from the cache", path.name, f"{size:,}")
                path.unlink(missing_ok=True)
            os.close(file)
        return excess <= 0

    def _write(self, path: Path, views: Iterable[memoryview]) -> None:
        file, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem}-", suffix=".tmp")
        try:
            # A sign for others that somebody still writes it.
            fcntl.flock(file, fcntl.LOCK_EX)
            for view in views:
                while view:
                    view = view[os.write(file, view) :]
            os.replace(name, path)
        except BaseException:  # an interrupt, too, leaves no half file
            Path(name).unlink(missing_ok=True)
            raise
        finally:
            os.close(file)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One at a time makes room and writes, of all processes: else each would take the same room for free."""
        file = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _wait_for_turn(file)
            with suppress(OSError):  # on a full disk: whoever waits is told less
                os.ftruncate(file, 0)
                os.pwrite(file, b"%d" % os.getpid(), 0)
            yield
        finally:
            os.close(file)

    def _drop_unfinished(self) -> None:
        for path in [*self.path.glob("*.tmp"), *(self._notes.glob("*.tmp") if self._notes else ())]:
            if (file := _lock(path, fcntl.LOCK_EX)) is not None:
                path.unlink(missing_ok=True)
                os.close(file)

    def _default_limit(self) -> int:
        system = os.statvfs(self.path)
        return int(DEFAULT_SHARE * (system.f_bavail * system.f_frsize + self.num_bytes))


class _FileSource:
    """A blob that is read chunk by chunk. Its receiver verifies it, as always."""

    def __init__(self, info: BlobInfo, path: Path) -> None:
        self._info = info
        self._path = path

    @property
    def num_bytes(self) -> int:
        return self._info.num_bytes

    def digests(self) -> bytes:
        return self._info.digests

    def chunk(self, index: int) -> bytes:
        with self._path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), self._info.chunk_bytes(index), index * CHUNK_BYTES)


def _files_in(directory: Path, name: re.Pattern[str]) -> Iterator[tuple[float, int, Path]]:
    """Yield time of last use, bytes, and path of each file in a directory whose name matches `name`."""
    for entry in os.scandir(directory):
        if not name.fullmatch(entry.name):
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue  # another process dropped it
        if stat.S_ISREG(status.st_mode):
            yield status.st_mtime, status.st_size, Path(entry.path)


def _in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _wait_for_turn(file: int) -> None:
    """Lock a file; another process that has it may be stopped, and keeps it then.

    Raises:
        OSError: it has it for too long (EBUSY); says which one.
    """
    until = time.monotonic() + TURN_TIMEOUT
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            if time.monotonic() < until:
                time.sleep(TURN_AGAIN)
                continue
            number = os.pread(file, 32, 0).decode("ascii", "replace")
            whose = f"process {number}" if number.isdecimal() else "another process"
            raise OSError(
                errno.EBUSY,
                f"{whose} keeps it locked for {TURN_TIMEOUT:g} s: if it was stopped, let it go on (kill -CONT), or "
                "end it",
            ) from exc
        else:
            return


def _lock(path: Path, how: int) -> int | None:
    """The file, locked; None where it is gone, or in use in another way. Close it to give it back."""
    try:
        file = _open(path)
    except OSError:
        return None
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def _read(file: int, num_bytes: int, path: Path) -> tuple[memoryview, bytes]:
    """All of a file in fresh memory, and the digests of its chunks, hashed while they are in the cache of the core."""
    data = reserve_pages(num_bytes, path.name)
    digests = bytearray()
    for start in range(0, max(num_bytes, 1), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        populate_pages(data, start, len(chunk), path.name)
        filled = 0
        while filled < len(chunk):
            taken = os.preadv(file, [chunk[filled:]], start + filled)
            if not taken:
                raise OSError(0, "it has become shorter")
            filled += taken
        digests += chunk_digest(chunk)
    return data, bytes(digests)
