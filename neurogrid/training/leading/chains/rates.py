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
    """Rates by steps, of which each is a round.

    Args:
        run: the run file.
        state: of the run.
        rules_of: what a run file makes of the data.
    """

    def __init__(self, run: RunFile, state: RunState, rules_of: Callable[[RunFile], Rules]) -> None:
        self._run, self._state, self._rules_of = run, state, rules_of

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        inner = run_at(self._run, self._state.changes, step + 1).inner
        return rates_of(inner, self._total_steps(step + 1))(step)

    def changed(self, step: int) -> tuple[float | None, float | None]:
        """The learning rate and the clipping of a step, where they are not those of the run file."""
        first, now = self._run.inner, run_at(self._run, self._state.changes, step + 1).inner
        is_same = now.lr == first.lr and self._total_steps(step + 1) == self._total_steps(0)
        return None if is_same else self.rate(step), None if now.clip == first.clip else now.clip

    def _total_steps(self, round_: int) -> int:
        """Steps of the whole schedule, as it holds in a round."""
        changes = self._state.changes
        rules = self._rules_of(run_at(self._run, changes, round_))
        known = [] if rules.max_rounds is None else [rules.max_rounds]
        if rules.max_samples is not None:
            # Batches of other sizes were dealt before: what is left of the samples makes so many more.
            last = max((each.round for each in changes.made if each.round <= round_), default=0)
            has_sizes = _BATCH in changes.at(round_)
            steps, samples = self._state.dealt_before[last] if has_sizes else (0, 0)
            left = max(rules.max_samples - samples, 0)
            known.append(steps + -(-left // rules.batch_samples))
        # As stages count it where the run has no end that is known.
        return min(known, default=0) or 1
