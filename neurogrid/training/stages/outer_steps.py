"""Weights that replicas have in common since the last round, and what the next one makes of them.

Differences go out, a vector of pieces at a time, and their means come in; until the round is said to be made nothing
has changed. How the means are found is not known here.

Source: protocol_spec/training/stages.md, "Replicas".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from neurogrid.training.averaging.parts import Layout, Span
from neurogrid.training.optimizers import OuterOptimizer
from neurogrid.training.stages.stage_sums import Means

__all__ = ["OuterSteps"]


class OuterSteps:
    """A stage's part of the outer optimiser, float32 on the CPU.

    Args:
        parameters: that learn here, by name, in an order that all have; their weights are the common ones.
        pieces: the piece of each parameter.
        lr, momentum: of the outer step.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        pieces: Mapping[str, str],
        *,
        lr: float,
        momentum: float,
    ) -> None:
        self._parameters, self._pieces = parameters, pieces
        self._layout = Layout.of(parameters)
        self._has_momentum = momentum > 0
        self._outer = OuterOptimizer(self._flat(), lr=lr, momentum=momentum)
        self._agreed: list[tuple[Sequence[Span], Tensor]] | None = None

    def differences(self, groups: Sequence[Sequence[str]]) -> Means:
        """Yield the differences since the last round, a vector for each group of pieces in turn, and take their means.

        Args:
            groups: names of pieces, of which this stage has all that is in them.

        Raises:
            ValueError: a difference is not finite.
        """
        self._agreed = None
        agreed: list[tuple[Sequence[Span], Tensor]] = []
        for pieces in groups:
            names = [
                name
                for piece in pieces
                for name in self._layout.names
                if self._pieces[name] == piece
            ]
            spans = [self._span(name) for name in names]
            # One vector of a group: the mean takes the place of what was learned.
            vector = torch.empty(sum(stop - start for start, stop in spans))
            for name, (start, stop), own in zip(names, spans, _parts(vector, spans), strict=True):
                torch.sub(_flat(self._parameters[name]), self._outer.theta0[start:stop], out=own)
            if not torch.isfinite(vector).all():
                raise ValueError("what was learned is not finite")
            mean = yield vector
            vector.copy_(mean)
            agreed.append((spans, vector))
        self._agreed = agreed

    def commit(self) -> None:
        """Make the outer step: the weights are the common ones then.

        Raises:
            ValueError: nothing was agreed on, or it is not finite.
        """
        if self._agreed is None:
            raise ValueError("no round is to be made: nothing was averaged")
        for spans, mean in self._agreed:
            for span, part in zip(spans, _parts(mean, spans), strict=True):
                self._outer.step(part, [span])
        self._agreed = None
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                start, stop = self._span(name)
                parameter.copy_(self._outer.theta0[start:stop].view_as(parameter))

    def forget(self) -> None:
        """Let go of what was agreed on."""
        self._agreed = None

    def momentum(self, name: str) -> Tensor | None:
        """The outer momentum of a parameter, in its shape; None where there is none."""
        if not self._has_momentum:
            return None
        start, stop = self._span(name)
        return self._outer.state_vectors()[1][start:stop].view(self._parameters[name].shape)

    def load(self, momenta: Mapping[str, Tensor]) -> None:
        """Go on from a state: the weights that there are become the common ones.

        Args:
            momenta: the outer momentum of each parameter; nothing where it begins.
        """
        self._agreed = None
        common, *moved = self._outer.state_vectors()
        for name, parameter in self._parameters.items():
            start, stop = self._span(name)
            common[start:stop] = _flat(parameter)
            for vector in moved:
                vector[start:stop] = momenta[name].flatten() if name in momenta else -0.0

    def _flat(self) -> Tensor:
        return torch.cat([_flat(each) for each in self._parameters.values()] or [torch.empty(0)])

    def _span(self, name: str) -> Span:
        return self._layout.spans[self._layout.names.index(name)]


def _parts(vector: Tensor, spans: Sequence[Span]) -> tuple[Tensor, ...]:
    """Split a vector into the parts of its spans, which stand in it one after the other."""
    return vector.split([stop - start for start, stop in spans]) if spans else ()


def _flat(parameter: Tensor) -> Tensor:
    return parameter.detach().to("cpu", torch.float32).flatten()
