"""A new checkpoint: filled under a temporary name, and there under its own when all of it is on the disk.

A process or machine that dies meanwhile, or a disk that is full, leaves the ones before as they were, and `latest`
naming the newest of them. What did not change since the newest is a link to the same file there.

A draft blocks the thread that it is used in; `new_checkpoint` begins and ends one in another.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import torch
import trio
from safetensors import SafetensorError
from safetensors.torch import save_file

from neurogrid.errors import CheckpointError, ConfigurationError
from neurogrid.training.checkpoints.places import (
    CONFIGS,
    LATEST,
    MEMBERS,
    OUTER,
    STATE,
    TEMPORARY,
    TOKENIZER_FILES,
    TRAINING,
    name_of,
)
from neurogrid.training.checkpoints.reading import checkpoints_of, latest_checkpoint

__all__ = ["CheckpointDraft", "new_checkpoint", "prune", "sync", "sync_tree"]


class CheckpointDraft:
    """A checkpoint that is being filled. Made by `begin`; then it is either committed or discarded.

    Attributes:
        path: where config.json and safetensors go.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._final = folder / name_of(step)
        self.path = folder / f"{TEMPORARY}{self._final.name}"

    @classmethod
    def begin(cls, folder: Path, step: int) -> CheckpointDraft:
        """An empty draft of the checkpoint of a step. One at a time in a directory.

        Args:
            folder: `checkpoints` of the run; made where it is not there.

        Raises:
            CheckpointError: `latest` names the checkpoint of that step already, or nothing can be written.
        """
        draft = cls(folder, step)
        with draft.writing():
            folder.mkdir(parents=True, exist_ok=True)
            _remove_unfinished(folder)
            # Another may be left of a leader that died before it was the latest, or of a run that was gone back in.
            if latest_checkpoint(folder) == draft._final:
                raise CheckpointError(f"{draft._final}: is there already")
            draft.path.mkdir()
        return draft

    def add_tokenizer(self, directory: Path) -> None:
        """Copy a tokenizer's files.

        Raises:
            ConfigurationError: there are none.
        """
        found = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
        if not found:
            raise ConfigurationError(f"{directory}: has no tokenizer, as tokenizer.json would be")
        for name in found:
            with self.writing():
                shutil.copyfile(directory / name, self.path / name)

    def add_training(
        self,
        state: Mapping[str, Any],
        *,
        outer: Mapping[str, torch.Tensor],
        members: Mapping[int, Path],
    ) -> None:
        """Write what the run needs to go on.

        Args:
            state: what JSON has: round, step, tokens, the dealer's state, seats.
            outer: vectors of the outer optimiser by name, float32: momentum. The weights are the model itself.
            members: files of inner optimisers, by seat; copied, or linked to where they are on the same disk, so they
                must not be written to afterwards.
        """
        folder = self.path / TRAINING
        text = json.dumps(state, indent=1, sort_keys=True, allow_nan=False)
        with self.writing():
            (folder / MEMBERS).mkdir(parents=True)
            (folder / STATE).write_text(text, encoding="utf-8")
            save_file({name: each.contiguous() for name, each in outer.items()}, folder / OUTER)
            for seat, file in members.items():
                to = folder / MEMBERS / f"{seat:d}.safetensors"
                if not _has_linked(file, to):
                    shutil.copyfile(file, to)

    def commit(self) -> Path:
        """Make it the checkpoint of its step, and the latest.

        Raises:
            CheckpointError: it has no model, or it cannot be written. The ones before are whole.
        """
        has_config = any((self.path / name).is_file() for name in CONFIGS)
        if not has_config or not any(self.path.glob("*.safetensors")):
            raise CheckpointError(f"{self._final}: no model was written to this checkpoint")
        with self.writing():
            before = latest_checkpoint(self._folder)
            if before is not None:
                _link_unchanged(self.path, before)
            sync_tree(self.path)
            if self._final.exists():
                self._final.rename(self._folder / f"{TEMPORARY}{self._final.name}-replaced")
            self.path.rename(self._final)
            sync(self._folder)
            _name_latest(self._folder, self._final)
            _remove_unfinished(self._folder)
        return self._final

    def discard(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Let what cannot be written within the block be a `CheckpointError` that says so."""
        try:
            yield
        except (OSError, SafetensorError) as exc:
            raise CheckpointError(
                f"{self._final}: cannot be written: {exc}; make room there. The checkpoints before it are whole"
            ) from exc


@asynccontextmanager
async def new_checkpoint(folder: Path, step: int) -> AsyncIterator[CheckpointDraft]:
    """Make the checkpoint of a step: fill the draft within the block; at its end `latest` names it.

    Where the block raises or is cancelled, nothing is left of the draft. Errors and arguments as of
    `CheckpointDraft.begin` and `commit`.
    """
    draft = await trio.to_thread.run_sync(CheckpointDraft.begin, folder, step)
    try:
        yield draft
        await trio.to_thread.run_sync(draft.commit)
    except BaseException:  # cancelled, too: nothing of it is left
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(draft.discard)
        raise


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` checkpoints, never the one that `latest` names; those that are gone.

    Raises:
        CheckpointError: one of them cannot be removed.
    """
    if keep < 1:
        raise ValueError(f"{keep} checkpoints are none to go on from")
    latest = latest_checkpoint(folder)
    gone = [each for each in checkpoints_of(folder)[:-keep] if each != latest]
    try:
        for each in gone:
            # In one step: what is half removed is no checkpoint any more.
            each.rename(folder / f"{TEMPORARY}{each.name}-removed")
        _remove_unfinished(folder)
    except OSError as exc:
        raise CheckpointError(
            f"{folder}: older checkpoints cannot be removed: {exc.strerror or exc}"
        ) from exc
    return gone


def _remove_unfinished(folder: Path) -> None:
    """Remove what a process that died has left."""
    for each in folder.glob(f"{TEMPORARY}*"):
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()


def _link_unchanged(draft: Path, before: Path) -> None:
    """Let each file that has the bytes of its like in another checkpoint be that file."""
    for root, _, names in os.walk(draft):
        for name in names:
            file = Path(root, name)
            same = before / file.relative_to(draft)
            if same.is_file() and filecmp.cmp(file, same, shallow=False):
                link = file.with_name(f"{TEMPORARY}{name}")
                if _has_linked(same, link):
                    link.replace(file)


def _has_linked(file: Path, to: Path) -> bool:
    """Whether `to` is the same file now; not on another disk, or one that has no links."""
    try:
        os.link(file, to)
    except OSError:
        return False
    return True


def _name_latest(folder: Path, path: Path) -> None:
    """Let `latest` be a link to a checkpoint, in one step."""
    link = folder / f"{TEMPORARY}{LATEST}"
    link.symlink_to(path.name)
    link.replace(folder / LATEST)
    sync(folder)


def sync_tree(folder: Path) -> None:
    """Have a directory, and all that is in it, on the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            sync(Path(root, name))
        sync(Path(root))


def sync(path: Path) -> None:
    """Have a file or directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
