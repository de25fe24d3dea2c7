"""Memory that several models of one process plan with: each counts on its own part of the same machines.

    sharing = MemorySharing()
    sharing.expect("A", demand), sharing.expect("B", demand)      # all that are to be opened, before the first is
    async with open_coordinator(settings, model=a, share=sharing.share("A")) as coordinator: ...

A model that is opened is planned over what the open ones do not hold and the expected ones need (`planner.sharing`).
Once it is open it may plan anew, as when a worker is lost, with all that nobody else holds then. Of a worker's memory
this counts what models of this process hold; what others hold there the worker does not offer in the first place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

from neurogrid.assembly.coordinator_settings import CoordinatorSettings
from neurogrid.errors import CapacityError
from neurogrid.fleet.worker_info import WorkerInfo
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.planner import (
    Division,
    Plan,
    PlannedStage,
    Replica,
    Room,
    SharedLayer,
    SharedModel,
    divide,
    format_bytes,
    taken_bytes,
)

__all__ = ["HERE", "MemoryShare", "MemorySharing", "demand_of"]

HERE: Final = "this machine"
"""The name of this machine's memory among those of workers: layers of every model that lie here take it."""


def demand_of(model: LoadedModel, settings: CoordinatorSettings, *, asked: float) -> SharedModel:
    """A loaded model as it is divided for.

    Args:
        asked: tokens that were asked of it lately.
    """
    fixed, one = (model.size(num_sessions=number).layers for number in (0, 1))
    local = settings.local_layers
    return SharedModel(
        name=model.name,
        layers=tuple(
            SharedLayer(none.total_bytes, some.total_bytes - none.total_bytes)
            for none, some in zip(fixed, one, strict=True)
        ),
        workspace_bytes=model.size(num_sessions=0).workspace_bytes,
        max_sessions=settings.max_sessions,
        asked=asked,
        num_stages=settings.stages,
        num_local_layers=local if isinstance(local, int) else None,
        is_quantised=model.checkpoint.is_quantised,
    )


@dataclass
class _Held:
    """Memory that an open model holds, looked up when it is asked for.

    Attributes:
        local_ids: peer ids under which this machine's memory is in the plan.
        workspace_bytes: on each worker.
        machine_bytes: of this machine, whatever the plan says: of workers that were started here.
    """

    plan: Callable[[], Plan]
    local_ids: frozenset[str]
    workspace_bytes: int
    machine_bytes: int = 0

    def by_peer(self) -> Counter[str]:
        taken: Counter[str] = Counter()
        plan = self.plan()
        for part in [*plan.stages, *(_as_stage(replica) for replica in plan.replicas)]:
            num_bytes = taken_bytes(part.num_bytes, self.workspace_bytes)
            taken[HERE if part.peer_id in self.local_ids else part.peer_id] += num_bytes
        if self.machine_bytes:
            taken[HERE] = self.machine_bytes
        return taken


def _as_stage(replica: Replica) -> PlannedStage:
    return PlannedStage(replica.peer_id, replica.start, replica.stop, replica.num_bytes)


class MemorySharing:
    """The memory of one process's models. Used from one thread; models are opened one after the other.

    Args:
        gives_way: models that find no room beside others are left out, to be opened when those give way; otherwise
            it is an error that they do not all fit.
    """

    def __init__(self, *, gives_way: bool) -> None:
        self._gives_way = gives_way
        self._expected: dict[str, SharedModel] = {}
        self._kept: dict[str, Mapping[str, int]] = {}
        self._held: dict[str, _Held] = {}
        self._machine_bytes: int | None = None

    def expect(self, demand: SharedModel) -> None:
        """A model is to be opened, and room is left for it."""
        self._expected[demand.name] = demand

    def forget(self, name: str) -> None:
        """No room is left for a model any more, unless it is open."""
        self._expected.pop(name, None)
        self._kept.pop(name, None)

    def share(self, demand: SharedModel) -> MemoryShare:
        """Return the part of the memory that a model which is opened now plans with."""
        self.expect(demand)
        return MemoryShare(self, demand)

    def held(self) -> Mapping[str, Mapping[str, int]]:
        """Bytes that each open model holds, by its name and peer id."""
        return {name: held.by_peer() for name, held in self._held.items()}

    # For shares.

    def _machine(self, free_bytes: int) -> int:
        """This machine's memory that layers may take in all: what was free when nobody had any of it."""
        if self._machine_bytes is None or not any(HERE in taken for taken in self.held().values()):
            self._machine_bytes = free_bytes
        return self._machine_bytes

    def _beside(self, name: str) -> Counter[str]:
        """Bytes that the other open models hold, by peer id."""
        taken: Counter[str] = Counter()
        for other, by_peer in self.held().items():
            if other != name:
                taken.update(by_peer)
        return taken

    def _num_beside(self, name: str) -> Counter[str]:
        """Number of other open models that each peer computes for, by peer id."""
        return Counter(
            stage.peer_id
            for other, held in self._held.items()
            if other != name
            for stage in held.plan().stages
        )

    def _kept_beside(self, name: str) -> Counter[str]:
        """Bytes that are left for the others that are to be opened."""
        kept: Counter[str] = Counter()
        for other, by_peer in self._kept.items():
            if other != name and other not in self._held:
                kept.update(by_peer)
        return kept

    def _divide(self, demand: SharedModel, rooms: Sequence[Room]) -> Division:
        others = [
            each
            for name, each in self._expected.items()
            if name not in self._held and name != demand.name
        ]
        while True:
            try:
                division = divide([demand, *others], rooms)
                break
            except CapacityError as exc:
                if not others or not self._gives_way:
                    raise self._explained(exc, rooms) from exc
                others.pop()  # those that were named first come first
        self._kept = {other.name: division.packed[other.name] for other in others}
        return division

    def _explained(self, error: CapacityError, rooms: Sequence[Room]) -> CapacityError:
        taken = {name: sum(by_peer.values()) for name, by_peer in self.held().items()}
        if not taken:
            return error
        beside = ", ".join(f"{name} has {format_bytes(num)}" for name, num in taken.items())
        return CapacityError(
            f"{error} ({beside} already)", needed=error.needed, available=error.available
        )


