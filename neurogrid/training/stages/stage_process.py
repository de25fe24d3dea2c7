"""A stage as its owner has it: a child process that computes, and that is given tensors as bytes.

One process may be one stage after another: what takes seconds is to import torch, so it begins before it is needed, and
goes on when stages are arranged anew. A call that nobody waits for any more runs to its end all the same, before the
next; one that does not end in time costs the process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import trio
from torch import Tensor

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.wire.messages import Data
from neurogrid.training.stages.stage_settings import StageSettings
from neurogrid.training.trainer.child import Child
from neurogrid.training.trainer.errors import TrainerError
from neurogrid.training.trainer.shared import make_shared, map_shared, shared_directory

__all__ = ["PlainTensor", "StageProcess", "open_stage_process"]

_PROGRAM: Final = "neurogrid.training.stages.stage_program"
_ERRORS: Final = (CheckpointError, ConfigurationError, TrainerError, UnsupportedModelError)
# Seconds for a call of before to end, and for a process to begin: to import torch takes minutes where the disk is slow.
_PATIENCE: Final = 20.0
_BEGIN_PATIENCE: Final = 300.0


class PlainTensor(NamedTuple):
    """A tensor that nobody here computes with.

    Attributes:
        dtype: "F32", "BF16" or "I32".
        shape: of it.
        data: the elements in C order, little-endian.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Data


@asynccontextmanager
async def open_stage_process(*, threads: int) -> AsyncIterator[StageProcess]:
    """A process for stages, which begins at once; it ends with the block.

    Args:
        threads: of torch; 0 for its own choice.
    """
    with unwrap_errors(), shared_directory() as directory:
        async with trio.open_nursery() as nursery:
            process = StageProcess(nursery, threads, directory)
            nursery.start_soon(process.begin)
            try:
                yield process
            finally:
                nursery.cancel_scope.cancel()
                await process.end()


