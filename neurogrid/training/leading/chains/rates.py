"""The learning rate and the clipping of each step of a chain, as its leader has changed them or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from neurogrid.training.runs.changes import run_at
from neurogrid.training.runs.inner_optimizer import rates_of
from neurogrid.training.runs.machine import Rules
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.state import RunState

__all__ = ["StepRates"]

_BATCH: Final = "inner.batch_tokens"


class StepRates:
    """Rates by steps, each in the round that it is of.

    Args:
        run: the run file.
        state: of the run.
        rules_of: what a run file makes of the data.
    """

    def __init__(self, run: RunFile, state: RunState, rules_of: Callable[[RunFile], Rules]) -> None:
        self._run, self._state, self._rules_of = run, state, rules_of
        self._every = rules_of(run).steps

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        round_ = self._round_of(step)
        inner = run_at(self._run, self._state.changes, round_).inner
        return rates_of(inner, self._total_steps(round_))(step)

    def changed(self, step: int) -> tuple[float | None, float | None]:
        """The learning rate and the clipping of a step, where they are not those of the run file."""
        round_ = self._round_of(step)
        first, now = self._run.inner, run_at(self._run, self._state.changes, round_).inner
        is_same = now.lr == first.lr and self._total_steps(round_) == self._total_steps(0)
        return None if is_same else self.rate(step), None if now.clip == first.clip else now.clip

    def _round_of(self, step: int) -> int:
        return step // self._every + 1

    def _total_steps(self, round_: int) -> int:
        """Steps of the whole schedule, as it holds in a round."""
        changes = self._state.changes
        rules = self._rules_of(run_at(self._run, changes, round_))
        total = rules.total_steps
        if rules.max_samples is not None and _BATCH in changes.at(round_):
            # Batches of other sizes were dealt before: what is left of the samples makes so many more.
            last = max((each.round for each in changes.made if each.round <= round_), default=0)
            steps, samples = self._state.dealt_before[last]
            left = max(rules.max_samples - samples, 0)
            total = steps + -(-left // rules.batch_samples)
            total = min(total, rules.max_rounds or total)
        # As stages count it where the run has no end that is known.
        return total or 1
