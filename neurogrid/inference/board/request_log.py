"""The generations of one coordinator: those that go on, and the last that ended, with how fast each was."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from neurogrid.inference.board.status import RequestStatus
from neurogrid.node.rates import RateWindow

__all__ = ["RequestLog"]

# Generations that are shown: those that go on first come first, and that many that are over.
MAX_SHOWN: Final = 32
MAX_ENDED: Final = 32


@dataclass
class _Request:
    """One generation; times on the clock that never goes back, but for `at`."""

    number: int
    at: float
    queued: float
    num_prompt_tokens: int
    opened: float | None = None
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0
    num_reroutes: int = 0
    is_over: bool = False
    error: str = ""


class RequestLog:
    """Told of each generation, by its number."""

    def __init__(self) -> None:
        self._open: dict[int, _Request] = {}
        self._ended: deque[_Request] = deque(maxlen=MAX_ENDED)
        self._tokens = RateWindow()
        self._seconds = RateWindow(bucket=1.0, num_kept=61)
        self.num_ended = 0
        self.num_failed = 0
        self.num_tokens = 0

    @property
    def num_running(self) -> int:
        """The number of generations that have room."""
        return sum(request.opened is not None for request in self._open.values())

    @property
    def num_waiting(self) -> int:
        """The number of generations that wait for room."""
        return len(self._open) - self.num_running

    def queued(self, now: float, at: float, number: int, num_prompt_tokens: int) -> None:
        """Somebody asks for tokens; `at` is the time of the day."""
        self._open[number] = _Request(number, at, now, num_prompt_tokens)

    def opened(self, now: float, number: int) -> None:
        """It has room."""
        self._open[number].opened = now

    def token(self, now: float, number: int) -> None:
        """One more token."""
        request = self._open[number]
        request.first = now if request.first is None else request.first
        request.last = now
        request.num_tokens += 1
        self.num_tokens += 1
        self._tokens.add(now)
        self._seconds.add(now)

    def rerouted(self, number: int) -> None:
        """Others took over from a worker that failed it."""
        self._open[number].num_reroutes += 1

    def ended(self, number: int, error: str) -> None:
        """It is over."""
        request = self._open.pop(number)
        request.is_over, request.error = True, error
        self._ended.append(request)
        self.num_ended += 1
        self.num_failed += bool(error)

    def tokens_per_second(self, now: float) -> float:
        """Of all together, over the last seconds."""
        return self._tokens.rate(now)

    def history(self, now: float) -> tuple[float, ...]:
        """Tokens a second in each of the last 60 whole seconds, oldest first."""
        return self._seconds.history(now, 60)

    def requests(self) -> tuple[RequestStatus, ...]:
        """The last that ended, then those that go on, each oldest first."""
        shown = [*self._ended, *list(self._open.values())[:MAX_SHOWN]]
        return tuple(map(_status, shown))


def _status(request: _Request) -> RequestStatus:
    first, spent = request.first, None
    if first is not None and request.num_tokens > 1 and request.last > first:
        spent = (request.num_tokens - 1) / (request.last - first)
    return RequestStatus(
        number=request.number,
        queued_at=request.at,
        num_prompt_tokens=request.num_prompt_tokens,
        num_new_tokens=request.num_tokens,
        waited_seconds=None if request.opened is None else request.opened - request.queued,
        time_to_first_token=None if first is None else first - request.queued,
        tokens_per_second=spent,
        num_reroutes=request.num_reroutes,
        is_over=request.is_over,
        error=request.error,
    )
