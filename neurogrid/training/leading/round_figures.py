"""Figures of rounds, from when they are decided until they are a line of metrics.jsonl: of each round one. Pure.

A leader that was away learns of rounds that were decided meanwhile, and one that was killed had yet to write some.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.state import Occupant, RunState

__all__ = ["RoundFigures"]


class RoundFigures:
    """Figures of rounds that have no line in metrics.jsonl yet.

    Args:
        run: the run file.
        sequence_length: tokens of a sample; 0 where it is none of text.
    """

    def __init__(self, run: RunFile, sequence_length: int) -> None:
        self._steps = run.outer.every, run.outer.fragments
        self._tokens = max(sequence_length, 1)
        self._written = 0
        self._waiting: dict[int, dict[str, float]] = {}
        self._told: dict[Occupant, tuple[float, int]] = {}
        self._loss_sum, self._num_tokens = 0.0, 0
        self._norms: dict[Occupant, float] = {}

    def heard(
        self,
        member: Occupant,
        loss_sum: float,
        num_tokens: int,
        gradient_norm: float | None = None,
    ) -> None:
        """A member tells of all losses and tokens since it began; what it tells first is of rounds before.

        Args:
            gradient_norm: of its last batch, before clipping; None for none yet.
        """
        if gradient_norm is not None:
            self._norms[member] = gradient_norm
        loss_before, tokens_before = self._told.get(member, (loss_sum, num_tokens))
        self._told[member] = loss_sum, num_tokens
        if num_tokens >= tokens_before:
            self._loss_sum += loss_sum - loss_before
            self._num_tokens += num_tokens - tokens_before

    def keep(self, members: Collection[Occupant]) -> None:
        """Forget all but these, which are the members from here on."""
        self._told = {member: told for member, told in self._told.items() if member in members}
        self._norms = {member: norm for member, norm in self._norms.items() if member in members}

    def decided(self, state: RunState, *, num_members: int | None = None) -> None:
        """A round was decided: the last one of this state.

        Args:
            num_members: that there were then; None for those that there are.
        """
        if state.round <= self._written:
            return
        figures = self.of(state)
        if num_members is not None:
            figures["members"] = num_members
        if self._num_tokens:
            figures["loss"] = round(self._loss_sum / self._num_tokens, 6)
            self._loss_sum, self._num_tokens = 0.0, 0
        if self._norms:
            figures["gradient_norm"] = round(math.fsum(self._norms.values()) / len(self._norms), 6)
        self._waiting[state.round] = figures

    def of(self, state: RunState) -> dict[str, float]:
        """Figures of the last round of this state that follow from the journal."""
        every, fragments = self._steps
        return {
            "round": state.round,
            "step": state.num_trained * every // fragments,
            "tokens": state.num_used * self._tokens,
            "members": len(state.occupied()),
        }

    def resumed(self, round_number: int) -> None:
        """Rounds after this one are taken back, and will be others."""
        self._waiting = {r: each for r, each in self._waiting.items() if r <= round_number}
        self._written = min(self._written, round_number)

    def written(self, round_number: int) -> None:
        """Rounds up to this one have their lines."""
        self.take(round_number)

    def take(self, round_number: int) -> list[dict[str, float]]:
        """Take out the figures of each round up to this one that has no line yet, in order; they count as written."""
        due = sorted(number for number in self._waiting if number <= round_number)
        self._written = max(self._written, round_number)
        return [self._waiting.pop(number) for number in due]
