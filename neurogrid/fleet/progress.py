"""The progress of a leader's work with its machines, told to whatever shows it.

The leader calls; a terminal, a page or a count draws. All calls are quick, never fail, and come from the leader's trio
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from neurogrid.fleet.step_times import StepTimes
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.p2p.exchange.counters import TrafficCounters
from neurogrid.planner import Plan

__all__ = ["FleetProgress", "FleetView", "MemberView"]


class MemberView(Protocol):
    """A worker of a fleet, to look at (`member.Member`)."""

    @property
    def peer_id(self) -> str: ...
    @property
    def info(self) -> WorkerInfo: ...
    @property
    def layers(self) -> range:
        """The layers that it is ready for."""

    @property
    def assigned(self) -> range:
        """Layers that the worker was given, or is being given."""

    @property
    def num_sessions(self) -> int: ...
    @property
    def is_placing(self) -> bool: ...
    @property
    def is_leaving(self) -> bool: ...
    @property
    def is_resting(self) -> bool:
        """The worker has refused, and is left alone for a while."""

    @property
    def times(self) -> StepTimes: ...


class FleetView(Protocol):
    """The workers of a coordinator, to look at (`fleet.Fleet`)."""

    @property
    def plan(self) -> Plan: ...
    @property
    def members(self) -> Sequence[MemberView]: ...


class FleetProgress:
    """Progress that shows nothing; subclasses show what happens."""

    def model_read(self, name: str, num_layers: int) -> None:
        """The model is known."""

    def listening(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Workers can dial us, at these full multiaddrs."""

    def named(self, name: str) -> None:
        """Peers are told that this machine is called so; empty for nothing."""

    def working(self, what: str) -> None:
        """Work begins that takes a while; it ends when anything else is told."""

    def waiting(self, found: int, wanted: int) -> None:
        """`found` of `wanted` workers are there."""

    def explained(self, table: str) -> None:
        """Too few workers are there: what was tried to find them, a line each."""

    def formed(self, fleet: FleetView, counters: TrafficCounters) -> None:
        """A fleet is there: from here on it and its traffic can be looked at."""

    def plan_made(self, seconds: float, error: str) -> None:
        """The planner has run for so long; `error` says why it found no plan, empty if it did."""

    def planned(self, plan: Plan, workers: Sequence[WorkerInfo], num_layers: int) -> None:
        """The layers have been placed."""

    def transfer_planned(self, peer_id: str, num_bytes: int) -> None:
        """So many bytes of weights may go to this worker."""

    def transfer_begun(self, peer_id: str) -> None:
        """Bytes of one of its layers are about to go; told before each."""

    def transfer_stalled(self, peer_id: str, seconds: float) -> None:
        """Nothing has come to a worker for so long, and something is missing."""

    def transfer_resumed(self, peer_id: str, seconds: float) -> None:
        """Bytes come again, after so long."""

    def suspected(self, peer_id: str, why: str) -> None:
        """A worker keeps a step waiting: what it does, or does not do, in words."""

    def found_wrong(self, peer_id: str, why: str) -> None:
        """A worker computed wrong, and is excluded: in words."""

    def transferred(self, peer_id: str, num_bytes: int) -> None:
        """So many more bytes of weights have gone out."""

    def passed_on(self, peer_id: str, num_bytes: int) -> None:
        """Bytes came to a worker from other workers."""

    def already_held(self, peer_id: str, num_bytes: int) -> None:
        """So many bytes of the plan need not be sent: the worker has them."""

    def ready(self) -> None:
        """Every worker is ready."""

    def joined(self, worker: WorkerInfo) -> None:
        """A worker came later, or again."""

    def described(self, worker: WorkerInfo) -> None:
        """A worker said anew what memory it has, and answered that fast."""

    def lost(self, peer_id: str, layers: range, reason: str) -> None:
        """A worker is gone, and with it what it held."""

    def local_worker_ended(self, number: int, how: str, restart_in: float | None) -> None:
        """A worker process on this machine has ended by itself; it is started again after so many seconds, or not."""

    def mending(self, missing: Sequence[range]) -> None:
        """Layers that no member holds any more are being placed."""

    def mended(self, plan: Plan) -> None:
        """Every layer is on a worker again."""

    def drifted(self, peer_id: str, slowness: float) -> None:
        """A worker computes so many times slower than it said, compared with the others; 1: no longer."""

    def improved(self, plan: Plan) -> None:
        """A better plan is in place; new sessions use it."""

    def replicated(self, peer_id: str, layers: range) -> None:
        """A worker that was left over holds these layers, too."""
