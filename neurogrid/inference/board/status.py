"""The state of a cluster at one moment, as plain data. Made by `status_board.StatusBoard`.

Units: bytes, seconds, and rates a second. Times of the day (`at`, `since`) are Unix times in seconds. None stands
for what nobody knows, never for zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from neurogrid.fleet.board.status import (
    Failure,
    Health,
    Json,
    LinkStatus,
    PeerStatus,
    StageStatus,
    to_json,
)
from neurogrid.node.events import Event

__all__ = ["ClusterStatus", "Phase", "RequestStatus"]


class Phase(StrEnum):
    """The phase of a coordinator's work."""

    READING = "reading"
    """It reads the model."""
    WAITING = "waiting"
    """It waits for workers, and asks them what they have."""
    TRANSFERRING = "transferring"
    """The workers get their layers."""
    READY = "ready"
    """Every layer is on a worker that is ready."""
    MENDING = "mending"
    """A worker was lost, and its layers are being placed."""


@dataclass(frozen=True)
class RequestStatus:
    """A generation that is going on, waits for room, or has ended.

    Attributes:
        number: counts those of one coordinator, from 1.
        queued_at: when it was asked for.
        waited_seconds: for room; None while it waits.
        time_to_first_token: seconds since it was asked for; None while there is none.
        tokens_per_second: after the first; None before there are two.
        num_reroutes: how often others took over from a worker that failed it.
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
    is_over: bool
    error: str


@dataclass(frozen=True)
class ClusterStatus:
    """A coordinator and its workers.

    Attributes:
        at: when this was so.
        started_at: when the coordinator began.
        peer_id: the coordinator's; empty until it listens.
        machine: what its peers are told that its machine is called; empty for nothing.
        model: its name; empty until it is read.
        total_layers: of the model; 0 until it is read.
        phase_text: what is being done, in words; empty when nothing is.
        workers_wanted: that are waited for.
        peers: by peer id, as they came; those that were lost lately, too.
        links: coordinator to each worker, stage to stage, last stage to coordinator.
        num_running, num_waiting: sessions.
        num_requests, num_failed: that have ended, and those of them that failed.
        num_tokens: generated in all.
        tokens_per_second: over the last seconds.
        tokens_history: tokens a second in each of the last seconds, oldest first.
        requests: those that are not over, and the last that are; oldest first.
        failures: the last ones, oldest first.
        events: the last ones, oldest first.
    """

    at: float
    started_at: float
    peer_id: str
    machine: str
    addresses: tuple[str, ...]
    model: str
    total_layers: int
    phase: Phase
    phase_text: str
    workers_found: int
    workers_wanted: int
    peers: Mapping[str, PeerStatus]
    stages: tuple[StageStatus, ...]
    links: tuple[LinkStatus, ...]
    num_running: int
    num_waiting: int
    num_requests: int
    num_failed: int
    num_tokens: int
    tokens_per_second: float
    tokens_history: tuple[float, ...]
    requests: tuple[RequestStatus, ...]
    failures: tuple[Failure, ...]
    events: tuple[Event, ...]

    @property
    def loaded_layers(self) -> tuple[int, ...]:
        """Layers that at least one worker is ready for, in order."""
        held = (peer.layers_held for peer in self.peers.values() if peer.health != Health.LOST)
        return tuple(sorted({layer for layers in held for layer in layers}))

    def to_json(self) -> dict[str, Json]:
        """The same as JSON has it: see `to_json`."""
        return cast("dict[str, Json]", to_json(self))
