"""Temporary directories that go with the process, also when it ends on the spot.

What is left by SIGKILL alone is found under the system's directory for such things, by its prefix.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["remove_temporary_directories", "temporary_directory"]

# Of this process, at this moment.
_directories: set[str] = set()


@contextmanager
def temporary_directory(prefix: str) -> Iterator[Path]:
    """Make a directory for this user alone (0700), for as long as the block runs."""
    with TemporaryDirectory(prefix=prefix) as name:
        _directories.add(name)
        try:
            yield Path(name)
        finally:
            _directories.discard(name)


def remove_temporary_directories() -> None:
    """Remove those that there are: for who ends the process and leaves no block. Takes no lock, raises nothing."""
    for name in tuple(_directories):
        shutil.rmtree(name, ignore_errors=True)