@dataclass
class MemoryShare:
    """One model's part. Made by `MemorySharing.share`, for one opening.

    Attributes:
        demand: the model's.
        num_sessions: that it may have at once; known when it was divided.
    """

    _sharing: MemorySharing
    demand: SharedModel
    num_sessions: int = 0
    _told: dict[str, tuple[int, int]] = field(default_factory=dict)
    _local_bytes: int | None = None
    _local_ids: frozenset[str] = frozenset()
    _machine_bytes: int = 0

    @property
    def name(self) -> str:
        """The model's name."""
        return self.demand.name

    def workers_here(self, free_bytes: int) -> int:
        """Memory of this machine for workers that are started here for this model: by what it and the others need."""
        sharing, name = self._sharing, self.name
        left = sharing._machine(free_bytes) - sharing._beside(name)[HERE]
        waiting = [
            each
            for other, each in sharing._expected.items()
            if other != name and other not in sharing._held
        ]
        own = self.demand.needed_bytes(1)
        together = own + sum(each.needed_bytes(1) for each in waiting)
        self._machine_bytes = max(left * own // max(together, 1), 0)
        return self._machine_bytes

    def divide(
        self,
        infos: Sequence[WorkerInfo],
        *,
        own_id: str,
        free_here: int | None,
        beside_bytes: Sequence[int],
    ) -> None:
        """Decide what this model plans with, and how many sessions it has.

        Args:
            infos: of the workers that it found, as each says.
            own_id: peer id of its own stage.
            free_here: memory of this machine that layers may take; None where none do, or workers here have it.
            beside_bytes: what stands beside each layer, as adapters.

        Raises:
            CapacityError: there is no room for it; says who needs and who has what.
        """
        sharing, name = self._sharing, self.name
        beside = sharing._beside(name)
        self._local_ids = frozenset({own_id})
        layers = tuple(
            replace(layer, fixed_bytes=layer.fixed_bytes + more)
            for layer, more in zip(self.demand.layers, beside_bytes, strict=True)
        )
        self.demand = replace(self.demand, layers=layers)
        # What is kept for those that are to be opened is divided anew.
        left_there = self._left(infos, kept=Counter())
        rooms = [Room(info.peer_id, info.free_bytes) for info in left_there]
        if free_here is not None:
            left = max(sharing._machine(free_here) - beside[HERE], 0)
            rooms.append(Room(HERE, left, is_last=True))
        division = sharing._divide(self.demand, rooms)
        self.num_sessions = division.num_sessions[name]
        self._local_bytes = division.left_for(name, rooms)[HERE] if free_here is not None else None

    @property
    def local_bytes(self) -> int | None:
        """Memory of this machine that the coordinator's own stage may take; None where it has none."""
        return self._local_bytes

    def limited(self, infos: Sequence[WorkerInfo]) -> list[WorkerInfo]:
        """The workers with the memory that this model may plan with at this moment, and what else they compute for.

        What a worker says is what is left beside all others then. Of these the ones of this process may hold more now,
        or less.
        """
        return self._left(infos, kept=self._sharing._kept_beside(self.name))

    def _left(self, infos: Sequence[WorkerInfo], *, kept: Mapping[str, int]) -> list[WorkerInfo]:
        """The workers with what they have beside the open models, less what is kept there."""
        beside = self._sharing._beside(self.name)
        num_beside = self._sharing._num_beside(self.name)
        found = []
        for info in infos:
            peer_id, told = info.peer_id, info.free_bytes
            if peer_id in self._local_ids:
                found.append(info)
                continue
            if self._told.get(peer_id, (None, 0))[0] != told:
                self._told[peer_id] = told, beside[peer_id]
            left = told + self._told[peer_id][1] - beside[peer_id] - kept.get(peer_id, 0)
            found.append(
                replace(info, free_bytes=max(left, 0), num_models_beside=num_beside[peer_id])
            )
        return found

    @contextmanager
    def holding(self, plan: Callable[[], Plan]) -> Iterator[None]:
        """The model is placed, by this plan, while the block runs."""
        sharing, name = self._sharing, self.name
        sharing._held[name] = _Held(
            plan, self._local_ids, self.demand.workspace_bytes, self._machine_bytes
        )
        sharing.forget(name)
        try:
            yield
        finally:
            del sharing._held[name]
