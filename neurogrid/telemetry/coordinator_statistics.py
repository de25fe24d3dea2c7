"""Statistics of a coordinator's generations and workers since it began: counts and histograms.

A `Progress` that shows nothing and forgets nobody's time. Times are those of a clock that never goes back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from neurogrid.errors import (
    ModelError,
    NoRouteError,
    PeerRefusedError,
    RemoteProtocolError,
    ResponseTimeout,
    TransportError,
)
from neurogrid.fleet.progress import Progress, WorkerInfo
from neurogrid.node.histogram import COMPUTE_SECONDS, WAIT_SECONDS, Histogram
from neurogrid.planner import Plan

__all__ = ["FAILURES", "OUTCOMES", "SOURCES", "CoordinatorStatistics", "failure_kind"]

OUTCOMES = ("stop", "length", "closed", "failed")
FAILURES = ("lost", "timeout", "cut_off", "refused", "protocol", "not_finite", "no_worker")
SOURCES = ("coordinator", "worker", "cache")


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
    queued: float
    num_prompt_tokens: int
    last: float | None = None
    reason: str = "closed"


class CoordinatorStatistics(Progress):
    """Of one coordinator.

    Attributes:
        outcomes: generations that are over, by `OUTCOMES`: the model ended it, there was no place for more, its
            reader wanted no more, an error.
        num_prompt_tokens, num_new_tokens: of all of them, also of those that go on.
        queue: seconds for which they waited for room.
        first_token: seconds from when each was asked for to its first token.
        between_tokens: seconds from each token to the next.
        duration: seconds from when each was asked for to its end.
        failures: steps that a worker failed, by `FAILURES`.
        recovery: seconds from a failed step until the generation went on.
        num_joined, num_lost: workers.
        mending_seconds: that it took to place the layers anew that nobody held.
        weight_bytes: that came to workers, by `SOURCES`.
        planning: seconds that each run of the planner took.
        plans: runs by `made` and `impossible`.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: dict[int, _Generation] = {}
        self._running: set[int] = set()
        self._mending_since: float | None = None
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.num_prompt_tokens = 0
        self.num_new_tokens = 0
        self.queue = Histogram(WAIT_SECONDS)
        self.first_token = Histogram(WAIT_SECONDS)
        self.between_tokens = Histogram(WAIT_SECONDS)
        self.duration = Histogram(WAIT_SECONDS)
        self.failures: Counter[str] = Counter(dict.fromkeys(FAILURES, 0))
        self.recovery = Histogram(WAIT_SECONDS)
        self.num_joined = 0
        self.num_lost = 0
        self.mending_seconds = Histogram(WAIT_SECONDS)
        self.weight_bytes: Counter[str] = Counter(dict.fromkeys(SOURCES, 0))
        self.planning = Histogram(COMPUTE_SECONDS)
        self.plans: Counter[str] = Counter({"made": 0, "impossible": 0})

    @property
    def num_running(self) -> int:
        """Generations that have room on the workers."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Generations that wait for it."""
        return len(self._open) - len(self._running)

    def session_queued(self, number: int, num_prompt_tokens: int) -> None:
        self._open[number] = _Generation(self._clock(), num_prompt_tokens)

    def session_opened(self, number: int) -> None:
        generation = self._open[number]
        self._running.add(number)
        self.queue.observe(self._clock() - generation.queued)
        self.num_prompt_tokens += generation.num_prompt_tokens

    def token_generated(self, number: int) -> None:
        generation, now = self._open[number], self._clock()
        if generation.last is None:
            self.first_token.observe(now - generation.queued)
        else:
            self.between_tokens.observe(now - generation.last)
        generation.last = now
        self.num_new_tokens += 1

    def session_finished(self, number: int, reason: str) -> None:
        self._open[number].reason = reason

    def session_ended(self, number: int, error: str) -> None:
        generation = self._open.pop(number)
        self._running.discard(number)
        self.duration.observe(self._clock() - generation.queued)
        self.outcomes["failed" if error else generation.reason] += 1

    def step_failed(self, number: int, error: NoRouteError) -> None:
        self.failures[failure_kind(error)] += 1

    def session_rerouted(self, number: int, reason: str, seconds: float) -> None:
        self.recovery.observe(seconds)

    def joined(self, worker: WorkerInfo) -> None:
        self.num_joined += 1

    def planned(self, plan: Plan, workers: Sequence[WorkerInfo], num_layers: int) -> None:
        if not self.num_joined:
            self.num_joined = len(workers)  # those that were there before any could join

    def lost(self, peer_id: str, layers: range, reason: str) -> None:
        self.num_lost += 1

    def mending(self, missing: Sequence[range]) -> None:
        if self._mending_since is None:
            self._mending_since = self._clock()

    def mended(self, plan: Plan) -> None:
        if self._mending_since is not None:
            self.mending_seconds.observe(self._clock() - self._mending_since)
            self._mending_since = None

    def plan_made(self, seconds: float, error: str) -> None:
        self.planning.observe(seconds)
        self.plans["impossible" if error else "made"] += 1

    def transferred(self, peer_id: str, num_bytes: int) -> None:
        self.weight_bytes["coordinator"] += num_bytes

    def passed_on(self, peer_id: str, num_bytes: int) -> None:
        self.weight_bytes["worker"] += num_bytes

    def already_held(self, peer_id: str, num_bytes: int) -> None:
        self.weight_bytes["cache"] += num_bytes
