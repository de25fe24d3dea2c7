"""The lock by which a host has a cluster's directory while it runs: only one at a time may be what the directory says.

DIR/running          held, by a lock that ends with its process, by the host that runs with the directory; says which
                     process that is, and since when

Two hosts with one identity would take each other's connections. A program that changes files in the directory and
ends (`locked`) is not kept out. Other things that one process at a time may have are locked in the same way
(`held_alone`).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.trust.private_files import holder_of, note_holder, open_private

__all__ = ["DirectoryInUseError", "held", "held_alone"]

FILE: Final = "running"


class DirectoryInUseError(ConfigurationError):
    """Another process runs with the directory."""


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Run with a cluster's directory, and nobody else does until the block is left or the process has ended.

    Raises:
        DirectoryInUseError: somebody does; says who, and since when.
        ConfigurationError: it cannot be written to.
    """
    with held_alone(
        directory / FILE,
        lambda holder: (
            f"a coordinator runs with {directory} already: {holder}. Two would take each other's workers: end that "
            "one first, make a directory for a second one of this cluster (neurogrid-coordinator --cluster "
            f"{directory} --copy-to DIR), or another cluster (--new-cluster DIR). Tickets and revocations need no end "
            "of it"
        ),
    ):
        yield


@contextmanager
def held_alone(path: Path, in_use: Callable[[str], str]) -> Iterator[None]:
    """Hold a lock file, made if it is not there, until the block is left or the process has ended.

    Args:
        path: of the lock file, which says who holds it.
        in_use: makes of who does the text of the error.

    Raises:
        DirectoryInUseError: somebody holds it.
        ConfigurationError: it cannot be written to.
    """
    descriptor = open_private(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise DirectoryInUseError(in_use(holder_of(descriptor))) from exc
        except OSError as exc:
            raise ConfigurationError(f"cannot lock {path}: {exc.strerror}") from exc
        try:
            note_holder(descriptor)
        except OSError as exc:
            raise ConfigurationError(f"cannot write {path}: {exc.strerror}") from exc
        yield
    finally:
        os.close(descriptor)
