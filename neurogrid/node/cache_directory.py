"""Directory in which weights and hashes are kept between runs, and the limit of its size.

    ~/.cache/neurogrid/blobs/      layers that a worker was sent, by their content
    ~/.cache/neurogrid/models/     which layer of a model has which content: a hint
    ~/.cache/neurogrid/hashes/     the hashes of a coordinator's files, so that they are not hashed again

The limit is of layers and hints together. Nothing in it is needed, and all of it may be deleted at any time.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from neurogrid.errors import ConfigurationError

__all__ = ["CacheSettings", "default_cache_directory", "open_directory"]

logger = logging.getLogger(__name__)


def default_cache_directory() -> Path:
    """The user's own: `neurogrid` in $XDG_CACHE_HOME, which is ~/.cache where it is not set."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative one is to be ignored (XDG Base Directory Specification 0.8).
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "neurogrid"


@dataclass(frozen=True)
class CacheSettings:
    """A cache on disk.

    Attributes:
        directory: made if need be, for its owner alone.
        max_bytes: what layers and hints may take; None for a share of what the disk has free.
        is_required: whether it is an error that the directory cannot be used; else it is said, and there is no cache.
    """

    directory: Path
    max_bytes: int | None = None
    is_required: bool = False


def open_directory(settings: CacheSettings, name: str) -> Path | None:
    """The directory of that name in the cache, made if need be; None, with a warning, where it cannot be had.

    Raises:
        ConfigurationError: it cannot be had, and is required.
    """
    path = settings.directory / name
    try:
        settings.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(0, "it is not writable")
    except OSError as exc:
        text = f"the cache directory {path} cannot be used: {exc.strerror or exc}"
        if settings.is_required:
            raise ConfigurationError(
                f"{text}; give another with --cache-dir, or --no-cache"
            ) from exc
        logger.warning("%s; there is no cache", text)
        return None
    return path
