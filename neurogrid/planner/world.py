"""The world that a plan is made from: the model's layers, the peers, the links between them. Data, and nothing else.

Units: bytes and seconds. One "step" is one token of one session through a layer (decode).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "KeptLayers",
    "LayerSize",
    "Link",
    "Links",
    "ModelSize",
    "PeerCapacity",
    "PeerSpeed",
]

# Of a peer's free memory, what no plan touches: allocator slack, the interpreter, buffers of messages.
RESERVED_FRACTION = 0.1


@dataclass(frozen=True)
class LayerSize:
    """The size of one layer on a peer.

    Attributes:
        weight_bytes: of its weights.
        cache_bytes: of its KV caches, for all agreed sessions at the agreed length.
        step_bytes: read for each token; None for all weights (a mixture reads the active experts only).
        optimizer_bytes: where the layer is trained: of its gradients, master weights and optimiser states.
        backward_bytes: where the layer is trained: of the activations that wait for the backward pass.
    """

    weight_bytes: int
    cache_bytes: int = 0
    step_bytes: int | None = None
    optimizer_bytes: int = 0
    backward_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes that the layer takes for as long as it is there."""
        return self.weight_bytes + self.cache_bytes + self.training_bytes

    @property
    def training_bytes(self) -> int:
        """Bytes that training takes beside the weights."""
        return self.optimizer_bytes + self.backward_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that a step reads."""
        return self.weight_bytes if self.step_bytes is None else self.step_bytes


@dataclass(frozen=True)
class ModelSize:
    """A model as the planner sees it.

    Attributes:
        layers: first to last.
        workspace_bytes: what a peer needs for a moment while it computes, however many layers it has.
        activation_bytes: of the hidden state of one token, as it travels from stage to stage.
        ends_seconds: for embedding, head and all else that the coordinator does for one token; 0 where it is not
            known.
        stage_seconds: what a step costs a peer besides its layers, however few they are.
        is_quantised: whether the checkpoint is, so that `--quantize` makes nothing smaller.
    """

    layers: tuple[LayerSize, ...]
    workspace_bytes: int = 0
    activation_bytes: int = 0
    ends_seconds: float = 0.0
    stage_seconds: float = 0.0
    is_quantised: bool = False


@dataclass(frozen=True)
class PeerSpeed:
    """Speed of a peer, as it measured itself.

    Attributes:
        bytes_per_second: at which a matrix-vector product goes through its matrix.
        layer_seconds: what a step through a layer costs besides, however small the layer.
    """

    bytes_per_second: float
    layer_seconds: float = 0.0


@dataclass(frozen=True)
class KeptLayers:
    """Layers [start, stop) that sessions of an older plan still go through.

    Old and new sessions together are no more than were agreed, so a layer of both plans takes its bytes once,
    caches included.
    """

    start: int
    stop: int


@dataclass(frozen=True)
class PeerCapacity:
    """A peer and what it can give.

    Attributes:
        free_bytes: what weights, caches and workspace may take; layers that it holds count as free.
        speed: None where it is not known.
        held: layers of this very model, in memory or on its disk, that need not be sent.
        kept: what it must go on holding beside the new plan until it is drained.
    """

    peer_id: str
    free_bytes: int
    speed: PeerSpeed | None = None
    held: frozenset[int] = frozenset()
    kept: KeptLayers | None = None

    def usable_bytes(self, workspace_bytes: int = 0) -> int:
        """Free memory less the reserve and the workspace; never negative."""
        return max(int(self.free_bytes * (1 - RESERVED_FRACTION)) - workspace_bytes, 0)


@dataclass(frozen=True)
class Link:
    """One way between two peers: latency in seconds, bandwidth in bytes a second (None: not known)."""

    latency: float
    bandwidth: float | None = None

    def seconds(self, num_bytes: int) -> float:
        """Return the time that so many bytes take."""
        return self.latency + (num_bytes / self.bandwidth if self.bandwidth else 0.0)


@dataclass(frozen=True)
class Links:
    """The network as far as it is known; all of it may be unknown, and costs nothing then.

    Attributes:
        coordinator: peer id to the link with the coordinator.
        peers: pairs of peer ids to their link, in that direction.
    """

    coordinator: Mapping[str, Link] = field(default_factory=dict)
    peers: Mapping[tuple[str, str], Link] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.coordinator or self.peers)

    def seconds(self, source: str | None, target: str | None, num_bytes: int) -> float:
        """Return the time that `num_bytes` take from one peer to another; None is the coordinator.

        Two peers whose link was not measured are no further apart than both ways over the coordinator.
        """
        if source is None or target is None:
            link = self.coordinator.get(source or target or "")
            return link.seconds(num_bytes) if link else 0.0
        link = self.peers.get((source, target))
        if link is not None:
            return link.seconds(num_bytes)
        return self.seconds(source, None, num_bytes) + self.seconds(None, target, num_bytes)
