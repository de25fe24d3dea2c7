"""Files of a run that its deputy has beside the journal: the tokenizer, and the newest checkpoint.

Members' optimisers are not among them: where a deputy has to go back to a checkpoint, members begin with new ones.

Source: protocol_spec/training/terms.md, "Lines".
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import trio

from neurogrid.p2p.transfer import Transfers
from neurogrid.training.checkpoints import latest_checkpoint, new_checkpoint, prune
from neurogrid.training.data.blob_files import OfferedFiles, fetch_file
from neurogrid.training.data.slices import TOKENIZER_NAME
from neurogrid.training.runs.run_directory import RunDirectory

__all__ = ["OfferedCopies", "fetch_copies"]

logger = logging.getLogger(__name__)

_TOKENIZER: Final = re.compile(r"data/tokenizer/([A-Za-z0-9_.-]{1,64})")
_CHECKPOINT: Final = re.compile(
    r"checkpoints/step-(0|[1-9][0-9]{0,17})/((?:training/)?[A-Za-z0-9_.-]{1,64})"
)
_FETCH_TIMEOUT: Final = 600.0


class OfferedCopies:
    """The same, with the leader.

    Args:
        directory: of the run.
        data: where its data lie.
        offered: gives them to peers.

    Attributes:
        version: rises when there are others.
        names, blobs: what they are called, and the blob that each is.
    """

    def __init__(self, directory: RunDirectory, data: Path, offered: OfferedFiles) -> None:
        self._directory, self._data, self._offered = directory, data, offered
        self._latest: Path | None = None
        self._paths: list[Path] = []
        self.version = 0
        self.names: tuple[str, ...] = ()
        self.blobs: tuple[bytes, ...] = ()

    async def refresh(self) -> None:
        """Offer what there is by now, if it is other than before."""
        latest = latest_checkpoint(self._directory.checkpoints)
        if self.version and latest == self._latest:
            return
        found = {
            f"data/{TOKENIZER_NAME}/{path.name}": path
            for path in sorted((self._data / TOKENIZER_NAME).glob("*"))
        }
        if latest is not None:
            for path in sorted((*latest.glob("*"), *(latest / "training").glob("*"))):
                found[f"checkpoints/{latest.name}/{path.relative_to(latest)}"] = path
        blobs = {}
        try:
            for name, path in found.items():
                if path.is_file() and path.stat().st_size and _place(name) is not None:
                    blobs[name] = await self._offered.offer(path)
        except OSError as exc:  # a checkpoint that was removed meanwhile: there is a newer one
            logger.info("the deputy gets no checkpoint yet: %s", exc)
            return
        for path in self._paths:
            if path not in found.values():
                self._offered.withdraw(path)
        self._paths, self._latest = list(found.values()), latest
        self.names, self.blobs = tuple(blobs), tuple(blobs.values())
        self.version += 1


async def fetch_copies(
    files: Mapping[str, bytes],
    directory: RunDirectory,
    transfers: Transfers,
    peers: Sequence[str],
    *,
    keep: int,
) -> None:
    """Have these files in the directory of a run; names that are no such files are left out.

    Args:
        files: the blob of each, by its name.
        keep: checkpoints that are kept.

    Raises:
        NeuroGridError: they cannot be fetched, or written. A checkpoint is there whole or not at all.
    """

    async def fetch(blob: bytes, path: Path) -> None:
        await fetch_file(transfers, blob, list(peers), path, timeout=_FETCH_TIMEOUT)

    checkpoints: dict[int, dict[str, bytes]] = {}
    for name, blob in files.items():
        if (place := _place(name)) is None:
            continue
        step, within = place
        if step is not None:
            checkpoints.setdefault(step, {})[within] = blob
        elif not (path := directory.data / TOKENIZER_NAME / within).exists():
            await fetch(blob, path)
    for step, parts in sorted(checkpoints.items()):
        folder = directory.checkpoints
        if (folder / f"step-{step}").exists():
            continue
        async with new_checkpoint(folder, step) as draft:
            for within, blob in parts.items():
                await fetch(blob, draft.path / within)
        await trio.to_thread.run_sync(prune, folder, keep)
        logger.info("has the checkpoint of step %d", step)


def _place(name: str) -> tuple[int | None, str] | None:
    """The step of a checkpoint and the file within; of the tokenizer None and the file. None for another name."""
    if (match := _TOKENIZER.fullmatch(name)) is not None:
        found: tuple[int | None, str] = None, match[1]
    elif (match := _CHECKPOINT.fullmatch(name)) is not None:
        found = int(match[1]), match[2]
    else:
        return None
    return None if found[1].rpartition("/")[2].startswith(".") else found
