"""Statistics of a worker's computing: how many rows at once, how long they waited, how long torch took.

Fed by `SessionService`, once a call to torch; read for display. Knows neither side.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from neurogrid.node.histogram import COMPUTE_SECONDS, NUM_ROWS, WAIT_SECONDS, Histogram

__all__ = ["ComputeStatistics", "PhaseStatistics", "StageCall"]


@dataclass(frozen=True, slots=True)
class StageCall:
    """One call to torch over the layers of a stage.

    Attributes:
        number: counts those of one worker, from 1.
        num_rows: sessions that it served.
        num_tokens: of all of them together.
        seconds: that torch took.
    """

    number: int
    num_rows: int
    num_tokens: int
    seconds: float


@dataclass
class PhaseStatistics:
    """Calls of one phase.

    Attributes:
        seconds: of each call.
        num_tokens: that went through.
    """

    seconds: Histogram = field(default_factory=lambda: Histogram(COMPUTE_SECONDS))
    num_tokens: int = 0


@dataclass
class ComputeStatistics:
    """Statistics of one worker's calls to torch since its start.

    Attributes:
        prefill: chunks of prompts.
        decode: forward passes over one token of each of several sessions.
        rows: sessions of each decoding pass.
        queue: seconds for which a step waited for its turn.
        num_calls: of both phases.
    """

    prefill: PhaseStatistics = field(default_factory=PhaseStatistics)
    decode: PhaseStatistics = field(default_factory=PhaseStatistics)
    rows: Histogram = field(default_factory=lambda: Histogram(NUM_ROWS))
    queue: Histogram = field(default_factory=lambda: Histogram(WAIT_SECONDS))
    num_calls: int = 0

    def called(
        self, *, is_decoded: bool, num_rows: int, num_tokens: int, seconds: float
    ) -> StageCall:
        """Count one call."""
        self.num_calls += 1
        phase = self.decode if is_decoded else self.prefill
        phase.seconds.observe(seconds)
        phase.num_tokens += num_tokens
        if is_decoded:
            self.rows.observe(num_rows)
        return StageCall(self.num_calls, num_rows, num_tokens, seconds)
