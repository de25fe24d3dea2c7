"""The outer optimiser: weights at the last sync, momentum, and what a round's mean difference makes of them.

theta0 are the weights at the last sync, theta a member's after its steps, D = theta - theta0 its difference. With the
mean D that all members agreed on, g = -D, m = momentum x m + g, and theta0 -= lr x (g + momentum x m): the arithmetic
of `torch.optim.SGD(lr, momentum, nesterov=True)`, to the bit. lr 1 without momentum is plain averaging of weights.

Both buffers are float32 and the same with all members, so a newcomer can fetch them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from neurogrid.training.optimizers.rounding import add_scaled_
from neurogrid.training.optimizers.vectors import (
    Spans,
    check_finite,
    check_spans,
    check_vector,
    load_vectors,
    pieces,
)

__all__ = ["OuterOptimizer"]


class OuterOptimizer:
    """Nesterov momentum on one flat vector.

    Args:
        theta0: float32 [n], copied.
        lr: of the outer step. May be set anew between steps, by all members alike.
        momentum: from 0 to less than 1. With 0 no buffer is kept for it.

    Attributes:
        theta0: float32 [n], the weights at the last sync. Not to be written to.

    Raises:
        ValueError: a setting is out of its range, or theta0 is no flat float32 vector.
    """

    def __init__(self, theta0: Tensor, *, lr: float = 0.7, momentum: float = 0.9) -> None:
        check_vector("theta0", theta0, theta0.numel())
        if not (math.isfinite(lr) and lr > 0):
            raise ValueError(f"the outer lr must be finite and above 0, not {lr}")
        if not 0 <= momentum < 1:
            raise ValueError(f"the outer momentum must be in [0, 1), not {momentum}")
        self.lr = lr
        self.theta0 = theta0.detach().clone()
        self._factor = momentum
        # -0.0 and not 0.0: g + -0.0 is g to the bit, also where g is -0.0, and so is torch's first step.
        self._momentum = torch.full_like(self.theta0, -0.0) if momentum else None

    def difference(
        self, theta: Tensor, out: Tensor | None = None, part: Spans | None = None
    ) -> Tensor:
        """D = theta - theta0 over `part`, or all: float32 [num_elements of the part].

        Args:
            theta: float32 [n], a member's weights.
            out: where D is written; a new tensor if not given.
            part: some of the elements, which are all that D has then.

        Raises:
            ValueError: a shape or a dtype is wrong.
        """
        spans, num_elements = self._part(part)
        check_vector("theta", theta, self.theta0.numel())
        if out is None:
            out = torch.empty(num_elements, dtype=torch.float32, device=theta.device)
        check_vector("the buffer of the difference", out, num_elements)
        for place, own in pieces(spans):
            torch.sub(theta[place], self.theta0[place], out=out[own])
        return out

    @torch.no_grad()
    def step(self, mean_difference: Tensor, part: Spans | None = None) -> float:
        """Applies the mean difference of a round to `part`, or all.

        Args:
            mean_difference: float32 [num_elements of the part]. Left as it is.
            part: some of the elements; the others keep their weights and momentum.

        Returns:
            The norm of what the weights have moved by, but for rounding.

        Raises:
            ValueError: a shape or a dtype is wrong.
            NotFiniteError: an element is infinite or no number. Nothing was applied.
        """
        spans, num_elements = self._part(part)
        check_vector("the mean difference", mean_difference, num_elements)
        check_finite("the mean difference", mean_difference)
        squares = []
        for place, own in pieces(spans):
            difference = mean_difference[own]
            update = difference.neg()
            if self._momentum is not None:
                momentum = self._momentum[place]
                momentum.mul_(self._factor).sub_(difference)
                add_scaled_(update, momentum, self._factor)
            add_scaled_(self.theta0[place], update, -self.lr)
            squares.append(float(torch.dot(update, update)))
        return self.lr * math.sqrt(math.fsum(squares))

    @torch.no_grad()
    def take(self, mean_difference: Tensor, part: Spans | None = None) -> None:
        """Adds the mean difference of a round to `part`, or all, and leaves the momentum. Arguments and errors as of
        `step`."""
        spans, num_elements = self._part(part)
        check_vector("the mean difference", mean_difference, num_elements)
        check_finite("the mean difference", mean_difference)
        for place, own in pieces(spans):
            self.theta0[place].add_(mean_difference[own])

    def state_vectors(self) -> list[Tensor]:
        """State for a newcomer, in a fixed order, as the live buffers: theta0, and momentum where there is any."""
        return [self.theta0] if self._momentum is None else [self.theta0, self._momentum]

    def load(self, vectors: Sequence[Tensor]) -> None:
        """Takes over the state of another member, in the order of `state_vectors`.

        Raises:
            ValueError: number, shape or dtype of the vectors is wrong. Nothing was taken over.
            NotFiniteError: an element is infinite or no number. Nothing was taken over.
        """
        load_vectors(self.state_vectors(), vectors)

    def state_dict(self) -> dict[str, Tensor]:
        """The state by name, as copies: for a checkpoint."""
        return {
            name: vector.clone()
            for name, vector in zip(self._names(), self.state_vectors(), strict=True)
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes over what `state_dict` gave.

        Raises:
            ValueError: names, shapes or dtypes are wrong.
            NotFiniteError: an element is infinite or no number.
        """
        if sorted(state) != sorted(self._names()):
            raise ValueError(f"the outer state has {self._names()}, and not {sorted(state)}")
        self.load([state[name] for name in self._names()])

    def _names(self) -> list[str]:
        return ["theta0"] if self._momentum is None else ["theta0", "momentum"]

    def _part(self, part: Spans | None) -> tuple[Spans, int]:
        """Spans of a part, or of all, and how many elements they have."""
        spans = [(0, self.theta0.numel())] if part is None else part
        return spans, check_spans(spans, self.theta0.numel())
