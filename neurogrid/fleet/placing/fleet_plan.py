"""The plans of one fleet: the first, and those that follow when members join, go or change.

Between the fleet, which knows members, and the planner, which knows nothing of them. The coordinator's own stage is
either a peer like any other, or given: exactly so many layers, the first ones, and the others are planned without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.fleet.worker_questions import capacities, far_links, links
from neurogrid.planner import (
    KeptLayers,
    ModelSize,
    PeerCapacity,
    Plan,
    PlannedStage,
    Replica,
    explain,
    make_plan,
    make_replicas,
    replan,
)

__all__ = ["FleetPlanning"]


@dataclass(frozen=True)
class FleetPlanning:
    """Demands on every plan of a fleet.

    Attributes:
        size: of the model.
        num_stages: that many stages; None for the fewest that fit.
        with_replicas: whether members that are left over get layers, too.
        prepares_spares: whether members without layers are told the model's config, so that they can stand by.
        local_id: the peer id of the coordinator's own stage, if it may hold one; it stands by for nobody.
        num_local_layers: that many layers of it, exactly, the first ones; None for what the plan gives it.
    """

    size: ModelSize
    num_stages: int | None = None
    with_replicas: bool = True
    prepares_spares: bool = True
    local_id: str | None = None
    num_local_layers: int | None = None

    def first(self, infos: Sequence[WorkerInfo]) -> Plan:
        """Make the plan over the workers that are there at the beginning.

        Raises:
            CapacityError: the layers do not fit.
            ConfigurationError: there is nobody, or not as many as there should be stages.
        """
        if self._is_all_local:
            return self._outer(Plan(()))
        peers = self._peers(infos)
        count = None if self.num_stages is None else max(self.num_stages - self._num_fixed, 1)
        plan = make_plan(self._inner_size, peers, far_links(self._others(infos)), num_stages=count)
        return self._outer(self._without_spares(plan))

    def rate(self, infos: Sequence[WorkerInfo]) -> float | None:
        """Tokens a second that one session would get of the plan over these; None where that is not known.

        Raises:
            CapacityError, ConfigurationError: as `first`.
        """
        peers = capacities(infos, len(self.size.layers))
        return explain(self.first(infos), self.size, peers, links(infos)).tokens_per_second

    def again(self, current: Plan, infos: Sequence[WorkerInfo]) -> Plan:
        """The plan that takes the place of one with a stage that nobody holds: as few bytes as possible to send.

        Raises:
            CapacityError: the layers do not fit the members that are left.
            ConfigurationError: nobody is.
        """
        if self._is_all_local:
            return replace(current, generation=current.generation + 1)
        peers = self._peers(infos)
        result = replan(
            self._inner(current),
            self._inner_size,
            peers,
            far_links(self._others(infos)),
            num_stages=self._count(len(peers)),
        )
        return self._outer(self._without_spares(result.plan))

    def better(
        self, current: Plan, infos: Sequence[WorkerInfo], *, kept: Mapping[str, range]
    ) -> Plan | None:
        """A plan for new sessions that is worth its bytes, now that members joined or changed; None if there is none.

        Args:
            infos: with the speeds that the members have now.
            kept: layers that members have to go on holding, for sessions of the current plan, by peer id.
        """
        if self._is_all_local:
            return None
        peers = [
            replace(peer, kept=self._kept(kept.get(peer.peer_id))) for peer in self._peers(infos)
        ]
        inner = self._inner(current)
        result = replan(
            inner,
            self._inner_size,
            peers,
            far_links(self._others(infos)),
            num_stages=self._count(len(peers)),
        )
        if result.is_required or result.plan.stages == inner.stages:
            return None
        return self._outer(self._without_spares(result.plan))

    def _kept(self, layers: range | None) -> KeptLayers | None:
        if not layers or layers.start < self._offset:
            return None
        return KeptLayers(layers.start - self._offset, layers.stop - self._offset)

    def fits(self, info: WorkerInfo, layers: range) -> bool:
        """Whether a member has memory for all of these layers."""
        (peer,) = capacities([info], len(self.size.layers))
        needed = sum(layer.total_bytes for layer in self.size.layers[layers.start : layers.stop])
        return needed <= peer.usable_bytes(self.size.workspace_bytes)

    def replicas(
        self, stages: Iterable[PlannedStage], infos: Sequence[WorkerInfo]
    ) -> tuple[Replica, ...]:
        """Choose the replicas that members without a stage should stand by with."""
        inner = self._inner(Plan(tuple(stages)))
        holders = {stage.peer_id for stage in inner.stages}
        others = [i for i in infos if i.peer_id != self.local_id or i.peer_id in holders]
        if not inner.stages:
            return ()
        found = make_replicas(self._inner_size, self._peers(others), inner.stages)
        return self._outer(Plan(inner.stages, found)).replicas

    def _count(self, num_peers: int) -> int | None:
        """Return the number of stages to plan over so many peers, at most what was asked for; None for any number."""
        if self.num_stages is None:
            return None
        return max(min(self.num_stages - self._num_fixed, num_peers), 1)

    # What the planner sees where the first layers are given away already.

    @property
    def _num_fixed(self) -> int:
        return int(bool(self.num_local_layers))

    @property
    def _is_all_local(self) -> bool:
        return self.num_local_layers == len(self.size.layers)

    @property
    def _offset(self) -> int:
        return self.num_local_layers or 0

    @property
    def _inner_size(self) -> ModelSize:
        return replace(self.size, layers=self.size.layers[self._offset :])

    def _others(self, infos: Sequence[WorkerInfo]) -> list[WorkerInfo]:
        """Return the workers that are planned over."""
        return [i for i in infos if not self._offset or i.peer_id != self.local_id]

    def _peers(self, infos: Sequence[WorkerInfo]) -> list[PeerCapacity]:
        return [
            replace(peer, held=frozenset(n - self._offset for n in peer.held if n >= self._offset))
            for peer in capacities(self._others(infos), len(self.size.layers))
        ]

    def _without_spares(self, plan: Plan) -> Plan:
        if not self.with_replicas:
            return replace(plan, replicas=())
        kept = tuple(replica for replica in plan.replicas if replica.peer_id != self.local_id)
        return replace(plan, replicas=kept)

    def _inner(self, plan: Plan) -> Plan:
        """A plan without the fixed stage, its layers counted from behind that."""
        return _shifted(
            replace(
                plan,
                stages=tuple(stage for stage in plan.stages if stage.start >= self._offset),
                replicas=tuple(r for r in plan.replicas if r.start >= self._offset),
            ),
            -self._offset,
        )

    def _outer(self, plan: Plan) -> Plan:
        """A plan with the fixed stage before it."""
        if not self._offset:
            return plan
        assert self.local_id is not None
        num_bytes = sum(layer.total_bytes for layer in self.size.layers[: self._offset])
        fixed = PlannedStage(self.local_id, 0, self._offset, num_bytes)
        shifted = _shifted(plan, self._offset)
        return replace(shifted, stages=(fixed, *shifted.stages))


def _shifted(plan: Plan, offset: int) -> Plan:
    return replace(
        plan,
        stages=tuple(
            replace(stage, start=stage.start + offset, stop=stage.stop + offset)
            for stage in plan.stages
        ),
        replicas=tuple(
            replace(replica, start=replica.start + offset, stop=replica.stop + offset)
            for replica in plan.replicas
        ),
    )
