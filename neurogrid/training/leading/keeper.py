"""Journal, figures and checkpoints of a run, as its leader keeps them on disk; and evaluation on held-out data.

A round's figures, its evaluation and its checkpoint are one job, in the order of the rounds, beside the run: the rounds
wait only for a keeper that is a few of them behind.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import trio
from torch import Tensor

from neurogrid.errors import CheckpointError, NeuroGridError
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.checkpoints import (
    latest_checkpoint,
    new_checkpoint,
    prune,
    read_checkpoint,
)
from neurogrid.training.data.evaluating import HeldOut, eval_figures, held_out_samples
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.leading.data import LeaderSlices
from neurogrid.training.leading.round_figures import RoundFigures
from neurogrid.training.leading.settings import LeaderProgress
from neurogrid.training.runs.entries import CheckpointEntry, Entry
from neurogrid.training.runs.estimate import saved_bytes
from neurogrid.training.runs.journal import Journal
from neurogrid.training.runs.outer_state import RunWeights
from neurogrid.training.runs.round_trace import after_round
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.state import Phase, RunState
from neurogrid.training.trainer import FileRange, Trainer, TrainerDiedError, TrainerError

__all__ = ["Keeper"]

logger = logging.getLogger(__name__)

FetchState = Callable[[int, int, Path, float], Awaitable[str]]
"""Puts the optimiser that a seat has saved after a round into a file, within so many seconds; why it did not, empty
where it did."""

# Rounds that may wait to be kept.
_MAX_WAITING: Final = 2
# Seconds for which members' optimisers are waited for, besides those in which all of them come at this pace.
_STATE_TIMEOUT: Final = 30.0
_STATES_PER_SECOND: Final = 8 * 1024 * 1024
# Images whose statistics batch normalisation is given.
_STATISTICS_SAMPLES: Final = 256
# Seconds for a slice that is held out, where it is not here.
_SLICE_TIMEOUT: Final = 60.0
_EVAL_LOSS: Final = "eval_loss"
# Figures that a line has also where others of its round are in one before.
_OF_ANY_LINE: Final = frozenset({"round", "step", "tokens", "seconds"})


class KeptWeights(Protocol):
    """Weights that are kept: `RunWeights`, as far as a keeper cares."""

    @property
    def round(self) -> int:
        """The last round that is in them."""

    @property
    def common(self) -> Tensor:
        """Float32 [num_elements]. Not to be written to."""

    def state_dict(self) -> dict[str, Tensor]:
        """The vectors by name, as copies."""


@dataclass(slots=True)
class _Job:
    """A round to be kept.

    Attributes:
        figures: of the round.
        is_new: it has no line in the figures yet.
    """

    figures: dict[str, float]
    weights: Tensor | None = None
    outer: dict[str, Tensor] = field(default_factory=dict)
    is_new: bool = True
    is_evaluated: bool = False
    is_checkpoint: bool = False
    members: frozenset[int] = frozenset()


class Keeper:
    """Keeps a run. Run `run` beside it.

    Args:
        directory: of the run.
        run_id: 16 bytes.
        run: the run file.
        run_at: it as it holds in a round.
        journal: that is open.
        trainer: for evaluation, and to write the model.
        manifest, data: of the data, and where they lie.
        slices: those that are held out come from there.
        fetch_state: gets a member's saved optimiser.
        progress: is told the figures.
        figures: of rounds that have no line yet.
        seconds: that the run has taken before.
    """

    def __init__(
        self,
        directory: RunDirectory,
        run_id: bytes,
        run: RunFile,
        run_at: Callable[[int], RunFile],
        journal: Journal,
        trainer: Trainer,
        manifest: Manifest,
        data: Path,
        slices: LeaderSlices,
        fetch_state: FetchState,
        progress: LeaderProgress,
        figures: RoundFigures,
        *,
        seconds: float = 0.0,
    ) -> None:
        self._directory, self._run_id = directory, run_id
        self._run, self._run_at, self._journal = run, run_at, journal
        self._trainer, self._manifest, self._data = trainer, manifest, data
        self._slices, self._fetch_state, self._progress = slices, fetch_state, progress
        self._began, self._seconds_before = trio.current_time(), seconds
        self.figures = figures
        self._jobs: list[_Job] = []
        self._last_figures: dict[str, float] = {}
        self._last_round: int | None = None  # of the run, once that is known
        self._changed = RenewedEvent()

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken."""
        return self._seconds_before + trio.current_time() - self._began

    # What happens

    def write(self, entries: Sequence[Entry]) -> None:
        """Write entries into the journal. Returns when they are on the disk."""
        for entry in entries:
            self._journal.append(entry)

    async def wait_room(self) -> None:
        """Wait until few enough rounds are to be kept."""
        while len(self._jobs) > _MAX_WAITING:
            await self._changed.wait()

    def applied(
        self,
        outer: KeptWeights,
        state: RunState,
        members: Collection[int],
        digests: tuple[int, int] = (0, 0),
        checks: Mapping[str, float] | None = None,
        step_norm: float | None = None,
    ) -> None:
        """A round is in the common weights; once more of the last one, where that was known to be it later.

        Args:
            members: seats that are to save their optimisers after it.
            digests: of members' weights after a round, that were told since the last call: how many were those of the
                leader, and how many were not.
            checks: figures of what members have found about each other's results since the last call.
            step_norm: of the round's outer step; None where it made none, or where that is not known.
        """
        round_ = outer.round
        run = self._run_at(round_)
        is_last = state.phase is Phase.ENDED and 0 < round_ == state.round
        if is_last:
            self._last_round = round_
        is_checkpoint = is_last or (
            state.phase is Phase.TRAINING and round_ % run.checkpoints.every == 0
        )
        is_evaluated = bool(
            run.eval.every and self._manifest.held_out and (is_last or round_ % run.eval.every == 0)
        )
        due = self.figures.take(round_)
        for each in due:
            each["seconds"] = round(self.seconds, 3)
        _note(due, digests, checks)
        is_new = bool(due) and due[-1]["round"] == round_
        if is_new:
            self._last_figures = due.pop()
            if step_norm is not None and math.isfinite(step_norm):
                self._last_figures["outer_step_norm"] = round(step_norm, 6)
        self._jobs += [_Job(each) for each in due]
        if is_new or is_last:
            figures = self._last_figures
            if figures.get("round") != round_:
                figures = {**self.figures.of(state), "seconds": round(self.seconds, 3)}
            self._jobs.append(
                _Job(
                    figures,
                    outer.common.clone() if is_checkpoint or is_evaluated else None,
                    outer.state_dict() if is_checkpoint else {},
                    is_new=is_new,
                    is_evaluated=is_evaluated,
                    is_checkpoint=is_checkpoint,
                    members=frozenset(() if is_last or not is_checkpoint else members),
                )
            )
        self._changed.set()

    def noted(
        self,
        round_number: int,
        digests: tuple[int, int] = (0, 0),
        checks: Mapping[str, float] | None = None,
    ) -> None:
        """Keep the figures of rounds up to this one, whose weights are not here; the others as of `applied`."""
        due = self.figures.take(round_number)
        for each in due:
            each["seconds"] = round(self.seconds, 3)
        _note(due, digests, checks)
        self._jobs += [_Job(each) for each in due]
        self._changed.set()

    async def keep_state(self, outer: RunWeights, state: RunState) -> None:
        """Keep what is yet to be kept, and make a checkpoint of what was applied last.

        It has no optimisers: members begin with new ones there.
        """
        while self._jobs:
            await self._changed.wait()
        figures = self._last_figures
        if state.round == outer.round:
            figures = self.figures.of(state)
        # The rounds at the end that only sync are of one step, which is to have the last one's checkpoint.
        if state.phase is Phase.TRAINING and figures.get("round") == outer.round:
            self._trainer.weights.copy_(outer.common)
            await self._gather_statistics()
            await self._keep_checkpoint(_Job(figures, outer=outer.state_dict()))

    async def finish(self) -> Path:
        """Wait until all is kept; the last checkpoint.

        Raises:
            CheckpointError: it was not written.
        """
        while self._jobs:
            await self._changed.wait()
        path = latest_checkpoint(self._directory.checkpoints)
        if path is None and not self._last_figures:
            raise CheckpointError(
                "the run has ended before its first round: nothing was trained, and there is no checkpoint"
            )
        if path is None:
            raise CheckpointError("the run has ended, and no checkpoint could be written")
        newest = read_checkpoint(path).state.get("round")
        if self._last_round not in (None, newest):
            raise CheckpointError(
                f"the run has ended, and the checkpoint of its last round, {self._last_round}, was not written: make "
                f"room, and --resume trains again what came after round {newest}"
            )
        return path

    async def run(self) -> None:
        """Keep what there is to keep, round by round."""
        while True:
            while not self._jobs:
                await self._changed.wait()
            await self._keep(self._jobs[0])
            del self._jobs[0]
            self._changed.set()

    async def _keep(self, job: _Job) -> None:
        is_late = False
        if job.weights is not None:
            await self._revive_trainer()
            self._trainer.weights.copy_(job.weights)
            await self._gather_statistics()
            # Of a round that was known late to be the last one it may be done.
            if job.is_evaluated and _EVAL_LOSS not in job.figures:
                with self._traced(job, "training.evaluate"):
                    await self._evaluate(job, job.weights)
                is_late = not job.is_new and _EVAL_LOSS in job.figures
        if job.is_new or is_late:
            figures = job.figures if job.is_new else _only_evaluated(job.figures)
            await trio.to_thread.run_sync(self._directory.add_figures, dict(figures))
            self._progress.metrics(figures)
        if job.is_checkpoint:
            with self._traced(job, "training.checkpoint"):
                await self._keep_checkpoint(job)

    async def _keep_checkpoint(self, job: _Job) -> None:
        latest = latest_checkpoint(self._directory.checkpoints)
        try:
            if (
                latest is not None
                and read_checkpoint(latest).state.get("round") == job.figures["round"]
            ):
                return
            await self._write_checkpoint(job)
        except NeuroGridError as exc:
            self._progress.warn(
                f"no checkpoint after round {job.figures['round']}: {exc}. The one before is whole"
            )
            return
        step = int(job.figures["step"])
        # A journal that cannot be written ends the run: that is more than a checkpoint that is missing.
        self._journal.append(CheckpointEntry(step=step, round=int(job.figures["round"])))
        logger.info("checkpoint of step %d", step)
        try:
            await trio.to_thread.run_sync(
                prune, self._directory.checkpoints, self._run.checkpoints.keep
            )
        except CheckpointError as exc:
            self._progress.warn(str(exc))

    async def _revive_trainer(self) -> None:
        """Start the trainer again, where its process has ended in a call before."""
        if self._trainer.pid is None:
            await self._trainer.restart()

    def _traced(self, job: _Job, name: str) -> AbstractContextManager[None]:
        return after_round(self._run_id, int(job.figures["round"]), name)

    async def _gather_statistics(self) -> None:
        """Make batch normalisation's statistics those of the common weights: they are no weights, and no member has
        them."""
        if self._manifest.kind != "images":
            return
        info = self._manifest.slices[0]
        try:
            path = await self._slices.fetch(info, _SLICE_TIMEOUT)
            ranges = [FileRange(path, 0, min(info.num_samples, _STATISTICS_SAMPLES))]
            await self._trainer.gather_statistics(ranges)
        except NeuroGridError as exc:
            self._progress.warn(f"batch normalisation has no statistics of these weights: {exc}")

    async def _evaluate(self, job: _Job, weights: Tensor) -> None:
        limit = self._run_at(int(job.figures["round"])).eval.samples
        held_out = held_out_samples(self._manifest, limit)
        try:
            ranges = [await self._files(each) for each in held_out]
        except NeuroGridError as exc:
            self._progress.say(f"round {job.figures['round']} was not evaluated: {exc}")
            return
        try:
            found = [await self._trainer.evaluate(each) for each in ranges]
        except (TrainerError, TrainerDiedError) as exc:
            self._progress.warn(f"round {job.figures['round']} was not evaluated: {exc}")
            await self._revive_trainer()
            self._trainer.weights.copy_(weights)
            return
        figures = eval_figures(
            [(each, e.loss, e.labels) for each, e in zip(held_out, found, strict=True)]
        )
        if odd := {name: each for name, each in figures.items() if not math.isfinite(each)}:
            told = ", ".join(f"{name} is {each}" for name, each in odd.items())
            self._progress.warn(f"the weights after round {job.figures['round']} are bad: {told}")
        # What is no number is in no file of JSON.
        job.figures |= {name: each for name, each in figures.items() if name not in odd}
        if found[0].accuracy is not None:  # of images, which are no mixture
            job.figures["eval_accuracy"] = round(found[0].accuracy, 6)

    async def _files(self, held_out: HeldOut) -> list[FileRange]:
        return [
            FileRange(await self._slices.fetch(info, _SLICE_TIMEOUT), 0, num_samples)
            for info, num_samples in held_out.samples
        ]

    async def _write_checkpoint(self, job: _Job) -> None:
        step, round_ = int(job.figures["step"]), int(job.figures["round"])
        members = await self._fetch_members(round_, job.members)
        folder = self._directory.checkpoints
        tokenizer = self._data / "tokenizer"
        outer = {name: each for name, each in job.outer.items() if name != "theta0"}
        state = {**job.figures, "seed": self._run.seed, "written": round(time.time(), 3)}
        async with new_checkpoint(folder, step) as draft:
            await self._trainer.save(draft.path)
            if tokenizer.is_dir():
                draft.add_tokenizer(tokenizer)
            await trio.to_thread.run_sync(
                lambda: draft.add_training(state, outer=outer, members=members)
            )

    async def _fetch_members(self, round_number: int, seats: Collection[int]) -> dict[int, Path]:
        """Files of the members' optimisers, of those that save them in time."""
        found: dict[int, Path] = {}
        is_common = self._run.outer.method == "data_parallel"  # and in the outer state
        if is_common or not self._run.checkpoints.optimizers:
            return found
        num_bytes = len(seats) * saved_bytes(self._run, self._trainer.layout.num_elements)
        seconds = _STATE_TIMEOUT + num_bytes / _STATES_PER_SECOND
        reasons = dict.fromkeys(sorted(seats), f"it was not here within {seconds:.0f} s")

        async def fetch(seat: int) -> None:
            path = self._directory.path / ".members" / f"{seat}.safetensors"
            if reason := await self._fetch_state(round_number, seat, path, seconds):
                reasons[seat] = reason
                return
            found[seat] = path
            del reasons[seat]

        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                for seat in seats:
                    nursery.start_soon(fetch, seat)
        for seat, reason in reasons.items():
            self._progress.warn(
                f"the optimiser of member {seat} is not in the checkpoint of round {round_number}, where it begins "
                f"anew if the run is resumed there: {reason}"
            )
        return found


def _only_evaluated(figures: Mapping[str, float]) -> dict[str, float]:
    """Select the figures of a late evaluation, for a line of their own: the round's others are in one already."""
    return {
        name: each
        for name, each in figures.items()
        if name in _OF_ANY_LINE or name.startswith("eval_")
    }


def _note(
    due: Sequence[dict[str, float]], digests: tuple[int, int], checks: Mapping[str, float] | None
) -> None:
    """Put what was told since the last round into the figures of the newest one."""
    if due and any(digests):
        due[-1]["weights_equal"], due[-1]["weights_other"] = digests
    if due and checks:
        due[-1] |= checks
