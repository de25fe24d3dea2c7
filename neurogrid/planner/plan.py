"""The plan that comes out: stages, replicas, and which generation of plans they belong to."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Plan", "PlannedStage", "Replica", "name_range"]


def name_range(layers: range) -> str:
    """Layers for a text: `layer 3`, `layers 0 to 5`."""
    first, last = layers.start, layers.stop - 1
    return f"layer {first}" if first == last else f"layers {first} to {last}"


@dataclass(frozen=True)
class PlannedStage:
    """Layers [start, stop) on one worker, and the bytes that they take there, with caches and what training takes."""

    peer_id: str
    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True)
class Replica:
    """A worker that stands by with layers [start, stop): one or more whole stages of the plan."""

    peer_id: str
    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True)
class Plan:
    """Stages and replicas, and which peer holds each.

    Attributes:
        stages: in order; every layer is in exactly one.
        replicas: of whole stages, on workers that have none.
        generation: counts the plans of one coordinator. Sessions stay with the stages of the generation that they
            were opened in.
    """

    stages: tuple[PlannedStage, ...]
    replicas: tuple[Replica, ...] = ()
    generation: int = 1

    def stage_of(self, peer_id: str) -> PlannedStage | None:
        """The stage of this peer, if it has one."""
        return next((stage for stage in self.stages if stage.peer_id == peer_id), None)

    def replica_of(self, peer_id: str) -> Replica | None:
        """Return the replica that this peer stands by with, if it does."""
        return next((replica for replica in self.replicas if replica.peer_id == peer_id), None)
