"""The trainer's own process: `python -m neurogrid.training.trainer.program`, which `open_trainer` starts.

What it is ordered, and how it answers, is the matter of `orders`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from safetensors import SafetensorError

from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.estimate import member_bytes
from neurogrid.training.runs.trainer_settings import FileRange, TrainerSettings, from_fields
from neurogrid.training.trainer.batches import Batch
from neurogrid.training.trainer.control import Control
from neurogrid.training.trainer.errors import TrainerError
from neurogrid.training.trainer.learner import Learner
from neurogrid.training.trainer.memory import is_out_of_memory, lift_limit, limit_memory
from neurogrid.training.trainer.models import make_model, trained_parameters
from neurogrid.training.trainer.orders import serve_orders, write_frame
from neurogrid.training.trainer.results import BatchDone, Evaluation, Gradient, Trained
from neurogrid.training.trainer.shared import make_shared, map_shared

__all__ = ["main"]

# Samples that are read at once to be evaluated.
_READ_AT_ONCE: Final = 64
# Batches may take less time than telling of each. Seconds.
_TOLD_EVERY: Final = 0.05
_HINT: Final = "lower the learning rate, clip, or compute in float32; where it is always one slice, look at its data"


def main() -> None:
    """Carry out orders until standard input ends."""
    serve_orders(_Program)


class _Program:
    """A learner, and what it shares with the other process."""

    def __init__(self, order: dict[str, Any], answers: BinaryIO) -> None:
        settings = TrainerSettings.parse(order["settings"])
        self._folder = Path(order["folder"])
        self._answers = answers
        self._control = Control.open(self._folder)
        if settings.device == "cpu" and settings.memory_limit:
            # Before there is a limit: where memory runs out while modules are imported, Python fails in odd ways.
            num_parameters = _num_parameters(settings)
            if num_parameters * torch.float32.itemsize > settings.memory_limit:
                raise ConfigurationError(_too_large(settings, num_parameters))
        self._limit_memory(settings)
        checkpoint = order["checkpoint"]
        try:
            self._learner = Learner(settings, None if checkpoint is None else Path(checkpoint))
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
            lift_limit()  # to say so takes some, too
            raise ConfigurationError(_too_large(settings, _num_parameters(settings))) from exc
        self._is_text = settings.kind == "causal-lm"
        num_elements = self._learner.layout.num_elements
        file = self._folder / "weights"
        is_first = not file.exists()
        if is_first:
            make_shared(file, num_elements)
        self._weights = map_shared(file, num_elements)
        if is_first:
            self._learner.write_weights(self._weights)
        # Again, for weights and libraries have been mapped.
        self._limit_memory(settings)
        self._gradients: torch.Tensor | None = None
        self._calls: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "train": self._train,
            "evaluate": self._evaluate,
            "gather_statistics": self._gather_statistics,
            "gradient": self._gradient,
            "save": self._save,
            "save_optimizer": self._save_optimizer,
            "load_optimizer": self._load_optimizer,
        }

    @staticmethod
    def _limit_memory(settings: TrainerSettings) -> None:
        if settings.device == "cpu" and settings.memory_limit:
            limit_memory(settings.memory_limit)

    def opened(self) -> dict[str, Any]:
        """The answer to the first order."""
        layout = self._learner.layout
        return {"names": layout.names, "shapes": layout.shapes}

    def carry_out(self, order: dict[str, Any]) -> dict[str, Any]:
        """An order, and its answer."""
        return self._calls[order["order"]](order)

    def _train(self, order: dict[str, Any]) -> dict[str, Any]:
        began, cpu_began = time.perf_counter(), time.process_time()
        learner = self._learner
        learner.read_weights(self._weights)
        batches = samples = tokens = labels = 0
        loss_sum, norm, not_finite = 0.0, 0.0, ""
        told: list[dict[str, Any]] = []
        told_at = 0.0
        for index, fields in enumerate(order["batches"]):
            batch_began = time.perf_counter()
            batch = learner.read(_ranges(fields))
            if not learner.micro_batch:
                learner.fit(batch)
                batch_began = time.perf_counter()  # others take no such time
            number = int(order["step"] + index * order["stride"])
            step = learner.step(batch, number=number, seed=order["seed"])
            if step.fault:
                not_finite = _not_finite(f"batch {index} ({batch.source})", step.fault)
                break
            batches += 1
            samples += batch.num_samples
            tokens += batch.num_tokens
            labels += batch.num_labels
            loss_sum += step.loss * batch.num_labels
            norm = step.norm
            seconds = time.perf_counter() - batch_began
            told.append(asdict(BatchDone(batches, step.loss, batch.num_tokens, seconds)))
            if time.perf_counter() - told_at >= _TOLD_EVERY:
                write_frame(self._answers, {"progress": told})
                told, told_at = [], time.perf_counter()
        self._write_weights()
        write_frame(self._answers, {"progress": told})
        return asdict(
            Trained(
                batches,
                samples,
                tokens,
                labels,
                loss_sum,
                time.perf_counter() - began,
                time.process_time() - cpu_began,
                norm,
                learner.micro_batch,
                learner.memory.most(),
                not_finite,
            )
        )

    def _evaluate(self, order: dict[str, Any]) -> dict[str, Any]:
        self._learner.read_weights(self._weights)
        total, num_right, labels, tokens = 0.0, 0, 0, 0
        for batch in self._pieces(order["ranges"]):
            batch_loss, right = self._learner.evaluate(batch)
            total += batch_loss
            num_right += right
            labels += batch.num_labels
            tokens += batch.num_tokens
        accuracy = None if self._is_text else num_right / labels
        return asdict(Evaluation(total / labels, labels, tokens, accuracy))

    def _gather_statistics(self, order: dict[str, Any]) -> dict[str, Any]:
        self._learner.read_weights(self._weights)
        with self._learner.gathering_statistics():
            for batch in self._pieces(order["ranges"]):
                self._learner.pass_through(batch)
        return {}

    def _gradient(self, order: dict[str, Any]) -> dict[str, Any]:
        learner = self._learner
        batch = learner.read(_ranges(order["batch"]))
        learner.fit(batch)
        began = time.perf_counter()
        learner.read_weights(self._weights)
        loss = learner.compute_gradients(batch, number=order["step"], seed=order["seed"])
        gradients = self._shared_gradients()
        learner.take_gradients(gradients)
        fault = "" if bool(gradients.isfinite().all()) else "a gradient"
        if fault or loss - loss != 0:
            fault = _not_finite(batch.source, fault or f"the loss is {loss}")
        return asdict(
            Gradient(
                batch.num_samples,
                batch.num_tokens,
                batch.num_labels,
                loss,
                time.perf_counter() - began,
                learner.micro_batch,
                fault,
            )
        )

    def _save(self, order: dict[str, Any]) -> dict[str, Any]:
        self._learner.read_weights(self._weights)
        with _writing(order["path"]):
            self._learner.save(Path(order["path"]))
        return {}

    def _save_optimizer(self, order: dict[str, Any]) -> dict[str, Any]:
        with _writing(order["path"]):
            self._learner.save_optimizer(Path(order["path"]))
        return {}

    def _load_optimizer(self, order: dict[str, Any]) -> dict[str, Any]:
        self._learner.load_optimizer(Path(order["path"]))
        return {}

    def _pieces(self, fields: Sequence[list[Any]]) -> Iterator[Batch]:
        """All samples of some ranges, a few at a time."""
        for part in _ranges(fields):
            for start in range(part.start, part.stop, _READ_AT_ONCE):
                stop = min(start + _READ_AT_ONCE, part.stop)
                yield self._learner.read([FileRange(part.path, start, stop)])

    def _write_weights(self) -> None:
        self._control.is_writing = True
        self._learner.write_weights(self._weights)
        self._control.is_writing = False

    def _shared_gradients(self) -> torch.Tensor:
        if self._gradients is None:
            num_elements = self._learner.layout.num_elements
            self._gradients = map_shared(self._folder / "gradients", num_elements)
        return self._gradients


def _num_parameters(settings: TrainerSettings) -> int:
    """Parameters that are trained."""
    with torch.device("meta"):
        model = make_model(settings.kind, settings.config, seed=0, checkpoint=None)
    return sum(each.numel() for each in trained_parameters(model).values())


def _too_large(settings: TrainerSettings, num_parameters: int) -> str:
    needed = member_bytes(settings.inner, num_parameters)
    had = f"{settings.memory_limit:,} bytes of" if settings.memory_limit else "what is free of"
    return (
        f"the model does not fit into {had} memory: weights, gradients and optimiser of its {num_parameters:,} "
        f"parameters take {needed:,} bytes, and Python and torch theirs. Give the member more (--memory-limit), or "
        "take a smaller model"
    )


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as exc:
        raise TrainerError(f"{path}: cannot be written: {exc}; make room there") from exc


def _ranges(fields: Sequence[list[Any]]) -> list[FileRange]:
    return [from_fields(each) for each in fields]


def _not_finite(where: str, fault: str) -> str:
    return f"{where}: {fault}, so no step was made of it; {_HINT}"


if __name__ == "__main__":
    main()
