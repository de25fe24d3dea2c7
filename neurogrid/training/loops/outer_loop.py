"""A model between two syncs: when the next is due, what its members average, and what becomes of the weights.

Knows no peers: what is to be averaged it gives, and what came of it it takes.

Source: training by local updates as in DiLoCo (Douillard et al., 2023).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from neurogrid.errors import ConfigurationError, NotFiniteError
from neurogrid.training.averaging.codecs import ErrorFeedback, parse_codec
from neurogrid.training.averaging.codecs.error_feedback import Pending
from neurogrid.training.averaging.groups import Outcome, State
from neurogrid.training.averaging.parts import Layout
from neurogrid.training.optimizers import OuterOptimizer
from neurogrid.training.optimizers.vectors import check_finite

__all__ = ["OuterLoop", "Rules"]

_MAX_EVERY = 1_000_000
# Contributions that are kept for a round that may have them yet; each is as large as the model.
_MAX_GIVEN_UP = 4


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that all members of a run follow, as the first member set them.

    Attributes:
        every: steps between two syncs, of each member.
        outer_lr, outer_momentum: of the outer step, SGD with Nesterov momentum: 0.7 and 0.9 as published for DiLoCo;
            1 and 0 average weights.
        feedback: share of what the codec lost of a contribution that is added to the next one, 0 to 1.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    every: int = 20
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    feedback: float = 0.0

    def __post_init__(self) -> None:
        fits = (
            type(self.every) is int
            and 1 <= self.every <= _MAX_EVERY
            and 0 < self.outer_lr <= 100
            and 0 <= self.outer_momentum < 1
            and 0 <= self.feedback <= 1
        )
        if not fits:
            raise ConfigurationError(
                f"a run syncs every 1 to {_MAX_EVERY} steps, with an outer lr above 0, a momentum from 0 to "
                f"less than 1, and a feedback from 0 to 1, not {self}"
            )

    def text(self) -> str:
        """The same as a line that members are told."""
        return json.dumps({"kind": "local updates", **asdict(self)}, sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> Rules:
        """Read what a group was founded with.

        Raises:
            ConfigurationError: the group is for something else.
        """
        try:
            told = json.loads(text)
            if told.pop("kind") != "local updates":
                raise ValueError
            lr, momentum = float(told["outer_lr"]), float(told["outer_momentum"])
            return cls(int(told["every"]), lr, momentum, float(told.get("feedback", 0.0)))
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise ConfigurationError(
                f"the group there averages for something else than a run: {text[:100]!r}"
            ) from exc


class OuterLoop:
    """The parameters of a model, and where they stand.

    Args:
        parameters: floats on any device, by name: those that are trained.
        rules: of the run.
        codec: the form in which members send; it matters where there is feedback.

    Attributes:
        layout: of the parameters as one vector.
        rules: as given.
        round: the last round that is in the weights.
        num_steps: steps of this member since it joined.
        num_samples: samples of all members' contributions that are in the weights.
    """

    def __init__(self, parameters: Mapping[str, Tensor], rules: Rules, codec: str = "f32") -> None:
        if not parameters:
            raise ConfigurationError("the model has no parameters that are trained")
        self.layout = Layout.of(parameters)
        self.rules = rules
        self.round = 0
        self.num_steps = 0
        self.num_samples = 0.0
        self._parameters = parameters
        self._vector = torch.empty(self.layout.num_elements)
        self._flatten()
        self._views = self.layout.views(self._vector)
        self._outer = OuterOptimizer(self._vector, lr=rules.outer_lr, momentum=rules.outer_momentum)
        self._restored = self._outer.theta0  # what was written to the parameters last
        self._samples = 0.0
        # Contributions that may be decided on all the same, by call.
        self._given_up: dict[int, tuple[Tensor, float, Pending]] = {}
        self._feedback: ErrorFeedback | None = None
        if rules.feedback:
            state = torch.zeros(self.layout.num_elements)
            self._feedback = ErrorFeedback(parse_codec(codec), state, decay=rules.feedback)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each vector of the state."""
        return tuple(len(vector) for vector in self._outer.state_vectors())

    def step(self, samples: float) -> bool:
        """A step was made on so many samples; whether a sync is due.

        Raises:
            ConfigurationError: `samples` is negative or not finite; nothing was counted.
        """
        if not 0 <= samples < math.inf:
            raise ConfigurationError(f"a step is made on 0 samples or more, not {samples}")
        self.num_steps += 1
        self._samples += samples
        return self.num_steps % self.rules.every == 0

    def check(self, trained: Mapping[str, Tensor]) -> None:
        """Check that what is trained is among what is synced.

        Args:
            trained: the parameters of the model that are trained now, by name.

        Raises:
            ConfigurationError: one is not; names it.
        """
        for name, parameter in trained.items():
            if self._parameters.get(name) is not parameter:
                raise ConfigurationError(
                    f"{name} is trained, and was not, or was another parameter, when the run was opened: it would not "
                    "be synced. Leave the run, and join it again with the model as it is now"
                )

    def contribution(self) -> tuple[Tensor, float]:
        """The difference since the last sync: float32 [num_elements], and the number of samples it is from.

        Raises:
            NotFiniteError: it has NaN or infinity, which the weights would keep; names the parameter.
        """
        self._flatten()
        for name, restored in self.layout.views(self._restored).items():
            dtype = self._parameters[name].dtype
            if dtype != torch.float32:
                # Nobody has learned what a coarser dtype has rounded: in the mean it would undo small outer steps.
                self._views[name] += restored - restored.to(dtype)
        difference = self._outer.difference(self._vector, self._vector)
        try:
            check_finite("the difference", difference)
        except NotFiniteError as exc:
            spans = zip(self.layout.names, self.layout.spans, strict=True)
            name = next(name for name, (_, stop) in spans if exc.index < stop)
            raise NotFiniteError(
                f"{name} has {float(difference[exc.index])} in it, and the others cannot use it: leave the run, and "
                "join it again to go on from the common weights",
                index=exc.index,
            ) from exc
        return difference, self._samples

    def due(self, difference: Tensor) -> Tensor:
        """Return what a group is given of a contribution: with what was lost of those before, where that is kept.

        Raises:
            NotFiniteError: the codec has no finite number for it.
        """
        return difference if self._feedback is None else self._feedback.due(difference)

    def apply(self, outcome: Outcome) -> None:
        """Take over what a round has come to.

        Where this member's contribution is not in it, what it has learned stays on top, and counts in the next.
        """
        self._keep_lost(outcome)
        late = self._not_in(outcome)
        self._outer.step(outcome.values)
        self.round = outcome.round
        self.num_samples += sum(outcome.weights)
        self._restore(late)

    def give_up(self, contribution: tuple[Tensor, float], *, call: int = 0) -> None:
        """A contribution was not decided on in time; it may be yet, also when a later one was not either.

        Args:
            call: tells it from others, as `Outcome.call` does.
        """
        vector, samples = contribution
        lost = [] if self._feedback is None else self._feedback.set_aside()
        self._given_up[call] = vector.clone(), samples, lost
        while len(self._given_up) > _MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]

    def _keep_lost(self, outcome: Outcome) -> None:
        """Keep what the codec has lost of the contribution that is in an outcome."""
        if self._feedback is None:
            return
        given_up = self._given_up.get(outcome.call)
        if not outcome.has_contributed:
            self._feedback.roll_back()
        elif outcome.is_of_withdrawn and given_up is not None:
            self._feedback.commit(given_up[2])
        else:
            self._feedback.commit()

    def _not_in(self, outcome: Outcome) -> Tensor | None:
        """The part of the difference that the outcome lacks; None for nothing. Its samples stay counted, too."""
        given_up = self._given_up.get(outcome.call)
        self._given_up.clear()
        if not outcome.has_contributed:
            return self.contribution()[0].clone()
        if not outcome.is_of_withdrawn or given_up is None:
            self._samples = 0.0
            return None
        vector, samples, _ = given_up
        self._samples -= samples
        return self.contribution()[0] - vector

    def state(self) -> State:
        """The state that a newcomer needs: live buffers, which `apply` writes to."""
        note = json.dumps({"samples": self.num_samples}).encode()
        return State(self.round, tuple(self._outer.state_vectors()), note)

    def load(self, state: State) -> None:
        """Begin where the others are.

        Raises:
            ConfigurationError: the note is none.
        """
        try:
            note: Any = json.loads(state.note)
            self.num_samples = float(note["samples"])
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigurationError("the others' state says nothing of their samples") from exc
        self._outer.load(state.vectors)
        self.round = state.round
        self._samples = 0.0
        self._restore(None)

    def _flatten(self) -> None:
        self.layout.flatten(self._parameters, self._vector)

    def _restore(self, on_top: Tensor | None) -> None:
        """The weights of the last sync, and what was learned since."""
        self._restored = self._outer.theta0 if on_top is None else self._outer.theta0 + on_top
        with torch.no_grad():
            for name, value in self.layout.views(self._restored).items():
                self._parameters[name].copy_(value)
