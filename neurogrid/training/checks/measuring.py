"""Worth of a result, measured: the weights that it alone would make, and losses before and after them.

    after = step_alone(weights, coefficients, settings, lr)
    worth = Worth(loss(weights, given), loss(after, given), loss(weights, other), loss(after, other))

A measurement costs four losses and no gradient. It says what an audit does not: whether what was computed helps. Who
did not compute, or copies, has no advantage where it was to train; what is wrong with it, only an audit says.

Source: protocol_spec/training/checks.md, "Worth".
"""

from __future__ import annotations

import torch
from torch import Tensor

from neurogrid.training.checks.claims import Settings
from neurogrid.training.optimizers import Coefficients, Distro

__all__ = ["step_alone"]


@torch.no_grad()
def step_alone(
    weights: Tensor, coefficients: Coefficients, settings: Settings, lr: float
) -> Tensor:
    """The weights after a round in which nothing but this result was agreed on: float32 [n], new.

    Args:
        weights: float32 [n], before the round.
        coefficients: the result, as `Distro.check` lets it pass.
        lr: of the round.

    Raises:
        ValueError, NotFiniteError: the result is none of these settings.
    """
    alone = Distro(
        weights,
        settings.shapes,
        top_k=settings.top_k,
        max_side=settings.max_side,
        decay=settings.decay,
        one_bit=settings.is_one_bit,
    )
    alone.apply(alone.mean([coefficients]), lr)
    return alone.theta
