"""Slices that a member has on its own disk: used where they lie, never fetched, and given to others.

A file is known by its name, and believed where its content has that id. One that is damaged is said, and not used: the
slice is fetched, as if there were none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import trio

from neurogrid.errors import ConfigurationError
from neurogrid.p2p.transfer import BlobSource
from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.data.slice_file import SliceFile
from neurogrid.training.data.slices import slice_path

__all__ = ["OwnSlices"]

logger = logging.getLogger(__name__)


class OwnSlices:
    """Slices in directories of the member's owner. They are only read.

    Args:
        directories: each a data directory, or what of one is there, or one with nothing but slices.

    Raises:
        ConfigurationError: one of them is not there.
    """

    def __init__(self, directories: Sequence[Path] = ()) -> None:
        for directory in directories:
            if not directory.is_dir():
                raise ConfigurationError(f"{directory}: there is no such directory with data")
        self._directories = tuple(directories)
        self._paths: dict[bytes, Path] = {}
        self._files: dict[bytes, SliceFile] = {}

    async def look_for(self, manifest: Manifest) -> tuple[int, ...]:
        """Find what is here of a data set, in the place of one before.

        Returns:
            Numbers of slices to train on, rising. What is in their files is seen when they are needed.
        """
        self._paths, self._files = await trio.to_thread.run_sync(self._find, manifest), {}
        return tuple(
            number for number, info in enumerate(manifest.slices) if info.blob_id in self._paths
        )

    def holds(self, blob_id: bytes) -> bool:
        """Whether a slice is here, as far as is known."""
        return blob_id in self._paths

    async def find(self, blob_id: bytes) -> Path | None:
        """The file of a slice, verified; None where there is none, or another content in it."""
        file = await self._open(blob_id)
        return file.path if file is not None else None

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        """See `TransferPolicy.provide`."""
        return await self._open(blob_id)

    async def _open(self, blob_id: bytes) -> SliceFile | None:
        path = self._paths.get(blob_id)
        if path is None:
            return None
        file = await trio.to_thread.run_sync(self._verified, path, blob_id)
        if file is None:
            self._paths.pop(blob_id, None)
        return file

    def _find(self, manifest: Manifest) -> dict[bytes, Path]:
        """Find files that have the name of a slice, and its length, in a thread."""
        found: dict[bytes, Path] = {}
        wrong: list[Path] = []
        for info in (*manifest.slices, *manifest.held_out) if self._directories else ():
            for path in self._candidates(info):
                try:
                    num_bytes = path.stat().st_size
                except OSError:
                    continue
                if num_bytes == info.num_bytes:
                    found.setdefault(info.blob_id, path)
                else:
                    wrong.append(path)
        if wrong:
            logger.warning(
                "%s and %d other slices have not the length that the data's have: they are fetched instead",
                wrong[0],
                len(wrong) - 1,
            )
        return found

    def _candidates(self, info: SliceInfo) -> Iterator[Path]:
        for directory in self._directories:
            path = slice_path(directory, info)
            yield path
            yield directory / path.name

    def _verified(self, path: Path, blob_id: bytes) -> SliceFile | None:
        """Open a slice in a thread, hashed where it is not the file that was hashed before; None where it is wrong."""
        try:
            file = self._files.get(blob_id)
            if file is None or file.has_changed():
                file = self._files[blob_id] = SliceFile(path)
        except OSError as exc:
            logger.warning("%s cannot be read (%s): it is fetched instead", path, exc.strerror)
            return None
        if file.info.blob_id != blob_id:
            logger.warning("%s is not what its name says: it is fetched instead", path)
            return None
        return file
