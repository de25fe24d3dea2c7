"""The inner optimiser that a run file describes, as torch has it, and the learning rate of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch
from torch import Tensor

from neurogrid.training.optimizers import PiecewiseAdamW, schedule_of
from neurogrid.training.runs.run_file import InnerSection

__all__ = ["make_optimizer", "rates_of", "round_rates"]

_SCHEDULES: Final = {"wsd": "warmup_stable_decay"}
# A step has a rate above 0: where the schedule is at 0, so little of its height.
_LEAST_RATE: Final = 1e-6


def make_optimizer(inner: InnerSection, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """A new optimiser, at the rate where the schedule is at its height."""
    if inner.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=inner.lr, momentum=inner.momentum, weight_decay=inner.weight_decay
        )
    return PiecewiseAdamW(
        parameters, inner.lr, betas=inner.betas, eps=inner.eps, weight_decay=inner.weight_decay
    )


def rates_of(inner: InnerSection, total_steps: int) -> Callable[[int], float]:
    """The learning rate by the number of a step within the run, from 0; later ones have that of the last.

    Args:
        total_steps: of the whole run.
    """
    factor = schedule_of(
        _SCHEDULES.get(inner.schedule, inner.schedule),
        num_steps=total_steps,
        num_warmup_steps=inner.warmup_steps(total_steps),
        num_decay_steps=inner.decay_steps(total_steps),
    )
    return lambda number: inner.lr * factor(min(number, total_steps))


def round_rates(inner: InnerSection, total_steps: int) -> Callable[[int], float]:
    """The learning rate of a run whose rounds are steps: above 0, for a step that moves nothing is none."""
    rate_of = rates_of(inner, max(total_steps, 1))
    return lambda number: max(rate_of(number), _LEAST_RATE * inner.lr)
