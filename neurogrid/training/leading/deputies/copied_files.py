"""Files of a run that its deputy has beside the journal: the tokenizer, and the newest checkpoint.

Members' optimisers are not among them: where a deputy has to go back to a checkpoint, members begin with new ones.

Source: protocol_spec/training/terms.md, "Lines".
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from neurogrid.p2p.transfer import Transfers
from neurogrid.training.checkpoints import latest_checkpoint, new_checkpoint, prune
from neurogrid.training.data.blob_files import OfferedFiles, fetch_file
from neurogrid.training.data.slices import TOKENIZER_NAME
from neurogrid.training.runs.run_directory import RunDirectory

__all__ = ["OfferedCopies", "fetch_copies", "forget_unfinished"]

logger = logging.getLogger(__name__)

_TOKENIZER: Final = re.compile(r"data/tokenizer/([A-Za-z0-9_.-]{1,64})")
_CHECKPOINT: Final = re.compile(
    r"checkpoints/step-(0|[1-9][0-9]{0,17})/((?:training/)?[A-Za-z0-9_.-]{1,64})"
)
_FETCH_TIMEOUT: Final = 600.0
# In the directory of the run: files of a checkpoint as they come, by their blobs.
_UNFINISHED: Final = ".copies"


@dataclass(frozen=True, slots=True, eq=False)
class _Copies:
    """Files that the deputy was told of at a time: the blob of each, and where all of them lie."""

    blobs: Mapping[str, bytes]
    paths: frozenset[Path]


class OfferedCopies:
    """The same, with the leader.

    A checkpoint that the deputy has begun to fetch is offered until it has begun with a newer one: a deputy that takes
    longer than the run from one checkpoint to the next would have none otherwise.

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
        # The newest is the last; of those before it the one that is being fetched.
        self._copies: list[_Copies] = []
        self.version = 0
        self.names: tuple[str, ...] = ()
        self.blobs: tuple[bytes, ...] = ()

    async def refresh(self) -> None:
        """Offer what there is by now, if it is other than before."""
        self._withdraw_others()
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
            self._withdraw(found[name] for name in blobs)
            return
        self._copies.append(_Copies(blobs, frozenset(found[name] for name in blobs)))
        self._latest = latest
        self.names, self.blobs = tuple(blobs), tuple(blobs.values())
        self.version += 1
        self._withdraw_others()

    def _withdraw_others(self) -> None:
        """Offer the newest, and what was asked for last."""
        if len(self._copies) < 2:
            return
        before, self._copies = self._copies, [max(self._copies, key=self._asked), self._copies[-1]]
        if self._copies[0] is self._copies[1] or not self._asked(self._copies[0]):
            del self._copies[0]
        self._withdraw(path for each in before for path in each.paths)

    def _asked(self, copies: _Copies) -> int:
        """Place, in the order of all askings, of the last one for a file that is in these alone."""
        others = {
            blob for each in self._copies if each is not copies for blob in each.blobs.values()
        }
        return self._offered.asked(set(copies.blobs.values()) - others)

    def _withdraw(self, paths: Iterable[Path]) -> None:
        """Offer these no more, as far as they are of no copies."""
        for path in {*paths}.difference(*(each.paths for each in self._copies)):
            self._offered.withdraw(path)


def forget_unfinished(directory: RunDirectory) -> None:
    """Remove what there is of a checkpoint that has not come as a whole."""
    shutil.rmtree(directory.path / _UNFINISHED, ignore_errors=True)


async def fetch_copies(
    files: Mapping[str, bytes],
    directory: RunDirectory,
    transfers: Transfers,
    peers: Sequence[str],
    *,
    keep: int,
) -> None:
    """Have these files in the directory of a run; names that are no such files are left out.

    Where one of a checkpoint does not come, the next call for the same goes on with what is here.

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
        folder, unfinished = directory.checkpoints, directory.path / _UNFINISHED
        if (folder / f"step-{step}").exists():
            continue
        await trio.to_thread.run_sync(_keep_parts, unfinished, parts.values())
        for blob in parts.values():
            if not (path := unfinished / blob.hex()).exists():
                await fetch(blob, path)
        async with new_checkpoint(folder, step) as draft:
            for within, blob in parts.items():
                to = draft.path / within
                with draft.writing():
                    await trio.to_thread.run_sync(_link, unfinished / blob.hex(), to)
        await trio.to_thread.run_sync(forget_unfinished, directory)
        await trio.to_thread.run_sync(prune, folder, keep)
        logger.info("has the checkpoint of step %d", step)


def _keep_parts(folder: Path, blobs: Iterable[bytes]) -> None:
    """Remove what is of no file of a checkpoint, as that is of one before."""
    wanted = {blob.hex() for blob in blobs}
    for path in folder.glob("*"):
        if path.name.partition("-")[0] not in wanted:
            # Of a disk that takes nothing it is said where something is written.
            with suppress(OSError):
                path.unlink()


def _link(file: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, to)
    except OSError:  # a disk that has no links
        shutil.copyfile(file, to)


def _place(name: str) -> tuple[int | None, str] | None:
    """The step of a checkpoint and the file within; of the tokenizer None and the file. None for another name."""
    if (match := _TOKENIZER.fullmatch(name)) is not None:
        found: tuple[int | None, str] = None, match[1]
    elif (match := _CHECKPOINT.fullmatch(name)) is not None:
        found = int(match[1]), match[2]
    else:
        return None
    return None if found[1].rpartition("/")[2].startswith(".") else found
