"""Journal, figures, and checkpoints made of the stages' state, as the leader of a chain keeps them on disk."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trio
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from neurogrid.errors import CheckpointError, NeuroGridError
from neurogrid.training.checkpoints import (
    CheckpointDraft,
    latest_checkpoint,
    new_checkpoint,
    prune,
    read_checkpoint,
)
from neurogrid.training.leading.chains.model_files import write_model
from neurogrid.training.leading.chains.state import ChainState
from neurogrid.training.leading.round_figures import RoundFigures
from neurogrid.training.leading.settings import LeaderProgress
from neurogrid.training.runs.entries import CheckpointEntry, Entry
from neurogrid.training.runs.journal import Journal
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.state import RunState
from neurogrid.training.stages.lora import write_adapter

__all__ = ["ChainKeeper"]


class ChainKeeper:
    """Keeps a run in stages.

    Args:
        directory: of the run.
        run: the run file.
        journal: that is open.
        model: directory of the checkpoint that stages began with.
        data: where the data lie, with their tokenizer.
        progress: is told the figures.
        figures: of rounds that have no line yet.
        seconds: that the run has taken before.
        steps_a_round: of each member.

    Attributes:
        figures: as given.
        told: more figures of rounds that have no line yet, by their numbers from 1.
    """

    def __init__(
        self,
        directory: RunDirectory,
        run: RunFile,
        journal: Journal,
        model: Path,
        data: Path,
        progress: LeaderProgress,
        figures: RoundFigures,
        *,
        seconds: float = 0.0,
        steps_a_round: int = 1,
    ) -> None:
        self._directory, self._run, self._journal = directory, run, journal
        self._model, self._data, self._progress = model, data, progress
        self._began, self._seconds_before = trio.current_time(), seconds
        self._steps_a_round = steps_a_round
        self.figures = figures
        self.told: dict[int, dict[str, float]] = {}
        self._last: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken."""
        return self._seconds_before + trio.current_time() - self._began

    def write(self, entries: Sequence[Entry]) -> None:
        """Write entries into the journal. Returns when they are on the disk."""
        for entry in entries:
            self._journal.append(entry)

    async def note(self, round_number: int) -> None:
        """Write the figures of a step, and of those before it that have no line: a stage was lost before it."""
        for figures in self.figures.take(round_number):
            figures["seconds"] = round(self.seconds, 3)
            figures |= self.told.pop(int(figures["round"]), {})
            self._last = figures
            await trio.to_thread.run_sync(self._directory.add_figures, dict(figures))
            self._progress.metrics(figures)

    async def write_checkpoint(self, kept: ChainState, state: RunState) -> None:
        """Make the state that is kept a checkpoint: a model that transformers opens, or an adapter of PEFT.

        One that cannot be written is said, and the one before stays.
        """
        step, round_number = kept.step, self._round_of(kept.step)
        told: dict[str, Any] = {
            **self.figures.of(state),
            **self._last,
            "round": round_number,
            "seed": self._run.seed,
            "written": round(time.time(), 3),
        }
        folder, tokenizer = self._directory.checkpoints, self._data / "tokenizer"
        try:
            async with new_checkpoint(folder, step) as draft:
                await trio.to_thread.run_sync(self._write_model, draft, kept)
                if tokenizer.is_dir():
                    draft.add_tokenizer(tokenizer)
                await trio.to_thread.run_sync(
                    lambda: draft.add_training(told, outer={}, members={})
                )
        except NeuroGridError as exc:
            self._progress.warn(f"no checkpoint after step {step}: {exc}. The one before is whole")
            return
        self._journal.append(CheckpointEntry(step=step, round=round_number))
        try:
            await trio.to_thread.run_sync(prune, folder, self._run.checkpoints.keep)
        except CheckpointError as exc:
            self._progress.warn(str(exc))

    def _round_of(self, step: int) -> int:
        return step // self._steps_a_round

    def has_checkpoint(self, step: int) -> bool:
        """Whether the latest checkpoint is of this step."""
        path = latest_checkpoint(self._directory.checkpoints)
        return path is not None and int(read_checkpoint(path).state["round"]) == self._round_of(
            step
        )

    def finish(self, step: int) -> Path:
        """The last checkpoint.

        Raises:
            CheckpointError: it was not written.
        """
        path = latest_checkpoint(self._directory.checkpoints)
        if path is None or not self.has_checkpoint(step):
            raise CheckpointError(
                f"the run has ended, and the checkpoint after step {step} could not be written: --resume writes it"
            )
        return path

    def _write_model(self, draft: CheckpointDraft, kept: ChainState) -> None:
        if self._run.adapter.r:
            learned = _parameters(kept.files)
            with draft.writing():
                write_adapter(draft.path, self._run.adapter, learned, str(self._model.resolve()))
            return
        with draft.writing():
            write_model(draft.path, self._model, kept.files)


def _parameters(files: Mapping[str, Path]) -> dict[str, Tensor]:
    """Read an adapter's matrices of a state from its files, by name, without the optimisers' tensors."""
    found: dict[str, Tensor] = {}
    for path in files.values():
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as exc:
            raise CheckpointError(f"{path}: cannot be read: {exc}") from exc
        found |= {name: each for name, each in tensors.items() if "/" not in name}
    return found
