"""The state of a worker at one moment, as plain data, and the board that makes it.

    board = WorkerBoard(state, sessions, name="CPU")
    board.status()

A reader calls `status()` now and then; rates are those since a few seconds before.

Units: bytes, seconds, and rates a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from neurogrid.inference.sessions.load import WorkerLoad
from neurogrid.inference.sessions.service import SessionService
from neurogrid.node.rates import TotalRate
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.hosts.machine import PeerNames
from neurogrid.p2p.wire import Hello
from neurogrid.worker.state import WeightSource, WorkerState
from neurogrid.worker.tenant import Tenant

__all__ = ["PeerTraffic", "TenantStatus", "WorkerBoard", "WorkerStatus"]

# The files of the cache are looked at so often. Seconds.
DISK_INTERVAL: Final = 10.0


@dataclass(frozen=True)
class PeerTraffic:
    """The traffic between this worker and a peer, since the start and now.

    Attributes:
        machine: what people call the peer's machine, as it says itself; empty where it did not say.
        address: the IP address of that machine; empty where that is not known.
    """

    peer_id: str
    machine: str
    address: str
    is_coordinator: bool
    is_connected: bool
    received_bytes: int
    sent_bytes: int
    received_bytes_per_second: float
    sent_bytes_per_second: float


@dataclass(frozen=True)
class TenantStatus:
    """A coordinator that is served.

    Attributes:
        coordinator: its peer id.
        machine: what it calls its machine; empty where it did not say.
        model: that it serves; empty before its config is proven.
        total_layers: of that model.
        layers_assigned: [start, stop); empty for none.
        num_confirmed: of those, how many are here with the announced content.
        num_sessions: that are open.
        promised_bytes: of the memory, for its layers, its sessions' caches and adapters.
        has_given_way: it was idle, and another coordinator got its memory.
    """

    coordinator: str
    machine: str
    model: str
    total_layers: int
    layers_assigned: range
    num_confirmed: int
    num_sessions: int
    promised_bytes: int
    has_given_way: bool

    @property
    def is_ready(self) -> bool:
        """Whether all that was assigned is here."""
        return self.num_confirmed == len(self.layers_assigned)


@dataclass(frozen=True)
class WorkerStatus:
    """A worker.

    Attributes:
        uptime: seconds since it started.
        machine: what peers are told that its machine is called; empty for nothing.
        name: of its device.
        tenants: the coordinators that it serves, in the order in which they came.
        kept_models: that no coordinator uses now, and of which layers stayed in memory; the last one last.
        layers_held: in memory, whoever assigned them; of several models, those of each.
        memory_total_bytes: of the device, or the limit.
        memory_free_bytes: what layers and caches may take in all; those that are held count as free.
        num_given_way: coordinators that were idle and whose memory another one got, since the start.
        tokens_per_second: decoded, of all sessions together.
        prompt_tokens_per_second: of prompts.
        rows_per_pass: sessions that shared a decoding pass lately; None without any.
        busy: part of the time that torch computed lately, 0 to 1.
        weights_from: bytes of the layers that were loaded, by where they came from.
        peers: most traffic first.
        disk_bytes: that the cache takes; None where nothing is kept.
        disk_limit_bytes: that it may take.
    """

    uptime: float
    peer_id: str
    machine: str
    name: str
    tenants: tuple[TenantStatus, ...]
    kept_models: tuple[str, ...]
    layers_held: tuple[int, ...]
    memory_total_bytes: int
    memory_free_bytes: int
    num_given_way: int
    load: WorkerLoad
    tokens_per_second: float
    prompt_tokens_per_second: float
    rows_per_pass: float | None
    busy: float
    weights_from: Mapping[WeightSource, int]
    peers: tuple[PeerTraffic, ...]
    disk_bytes: int | None
    disk_limit_bytes: int | None


class WorkerBoard:
    """Makes the status of a worker. Used from its trio thread.

    Args:
        name: of its device.
        machine: what peers are told that this machine is called.
        clock: seconds that never go back.

    Attributes:
        names: what peers have told of their machines.
    """

    def __init__(
        self,
        state: WorkerState,
        sessions: SessionService,
        *,
        name: str,
        machine: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._name = name
        self._machine = machine
        self.names = PeerNames()
        self._clock = clock
        self._started = clock()
        self._decoded, self._prefilled = TotalRate(), TotalRate()
        self._passes, self._computing = TotalRate(), TotalRate()
        self._traffic: dict[tuple[str, Direction], TotalRate] = {}
        self._disk: tuple[int | None, int | None] = (None, None)
        self._disk_due = 0.0
        state.protocol.on_peer_opened(self._on_opened)

    def status(self) -> WorkerStatus:
        """Return the state of the worker at this moment."""
        state, now = self._state, self._clock()
        memory = state.memory()
        prefill, decode = self._sessions.statistics.prefill, self._sessions.statistics.decode
        decoded = self._decoded.update(now, decode.num_tokens)
        passes = self._passes.update(now, decode.seconds.num_values)
        if now >= self._disk_due:
            self._disk, self._disk_due = state.blobs.disk_use(), now + DISK_INTERVAL
        return WorkerStatus(
            uptime=now - self._started,
            peer_id=state.protocol.host.peer_id,
            machine=self._machine,
            name=self._name,
            tenants=tuple(map(self._tenant, state.tenants.values())),
            kept_models=tuple(model.name for model in state.kept),
            layers_held=tuple(sorted(layer for model in state.models for layer in model.held)),
            memory_total_bytes=memory.total_bytes,
            memory_free_bytes=memory.free_bytes,
            num_given_way=state.num_given_way,
            load=self._sessions.load,
            tokens_per_second=decoded,
            prompt_tokens_per_second=self._prefilled.update(now, prefill.num_tokens),
            rows_per_pass=decoded / passes if passes else None,
            busy=self._computing.update(now, prefill.seconds.total + decode.seconds.total),
            weights_from=dict(state.received_bytes),
            peers=self._peers(now),
            disk_bytes=self._disk[0],
            disk_limit_bytes=self._disk[1],
        )

    def _tenant(self, tenant: Tenant) -> TenantStatus:
        model, assignment = tenant.model, tenant.assignment
        return TenantStatus(
            coordinator=tenant.owner,
            machine=self.names.name_of(tenant.owner),
            model=model.name if model is not None else "",
            total_layers=model.num_layers if model is not None else 0,
            layers_assigned=range(assignment.start, assignment.stop) if assignment else range(0),
            num_confirmed=len(assignment.confirmed) if assignment else 0,
            num_sessions=self._sessions.num_sessions(tenant.owner),
            promised_bytes=self._state.room.promised(tenant.owner),
            has_given_way=tenant.has_given_way,
        )

    def _on_opened(self, peer_id: str, hello: Hello) -> None:
        self.names.note(peer_id, hello.name, self._state.protocol.host.remote_ip(peer_id))

    def _peers(self, now: float) -> tuple[PeerTraffic, ...]:
        host, snapshot = self._state.protocol.host, self._state.protocol.counters.snapshot()
        found = []
        for peer_id, by_way in snapshot.items():
            totals: dict[Direction, int] = {}
            rates: dict[Direction, float] = {}
            for way in Direction:
                totals[way] = sum(row.num_bytes for row in by_way.get(way.value, {}).values())
                rate = self._traffic.setdefault((peer_id, way), TotalRate())
                rates[way] = rate.update(now, totals[way])
            found.append(
                PeerTraffic(
                    peer_id=peer_id,
                    machine=self.names.name_of(peer_id),
                    address=self.names.address_of(peer_id),
                    is_coordinator=peer_id in self._state.tenants,
                    is_connected=host.is_connected(peer_id),
                    received_bytes=totals[Direction.RECEIVED],
                    sent_bytes=totals[Direction.SENT],
                    received_bytes_per_second=rates[Direction.RECEIVED],
                    sent_bytes_per_second=rates[Direction.SENT],
                )
            )
        for key in [key for key in self._traffic if key[0] not in snapshot]:
            del self._traffic[key]
        return tuple(sorted(found, key=lambda p: -(p.received_bytes + p.sent_bytes)))
