"""Vectors that two processes share: files in a private directory, in memory where the system has room there.

The whole file is reserved when it is made, so that a full disk is an error then, not a signal later.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from neurogrid.errors import ConfigurationError
from neurogrid.temporary import temporary_directory

__all__ = ["make_shared", "map_shared", "shared_directory"]

_IN_MEMORY = Path("/dev/shm")


@contextmanager
def shared_directory() -> Iterator[Path]:
    """A directory for this user alone, in memory where there is such a place, for as long as the block runs."""
    parent = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    with temporary_directory("neurogrid-trainer-", parent=parent) as folder:
        yield folder


def make_shared(path: Path, num_elements: int) -> None:
    """Make a file for a vector of float32.

    Raises:
        ConfigurationError: there is no room for it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, max(4 * num_elements, 1))
    except OSError as exc:
        path.unlink()
        if exc.errno not in (errno.ENOSPC, errno.EFBIG):
            raise
        raise ConfigurationError(
            f"{path.parent} has no room for {4 * num_elements} bytes of weights: make room there, or mount it larger"
        ) from exc
    finally:
        os.close(descriptor)


def map_shared(path: Path, num_elements: int) -> torch.Tensor:
    """The vector in such a file, float32 [num_elements]: what one process writes, the other has."""
    return torch.from_file(str(path), shared=True, size=num_elements, dtype=torch.float32)
