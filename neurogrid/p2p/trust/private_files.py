"""Files that their owner alone may read, replaced in one step, so that a crash leaves the old or the new."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from neurogrid.errors import ConfigurationError

__all__ = ["locked", "make_private_directory", "read_private", "write_private"]


def make_private_directory(path: Path) -> None:
    """Make the directory (0700) if it is not there.

    Raises:
        ConfigurationError: it cannot be made.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigurationError(f"cannot make the directory {path}: {exc.strerror}") from exc


def write_private(path: Path, data: bytes) -> None:
    """Write a file (0600) in place of the one that is there.

    Raises:
        ConfigurationError: it cannot be written.
    """
    new = path.parent / f"{path.name}.new"
    try:
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            if os.geteuid() == 0:
                # Root looks after a service's directory, and the service has to read it.
                owner = path.parent.stat()
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        _sync(path.parent)
    except OSError as exc:
        raise ConfigurationError(f"cannot write {path}: {exc.strerror}") from exc


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
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes from changing what is in the directory; they wait.

    Raises:
        ConfigurationError: the lock cannot be had.
    """
    descriptor = -1
    try:
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as exc:
        if descriptor >= 0:
            os.close(descriptor)
        raise ConfigurationError(f"cannot lock {directory}: {exc.strerror}") from exc
    try:
        yield
    finally:
        os.close(descriptor)
