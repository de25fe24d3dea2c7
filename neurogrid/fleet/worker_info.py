"""A worker as its coordinator sees it, from what it said and what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from neurogrid.p2p.hosts.machine import named_peer
from neurogrid.planner import PeerSpeed

__all__ = ["WorkerInfo"]


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
        num_models_beside: other models of the coordinator's process that it computes for.
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
    num_models_beside: int = 0
    machine: str = ""
    address: str = ""

    @property
    def label(self) -> str:
        """The worker, for people: the name of its machine, the end of its peer id, the address."""
        return named_peer(self.peer_id, self.machine, self.address)
