"""The learning rate and the clipping of each step of a chain, as its leader has changed them or not."""

from __future__ import annotations

from collections.abc import Callable

from neurogrid.training.runs.inner_optimizer import rates_of
from neurogrid.training.runs.machine import Rules
from neurogrid.training.runs.run_file import RunFile

__all__ = ["StepRates"]


class StepRates:
    """Rates by steps.

    Args:
        run_at: the run file as it holds in a round, from 1, of which each is a step.
        rules_of: what a run file makes of the data.
    """

    def __init__(
        self, run_at: Callable[[int], RunFile], rules_of: Callable[[RunFile], Rules]
    ) -> None:
        self._run_at, self._rules_of = run_at, rules_of
        self._first = run_at(0)

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 0."""
        run = self._run_at(step + 1)
        return rates_of(run.inner, self._total_steps(run))(step)

    def changed(self, step: int) -> tuple[float | None, float | None]:
        """The learning rate and the clipping of a step, where they are not those of the run file."""
        run, first = self._run_at(step + 1), self._first
        has_rate = run.inner.lr != first.inner.lr or self._total_steps(run) != self._total_steps(
            first
        )
        has_clip = run.inner.clip != first.inner.clip
        return self.rate(step) if has_rate else None, run.inner.clip if has_clip else None

    def _total_steps(self, run: RunFile) -> int:
        # As stages count it where the run has no end that is known.
        return self._rules_of(run).total_steps or 1
