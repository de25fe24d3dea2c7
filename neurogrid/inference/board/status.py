"""The state of a cluster at one moment, as plain data. Made by `status_board.StatusBoard`.

Units: bytes, seconds, and rates a second. Times of the day (`at`, `since`) are Unix times in seconds. None stands
for what nobody knows, never for zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from neurogrid.fleet.board.status import FleetStatus, Json, to_json

__all__ = ["ClusterStatus", "GenerationStatus", "VerificationStatus"]


@dataclass(frozen=True)
class GenerationStatus:
    """A generation that is going on, waits for room, or has ended.

    Attributes:
        number: counts those of one coordinator, from 1.
        queued_at: when it was asked for.
        waited_seconds: for room; None while it waits.
        time_to_first_token: seconds since it was asked for; None while there is none.
        tokens_per_second: after the first; None before there are two.
        num_reroutes: how often others took over from a worker that failed it.
        num_proposed, num_accepted: tokens that were proposed, and those of them that were what the model chose.
        error: why it failed; empty if it did not.
    """

    number: int
    queued_at: float
    num_prompt_tokens: int
    num_new_tokens: int
    waited_seconds: float | None
    time_to_first_token: float | None
    tokens_per_second: float | None
    num_reroutes: int
    num_proposed: int
    num_accepted: int
    is_over: bool
    error: str


@dataclass(frozen=True)
class VerificationStatus:
    """Result of verification since the cluster began: steps that were computed again, and workers that were wrong.

    Attributes:
        num_steps: that were computed again.
        num_differing: of those, the ones that were wrong.
        num_unverified: steps that were to be computed again, and could not be.
        wrong: peer ids of the workers that were found wrong, and are excluded.
    """

    num_steps: int = 0
    num_differing: int = 0
    num_unverified: int = 0
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClusterStatus(FleetStatus):
    """A coordinator and its workers: the state of its fleet, and that of its generations.

    Attributes:
        num_running, num_waiting: generations.
        num_requests, num_failed: that have ended, and those of them that failed.
        num_tokens: generated in all.
        tokens_per_second: over the last seconds.
        tokens_history: tokens a second in each of the last seconds, oldest first.
        requests: generations that are not over, and the last that are; oldest first.
        speculation: what tokens are proposed by, or why none are, in words.
        num_proposed, num_accepted: tokens that were proposed in all, and those of them that were what the model chose.
        tokens_per_pass: new tokens for each pass that gave some; None before the first.
        verification: of their steps.
    """

    num_running: int
    num_waiting: int
    num_requests: int
    num_failed: int
    num_tokens: int
    tokens_per_second: float
    tokens_history: tuple[float, ...]
    requests: tuple[GenerationStatus, ...]
    speculation: str
    num_proposed: int
    num_accepted: int
    tokens_per_pass: float | None
    verification: VerificationStatus = VerificationStatus()

    def to_json(self) -> dict[str, Json]:
        """The same as JSON has it: see `to_json`."""
        return cast("dict[str, Json]", to_json(self))
