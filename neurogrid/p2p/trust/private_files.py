"""Files that their owner alone may read, replaced in one step, so that a crash leaves the old or the new."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.trust.certificate import format_time

__all__ = [
    "LOCK_AGAIN",
    "LOCK_TIMEOUT",
    "DirectoryLockedError",
    "check_writable",
    "holder_of",
    "is_there",
    "locked",
    "make_private_directory",
    "note_holder",
    "open_private",
    "read_private",
    "write_private",
]

# Seconds until it is said that a directory stays locked, which files are written in within milliseconds; and between
# two looks.
LOCK_TIMEOUT: Final = 5.0
LOCK_AGAIN: Final = 0.01
MAX_HOLDER_BYTES: Final = 4096
# A file that is written is renamed within milliseconds: one that is not by then was left by a process that was killed.
LEFT_AFTER: Final = 3600.0  # seconds


class DirectoryLockedError(ConfigurationError):
    """Another process changes what is in a directory at this moment."""


def make_private_directory(path: Path) -> None:
    """Make the directory (0700) if it is not there.

    Raises:
        ConfigurationError: it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigurationError(f"cannot make the directory {path}: {exc.strerror}") from exc


def check_writable(directory: Path) -> None:
    """Check that files can be made in a directory, which may have to be made itself; makes nothing.

    Raises:
        ConfigurationError: they cannot; names what is in the way.
    """
    at = directory
    while not is_there(at) and at != at.parent:
        at = at.parent
    if not at.is_dir():
        raise ConfigurationError(f"cannot make the directory {directory}: {at} is no directory")
    if not os.access(at, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"cannot make files in {directory}: {at} may not be written to; name another directory"
        )


def write_private(path: Path, data: bytes) -> None:
    """Write a file (0600) in place of the one that is there.

    Raises:
        ConfigurationError: it cannot be written.
    """
    try:
        # A name of its own: two processes may write the file at once, and each is to put its own there, whole.
        descriptor, new = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}-", suffix=".new")
        try:
            with os.fdopen(descriptor, "wb") as file:
                _give_to_owner(descriptor, path.parent)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except BaseException:  # it may be a key
            Path(new).unlink(missing_ok=True)
            raise
        _remove_left(path)
        _sync(path.parent)
    except OSError as exc:
        raise ConfigurationError(f"cannot write {path}: {exc.strerror}") from exc


def open_private(path: Path) -> int:
    """Open a file (0600) to be locked, made if it is not there; returns its descriptor.

    Raises:
        ConfigurationError: it cannot be had.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _give_to_owner(descriptor, path.parent)
    except OSError as exc:
        raise ConfigurationError(f"cannot write {path}: {exc.strerror}") from exc
    return descriptor


def is_there(path: Path) -> bool:
    """Whether there is such a file.

    Raises:
        ConfigurationError: one may not look.
    """
    try:
        return path.exists()
    except OSError as exc:
        raise ConfigurationError(f"cannot look for {path}: {exc.strerror}") from exc


def _give_to_owner(descriptor: int, directory: Path) -> None:
    """Root looks after the directory of a service, and the service has to read what is in it."""
    if os.geteuid() == 0:
        owner = directory.stat()
        os.fchown(descriptor, owner.st_uid, owner.st_gid)


def _remove_left(path: Path) -> None:
    """Remove what processes that were killed while they wrote this file have left beside it: it may be a key."""
    for left in path.parent.glob(f"{glob.escape(path.name)}-*.new"):
        with suppress(OSError):  # another process does the same
            if time.time() - left.stat().st_mtime > LEFT_AFTER:
                left.unlink()


def _sync(directory: Path) -> None:
    """Let the names in a directory outlast a loss of power: a use of a ticket that was counted stays counted."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_private(path: Path, max_bytes: int) -> bytes | None:
    """The content of a file; None if there is none.

    Raises:
        ConfigurationError: it cannot be read, or has more than `max_bytes`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ConfigurationError(f"cannot read {path}: {exc.strerror}") from exc
    if len(data) > max_bytes:
        raise ConfigurationError(
            f"{path} is longer than {max_bytes} B: it is not what it should be"
        )
    return data


@contextmanager
def locked(directory: Path, *, patience: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Keep other processes from changing what is in the directory; they wait, and not for long.

    Args:
        patience: seconds that the lock is waited for. That blocks: 0 where others are served meanwhile, whose caller
            asks again.

    Raises:
        DirectoryLockedError: another process has it; says which one.
        ConfigurationError: the lock cannot be had.
    """
    descriptor = open_private(directory / "lock")
    try:
        try:
            if not _lock(descriptor, until=time.monotonic() + patience):
                raise DirectoryLockedError(
                    f"cannot lock {directory}: another process changes what is in it ({holder_of(descriptor)}): if it "
                    "was stopped, let it go on (kill -CONT), or end it"
                )
        except OSError as exc:
            raise ConfigurationError(f"cannot lock {directory}: {exc.strerror}") from exc
        with suppress(OSError):  # on a full disk: whoever waits is told less
            note_holder(descriptor)
        try:
            yield
        finally:
            with suppress(OSError):
                os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, until: float) -> bool:
    """Whether the lock could be had. It is asked for again and again: a process that was stopped keeps its locks."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(LOCK_AGAIN)
        else:
            return True


def note_holder(descriptor: int) -> None:
    """Write to a file that was locked that this process has it.

    Raises:
        OSError: it cannot be written.
    """
    told = {"pid": os.getpid(), "host": platform.node(), "since": int(time.time())}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(told).encode(), 0)


def holder_of(descriptor: int) -> str:
    """Return the process that has a file locked, as it has written there; for people."""
    try:
        told = json.loads(os.pread(descriptor, MAX_HOLDER_BYTES, 0))
        return f"process {told['pid']} on {told['host']}, since {format_time(float(told['since']))}"
    except (OSError, ValueError, LookupError, TypeError):
        return "it has not said yet which process it is"
