"""`--cache-dir`, `--cache-limit` and `--no-cache`: what is kept on disk between runs."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from neurogrid.errors import ConfigurationError

if TYPE_CHECKING:
    from neurogrid.node.cache_directory import CacheSettings

__all__ = ["add_cache_options", "cache_of"]

logger = logging.getLogger(__name__)


def add_cache_options(
    parser: argparse.ArgumentParser,
    what: str,
    *,
    size: Callable[[str], int] | None,
    with_prefixes: bool = False,
) -> None:
    """The options of a command that keeps `what`.

    Args:
        size: the type of `--cache-limit`, for a command that has it.
        with_prefixes: whether it has `--prefix-cache`, too, of that type.
    """
    group = parser.add_argument_group("cache")
    group.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help=f"keep {what} here between runs (default: neurogrid in $XDG_CACHE_HOME or ~/.cache)",
    )
    if size is not None:
        group.add_argument(
            "--cache-limit",
            type=size,
            metavar="BYTES",
            help="what it may take, e.g. 50GiB (default: a fifth of what the disk has free); what was used "
            "least recently goes first",
        )
    if with_prefixes and size is not None:
        group.add_argument(
            "--prefix-cache",
            type=size,
            metavar="BYTES",
            help="besides, what the caches of sessions that nobody goes on with may take there, e.g. 20GiB: what a "
            "prompt has in common with one of them is read, not computed (default: none are kept)",
        )
    group.add_argument("--no-cache", action="store_true", help="keep nothing on disk")


def cache_of(options: argparse.Namespace) -> CacheSettings | None:
    """The cache that the options ask for; None for none.

    Raises:
        ConfigurationError: contradicting options.
    """
    from neurogrid.node.cache_directory import CacheSettings, default_cache_directory

    limit: int | None = getattr(options, "cache_limit", None)
    if options.no_cache:
        if options.cache_dir is not None or limit is not None:
            raise ConfigurationError(
                "give either --no-cache, or --cache-dir and --cache-limit, not both"
            )
        if getattr(options, "prefix_cache", None) is not None:
            raise ConfigurationError("--prefix-cache is of no use with --no-cache: leave one out")
        return None
    directory: Path | None = options.cache_dir
    if directory is None:
        try:
            directory = default_cache_directory()
        except RuntimeError:  # a service of a user without a home
            logger.warning("this user has no home directory: there is no cache without --cache-dir")
            return None
    return CacheSettings(directory, limit, is_required=options.cache_dir is not None)
