"""Records of a coordinator's workers, besides what its fleet knows: memory, weights, and since when.

For `StatusBoard`, which is told and asks.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from neurogrid.fleet.board.status import Health, PeerStatus, Role, TransferStatus
from neurogrid.fleet.progress import MemberView
from neurogrid.fleet.stalls import STALLED_AFTER
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.node.rates import RateWindow
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.planner import Plan

__all__ = ["WorkerRecords"]


@dataclass
class _Transfer:
    """Bytes of weights, from when a worker was last given layers."""

    planned: int
    rate: RateWindow
    sent: int = 0
    cached: int = 0
    from_workers: int = 0
    moved_at: float | None = None  # when anything was last heard of it

    def status(self, now: float) -> TransferStatus:
        rate = self.rate.rate(now)
        missing = max(self.planned - self.sent - self.cached - self.from_workers, 0)
        return TransferStatus(
            planned_bytes=self.planned,
            sent_bytes=self.sent,
            cached_bytes=self.cached,
            from_workers_bytes=self.from_workers,
            bytes_per_second=rate if missing else 0.0,
            remaining_seconds=missing / rate if rate and missing else None if missing else 0.0,
            is_done=not missing,
            stalled_seconds=self._stalled(now) if missing else None,
        )

    def _stalled(self, now: float) -> float | None:
        seconds = 0.0 if self.moved_at is None else now - self.moved_at
        return seconds if seconds >= STALLED_AFTER else None


class WorkerRecords:
    """Records by peer id; those of workers that are gone are forgotten."""

    def __init__(self) -> None:
        self._infos: dict[str, WorkerInfo] = {}
        self._transfers: dict[str, _Transfer] = {}
        self._health: dict[str, tuple[Health, float]] = {}

    def described(self, worker: WorkerInfo) -> None:
        """A worker said anew what it has."""
        self._infos[worker.peer_id] = worker

    def transfer_planned(self, peer_id: str, num_bytes: int) -> None:
        """A worker is to have so many bytes of weights."""
        self._transfers[peer_id] = _Transfer(num_bytes, RateWindow(seconds=3.0, num_kept=8))

    def transfer_begun(self, peer_id: str, now: float) -> None:
        """Bytes are about to go."""
        if transfer := self._transfers.get(peer_id):
            transfer.moved_at = now

    def came(self, peer_id: str, now: float, *, sent: int = 0, from_workers: int = 0) -> None:
        """Bytes of them have come: from the coordinator, from other workers."""
        if transfer := self._transfers.get(peer_id):
            transfer.sent += sent
            transfer.from_workers += from_workers
            transfer.moved_at = now
            transfer.rate.add(now, sent + from_workers)

    def already_held(self, peer_id: str, now: float, num_bytes: int) -> None:
        """Bytes of them need not come."""
        if transfer := self._transfers.get(peer_id):
            transfer.moved_at = now
            transfer.cached += num_bytes

    def transfer(self, peer_id: str, now: float) -> TransferStatus | None:
        """Return the progress of a worker's weights; None if it was given none."""
        transfer = self._transfers.get(peer_id)
        return transfer.status(now) if transfer else None

    def forget(self, peer_id: str) -> None:
        """A worker is gone."""
        for known in self._all:
            known.pop(peer_id, None)

    def keep_only(self, peer_ids: Container[str]) -> None:
        """Forget all others."""
        for known in self._all:
            for peer_id in [key for key in known if key not in peer_ids]:
                del known[peer_id]

    @property
    def _all(self) -> tuple[MutableMapping[str, Any], ...]:
        return (self._infos, self._transfers, self._health)

    def status(
        self,
        member: MemberView,
        plan: Plan,
        traffic: Mapping[tuple[str, Direction], int],
        now: float,
        at: float,
    ) -> PeerStatus:
        """Return the status of a member.

        Args:
            traffic: bytes between the coordinator and each worker, in all.
            now: on the clock that never goes back.
            at: Unix time, in seconds.
        """
        peer_id = member.peer_id
        info = self._infos.get(peer_id, member.info)
        number, stage = next(
            ((n, stage) for n, stage in enumerate(plan.stages, 1) if stage.peer_id == peer_id),
            (None, None),
        )
        replica = plan.replica_of(peer_id)
        planned = stage or replica
        assigned = range(planned.start, planned.stop) if planned else member.assigned
        return PeerStatus(
            peer_id=peer_id,
            machine=info.machine,
            address=info.address,
            name=info.name,
            device_kind=info.device_kind,
            protocol_id=info.protocol_id,
            role=Role.STAGE if stage else Role.REPLICA if assigned else Role.SPARE,
            stage=number,
            layers_assigned=assigned,
            layers_held=member.layers,
            memory_known=info.memory_known,
            memory_total_bytes=info.total_bytes or None,
            memory_free_bytes=info.free_bytes,
            memory_used_bytes=max(info.total_bytes - info.free_bytes, 0)
            if info.total_bytes
            else None,
            memory_stage_bytes=planned.num_bytes if planned else 0,
            flops=float(info.flops) if info.flops else None,
            read_bytes_per_second=info.speed.bytes_per_second if info.speed else None,
            latency=info.latency,
            step_seconds=member.times.typical_step(len(member.layers)),
            last_step_seconds=member.times.last_step(len(member.layers)),
            health=(health := _health_of(member)),
            since=self._since(peer_id, health, at),
            num_sessions=member.num_sessions,
            sent_bytes=traffic.get((peer_id, Direction.SENT), 0),
            received_bytes=traffic.get((peer_id, Direction.RECEIVED), 0),
            transfer=self.transfer(peer_id, now),
            lost_reason="",
            suspicion=member.times.suspicion,
        )

    def _since(self, peer_id: str, health: Health, at: float) -> float:
        known, since = self._health.get(peer_id, (None, at))
        if known != health:
            since = at
            self._health[peer_id] = (health, at)
        return since


def _health_of(member: MemberView) -> Health:
    if member.is_leaving:
        return Health.LEAVING
    if member.is_placing:
        return Health.RECEIVING
    if member.is_resting:
        return Health.RESTING
    if member.times.suspicion:
        return Health.SUSPECTED
    return Health.READY