class StageProcess:
    """Layers of a model that learn, in a process of its own. Made by `open_stage_process`.

    Attributes:
        is_tied: whether embedding and head are one, so that the first and the last stage each have a part of its
            gradient.
        memory_bytes: the most that the process has taken.
        step: how many steps the state has made that it has; None where it has none, or none that is whole.
    """

    def __init__(self, nursery: trio.Nursery, threads: int, directory: Path) -> None:
        self._child = Child("stage", _PROGRAM, _ERRORS, nursery)
        self._nursery, self._threads = nursery, threads
        self._lock = trio.Lock()
        self._has_begun = trio.Event()  # no process is on its way
        self._has_begun.set()
        self._directory = directory
        self._layers: StageSettings | None = None
        self._num_elements = 0
        self._vectors: tuple[Tensor, Tensor] | None = None
        self.is_tied = False
        self.memory_bytes = 0
        self.step: int | None = None

    @property
    def _is_replica(self) -> bool:
        return self._layers is not None and self._layers.outer_lr > 0

    async def begin(self) -> None:
        """Start the process, if it does not run."""
        async with self._lock:
            await self._start()

    async def _start(self) -> None:
        if self._child.pid is None:
            self._has_begun = trio.Event()
            try:
                await self._child.start(threads=self._threads)
                await self._child.exchange({"order": "begin"}, lambda _: None)
            finally:
                self._has_begun.set()

    async def end(self) -> None:
        """End the process, if it runs."""
        await self._child.end()

    async def settle(self) -> None:
        """Wait until the process is at nothing; one that does not come to an end is ended."""
        with trio.move_on_after(_BEGIN_PATIENCE):
            await self._has_begun.wait()
        with trio.move_on_after(_PATIENCE):
            async with self._lock:
                pass
        if self._lock.locked():
            await self._child.end()
        if self._child.pid is None:
            self.step = self._layers = None

    def is_at(self, settings: StageSettings, step: int) -> bool:
        """Whether it has these layers, in the state after `step`."""
        return self._layers is not None and (self._layers, self.step) == (settings, step)

    async def open(
        self,
        settings: StageSettings,
        *,
        step: int,
        weights: Sequence[Path],
        pieces: Mapping[str, Path],
        activations: str,
    ) -> None:
        """Become a stage, in the place of what it was; with a new process where there is none.

        Layers that it has already are kept, and given the state.

        Args:
            step: how many steps the state has made.
            weights: files of safetensors with the tensors that it begins with.
            pieces: of the state that it goes on from, by name; none to begin.
            activations: "F32" or "BF16", of what it gives.

        Raises:
            UnsupportedModelError, CheckpointError, ConfigurationError: there can be no such stage.
            ChildEnded: the process ended.
        """
        await self.settle()
        await self.begin()
        files = {name: str(path) for name, path in pieces.items()}
        has_layers, self.step = self._layers == settings and bool(pieces), None
        if has_layers:
            await self._call("load", pieces=files)
        else:
            self._layers = self._vectors = None
            opened = await self._call(
                "open",
                settings=settings.text(),
                weights=[str(path) for path in weights],
                pieces=files,
                activations=activations,
            )
            self.is_tied, self.memory_bytes = opened["is_tied"], opened["memory"]
            self._num_elements = opened["num_elements"]
        self._layers, self.step = settings, step

    async def forget(self) -> None:
        """Let go of all micro-batches and gradients: the step that was under way did not begin."""
        await self.settle()
        await self._call("forget")

    async def average(
        self,
        what: str,
        reduce: Callable[[int, Tensor, Tensor], Awaitable[None]],
        *,
        num_members: int = 1,
        chain: int = 0,
        turn: int = 0,
        groups: Sequence[Sequence[str]] = (),
    ) -> bool:
        """Have gradients, or a part of the weights, in common with the other members of the stage; or find out what
        replicas have learned in a round.

        Args:
            what: "gradients", which are summed up, "weights", of which the mean is taken, or "differences" of a round,
                whose means wait for `commit`.
            reduce: writes the mean of a vector over all members, float32 [n], into the second one; the first is this
                member's. The number counts those of this call.
            num_members: of the stage.
            chain: the number of the arrangement.
            turn: which part of the weights.
            groups: of "differences", the pieces of each vector.

        Returns:
            Whether the gradients of this member were finite; else it gave zeros.
        """
        own, mean = await self._shared()
        told = await self._call(
            "begin_mean",
            what=what,
            members=num_members,
            chain=chain,
            turn=turn,
            groups=[list(group) for group in groups],
        )
        is_finite, number = bool(told["is_finite"]), 0
        while (num := told["num_elements"]) is not None:
            if num:
                await reduce(number, own[:num], mean[:num])
            number += 1
            told = await self._call("next_mean", num=num)
        return is_finite

    async def _shared(self) -> tuple[Tensor, Tensor]:
        """Vectors that the process has in common with this one."""
        if self._vectors is None:
            paths = [self._directory / name for name in ("own", "mean")]
            for path in paths:
                path.unlink(missing_ok=True)
                make_shared(path, self._num_elements)
            own, mean = (map_shared(path, self._num_elements) for path in paths)
            await self._call("share", own=str(paths[0]), mean=str(paths[1]))
            self._vectors = own, mean
        return self._vectors

    @property
    def pid(self) -> int | None:
        """The process's number; None where it has ended."""
        return self._child.pid

    async def forward(
        self, number: int, step: int, given: PlainTensor, tokens: PlainTensor | None = None
    ) -> PlainTensor:
        """Compute a micro-batch's hidden state for the next stage.

        Args:
            tokens: token ids, where there is a subspace; the first stage is given them anyway.

        Raises:
            TrainerError: it is none for this stage, or there is no memory for it.
            ChildEnded: the process ended.
        """
        return _tensor(
            await self._call(
                "forward",
                number=number,
                step=step,
                given=_frame(given),
                tokens=_frame_of(tokens),
                labels=None,
                num_labels=0,
            )
        )

    async def forward_loss(
        self,
        number: int,
        step: int,
        given: PlainTensor,
        labels: PlainTensor,
        num_labels: int,
        tokens: PlainTensor | None = None,
    ) -> float:
        """A micro-batch's share of the batch's mean loss, at the last stage. Errors as of `forward`.

        Args:
            num_labels: label tokens of the whole batch.
        """
        told = await self._call(
            "forward",
            number=number,
            step=step,
            given=_frame(given),
            tokens=_frame_of(tokens),
            labels=_frame(labels),
            num_labels=num_labels,
        )
        return float(told["loss"])

    async def backward(self, number: int, gradient: PlainTensor | None) -> PlainTensor | None:
        """Compute a micro-batch's gradient for the stage before; None at the first. Errors as of `forward`."""
        told = await self._call("backward", number=number, gradient=_frame_of(gradient))
        return _tensor(told) if told else None

    async def evaluate(
        self, given: PlainTensor, labels: PlainTensor | None, tokens: PlainTensor | None = None
    ) -> PlainTensor | float:
        """Compute the hidden state for the next stage, or the sum of the losses, and learn nothing. As of `forward`."""
        told = await self._call(
            "evaluate", given=_frame(given), tokens=_frame_of(tokens), labels=_frame_of(labels)
        )
        return float(told["loss"]) if "loss" in told else _tensor(told)

    async def tied_gradient(self, start: int, num: int) -> tuple[PlainTensor, int]:
        """Return some elements of this stage's part of the gradient of what is tied, float32 [num], and their number in
        all."""
        told = await self._call("tied_gradient", start=start, num=num)
        return _tensor(told), told["num_elements"]

    async def add_tied_gradient(self, gradient: PlainTensor) -> None:
        """Take in the next elements of the other end's part, float32 [num]; with the last ones all is added."""
        await self._call("add_tied_gradient", gradient=_frame(gradient))

    async def squared_norm(self) -> float:
        """Return the squared norm of the gradients of the parameters that count here."""
        return float((await self._call("squared_norm"))["squared_norm"])

    async def apply(
        self,
        step: int,
        norm: float,
        *,
        is_applied: bool,
        rate: float | None = None,
        clip: float | None = None,
    ) -> None:
        """Make a step of the optimiser, or drop the gradients.

        Of replicas no state is gone on from after it: a round that is made again may come to another.

        Args:
            norm: of the gradients of all stages.
            rate, clip: as of `StageLearner.apply`.
        """

        def note(told: dict[str, Any]) -> None:
            self.memory_bytes = told["memory"]
            self.step = None if self._is_replica else step + 1

        # Whoever waits for it or not: the state is none of a step's until it is done.
        self.step = None
        await self._call(
            "apply", note, step=step, norm=norm, is_applied=is_applied, rate=rate, clip=clip
        )

    async def commit(self) -> None:
        """A round is made: let the weights be those that all replicas have in common."""

        def note(told: dict[str, Any]) -> None:
            self.memory_bytes = told["memory"]

        self.step = None
        await self._call("commit", note)

    async def save(self, directory: Path) -> dict[str, Path]:
        """Write the state, and return its pieces' files by name.

        Raises:
            TrainerError: the disk is full, or the like.
        """
        told = await self._call("save", directory=str(directory))
        return {name: Path(path) for name, path in told["files"].items()}

    async def _call(
        self,
        order: str,
        note: Callable[[dict[str, Any]], None] = lambda _: None,
        **arguments: object,
    ) -> dict[str, Any]:
        """The answer to an order, which `note` is told also where nobody waits for it any more."""
        told: list[dict[str, Any]] = []
        failed: list[Exception] = []
        is_done = trio.Event()

        async def run() -> None:
            try:
                async with self._lock:
                    told.append(
                        await self._child.exchange({"order": order, **arguments}, lambda _: None)
                    )
                    note(told[0])
            except Exception as exc:  # noqa: BLE001 - raised again where the caller waits
                failed.append(exc)
            finally:
                is_done.set()

        self._nursery.start_soon(run)
        await is_done.wait()
        if failed:
            raise failed[0]
        return told[0]


def _frame(tensor: PlainTensor) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "data": tensor.data}


def _frame_of(tensor: PlainTensor | None) -> dict[str, Any] | None:
    return None if tensor is None else _frame(tensor)


def _tensor(told: Mapping[str, Any]) -> PlainTensor:
    return PlainTensor(told["dtype"], tuple(told["shape"]), told["data"])
