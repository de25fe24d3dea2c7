"""Weights that all members step alike: each round averages gradients, and the inner optimiser applies their mean.

Data parallel training: the optimiser's state is common, too, so that a newcomer can fetch it. Knows no peers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from neurogrid.errors import ConfigurationError
from neurogrid.training.averaging.groups import Outcome, State
from neurogrid.training.averaging.parts import Layout
from neurogrid.training.runs.inner_optimizer import make_optimizer, rates_of
from neurogrid.training.runs.outer_state import digest_of
from neurogrid.training.runs.run_file import InnerSection

__all__ = ["CommonSteps"]

_STATES = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class CommonSteps:
    """Weights, the optimiser's state, and gradients that are in no round yet.

    Args:
        layout: of the model's trained parameters.
        weights: float32 [num_elements]: stepped in place.
        inner: the optimiser.
        total_steps: of the schedule.
        freshness: what is left of the weight of gradients, beside newer ones, with each round that they are not in.

    Attributes:
        layout, weights: as given.
        group_layout: of the vector that the group averages: gradients.
        round: the last round that is in the weights, and the number of steps that they have made.
        step_norm: None: there is no outer step.
    """

    def __init__(
        self,
        layout: Layout,
        weights: Tensor,
        inner: InnerSection,
        *,
        total_steps: int,
        freshness: float = 1.0,
    ) -> None:
        self._freshness = freshness
        self.layout = self.group_layout = layout
        self.weights = weights
        self.round = 0
        self.step_norm: float | None = None
        self._inner = inner
        self._parameter = nn.Parameter(weights, requires_grad=True)
        self._rate_of = rates_of(inner, total_steps)
        names = _STATES[inner.optimizer] if inner.optimizer == "adamw" or inner.momentum else ()
        self._moments = {name: torch.zeros_like(weights) for name in names}
        self._gradient = torch.zeros_like(weights)
        self._weight = 0.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each vector of the state."""
        return (len(self.weights),) * (1 + len(self._moments))

    @property
    def common(self) -> Tensor:
        """float32 [num_elements], the weights that all members have in common. Not to be written to."""
        return self.weights

    def digest(self) -> bytes:
        """See `RunWeights.digest`."""
        return digest_of(self.common)

    def add(self, gradient: Tensor, weight: float) -> None:
        """A gradient was computed, float32 [num_elements], which counts by its weight."""
        self._weight += weight
        self._gradient.lerp_(gradient, weight / self._weight)

    def contribution(self) -> Tensor:
        """The mean of the gradients that are in no round: float32 [num_elements]."""
        return self._gradient.clone()

    def apply(self, outcome: Outcome) -> None:
        """Make a step by the mean gradient of a round.

        A gradient of this member that is not in it counts in the next: beside those that are computed until then, by
        its samples as far as it is fresh.

        Raises:
            ConfigurationError: it is not the next round.
        """
        if outcome.round != self.round + 1:
            raise ConfigurationError(
                f"round {outcome.round} cannot be applied to the weights after round {self.round}"
            )
        self._parameter.grad = outcome.values.clone()
        if self._inner.clip:
            nn.utils.clip_grad_norm_([self._parameter], self._inner.clip)
        self._optimizer().step()
        self._parameter.grad = None
        self.round = outcome.round
        if outcome.has_contributed:
            self._gradient.zero_()
            self._weight = 0.0
        else:
            self._weight *= self._freshness

    def _optimizer(self) -> torch.optim.Optimizer:
        """The optimiser as it stands: it steps the vectors that are here."""
        inner = self._inner
        optimizer = make_optimizer(inner, [self._parameter])
        optimizer.param_groups[0]["lr"] = self._rate_of(self.round)
        if inner.optimizer == "adamw":
            step = torch.tensor(float(self.round))
            optimizer.state[self._parameter] = {"step": step, **self._moments}
        elif self._moments and self.round:
            optimizer.state[self._parameter] = dict(self._moments)
        if inner.optimizer == "sgd" and self._moments and not self.round:
            # Torch's first step has no buffer: it takes the gradient for it.
            assert self._parameter.grad is not None
            gradient = self._parameter.grad
            if inner.weight_decay:
                gradient = gradient.add(self.weights, alpha=inner.weight_decay)
            self._moments["momentum_buffer"].copy_(gradient)
        return optimizer

    def state(self) -> State:
        """The state that a newcomer needs: live buffers, which `apply` writes to."""
        return State(self.round, (self.weights, *self._moments.values()))

    def load(self, state: State) -> None:
        """Begin where the others are."""
        own = (self.weights, *self._moments.values())
        with torch.no_grad():
            for here, there in zip(own, state.vectors, strict=True):
                here.copy_(there)
        self.round = state.round
        self._gradient.zero_()
        self._weight = 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """The vectors by name, as copies: for a checkpoint."""
        return {
            "theta0": self.weights.clone(),
            **{name: vector.clone() for name, vector in self._moments.items()},
        }

    def load_state_dict(self, state: Mapping[str, Tensor], round_number: int) -> None:
        """Take over what `state_dict` gave after a round."""
        names = ("theta0", *self._moments)
        self.load(State(round_number, tuple(state[name] for name in names)))
