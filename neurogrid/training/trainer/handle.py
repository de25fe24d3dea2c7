"""A trainer as its owner has it: a child process that computes, and the memory that both share.

The child has model, optimiser and batches, so that neither its crash nor its computing stops the network. One call at a
time; others wait for it. No call has a time limit of its own: put it in a cancel scope. A call that is cancelled in the
middle costs the process, and `restart` makes another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import torch
import trio

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.training.averaging.parts import Layout
from neurogrid.training.runs.trainer_settings import FileRange, TrainerSettings, as_fields
from neurogrid.training.trainer.child import Child, ChildEnded
from neurogrid.training.trainer.control import Control
from neurogrid.training.trainer.errors import BatchError, TrainerDiedError, TrainerError
from neurogrid.training.trainer.results import BatchDone, Evaluation, Gradient, Trained
from neurogrid.training.trainer.shared import make_shared, map_shared, shared_directory

__all__ = ["Trainer", "open_trainer"]

_PROGRAM: Final = "neurogrid.training.trainer.program"
_ERRORS: Final = (
    BatchError,
    CheckpointError,
    ConfigurationError,
    TrainerError,
    UnsupportedModelError,
)


@asynccontextmanager
async def open_trainer(
    settings: TrainerSettings, *, checkpoint: Path | None = None
) -> AsyncIterator[Trainer]:
    """Start a trainer, and yield it when its model is there. It ends with the block.

    Args:
        checkpoint: a directory with the initial weights, safetensors; None for random ones by the seed.

    Raises:
        UnsupportedModelError, CheckpointError, ConfigurationError: there can be no such model.
        TrainerDiedError: the process ended.
    """
    with unwrap_errors(), shared_directory() as folder:
        async with trio.open_nursery() as nursery:
            trainer = Trainer(settings, checkpoint, folder, nursery)
            try:
                await trainer.restart()
                yield trainer
            finally:
                await trainer._child.end()


class Trainer:
    """A model in a process of its own that learns. Made by `open_trainer`.

    Attributes:
        settings: as given.
        layout: of the trained parameters, tied ones once.
        weights: float32 [layout.num_elements], shared: what a call begins with, and where it leaves what came of it.
            At first the initial weights.
    """

    layout: Layout
    weights: torch.Tensor

    def __init__(
        self,
        settings: TrainerSettings,
        checkpoint: Path | None,
        folder: Path,
        nursery: trio.Nursery,
    ) -> None:
        self.settings = settings
        self._checkpoint = checkpoint
        self._folder = folder
        self._control = Control.open(folder)
        self._child = Child("trainer", _PROGRAM, _ERRORS, nursery)
        self._gradients: torch.Tensor | None = None
        self._lock = trio.Lock()

    @property
    def pid(self) -> int | None:
        """The process's number; None where it has ended."""
        return self._child.pid

    @property
    def are_weights_torn(self) -> bool:
        """Whether a process died while it wrote `weights`: they are to be written anew then, before `restart`."""
        return self._child.pid is None and self._control.is_writing

    @property
    def gradients(self) -> torch.Tensor:
        """Float32 [layout.num_elements], shared: what `gradient` writes.

        Raises:
            ConfigurationError: there is no room for it.
        """
        if self._gradients is None:
            file = self._folder / "gradients"
            make_shared(file, self.layout.num_elements)
            self._gradients = map_shared(file, self.layout.num_elements)
        return self._gradients

    async def restart(self) -> None:
        """End the process, if it runs, and start another: with `weights` as they are, and a new inner optimiser.

        Raises:
            TrainerDiedError: it ended before it was ready.
        """
        async with self._lock:
            await self._child.end()
            self._control.is_writing = False
            await self._child.start(threads=self.settings.threads)
            told = await self._exchange(
                {
                    "settings": self.settings.text(),
                    "folder": str(self._folder),
                    "checkpoint": None if self._checkpoint is None else str(self._checkpoint),
                },
                None,
            )
            if not hasattr(self, "weights"):
                shapes = tuple(tuple(shape) for shape in told["shapes"])
                self.layout = Layout(tuple(told["names"]), shapes)
                self.weights = map_shared(self._folder / "weights", self.layout.num_elements)

    async def train(
        self,
        batches: Sequence[Sequence[FileRange]],
        *,
        step: float,
        seed: int,
        stride: float = 1.0,
        on_batch: Callable[[BatchDone], None] = lambda _: None,
    ) -> Trained:
        """Make a step of each batch, from `weights` on, and leave the new ones there.

        Args:
            batches: each of ranges, in order.
            step: of the first batch within the run, from 0: for its learning rate.
            seed: of what is random in the steps, with the number of each.
            stride: steps of the schedule that each batch is, of a member that makes more or fewer than others.
            on_batch: is told after each; of short ones of several at once.

        Raises:
            BatchError: a slice cannot be learned from. The inner optimiser has made the steps before it all the same.
            ConfigurationError: one sample does not fit into memory.
            TrainerDiedError: the process ended.
        """
        order = {
            "order": "train",
            "batches": [[as_fields(each) for each in batch] for batch in batches],
            "step": step,
            "stride": stride,
            "seed": seed,
        }
        async with self._lock:
            return Trained(**await self._exchange(order, on_batch))

    async def evaluate(self, ranges: Sequence[FileRange]) -> Evaluation:
        """The loss of `weights` on some samples, without dropout. Errors as of `train`."""
        if not ranges:
            raise ValueError("nothing to evaluate")
        return Evaluation(**await self._call("evaluate", ranges=list(map(as_fields, ranges))))

    async def gather_statistics(self, ranges: Sequence[FileRange]) -> None:
        """Make what batch normalisation keeps the mean over some samples, by `weights`. Errors as of `train`.

        Before `evaluate` and `save` where the weights are others' as well: these statistics are no weights and are not
        averaged. Of models that have none it changes nothing.
        """
        await self._call("gather_statistics", ranges=list(map(as_fields, ranges)))

    async def gradient(self, batch: Sequence[FileRange], *, step: int, seed: int) -> Gradient:
        """Write the gradient of a batch's mean loss at `weights` into `gradients`. Arguments and errors as of `train`.

        Members that average theirs, weighted by labels, have the gradient of all their batches as one.
        """
        assert len(self.gradients) == self.layout.num_elements  # it is there
        fields = list(map(as_fields, batch))
        return Gradient(**await self._call("gradient", batch=fields, step=step, seed=seed))

    async def save(self, directory: Path) -> None:
        """Write `weights` as a checkpoint that transformers opens: config.json and safetensors in float32.

        Raises:
            TrainerError: the disk is full, or the like; what was written is worth nothing.
        """
        await self._call("save", path=str(directory))

    async def save_optimizer(self, path: Path) -> None:
        """Write the inner optimiser as safetensors, with the size of micro-batches and the model's buffers.

        Raises:
            TrainerError: as of `save`.
        """
        await self._call("save_optimizer", path=str(path))

    async def load_optimizer(self, path: Path) -> None:
        """Take over what `save_optimizer` wrote: with the weights of then, all goes on with the same bits.

        Raises:
            CheckpointError: it is damaged, or of another model or optimiser.
        """
        await self._call("load_optimizer", path=str(path))

    async def _call(self, order: str, **arguments: object) -> dict[str, Any]:
        async with self._lock:
            return await self._exchange({"order": order, **arguments}, None)

    async def _exchange(
        self, order: dict[str, Any], on_batch: Callable[[BatchDone], None] | None
    ) -> dict[str, Any]:
        """The answer to an order. The lock is held."""
        if self._child.pid is None:
            raise TrainerDiedError(
                "the trainer's process has ended: restart it first",
                are_weights_torn=self.are_weights_torn,
            )

        def tell(progress: list[dict[str, Any]]) -> None:
            for done in progress:
                if on_batch is not None:
                    on_batch(BatchDone(**done))

        try:
            return await self._child.exchange(order, tell)
        except ChildEnded as exc:
            raise TrainerDiedError(str(exc), are_weights_torn=self.are_weights_torn) from exc
