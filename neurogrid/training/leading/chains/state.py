"""The state of all stages after a step, as their leader keeps it on disk: a file for each piece.

    RUN/stages/step-40/layer.3.safetensors    what learns of a layer, and the optimiser's state of it

A state is there as a whole or not at all; the one before stays until then. Pieces are of layers, so that a chain that
is cut otherwise can go on from them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import trio

from neurogrid.errors import (
    CapacityError,
    CheckpointError,
    ConfigurationError,
    NeuroGridError,
    PeerRefusedError,
    RemoteProtocolError,
    TransportError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.transfer import Transfers
from neurogrid.training.checkpoints import require_whole, sync, sync_tree
from neurogrid.training.data.blob_files import OfferedFiles, fetch_file

__all__ = ["ChainState"]

_NAME: Final = re.compile(r"step-(\d{1,18})")
# What pieces of state are called: files have these names.
_PIECE: Final = re.compile(r"first|last|layer\.\d{1,5}", re.ASCII)
_SUFFIX: Final = ".safetensors"
_PARTIAL: Final = ".partial"
# For a piece, and the least that comes of it in a second, where two come at a time. Of a layer of 200 million numbers
# that learn it is 2.6 GB. A peer that is silent has a minute.
_FETCH_TIMEOUT: Final = 600.0
_SENT_PER_SECOND: Final = 1024**2
# Files that are fetched at a time: each may be in memory.
_MAX_FETCHES: Final = 2


class ChainState:
    """The newest state that is kept. Made by `open`.

    Attributes:
        step: steps that it has made; 0 where there is none.
        blobs: ids of its pieces by name, which members fetch.
    """

    def __init__(self, folder: Path, offered: OfferedFiles) -> None:
        self._folder, self._offered = folder, offered
        self.step = 0
        self.blobs: dict[str, bytes] = {}
        self.files: dict[str, Path] = {}

    @classmethod
    async def open(cls, folder: Path, offered: OfferedFiles) -> ChainState:
        """Open the state that a leader before this one has kept, or an empty one where there is none.

        Args:
            folder: made where it is not there.
            offered: gives the pieces to members.

        Raises:
            ConfigurationError: the directory cannot be used, or a file of the state is damaged.
        """
        state = cls(folder, offered)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for each in folder.glob(f"*{_PARTIAL}"):
                shutil.rmtree(each)
            found = [m for m in map(_NAME.fullmatch, (p.name for p in folder.iterdir())) if m]
        except OSError as exc:
            raise ConfigurationError(f"{folder}: cannot be used: {exc.strerror or exc}") from exc
        if found:
            step = max(int(match[1]) for match in found)
            for path in _files_of(folder / f"step-{step}").values():
                try:
                    await trio.to_thread.run_sync(require_whole, path)
                except CheckpointError as exc:
                    raise ConfigurationError(
                        f"{exc}. Put a copy of {path.parent} in its place; without that directory the run begins anew"
                    ) from exc
            await state._take(step)
        return state

    async def keep(
        self,
        step: int,
        pieces: Mapping[str, tuple[str, bytes]],
        transfers: Transfers,
        *,
        piece_bytes: int = 0,
    ) -> None:
        """Fetch the pieces of a state, in the place of the one before.

        Args:
            step: that it has made.
            pieces: who has each, and which blob it is, by name.
            piece_bytes: of the largest; it has time by that.

        Raises:
            TransportError: one of them is not to be had, or is none of a state; the text names it. The state before is
                whole.
            ConfigurationError: the directory cannot be written, or there is no room for one.
        """
        for name in pieces:
            if not _PIECE.fullmatch(name):
                raise TransportError(f"{name!r} is no piece of a state")
        draft = self._folder / f"step-{step}{_PARTIAL}"
        final = self._folder / f"step-{step}"
        limiter = trio.CapacityLimiter(_MAX_FETCHES)
        timeout = _FETCH_TIMEOUT + piece_bytes / _SENT_PER_SECOND

        async def fetch(name: str, peer_id: str, blob_id: bytes) -> None:
            path = draft / f"{name}{_SUFFIX}"
            async with limiter:
                try:
                    await fetch_file(transfers, blob_id, [peer_id], path, timeout=timeout)
                    # Whoever leads next would not open it, and the state before is removed.
                    await trio.to_thread.run_sync(require_whole, path)
                except (
                    CheckpointError,
                    TransportError,
                    PeerRefusedError,
                    RemoteProtocolError,
                ) as exc:
                    raise TransportError(f"{name}: {exc}") from exc
                except (CapacityError, ConfigurationError) as exc:
                    raise ConfigurationError(
                        f"{draft}: cannot be written: {exc}. Make room, and go on with --resume"
                    ) from exc

        try:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            with unwrap_errors():
                async with trio.open_nursery() as nursery:
                    for name, (peer_id, blob_id) in pieces.items():
                        nursery.start_soon(fetch, name, peer_id, blob_id)
            await trio.to_thread.run_sync(sync_tree, draft)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(draft, final)
            # Before the state before is removed: a machine that loses its power has one of the two.
            await trio.to_thread.run_sync(sync, self._folder)
        except (OSError, NeuroGridError) as exc:
            # The next state is of another step, and would find less room.
            await trio.to_thread.run_sync(shutil.rmtree, draft, True)
            if isinstance(exc, NeuroGridError):
                raise
            raise ConfigurationError(
                f"{draft}: cannot be written: {exc.strerror or exc}. Make room, and go on with --resume"
            ) from exc
        await self._take(step)

    async def _take(self, step: int) -> None:
        """Let the state of a step be the newest, and remove others."""
        directory = self._folder / f"step-{step}"
        for path in self.files.values():
            self._offered.withdraw(path)
        self.step = step
        self.files = _files_of(directory)
        self.blobs = {name: await self._offered.offer(path) for name, path in self.files.items()}
        for each in self._folder.iterdir():
            if _NAME.fullmatch(each.name) and each != directory:
                await trio.to_thread.run_sync(shutil.rmtree, each, True)


def _files_of(directory: Path) -> dict[str, Path]:
    """The pieces of a state, by name."""
    return {p.name.removesuffix(_SUFFIX): p for p in sorted(directory.glob("*" + _SUFFIX))}
