"""The board of a leader's machines: told what happens, and looked up in its fleet when somebody asks.

Nothing here waits, and all of it is bounded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from neurogrid.fleet.board.fleet_statistics import FleetStatistics
from neurogrid.fleet.board.link_rates import LinkRates
from neurogrid.fleet.board.status import (
    Failure,
    FleetStatus,
    Health,
    PeerStatus,
    Phase,
    StageStatus,
)
from neurogrid.fleet.board.worker_records import WorkerRecords
from neurogrid.fleet.progress import FleetProgress, FleetView, MemberView
from neurogrid.fleet.speeds.drift import how_fast
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.node.events import EventBus, EventKind, Severity
from neurogrid.p2p.exchange.counters import TrafficCounters
from neurogrid.p2p.hosts.machine import PeerNames
from neurogrid.planner import Plan, name_range

__all__ = ["FleetBoard"]

MAX_FAILURES: Final = 32
# Workers that are gone are shown for a while, so that people see which.
SHOW_LOST: Final = 60.0  # seconds
MAX_LOST: Final = 16


class FleetBoard(FleetProgress):
    """The board of one leader and its workers. Used from the leader's trio thread.

    Args:
        clock: seconds that never go back; trio's own while trio runs.
        wall_clock: Unix time, in seconds.

    Attributes:
        events: what happens, in words.
        counters: messages and bytes of the fleet's traffic; None before there is a fleet.
        statistics: counts since it began.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.events = EventBus(clock=wall_clock)
        self.counters: TrafficCounters | None = None
        self.statistics = FleetStatistics()
        self._clock = clock
        self._wall_clock = wall_clock
        self._started_at = wall_clock()
        self._peer_id = ""
        self._machine = ""
        self._names = PeerNames()
        self._addresses: tuple[str, ...] = ()
        self._model = ""
        self._num_layers = 0
        self._phase = Phase.READING
        self._phase_text = "reading the model"
        self._found = 0
        self._wanted = 0
        self._fleet: FleetView | None = None
        self._link_rates = LinkRates()
        self._workers = WorkerRecords()
        self._lost: dict[str, PeerStatus] = {}
        self._failures: deque[Failure] = deque(maxlen=MAX_FAILURES)
        self._mending_since: float | None = None

    @property
    def doing(self) -> str:
        """The part of the start that is going on, in words; empty once there can be generations."""
        return self._phase_text

    # ------------------------------------------------------------------ what is told

    def model_read(self, name: str, num_layers: int) -> None:
        self._model, self._num_layers = name, num_layers

    def listening(self, peer_id: str, addresses: Sequence[str]) -> None:
        self._peer_id, self._addresses = peer_id, tuple(addresses)

    def formed(self, fleet: FleetView, counters: TrafficCounters) -> None:
        self._fleet, self.counters = fleet, counters

    def named(self, name: str) -> None:
        self._machine = name

    def working(self, what: str) -> None:
        self._phase_text = what
        self.events.publish(EventKind.WORKING, _sentence(what))

    def waiting(self, found: int, wanted: int) -> None:
        self._found, self._wanted = found, wanted
        self._phase = Phase.WAITING
        self._phase_text = f"waiting for workers: {found} of {wanted} are there"
        self.events.publish(EventKind.WORKING, _sentence(self._phase_text))

    def planned(self, plan: Plan, workers: Sequence[WorkerInfo], num_layers: int) -> None:
        self._num_layers = num_layers
        if not self.statistics.num_joined:
            self.statistics.num_joined = len(workers)  # those that were there before any could join
        for worker in workers:
            self._names.note(worker.peer_id, worker.machine, worker.address)
        self._phase, self._phase_text = Phase.TRANSFERRING, "sending the workers their layers"
        num_stages = len(plan.stages)
        self.events.publish(
            EventKind.PLANNED,
            f"Planned {num_layers} layers in {num_stages} stage{'s' * (num_stages != 1)}",
        )

    def transfer_planned(self, peer_id: str, num_bytes: int) -> None:
        self._workers.transfer_planned(peer_id, num_bytes)

    def transferred(self, peer_id: str, num_bytes: int) -> None:
        self._workers.came(peer_id, self._clock(), sent=num_bytes)
        self.statistics.weight_bytes["coordinator"] += num_bytes

    def passed_on(self, peer_id: str, num_bytes: int) -> None:
        self._workers.came(peer_id, self._clock(), from_workers=num_bytes)
        self.statistics.weight_bytes["worker"] += num_bytes

    def already_held(self, peer_id: str, num_bytes: int) -> None:
        self._workers.already_held(peer_id, self._clock(), num_bytes)
        self.statistics.weight_bytes["cache"] += num_bytes

    def transfer_begun(self, peer_id: str) -> None:
        self._workers.transfer_begun(peer_id, self._clock())

    def transfer_stalled(self, peer_id: str, seconds: float) -> None:
        self.events.publish(
            EventKind.WORKER_STALLED,
            f"Nothing has come to worker {self._names.of(peer_id)} for {seconds:g} s, and it lacks layers",
            severity=Severity.WARNING,
            peer_id=peer_id,
        )

    def transfer_resumed(self, peer_id: str, seconds: float) -> None:
        self.events.publish(
            EventKind.WORKER_STALLED,
            f"The transfer to worker {self._names.of(peer_id)} goes on after {seconds:.0f} s",
            severity=Severity.GOOD,
            peer_id=peer_id,
        )

    def suspected(self, peer_id: str, why: str) -> None:
        self.events.publish(
            EventKind.WORKER_SUSPECTED,
            f"Worker {self._names.of(peer_id)} {why}",
            severity=Severity.WARNING,
            peer_id=peer_id,
        )

    def found_wrong(self, peer_id: str, why: str) -> None:
        self.statistics.num_wrong += 1
        self.events.publish(
            EventKind.WORKER_WRONG,
            f"Worker {self._names.in_full(peer_id)} {why}: it is excluded",
            severity=Severity.ERROR,
            peer_id=peer_id,
        )

    def ready(self) -> None:
        self._phase, self._phase_text = Phase.READY, ""
        self.settle("planned without it", self._wall_clock())
        self.events.publish(
            EventKind.READY, "Every worker is ready: generation can begin", severity=Severity.GOOD
        )

    def plan_made(self, seconds: float, error: str) -> None:
        self.statistics.planning.observe(seconds)
        self.statistics.plans["impossible" if error else "made"] += 1

    def joined(self, worker: WorkerInfo) -> None:
        self.statistics.num_joined += 1
        self._lost.pop(worker.peer_id, None)
        self._names.note(worker.peer_id, worker.machine, worker.address)
        self.events.publish(
            EventKind.WORKER_JOINED,
            f"Worker {worker.label} joined: {worker.name}",
            severity=Severity.GOOD,
            peer_id=worker.peer_id,
        )

    def described(self, worker: WorkerInfo) -> None:
        self._workers.described(worker)

    def lost(self, peer_id: str, layers: range, reason: str) -> None:
        self.statistics.num_lost += 1
        now, at = self._clock(), self._wall_clock()
        member = next((m for m in self._members() if m.peer_id == peer_id), None)
        action = "it held no layers: nothing to do"
        recovered_at: float | None = at
        held = ""
        if layers:
            held = f" with {name_range(layers)}"
            heirs = self._holders(layers, [m for m in self._members() if m.peer_id != peer_id])
            is_needed = any(stage.peer_id == peer_id for stage in self._plan.stages)
            if not is_needed:
                action = "it stood by: generation does not need it"
            elif heirs:
                names = " and ".join(map(self._names.of, heirs))
                action = f"{names} stood by with the same layers, and took over"
            else:
                action, recovered_at = "looking for a worker for its layers", None
        if member is not None:
            gone = self._peer(member, now, at)
            self._lost[peer_id] = replace(
                gone,
                layers_held=layers,
                health=Health.LOST,
                since=at,
                lost_reason=reason,
                num_sessions=0,
                transfer=None,
            )
            while len(self._lost) > MAX_LOST:
                del self._lost[next(iter(self._lost))]
        self._workers.forget(peer_id)
        self._failures.append(Failure(at, peer_id, layers, reason, action, recovered_at))
        self.events.publish(
            EventKind.WORKER_LOST,
            f"Lost worker {self._names.in_full(peer_id)}{held}: {reason}; {action}",
            severity=Severity.ERROR if recovered_at is None else Severity.WARNING,
            peer_id=peer_id,
        )

    def local_worker_ended(self, number: int, how: str, restart_in: float | None) -> None:
        what = "it stays away" if restart_in is None else f"starting it again in {restart_in:g} s"
        self.events.publish(
            EventKind.WORKER_LOST,
            f"Local worker {number} {how}: {what}",
            severity=Severity.ERROR if restart_in is None else Severity.WARNING,
        )

    def mending(self, missing: Sequence[range]) -> None:
        if self._mending_since is None:
            self._mending_since = self._clock()
        names = ", ".join(map(name_range, missing))
        self._phase_text = f"placing {names} anew"
        self.settle(f"{names} are being placed anew", None)
        self.events.publish(EventKind.MENDING, f"Placing {names} anew", severity=Severity.WARNING)

    def mended(self, plan: Plan) -> None:
        if self._mending_since is not None:
            self.statistics.mending_seconds.observe(self._clock() - self._mending_since)
            self._mending_since = None
        self._phase_text = ""
        where = _where(plan, self._names)
        self.settle(f"placed anew: {where}", self._wall_clock())
        text = f"All layers are placed again: {where}"
        self.events.publish(EventKind.MENDED, text, severity=Severity.GOOD)

    def drifted(self, peer_id: str, slowness: float) -> None:
        text = f"Worker {self._names.of(peer_id)} {how_fast(slowness)}"
        is_slow = slowness > 1
        severity = Severity.WARNING if is_slow else Severity.GOOD
        self.events.publish(EventKind.DRIFTED, text, severity=severity, peer_id=peer_id)

    def improved(self, plan: Plan) -> None:
        text = f"A better plan is in place for new generations: {_where(plan, self._names)}"
        self.events.publish(EventKind.PLANNED, text, severity=Severity.GOOD)

    def replicated(self, peer_id: str, layers: range) -> None:
        text = f"Worker {self._names.of(peer_id)} stands by with {name_range(layers)}"
        self.events.publish(EventKind.REPLICATED, text, severity=Severity.GOOD, peer_id=peer_id)

    # ------------------------------------------------------------------ what is known now

    def fleet_status(self) -> FleetStatus:
        """Return the state of the fleet at this moment."""
        now, at = self._clock(), self._wall_clock()
        if self.counters is not None:
            self._link_rates.update(now, self.counters)
        members = self._members()
        peers = {member.peer_id: self._peer(member, now, at) for member in members}
        self._workers.keep_only(peers)
        self._forget_lost(at)
        stages = self._stages(members)
        phase = self._phase
        if phase is Phase.READY and not all(stage.is_ready for stage in stages):
            phase = Phase.MENDING
        return FleetStatus(
            at=at,
            started_at=self._started_at,
            peer_id=self._peer_id,
            machine=self._machine,
            addresses=self._addresses,
            model=self._model,
            total_layers=self._num_layers,
            phase=phase,
            phase_text=self._phase_text
            if phase is not Phase.READY
            else _awaited(stages, peers, self._names),
            workers_found=len(members) or self._found,
            workers_wanted=self._wanted,
            peers={**peers, **{k: v for k, v in self._lost.items() if k not in peers}},
            stages=stages,
            links=self._link_rates.links(
                self._peer_id,
                [stage.peer_id for stage in stages if stage.peer_id in peers],
                {peer_id: peer.latency for peer_id, peer in peers.items()},
            ),
            failures=tuple(self._failures),
            events=self.events.last,
        )

    @property
    def _plan(self) -> Plan:
        return self._fleet.plan if self._fleet is not None else Plan(())

    def _members(self) -> Sequence[MemberView]:
        return self._fleet.members if self._fleet is not None else ()

    def _peer(self, member: MemberView, now: float, at: float) -> PeerStatus:
        return self._workers.status(member, self._plan, self._link_rates.total_bytes, now, at)

    def _stages(self, members: Iterable[MemberView]) -> tuple[StageStatus, ...]:
        found = []
        for number, stage in enumerate(self._plan.stages, 1):
            layers = range(stage.start, stage.stop)
            holders = [m.peer_id for m in members if _covers(m.layers, layers)]
            replicas = tuple(peer_id for peer_id in holders if peer_id != stage.peer_id)
            found.append(StageStatus(number, layers, stage.peer_id, bool(holders), replicas))
        return tuple(found)

    def _holders(self, layers: range, members: Sequence[MemberView]) -> list[str]:
        """Find one of `members` for each stage within `layers`; empty if a stage has none."""
        heirs: list[str] = []
        for stage in self._plan.stages:
            wanted = range(stage.start, stage.stop)
            if not _covers(layers, wanted):
                continue
            heir = next((m.peer_id for m in members if _covers(m.layers, wanted)), None)
            if heir is None:
                return []
            heirs.append(heir)
        return list(dict.fromkeys(heirs))

    def settle(self, action: str | None, recovered_at: float | None) -> None:
        """Say of the losses that are not mended yet what is done, and when it was."""
        for index, failure in enumerate(self._failures):
            if failure.recovered_at is None:
                self._failures[index] = replace(
                    failure, action=action or failure.action, recovered_at=recovered_at
                )

    def _forget_lost(self, at: float) -> None:
        for peer_id in [key for key, peer in self._lost.items() if at - peer.since > SHOW_LOST]:
            del self._lost[peer_id]


def _awaited(
    stages: Iterable[StageStatus], peers: Mapping[str, PeerStatus], names: PeerNames
) -> str:
    """Name the workers that keep generations waiting and cannot be bypassed; empty for none."""
    awaited = [
        f"{names.of(stage.peer_id)}, which {peers[stage.peer_id].suspicion}"
        for stage in stages
        if not stage.replicas and stage.peer_id in peers and peers[stage.peer_id].suspicion
    ]
    return f"waiting for {'; '.join(awaited)}" if awaited else ""


def _covers(held: range, wanted: range) -> bool:
    return bool(held) and held.start <= wanted.start and wanted.stop <= held.stop


def _where(plan: Plan, names: PeerNames) -> str:
    return ", ".join(
        f"{name_range(range(stage.start, stage.stop))} on {names.of(stage.peer_id)}"
        for stage in plan.stages
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
