"""Results of a trainer's calls: frozen, and as plain data between the two processes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BatchDone", "Evaluation", "Gradient", "Trained"]


@dataclass(frozen=True, slots=True)
class BatchDone:
    """Told after each batch of a call.

    Attributes:
        batches: of this call, with this one.
        loss: mean over the labels of this batch.
        tokens: of this batch; of images samples.
        seconds: that it took.
    """

    batches: int
    loss: float
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Trained:
    """Result of a call of `train`.

    Attributes:
        batches: that were learned from.
        samples: in them.
        tokens: that went into the model; of images samples.
        labels: that the losses are over.
        loss_sum: of all of them.
        seconds: that it took, the copying of the weights too.
        cpu_seconds: of the process, all its threads.
        gradient_norm: of the last batch, before it was clipped.
        micro_batch: samples at once.
        memory_bytes: the most that the process ever had, or its device where that is no CPU.
        not_finite: what was not finite, in which samples, and what to do; the steps before it are in the weights, and
            no other. Empty for nothing.
    """

    batches: int
    samples: int
    tokens: int
    labels: int
    loss_sum: float
    seconds: float
    cpu_seconds: float
    gradient_norm: float
    micro_batch: int
    memory_bytes: int
    not_finite: str

    @property
    def loss(self) -> float:
        """Mean over the labels; NaN where there were none."""
        return self.loss_sum / self.labels if self.labels else float("nan")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of a call of `evaluate`.

    Attributes:
        loss: mean over all labels.
        labels: their number.
        tokens: that went into the model; of images samples.
        accuracy: share of the images whose class was right; None for text.
    """

    loss: float
    labels: int
    tokens: int
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class Gradient:
    """Result of a call of `gradient`.

    Attributes:
        samples, tokens, labels: of the batch.
        loss: mean over the labels.
        seconds: that it took.
        micro_batch: samples at once.
        not_finite: as of `Trained`.
    """

    samples: int
    tokens: int
    labels: int
    loss: float
    seconds: float
    micro_batch: int
    not_finite: str
