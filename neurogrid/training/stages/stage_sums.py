"""Gradients and weights that the members of a stage have in common: vectors go out, and their means come in.

Each is a generator that gives vectors in turn and is sent the mean of each over the members. How that is found is not
known here. With a rank, gradients of matrices go out at that rank (PowerSGD).

Source: protocol_spec/training/stages.md, "Several members".
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from neurogrid.training.averaging.parts import (
    PARTITION_UNIT,
    Layout,
    RandomPartitions,
    gather,
    scatter,
)
from neurogrid.training.optimizers import PowerSgd

__all__ = ["NUM_PARTITIONS", "Means", "StageSums"]

Means = Generator[Tensor, Tensor, None]
"""Gives float32 vectors [elements] on the CPU, and is sent the mean of each over the members."""

NUM_PARTITIONS: Final = 20
"""Parts of the weights, of which one at a time is averaged."""


class StageSums:
    """Sums of gradients and means of weights that one member has in common with the others of its stage.

    Args:
        parameters: that learn here, by name, in an order that all have.
        rank: of what is sent of a matrix's gradient; 0 for all of it.
        seed: of the run.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, rank: int, seed: int) -> None:
        self._parameters, self._rank = parameters, rank
        self._layout = Layout.of(parameters)
        self._seed = struct.pack(">q", seed)
        self._power: PowerSgd | None = None
        self._chain = 0
        self._partitions: RandomPartitions | None = None

    @property
    def num_elements(self) -> int:
        """Elements of the longest vector that goes out."""
        return self._layout.num_elements

    def has_finite_gradients(self) -> bool:
        """Whether no gradient has a NaN or an infinity."""
        gradients = (each.grad for each in self._parameters.values() if each.grad is not None)
        return all(bool(torch.isfinite(each).all()) for each in gradients)

    @torch.no_grad()
    def gradients(self, num_members: int, chain: int) -> Means:
        """Let each gradient be the sum of those of all members. One that there is not counts as zeros.

        Args:
            chain: the number of the arrangement: with each PowerSGD begins anew, but for what it has yet to make good.
        """
        own = [_gradient(each).cpu() for each in self._parameters.values()]
        if self._rank:
            means = yield from self._begun(chain).exchange(own)
        else:
            mean = yield torch.cat([each.flatten() for each in own] or [torch.empty(0)])
            means = list(mean.split([each.numel() for each in own]))
        for parameter, found in zip(self._parameters.values(), means, strict=True):
            summed = (found * num_members).view_as(parameter)
            parameter.grad = summed.to(parameter.device)

    @torch.no_grad()
    def weights(self, turn: int) -> Means:
        """Let a part of the weights be the mean of those of all members.

        Args:
            turn: which of the random partitions, modulo their number.
        """
        if self._partitions is None:
            units = -(-self._layout.num_elements // PARTITION_UNIT)
            num = min(NUM_PARTITIONS, max(units, 1))
            self._partitions = RandomPartitions(self._layout, num, seed=self._seed)
        spans = self._partitions.spans(turn)
        vector = torch.empty(self._layout.num_elements)
        values = {name: each.detach().cpu() for name, each in self._parameters.items()}
        self._layout.flatten(values, vector)
        mean = yield gather(vector, spans).clone()
        scatter(mean, vector, spans)
        for name, (start, stop) in zip(self._layout.names, self._layout.spans, strict=True):
            parameter = self._parameters[name]
            parameter.copy_(vector[start:stop].view_as(parameter))

    def commit(self) -> None:
        """The step was applied, so what was not sent of it is to be made good."""
        if self._power is not None and self._power.is_pending:
            self._power.commit()

    def drop(self) -> None:
        """The step was not applied."""
        if self._power is not None:
            self._power.drop()

    def _begun(self, chain: int) -> PowerSgd:
        if self._power is None or chain != self._chain:
            if self._power is None:
                self._power = PowerSgd(self._layout.shapes, self._rank)
            self._power.restart(chain % 2**63)
            self._chain = chain
        return self._power


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
