"""Temporary directories that go with the process, also when it ends on the spot.

What is left by SIGKILL goes when the next directory of its kind is made: a directory is held by a lock, which ends with
its process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

__all__ = ["remove_temporary_directories", "temporary_directory"]

_HELD: Final = ".held"

# Of this process, at this moment.
_directories: set[str] = set()


@contextmanager
def temporary_directory(prefix: str, *, parent: Path | None = None) -> Iterator[Path]:
    """Make a directory for this user alone (0700), for as long as the block runs.

    Args:
        parent: where it is made; None for the system's directory for such things.
    """
    _remove_abandoned(Path(tempfile.gettempdir()) if parent is None else parent, prefix)
    with TemporaryDirectory(prefix=prefix, dir=parent) as name:
        held = _hold(Path(name))
        _directories.add(name)
        try:
            yield Path(name)
        finally:
            _directories.discard(name)
            os.close(held)


def _hold(directory: Path) -> int:
    """Lock a directory until the descriptor is closed."""
    path = directory / f"{_HELD}.new"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    path.rename(directory / _HELD)  # nobody finds it unlocked
    return descriptor


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove directories whose process has ended without removing them."""
    for directory in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # somebody else's, or gone by now
            descriptor = os.open(directory / _HELD, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(descriptor)


def remove_temporary_directories() -> None:
    """Remove those that there are: for who ends the process and leaves no block. Takes no lock, raises nothing."""
    for name in tuple(_directories):
        shutil.rmtree(name, ignore_errors=True)
