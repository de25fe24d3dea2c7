"""The state of machines and links at one moment, as plain data, and its form in JSON.

Units: bytes, seconds, and rates a second. Times of the day (`at`, `since`) are Unix times in seconds. None stands
for what nobody knows, never for zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum, StrEnum
from functools import cache
from typing import Any, TypeAlias

from neurogrid.node.events import Event

__all__ = [
    "Failure",
    "FleetStatus",
    "Health",
    "Json",
    "LinkStatus",
    "PeerStatus",
    "Phase",
    "Role",
    "StageStatus",
    "TransferStatus",
    "to_json",
]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


class Phase(StrEnum):
    """The phase of a leader's work."""

    READING = "reading"
    """The leader reads the model."""
    WAITING = "waiting"
    """The leader waits for workers, and asks them what they have."""
    TRANSFERRING = "transferring"
    """The workers get their layers."""
    READY = "ready"
    """Every layer is on a worker that is ready."""
    MENDING = "mending"
    """A worker was lost, and its layers are being placed."""


class Role(StrEnum):
    """The part that a worker has in the plan."""

    STAGE = "stage"
    REPLICA = "replica"
    """A worker with layers that another computes; stands by."""
    SPARE = "spare"
    """A worker without layers."""


class Health(StrEnum):
    """Health of a worker."""

    READY = "ready"
    RECEIVING = "receiving"
    """The worker gets layers."""
    RESTING = "resting"
    """The worker has refused, and is left alone for a while."""
    SUSPECTED = "suspected"
    """The worker keeps a step waiting: it does not answer, or is far slower than before."""
    LEAVING = "leaving"
    """The worker wants to go."""
    LOST = "lost"
    """The worker is gone, and shown for a while longer."""


@dataclass(frozen=True)
class TransferStatus:
    """A worker's weights, from when it was last given layers.

    Attributes:
        planned_bytes: of all its layers.
        sent_bytes: that came from the coordinator.
        cached_bytes: that it had already.
        from_workers_bytes: that came from other workers.
        bytes_per_second: at which they come now.
        remaining_seconds: at that rate; None while it is not known.
        is_done: nothing is missing.
        stalled_seconds: for how long nothing has come, where that is longer than usual; None while something does.
    """

    planned_bytes: int
    sent_bytes: int
    cached_bytes: int
    from_workers_bytes: int
    bytes_per_second: float
    remaining_seconds: float | None
    is_done: bool
    stalled_seconds: float | None = None


@dataclass(frozen=True)
class PeerStatus:
    """A worker.

    Attributes:
        machine: what people call its machine, as it says itself; empty where it did not say. Proves nothing.
        address: the IP address of that machine; empty through a relay, and within the coordinator's process.
        name: of its device, in its own words.
        role: in the plan; that of before for one that is lost.
        stage: its number, from 1; None without one.
        layers_assigned: [start, stop) that it was given, or is being given; empty for none.
        layers_held: [start, stop) that it is ready for; empty for none.
        memory_known: False where it did not say, and `memory_free_bytes` was assumed.
        memory_total_bytes: None where it did not say.
        memory_free_bytes: what layers may take in all; those that it holds count as free.
        memory_used_bytes: by others on its machine; None where it did not say.
        memory_stage_bytes: set aside for its layers and their caches.
        flops: floating point operations a second; None where it did not say.
        read_bytes_per_second: at which it goes through weights; None where it did not say.
        latency: seconds that a message takes to it; None where that was not measured.
        step_seconds: that a decoded token takes it, everything included: the median of the last 64; None before the
            first.
        last_step_seconds: that the last one took.
        since: when `health` became so.
        num_sessions: that go through it.
        sent_bytes: to it, by the coordinator, in all.
        received_bytes: from it.
        lost_reason: why it is lost; empty if it is not.
        suspicion: what it does, or does not do, that keeps steps waiting, in words; empty if it does not.
    """

    peer_id: str
    machine: str
    address: str
    name: str
    device_kind: str
    protocol_id: str
    role: Role
    stage: int | None
    layers_assigned: range
    layers_held: range
    memory_known: bool
    memory_total_bytes: int | None
    memory_free_bytes: int
    memory_used_bytes: int | None
    memory_stage_bytes: int
    flops: float | None
    read_bytes_per_second: float | None
    latency: float | None
    step_seconds: float | None
    last_step_seconds: float | None
    health: Health
    since: float
    num_sessions: int
    sent_bytes: int
    received_bytes: int
    transfer: TransferStatus | None
    lost_reason: str
    suspicion: str = ""


@dataclass(frozen=True)
class StageStatus:
    """A stage of the plan, in order from 1.

    Attributes:
        layers: [start, stop).
        peer_id: the worker that computes it.
        is_ready: a worker holds all of its layers.
        replicas: peer ids of the workers that could take over at once.
    """

    number: int
    layers: range
    peer_id: str
    is_ready: bool
    replicas: tuple[str, ...]


@dataclass(frozen=True)
class LinkStatus:
    """A way between two peers, in the direction in which activations flow.

    Attributes:
        source: peer id; activations come from here.
        target: peer id.
        latency: seconds, one way; None where it was not measured.
        bytes_per_second: that went from source to target over the last seconds, of all kinds.
        weight_bytes_per_second: of weights among them.
        activations_per_second: messages with hidden states, or with results of the last stage.
        is_counted: False between two workers: what passes there is computed from what went into the chain.
    """

    source: str
    target: str
    latency: float | None
    bytes_per_second: float
    weight_bytes_per_second: float
    activations_per_second: float
    is_counted: bool


@dataclass(frozen=True)
class Failure:
    """A worker that was lost, and what was done about it.

    Attributes:
        layers: [start, stop) that it held; empty for none.
        action: what is being done, or was, in words.
        recovered_at: when every layer was there again; None while that is not so.
    """

    at: float
    peer_id: str
    layers: range
    reason: str
    action: str
    recovered_at: float | None


@dataclass(frozen=True)
class FleetStatus:
    """A leader and its workers.

    Attributes:
        at: when this was so.
        started_at: when the leader began.
        peer_id: the leader's; empty until it listens.
        machine: what its peers are told that its machine is called; empty for nothing.
        model: its name; empty until it is read.
        total_layers: of the model; 0 until it is read.
        phase_text: what is being done, in words; empty when nothing is.
        workers_wanted: that are waited for.
        peers: by peer id, as they came; those that were lost lately, too.
        links: leader to each worker, stage to stage, last stage to leader.
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
    failures: tuple[Failure, ...]
    events: tuple[Event, ...]

    @property
    def loaded_layers(self) -> tuple[int, ...]:
        """Layers that at least one worker is ready for, in order."""
        held = (peer.layers_held for peer in self.peers.values() if peer.health != Health.LOST)
        return tuple(sorted({layer for layers in held for layer in layers}))


def to_json(value: object) -> Json:
    """Dataclasses as objects, ranges as `{"start", "stop"}`, floats to six digits after the point."""
    # Asked several times a second for all that is known: the commonest first.
    match value:
        case Enum():
            return str(value.value)
        case None | bool() | int() | str():
            return value
        case float():
            return round(value, 6)
        case list() | tuple():
            return [to_json(item) for item in value]
        case dict():
            return {str(key): to_json(item) for key, item in value.items()}
        case range():
            return {"start": value.start, "stop": value.stop}
    if is_dataclass(value) and not isinstance(value, type):
        return {name: to_json(getattr(value, name)) for name in _names(type(value))}
    raise TypeError(f"{type(value).__name__} has no form in JSON here")


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
