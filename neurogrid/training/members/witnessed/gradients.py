"""The mean gradient over the batches of a work, as whoever computes it gets it: its member, and who looks at it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import trio
from torch import Tensor

from neurogrid.training.runs.trainers import work_seed
from neurogrid.training.trainer import FileRange, Gradient, Trainer, TrainerError

__all__ = ["mean_gradient"]


async def mean_gradient(
    trainer: Trainer,
    batches: Sequence[Sequence[FileRange]],
    *,
    run_seed: int,
    seat: int,
    round_number: int,
    step: int,
    on_batch: Callable[[int, Gradient], None] = lambda number, found: None,
) -> Tensor:
    """The gradient of the mean loss over all samples, at the trainer's weights: float32 [num_elements].

    Args:
        run_seed: of the run file.
        seat: whose work it is.
        round_number: of the leader's count.
        step: the place in the schedule.
        on_batch: is told of each batch, from 1.

    Raises:
        TrainerError: a gradient is not finite, or the trainer has ended.
    """
    mean = torch.zeros_like(trainer.gradients)
    num_samples = 0
    for number, batch in enumerate(batches):
        seed = work_seed(run_seed, seat, round_number * len(batches) + number)
        found = await trainer.gradient(batch, step=step, seed=seed)
        if found.not_finite:
            raise TrainerError(found.not_finite)
        num_samples += found.samples
        share = found.samples / num_samples
        await trio.to_thread.run_sync(mean.lerp_, trainer.gradients, share)
        on_batch(number + 1, found)
    return mean
