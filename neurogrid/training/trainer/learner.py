"""A model, its optimiser and the steps that they take: what a trainer's process computes.

Knows tensors and files, no other process. Weights, gradients and the optimiser are float32; products are in bfloat16
where the settings say so. A step's random numbers (dropout) come from the seed that it is given and its own number
alone, and so does its learning rate: what was stopped and goes on has the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from neurogrid.errors import ConfigurationError
from neurogrid.model.stages.added_gradients import add_gradients_in_place
from neurogrid.model.stages.device import seed_device
from neurogrid.model.stages.narrow import has_narrow_products
from neurogrid.training.averaging.parts import Layout
from neurogrid.training.optimizers import token_weighted_loss
from neurogrid.training.runs.estimate import member_bytes
from neurogrid.training.runs.inner_optimizer import make_optimizer, rates_of
from neurogrid.training.runs.trainer_settings import FileRange, TrainerSettings
from neurogrid.training.trainer.batches import Batch, BatchReader
from neurogrid.training.trainer.memory import Memory, is_out_of_memory, memory_of
from neurogrid.training.trainer.models import make_model, save_model, trained_parameters
from neurogrid.training.trainer.optimizer_files import read_optimizer, write_optimizer

__all__ = ["Learner", "Step"]

# What a micro-batch may need of what is free: allocators round up, and others need memory, too.
_USABLE = 0.9
# Samples that are evaluated at once before any micro-batch was found.
_EVALUATED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Step:
    """Loss and gradient norm of a batch.

    Attributes:
        loss: mean over its labels.
        norm: of all gradients together, before they were clipped.
    """

    loss: float
    norm: float

    @property
    def fault(self) -> str:
        """The loss or the norm that is not finite, in words; empty if both are finite."""
        if not math.isfinite(self.loss):
            return f"the loss is {self.loss}"
        return "" if math.isfinite(self.norm) else f"the norm of the gradients is {self.norm}"


class Learner:
    """Makes the model that the settings name, on their device.

    Attributes:
        layout: of the trained parameters.
        memory: of the device.
        micro_batch: samples that are computed at once; 0 until it is known.
        reader: of batches for this model.
    """

    def __init__(self, settings: TrainerSettings, checkpoint: Path | None) -> None:
        self._settings = settings
        inner = settings.inner
        self._device = torch.device(settings.device)
        if settings.threads:
            torch.set_num_threads(settings.threads)
        model: Any = make_model(
            settings.kind, settings.config, seed=settings.seed, checkpoint=checkpoint
        )
        self._model = model.to(self._device)
        for parameter in self._model.parameters():
            # Out of the checkpoint's files, and where products are fast.
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        self._parameters = trained_parameters(self._model)
        self._values = list(self._parameters.values())
        add_gradients_in_place(self._model)
        self.layout = Layout.of(self._parameters)
        self.reader = BatchReader(settings.kind, model.config)
        self.micro_batch = inner.micro_batch
        self._is_text = settings.kind == "causal-lm"
        self._optimizer = make_optimizer(inner, self._values)
        self._rate_of = rates_of(inner, settings.total_steps)
        self.memory: Memory = memory_of(self._device, settings.memory_limit)

    def read_weights(self, vector: Tensor) -> None:
        """Take over a vector of weights, float32 [num_elements]."""
        with torch.no_grad():
            for name, value in self.layout.views(vector).items():
                self._parameters[name].copy_(value)

    def write_weights(self, vector: Tensor) -> None:
        """Write the weights into a vector."""
        self.layout.flatten(self._parameters, vector)

    def take_gradients(self, vector: Tensor) -> None:
        """Write the gradients into a vector, zeros for what has none; there are none afterwards."""
        for parameter, view in zip(self._values, self.layout.views(vector).values(), strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
        self._optimizer.zero_grad(set_to_none=True)

    def step(self, batch: Batch, *, number: int, seed: int) -> Step:
        """Learn from a batch; not where loss or gradients are not finite.

        Args:
            number: of the step within the run, from 0.
            seed: of this member's random numbers.
        """
        loss = self.compute_gradients(batch, number=number, seed=seed)
        step = Step(loss, self._clip())
        if not step.fault:
            try:
                self._apply(number)  # the first one makes the optimiser's vectors
            except (RuntimeError, MemoryError) as exc:
                if not is_out_of_memory(exc):
                    raise
                raise self._too_large() from exc
        self._optimizer.zero_grad(set_to_none=True)
        return step

    def fit(self, batch: Batch) -> None:
        """Find how many samples of a batch fit into memory at once, if it is not known; learns nothing.

        Raises:
            ConfigurationError: not even one does.
        """
        if not self.micro_batch:
            self._model.train()
            self.micro_batch = self._find_micro_batch(batch)

    def read(self, ranges: Sequence[FileRange]) -> Batch:
        """Read a batch, in the room of what was freed and is kept for later where there is no other.

        Raises:
            BatchError: as of `BatchReader.read`.
        """
        try:
            return self.reader.read(ranges)
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
        self.memory.let_go()
        return self.reader.read(ranges)

    def compute_gradients(self, batch: Batch, *, number: int, seed: int) -> float:
        """The gradients of a batch's mean loss, which is returned.

        Raises:
            ConfigurationError: not even one sample at once fits into memory.
        """
        self.fit(batch)
        self._model.train()
        # A call before that ran out of memory has left a part of its own.
        self._optimizer.zero_grad(set_to_none=True)
        while True:
            try:
                return self._accumulate(batch, self.micro_batch, _seed_of(seed, number))
            except (RuntimeError, MemoryError) as exc:
                if not is_out_of_memory(exc):
                    raise
                at_once = min(self.micro_batch, batch.num_samples)
                if at_once == 1:
                    raise self._too_large() from exc
            # Not within the handler, which keeps what was computed.
            self.micro_batch = at_once // 2
            self._optimizer.zero_grad(set_to_none=True)
            self.memory.let_go()

    @torch.inference_mode()
    def evaluate(self, batch: Batch) -> tuple[float, int]:
        """The sum of the losses of a batch's labels, and how many classes were right, of images."""
        self._model.eval()
        total, num_right = 0.0, 0
        for inputs, labels in batch.pieces(self.micro_batch or _EVALUATED_AT_ONCE):
            logits_NV, labels_N = self._forward(inputs, labels)
            total += float(token_weighted_loss(logits_NV, labels_N, 1))
            if not self._is_text:
                num_right += int((logits_NV.argmax(-1) == labels_N).sum())
        return total, num_right

    @contextmanager
    def gathering_statistics(self) -> Iterator[None]:
        """Make the statistics of batch normalisation means over the batches that `pass_through` is given meanwhile."""
        norms = [
            each
            for each in self._model.modules()
            if isinstance(each, torch.nn.modules.batchnorm._BatchNorm)
        ]
        momenta = [each.momentum for each in norms]
        for each in norms:
            each.reset_running_stats()
            each.momentum = None
        try:
            yield
        finally:
            for each, momentum in zip(norms, momenta, strict=True):
                each.momentum = momentum

    @torch.no_grad()
    def pass_through(self, batch: Batch) -> None:
        """Compute a batch as in training, and keep nothing but what batch normalisation does."""
        self._model.train()
        for inputs, labels in batch.pieces(self.micro_batch or _EVALUATED_AT_ONCE):
            self._forward(inputs, labels)

    def save(self, directory: Path) -> None:
        """Write the model as transformers opens it."""
        save_model(self._model, directory)

    def save_optimizer(self, path: Path) -> None:
        """Write all that a trainer needs to go on with the same bits, beside weights and numbers of steps."""
        write_optimizer(
            path,
            self._optimizer,
            self._parameters,
            dict(self._model.named_buffers()),
            kind=self._settings.inner.optimizer,
            micro_batch=self.micro_batch,
        )

    def load_optimizer(self, path: Path) -> None:
        """Take over what `save_optimizer` wrote.

        Raises:
            CheckpointError: it is damaged, or of another model or optimiser. Nothing has changed then.
        """
        stored = read_optimizer(
            path,
            self._parameters,
            dict(self._model.named_buffers()),
            self._settings.inner.optimizer,
        )
        self._optimizer = make_optimizer(self._settings.inner, self._values)
        for name, state in stored.states.items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = {
                # Out of the file, which may be written to again.
                key: value.clone() if value.ndim == 0 else value.to(self._device, copy=True)
                for key, value in state.items()
            }
        for name, buffer in self._model.named_buffers():
            buffer.copy_(stored.buffers[name])
        self.micro_batch = stored.micro_batch

    def _forward(self, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [N, V] and labels [N] of a micro-batch."""
        inputs, labels = inputs.to(self._device), labels.to(self._device)
        is_narrow = self._settings.inner.precision == "bfloat16"
        enabled = is_narrow and has_narrow_products(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=enabled):
            if self._is_text:
                logits = self._model(input_ids=inputs, use_cache=False).logits
            else:
                logits = self._model(pixel_values=inputs).logits
        return logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)

    def _accumulate(self, batch: Batch, micro_batch: int, seed: int) -> float:
        seed_device(self._device, seed)
        shares = []
        for inputs, labels in batch.pieces(micro_batch):
            logits_NV, labels_N = self._forward(inputs, labels)
            share = token_weighted_loss(logits_NV, labels_N, batch.num_labels)
            del logits_NV
            share.backward()
            shares.append(share.detach())
        return float(torch.stack(shares).sum())

    def _clip(self) -> float:
        """The norm of all gradients together, which is at most the setting afterwards."""
        if most := self._settings.inner.clip:
            return float(torch.nn.utils.clip_grad_norm_(self._values, most))
        gradients = [value.grad for value in self._values if value.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients))

    def _apply(self, number: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate_of(number)
        self._optimizer.step()

    def _find_micro_batch(self, batch: Batch) -> int:
        """Find how many samples fit into memory at once: try one, then as many as should fit by what that one took."""
        usable = _USABLE * self.memory.limit - self._num_optimizer_bytes()
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        fits, needs = 0, self.memory.used()
        needed: float | None = None
        trial = 1
        while trial > fits:
            needed = self._try(batch, trial)
            if needed is None or needed > usable:
                trial = (fits + trial) // 2
                continue
            a_sample = max((needed - needs) / (trial - fits), 1.0)
            fits, needs = trial, needed
            # What one sample took says little of many: not too far at once. The first took what a process takes once,
            # too: a second one is tried in any case.
            more = max(min(int((usable - needs) / a_sample), 3 * fits), int(fits == 1))
            # The last few are not worth a trial each.
            trial = min(fits + more, batch.num_samples) if 8 * more > fits else fits
        for name, buffer in self._model.named_buffers():
            buffer.copy_(buffers[name])
        if not fits:
            raise self._too_large(needed)
        return fits

    def _try(self, batch: Batch, num_samples: int) -> float | None:
        """The most bytes that the process had while it computed so many samples; None where it had not enough."""
        self.memory.begin()
        inputs, labels = batch.inputs[:num_samples], batch.labels[:num_samples]
        trial = Batch(inputs, labels, batch.num_labels, batch.source)
        try:
            self._accumulate(trial, num_samples, 0)
            return self.memory.peak()
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
            return None
        finally:
            self._optimizer.zero_grad(set_to_none=True)
            self.memory.let_go()

    def _num_optimizer_bytes(self) -> int:
        """Bytes that the optimiser will have and does not have yet."""
        if self._optimizer.state:
            return 0
        # There are weights and gradients.
        return (
            member_bytes(self._settings.inner, self.layout.num_elements)
            - 8 * self.layout.num_elements
        )

    def _too_large(self, needed: float | None = None) -> ConfigurationError:
        """The error of a member that has too little memory.

        Args:
            needed: bytes that the process had with one sample at once; None where it did not get them.
        """
        takes = "more"
        if needed is not None:
            takes = f"about {int((needed + self._num_optimizer_bytes()) / _USABLE):,}"
        return ConfigurationError(
            f"not even one sample at once fits into {self.memory.limit:,} bytes of memory: with "
            f"{self.layout.num_elements:,} parameters it takes {takes}. Give the member more (--memory-limit), or take "
            "a smaller model or shorter samples"
        )


def _seed_of(seed: int, number: int) -> int:
    """A seed for one step: seeds that are near each other make streams that are not alike."""
    digest = hashlib.sha256(f"neurogrid step {seed} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
