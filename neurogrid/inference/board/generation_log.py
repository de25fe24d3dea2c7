"""The generations of one coordinator: those that go on, the last that ended, and what all were like since it began.

Times are those of a clock that never goes back, but for `at`, the time of the day.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from neurogrid.errors import (
    ModelError,
    NoRouteError,
    PeerRefusedError,
    RemoteProtocolError,
    ResponseTimeout,
    TransportError,
)
from neurogrid.inference.board.status import GenerationStatus
from neurogrid.node.histogram import WAIT_SECONDS, Histogram
from neurogrid.node.rates import RateWindow

__all__ = ["FAILURES", "OUTCOMES", "GenerationLog", "failure_kind"]

OUTCOMES: Final = ("stop", "length", "closed", "failed")
FAILURES: Final = ("lost", "timeout", "cut_off", "refused", "protocol", "not_finite", "no_worker")

# Generations that are shown: those that go on first come first, and that many that are over.
MAX_SHOWN: Final = 32
MAX_ENDED: Final = 32


def failure_kind(error: NoRouteError) -> str:
    """One of `FAILURES`: why a step of a generation did not get through."""
    if error.peer_id is None:
        return "no_worker"
    if error.unreachable_from is not None:
        return "cut_off"
    match error.__cause__:
        case ResponseTimeout():
            return "timeout"
        case PeerRefusedError():
            return "refused"
        case RemoteProtocolError():
            return "protocol"
        case ModelError():
            return "not_finite"
        case TransportError() | _:
            return "lost"


@dataclass
class _Generation:
    number: int
    at: float
    queued: float
    num_prompt_tokens: int
    opened: float | None = None
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0
    num_reroutes: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    reason: str = "closed"
    is_over: bool = False
    error: str = ""


class GenerationLog:
    """Told of each generation, by its number.

    Attributes:
        outcomes: generations that are over, by `OUTCOMES`: the model ended it, there was no place for more, its
            reader wanted no more, an error.
        num_prompt_tokens, num_tokens: of all of them, also of those that go on.
        num_proposed, num_accepted: tokens that were proposed, and those of them that were accepted, of all.
        speculation: what tokens are proposed by, or why none are, in words.
        queue: seconds for which they waited for room.
        first_token: seconds from when each was asked for to its first token.
        between_tokens: seconds from each token to the next.
        duration: seconds from when each was asked for to its end.
        failures: steps that a worker failed, by `FAILURES`.
        recovery: seconds from a failed step until the generation went on.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Generation] = {}
        self._ended: deque[_Generation] = deque(maxlen=MAX_ENDED)
        self._tokens = RateWindow()
        self._seconds = RateWindow(bucket=1.0, num_kept=61)
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.num_proposed = 0
        self.num_accepted = 0
        self.speculation = ""
        self.queue = Histogram(WAIT_SECONDS)
        self.first_token = Histogram(WAIT_SECONDS)
        self.between_tokens = Histogram(WAIT_SECONDS)
        self.duration = Histogram(WAIT_SECONDS)
        self.failures: Counter[str] = Counter(dict.fromkeys(FAILURES, 0))
        self.recovery = Histogram(WAIT_SECONDS)

    @property
    def num_running(self) -> int:
        """The number of generations that have room."""
        return sum(generation.opened is not None for generation in self._open.values())

    @property
    def num_waiting(self) -> int:
        """The number of generations that wait for room."""
        return len(self._open) - self.num_running

    @property
    def tokens_per_pass(self) -> float | None:
        """New tokens for each pass that gave some: one, and those that were accepted with it."""
        passes = self.num_tokens - self.num_accepted
        return self.num_tokens / passes if passes > 0 else None

    @property
    def num_ended(self) -> int:
        """The number of generations that are over."""
        return self.outcomes.total()

    def queued(self, now: float, at: float, number: int, num_prompt_tokens: int) -> None:
        """Somebody asks for tokens."""
        self._open[number] = _Generation(number, at, now, num_prompt_tokens)

    def opened(self, now: float, number: int) -> None:
        """A generation has room."""
        generation = self._open[number]
        generation.opened = now
        self.queue.observe(now - generation.queued)
        self.num_prompt_tokens += generation.num_prompt_tokens

    def token(self, now: float, number: int) -> None:
        """One more token."""
        generation = self._open[number]
        if generation.first is None:
            generation.first = now
            self.first_token.observe(now - generation.queued)
        else:
            self.between_tokens.observe(now - generation.last)
        generation.last = now
        generation.num_tokens += 1
        self.num_tokens += 1
        self._tokens.add(now)
        self._seconds.add(now)

    def proposed(self, number: int, num_proposed: int, num_accepted: int) -> None:
        """A pass had so many proposed tokens in it."""
        generation = self._open[number]
        generation.num_proposed += num_proposed
        generation.num_accepted += num_accepted
        self.num_proposed += num_proposed
        self.num_accepted += num_accepted

    def failed(self, error: NoRouteError) -> None:
        """A worker failed a step."""
        self.failures[failure_kind(error)] += 1

    def rerouted(self, number: int, seconds: float) -> None:
        """Others took over from a worker that failed."""
        self._open[number].num_reroutes += 1
        self.recovery.observe(seconds)

    def finished(self, number: int, reason: str) -> None:
        """A generation has all its tokens: `stop` or `length`."""
        self._open[number].reason = reason

    def ended(self, now: float, number: int, error: str) -> None:
        """A generation is over."""
        generation = self._open.pop(number)
        generation.is_over, generation.error = True, error
        self._ended.append(generation)
        self.duration.observe(now - generation.queued)
        self.outcomes["failed" if error else generation.reason] += 1

    def tokens_per_second(self, now: float) -> float:
        """Rate of all generations together, over the last seconds."""
        return self._tokens.rate(now)

    def history(self, now: float) -> tuple[float, ...]:
        """Tokens a second in each of the last 60 whole seconds, oldest first."""
        return self._seconds.history(now, 60)

    def shown(self) -> tuple[GenerationStatus, ...]:
        """The last that ended, then those that go on, each oldest first."""
        return tuple(map(_status, [*self._ended, *list(self._open.values())[:MAX_SHOWN]]))


def _status(generation: _Generation) -> GenerationStatus:
    first, spent = generation.first, None
    if first is not None and generation.num_tokens > 1 and generation.last > first:
        spent = (generation.num_tokens - 1) / (generation.last - first)
    waited = None if generation.opened is None else generation.opened - generation.queued
    return GenerationStatus(
        number=generation.number,
        queued_at=generation.at,
        num_prompt_tokens=generation.num_prompt_tokens,
        num_new_tokens=generation.num_tokens,
        waited_seconds=waited,
        time_to_first_token=None if first is None else first - generation.queued,
        tokens_per_second=spent,
        num_reroutes=generation.num_reroutes,
        num_proposed=generation.num_proposed,
        num_accepted=generation.num_accepted,
        is_over=generation.is_over,
        error=generation.error,
    )
