"""The common weights of a run, as each of its members and its leader have them: what is averaged, and what comes of it.

Knows no peers. The weights may be synced in parts, one a round in turn: then each part has been trained on since its
last turn, and what was trained on other parts stays with the member.

Source: DiLoCo (Douillard et al., 2023), and its streaming form (2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from blake3 import blake3
from torch import Tensor

from neurogrid.errors import ConfigurationError
from neurogrid.training.averaging.groups import Outcome, State
from neurogrid.training.averaging.parts import AllOfIt, Fragments, Layout, gather, scatter
from neurogrid.training.optimizers import OuterOptimizer
from neurogrid.training.optimizers.vectors import Spans

__all__ = ["OuterState", "RunWeights", "digest_of"]

# Of what was agreed, in a member's own weights when it has trained on meanwhile.
_MIX: Final = 0.5


def digest_of(vector: Tensor) -> bytes:
    """BLAKE3 of a vector as float32 in little endian, 32 bytes."""
    return blake3(vector.detach().numpy().data.cast("B")).digest()


class RunWeights(Protocol):
    """The common weights of a run: what is averaged, and what comes of it.

    Attributes:
        group_layout: of the vector that the group averages.
        weights: float32 [num_elements], a member's own.
        round: the last round that is in the weights.
        step_norm: the norm of the outer step of that round; None where it made none.
    """

    group_layout: Layout
    weights: Tensor
    round: int
    step_norm: float | None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each vector of the state."""

    @property
    def common(self) -> Tensor:
        """float32 [num_elements], what all members have in common."""

    def digest(self) -> bytes:
        """`digest_of` what is common: the same for all members after the same round."""

    def contribution(self) -> Tensor:
        """The member's vector for the next round: float32 [group_layout.num_elements]."""

    def apply(self, outcome: Outcome) -> None:
        """Take over what a round has come to."""

    def state(self) -> State:
        """The state that a newcomer needs."""

    def load(self, state: State) -> None:
        """Begin where the others are."""

    def state_dict(self) -> dict[str, Tensor]:
        """The vectors by name, for a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Tensor], round_number: int) -> None:
        """Take over what `state_dict` gave."""


@dataclass(frozen=True, slots=True, eq=False)
class _Unsettled:
    """A part that was agreed on, and is not in a member's own weights yet.

    Attributes:
        spans: of the part.
        agreed: float32 [elements of the part], the common weights after it.
        before: the same before it, of a round that the member is not in; else None.
    """

    spans: Spans
    agreed: Tensor
    before: Tensor | None


class OuterState:
    """Weights at the last sync, outer momentum, and a member's own weights.

    Args:
        layout: of the model's trained parameters.
        weights: float32 [num_elements], a member's own: read, and written to when a round is applied.
        lr, momentum: of the outer step.
        num_parts: in which the weights are synced.
        overlaps: whether the member trains on while a round is under way: then the round changes its own weights only
            when it `settle`s.
        freshness: what is left of what the member has learned, with each round that it is not in; above 0, at most 1,
            and 1 where it overlaps.

    Attributes:
        layout, weights: as given.
        group_layout: of the vector that the group averages.
        round: the last round that is in the weights.
        step_norm: the norm of the outer step of that round; None where it made none, or was not applied here.

    Raises:
        ConfigurationError: the model has fewer tensors than parts.
    """

    def __init__(
        self,
        layout: Layout,
        weights: Tensor,
        *,
        lr: float,
        momentum: float,
        num_parts: int = 1,
        overlaps: bool = False,
        freshness: float = 1.0,
    ) -> None:
        self._freshness = freshness
        self.layout, self.weights = layout, weights
        self.round = 0
        self.step_norm: float | None = None
        self._overlaps = overlaps
        self._unsettled: list[_Unsettled] = []
        self._outer = OuterOptimizer(weights, lr=lr, momentum=momentum)
        self._turns = Fragments(layout, num_parts) if num_parts > 1 else AllOfIt(layout)
        longest = max(self._turns.num_elements(turn) for turn in range(num_parts))
        self.group_layout = (
            layout
            if num_parts == 1
            # Names the model: members with another one are refused.
            else Layout((f"{self._turns.name} of {layout.digest.hex()}",), ((longest,),))
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each vector of the state."""
        return tuple(len(vector) for vector in self._outer.state_vectors())

    @property
    def common(self) -> Tensor:
        """float32 [num_elements], the weights that all members have in common. Not to be written to."""
        return self._outer.theta0

    def digest(self) -> bytes:
        """See `RunWeights.digest`."""
        return digest_of(self.common)

    def contribution(self) -> Tensor:
        """The difference since the last sync of the part whose turn is next: float32 [group_layout.num_elements]."""
        spans = self._turns.spans(self.round)
        vector = torch.zeros(self.group_layout.num_elements)
        part = self._turns.num_elements(self.round)
        self._outer.difference(self.weights, vector[:part], spans)
        return vector

    def apply(self, outcome: Outcome) -> None:
        """Take over what a round has come to.

        Where this member's contribution is not in it, what it has learned stays on top, as far as it is fresh: it
        began from a state that is older by a round than that of the others. A round for which nobody has
        trained anything, as its weights say, syncs what is left at the end: its mean is taken as it is, since momentum
        would go on without a gradient.

        Raises:
            ConfigurationError: it is not the next round.
        """
        if outcome.round != self.round + 1:
            raise ConfigurationError(
                f"round {outcome.round} cannot be applied to the weights after round {self.round}"
            )
        spans = self._turns.spans(self.round)
        part = self._turns.num_elements(self.round)
        before = late = None
        if not outcome.has_contributed:
            if self._overlaps:
                before = gather(self._outer.theta0, spans).clone()
            else:
                late = self.contribution().mul_(self._freshness)
        self.step_norm = None
        if sum(outcome.weights) < 1:
            self._outer.take(outcome.values[:part], spans)
        else:
            self.step_norm = self._outer.step(outcome.values[:part], spans)
        agreed = gather(self._outer.theta0, spans)
        if self._overlaps:
            self._unsettled.append(_Unsettled(spans, agreed.clone(), before))
        else:
            scatter(agreed if late is None else agreed + late[:part], self.weights, spans)
        self.round = outcome.round

    def settle(self) -> None:
        """Take what was agreed since into the member's own weights, once it has trained on.

        Half of what it has learned since it contributed stays; where it did not contribute, all of it.
        """
        for each in self._unsettled:
            own = gather(self.weights, each.spans).clone()
            if each.before is None:
                own = own.lerp(each.agreed, _MIX)
            else:
                own += each.agreed - each.before
            scatter(own, self.weights, each.spans)
        self._unsettled.clear()

    def take_own(self, weights: Tensor) -> None:
        """Have own weights again that were kept with the round that is the last one now.

        Args:
            weights: float32 [num_elements], after training, and before what was agreed was in them where it `settle`s
                later.
        """
        self.weights.copy_(weights)
        self._unsettled.clear()
        if self._overlaps and self.round:
            spans = self._turns.spans(self.round - 1)
            agreed = gather(self._outer.theta0, spans).clone()
            self._unsettled.append(_Unsettled(spans, agreed, None))

    def state(self) -> State:
        """The state that a newcomer needs: live buffers, which `apply` writes to."""
        return State(self.round, tuple(self._outer.state_vectors()))

    def load(self, state: State) -> None:
        """Begin where the others are."""
        self._outer.load(state.vectors)
        self.round, self.step_norm = state.round, None
        self._unsettled.clear()
        self.weights.copy_(self._outer.theta0)

    def state_dict(self) -> dict[str, Tensor]:
        """The vectors by name, as copies: for a checkpoint."""
        return self._outer.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], round_number: int) -> None:
        """Take over what `state_dict` gave after a round."""
        self._outer.load_state_dict(dict(state))
        self.round, self.step_norm = round_number, None
        self._unsettled.clear()
        self.weights.copy_(self._outer.theta0)
