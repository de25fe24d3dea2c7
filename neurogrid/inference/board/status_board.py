"""Gathers what is known of a cluster: told by the coordinator, and looked up in its fleet when somebody asks.

    board = StatusBoard()
    async with open_coordinator(settings, board=board):
        board.status().to_json()

A reader calls `status()`, which takes about a millisecond for twenty workers, and subscribes to `events`; metrics read
its counts. Nothing here waits, and all of it is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from neurogrid.errors import NoRouteError
from neurogrid.fleet.board.fleet_board import FleetBoard
from neurogrid.inference.board.generation_log import GenerationLog
from neurogrid.inference.board.progress import Progress
from neurogrid.inference.board.status import ClusterStatus, VerificationStatus
from neurogrid.node.events import EventKind, Severity

__all__ = ["StatusBoard"]

# Workers that were found wrong, and are shown: the last ones.
MAX_WRONG: Final = 64


class StatusBoard(FleetBoard, Progress):
    """The board of one coordinator: its workers, as of any leader, and its generations.

    Attributes:
        generations: those of the coordinator.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(clock=clock, wall_clock=wall_clock)
        self.generations = GenerationLog()
        self._verified = VerificationStatus()

    @property
    def verification(self) -> VerificationStatus:
        """Result of verification so far."""
        return self._verified

    def steps_verified(self, num_steps: int, num_differing: int) -> None:
        known = self._verified
        self._verified = replace(
            known,
            num_steps=known.num_steps + num_steps,
            num_differing=known.num_differing + num_differing,
        )

    def steps_unverified(self, num_steps: int) -> None:
        known = self._verified
        self._verified = replace(known, num_unverified=known.num_unverified + num_steps)

    def found_wrong(self, peer_id: str, why: str) -> None:
        super().found_wrong(peer_id, why)
        known = self._verified
        if peer_id not in known.wrong:
            self._verified = replace(known, wrong=(*known.wrong, peer_id)[-MAX_WRONG:])

    def generation_queued(self, number: int, num_prompt_tokens: int) -> None:
        self.generations.queued(self._clock(), self._wall_clock(), number, num_prompt_tokens)

    def generation_opened(self, number: int) -> None:
        self.generations.opened(self._clock(), number)

    def token_generated(self, number: int) -> None:
        self.generations.token(self._clock(), number)

    def tokens_proposed(self, number: int, num_proposed: int, num_accepted: int) -> None:
        self.generations.proposed(number, num_proposed, num_accepted)

    def speculation_settled(self, how: str) -> None:
        self.generations.speculation = how

    def step_failed(self, number: int, error: NoRouteError) -> None:
        self.generations.failed(error)

    def generation_rerouted(self, number: int, reason: str, seconds: float) -> None:
        self.generations.rerouted(number, seconds)
        # When this is told, all layers are there, and these lines of the log belong together.
        self.settle(None, self._wall_clock())
        self.events.publish(
            EventKind.SESSION_REROUTED,
            f"Generation {number} goes on with other workers after a pause of {seconds:.1f} s: {reason}",
            severity=Severity.GOOD,
        )

    def generation_finished(self, number: int, reason: str) -> None:
        self.generations.finished(number, reason)

    def generation_ended(self, number: int, error: str) -> None:
        self.generations.ended(self._clock(), number, error)
        if error:
            text = f"Generation {number} failed: {error}"
            self.events.publish(EventKind.SESSION_FAILED, text, severity=Severity.ERROR)

    def status(self) -> ClusterStatus:
        """Return the state of the cluster at this moment."""
        now, generations = self._clock(), self.generations
        return ClusterStatus(
            **vars(self.fleet_status()),
            num_running=generations.num_running,
            num_waiting=generations.num_waiting,
            num_requests=generations.num_ended,
            num_failed=generations.outcomes["failed"],
            num_tokens=generations.num_tokens,
            tokens_per_second=generations.tokens_per_second(now),
            tokens_history=generations.history(now),
            requests=generations.shown(),
            speculation=generations.speculation,
            num_proposed=generations.num_proposed,
            num_accepted=generations.num_accepted,
            tokens_per_pass=generations.tokens_per_pass,
            verification=self._verified,
        )
