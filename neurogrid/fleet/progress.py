"""The progress of a coordinator's work, told to whatever shows it.

The coordinator calls; a terminal, a page or a count draws. All calls are quick, never fail, and come from the
coordinator's trio thread. Several may listen at once (`ProgressTee`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from neurogrid.errors import NoRouteError
from neurogrid.fleet.step_times import StepTimes
from neurogrid.p2p.exchange.counters import TrafficCounters
from neurogrid.p2p.hosts.machine import named_peer
from neurogrid.planner import PeerSpeed, Plan

__all__ = ["FleetView", "MemberView", "Progress", "ProgressTee", "WorkerInfo"]


@dataclass(frozen=True)
class WorkerInfo:
    """A worker as its coordinator sees it.

    Attributes:
        name: of its device, in its own words.
        free_bytes: what it can give to a stage.
        protocol_id: the version that it speaks with us.
        memory_known: False where it did not say and a size was assumed.
        held_layers: layers in its memory, of whatever model.
        model_layers: layers of the coordinator's model that need not be sent to it.
        speed: as it measured itself; None where it did not say.
        latency: seconds that a message takes to it; None where that was not measured.
        total_bytes: of its device's memory, or of what it lends of it; 0 where it did not say.
        device_kind: `cpu`, `cuda` or another; empty where it did not say.
        flops: floating point operations a second, as it measured itself; 0 where it did not say.
        machine: what people call its machine, as it says itself; empty where it did not say.
        address: the IP address of that machine; empty through a relay, and within the coordinator's process.
        slowness: how many times slower than `speed` it is in fact, compared with the others (`drift`).
    """

    peer_id: str
    name: str
    free_bytes: int
    protocol_id: str
    memory_known: bool
    held_layers: tuple[int, ...]
    model_layers: frozenset[int] = frozenset()
    speed: PeerSpeed | None = None
    latency: float | None = None
    total_bytes: int = 0
    device_kind: str = ""
    flops: int = 0
    slowness: float = 1.0
    machine: str = ""
    address: str = ""

    @property
    def label(self) -> str:
        """The worker, for people: the name of its machine, the end of its peer id, the address."""
        return named_peer(self.peer_id, self.machine, self.address)


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
        """The layers that it was given, or is being given."""

    @property
    def num_sessions(self) -> int: ...
    @property
    def is_placing(self) -> bool: ...
    @property
    def is_leaving(self) -> bool: ...
    @property
    def is_resting(self) -> bool:
        """It has refused, and is left alone for a while."""

    @property
    def times(self) -> StepTimes: ...


class FleetView(Protocol):
    """The workers of a coordinator, to look at (`fleet.Fleet`)."""

    @property
    def plan(self) -> Plan: ...
    @property
    def members(self) -> Sequence[MemberView]: ...


class Progress:
    """Does nothing; subclasses show what happens."""

    def model_read(self, name: str, num_layers: int) -> None:
        """The model is known."""

    def listening(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Workers can dial us, at these full multiaddrs."""

    def named(self, name: str) -> None:
        """Peers are told that this machine is called so; empty for nothing."""

    def working(self, what: str) -> None:
        """Something begins that takes a while; it ends when anything else is told."""

    def waiting(self, found: int, wanted: int) -> None:
        """`found` of `wanted` workers are there."""

    def explained(self, table: str) -> None:
        """Too few workers are there: what was tried to find them, a line each."""

    def formed(self, fleet: FleetView, counters: TrafficCounters) -> None:
        """There is a fleet: from here on it and its traffic can be looked at."""

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
        """Something comes again, after so long."""

    def suspected(self, peer_id: str, why: str) -> None:
        """A worker keeps a step waiting: what it does, or does not do, in words."""

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
        """Nobody holds these layers any more; they are being placed."""

    def mended(self, plan: Plan) -> None:
        """Every layer is on a worker again."""

    def drifted(self, peer_id: str, slowness: float) -> None:
        """A worker computes so many times slower than it said, compared with the others; 1: no longer."""

    def improved(self, plan: Plan) -> None:
        """A better plan is in place; new sessions use it."""

    def replicated(self, peer_id: str, layers: range) -> None:
        """A worker that was left over holds these layers, too."""

    def session_queued(self, number: int, num_prompt_tokens: int) -> None:
        """Somebody wants tokens. Numbers count the sessions of one coordinator."""

    def session_opened(self, number: int) -> None:
        """There is room for it."""

    def token_generated(self, number: int) -> None:
        """One more token of it is there."""

    def step_failed(self, number: int, error: NoRouteError) -> None:
        """A worker failed a step of it; whether others take over is told later."""

    def session_rerouted(self, number: int, reason: str, seconds: float) -> None:
        """A worker failed it, and others took over after so many seconds."""

    def session_finished(self, number: int, reason: str) -> None:
        """It has all its tokens: `stop`, the model ended it; `length`, there is no place for more."""

    def session_ended(self, number: int, error: str) -> None:
        """It is over; `error` says why it failed, empty if it did not."""


class ProgressTee(Progress):
    """Tells several what it is told, in their order."""

    def __init__(self, *listeners: Progress) -> None:
        self._listeners = listeners


def _tell_all(name: str) -> Callable[..., None]:
    def tell(self: ProgressTee, *args: object, **kwargs: object) -> None:
        for listener in self._listeners:
            getattr(listener, name)(*args, **kwargs)

    return tell


# Every method of `Progress`, so that none is forgotten when there is one more.
for _name in [name for name in vars(Progress) if not name.startswith("_")]:
    setattr(ProgressTee, _name, _tell_all(_name))
