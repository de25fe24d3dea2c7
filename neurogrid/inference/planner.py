"""Which worker computes which layers: a pure function from sizes to contiguous stages.

Knows bytes and peers, nothing of torch or the network. Strategy: take as few workers as hold the model
(or as many as asked for), the roomiest first, and give each a share of the layers in proportion to its
free memory: of all contiguous splits in that order, the one whose fullest worker is least full.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations

from neurogrid.errors import CapacityError, ConfigurationError

__all__ = ["LayerSize", "PeerCapacity", "PlannedStage", "plan_stages"]

# For workspace: activations of a prefill, allocator slack, the interpreter. Of a worker's free memory.
WORKSPACE_FRACTION = 0.1
# Layers of unequal size may fit in one order of the workers and not in another. Up to this many workers all
# orders are tried (24) for the best split; beyond, the roomiest first, its reverse, and one order in which
# they fit, looked for among the subsets of so many workers (4,096).
MAX_PERMUTED_WORKERS = 4
MAX_PACKED_WORKERS = 12


@dataclass(frozen=True)
class LayerSize:
    """Bytes that one layer takes on a worker: its weights, and its KV cache for the agreed sessions."""

    weight_bytes: int
    cache_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Weights and cache."""
        return self.weight_bytes + self.cache_bytes


@dataclass(frozen=True)
class PeerCapacity:
    """A worker and the bytes that it can give to a stage."""

    peer_id: str
    free_bytes: int

    @property
    def usable_bytes(self) -> int:
        """Free memory less the workspace."""
        return int(self.free_bytes * (1 - WORKSPACE_FRACTION))


@dataclass(frozen=True)
class PlannedStage:
    """Layers [start, stop) on one worker, and the bytes that they take there."""

    peer_id: str
    start: int
    stop: int
    num_bytes: int


def plan_stages(
    layers: Sequence[LayerSize],
    peers: Sequence[PeerCapacity],
    *,
    num_stages: int | None = None,
) -> list[PlannedStage]:
    """Split the layers into contiguous stages, in order, each on a peer of its own.

    Args:
        layers: the layers of the model, first to last.
        peers: the workers, in any order.
        num_stages: that many stages exactly; None for the fewest that fit.

    Raises:
        ConfigurationError: more stages were asked for than there are layers or workers.
        CapacityError: the layers do not fit; says how many bytes are needed and there.
    """
    if not peers:
        raise ConfigurationError("there is no worker to plan for")
    roomiest = sorted(peers, key=lambda peer: (-peer.usable_bytes, peer.peer_id))
    if num_stages is not None:
        if num_stages > len(layers):
            raise ConfigurationError(
                f"{num_stages} stages were asked for, and the model has {len(layers)} layers"
            )
        if num_stages > len(peers):
            raise ConfigurationError(
                f"{num_stages} stages were asked for, and there are {len(peers)} workers"
            )
        counts: Sequence[int] = [num_stages]
    else:
        counts = range(1, min(len(peers), len(layers)) + 1)
    sizes = [layer.total_bytes for layer in layers]
    for count in counts:
        stages = _best_split(sizes, roomiest[:count])
        if stages is not None:
            return stages
    raise _does_not_fit(sizes, roomiest[: counts[-1]])


def _best_split(sizes: Sequence[int], peers: Sequence[PeerCapacity]) -> list[PlannedStage] | None:
    best: tuple[float, list[PlannedStage]] | None = None
    for order in _orders(sizes, peers):
        found = _split(sizes, order)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return best[1] if best else None


def _orders(
    sizes: Sequence[int], peers: Sequence[PeerCapacity]
) -> Iterable[Sequence[PeerCapacity]]:
    if len({peer.usable_bytes for peer in peers}) == 1:
        return [peers]
    if len(peers) <= MAX_PERMUTED_WORKERS:
        return permutations(peers)
    orders = [peers, peers[::-1]]
    if len(peers) <= MAX_PACKED_WORKERS and len(set(sizes)) > 1:
        orders.append(_packed_order(sizes, peers))
    return orders


def _packed_order(sizes: Sequence[int], peers: Sequence[PeerCapacity]) -> Sequence[PeerCapacity]:
    """An order in which the peers, each filled before the next, hold the most layers.

    `reach[subset]`: the most layers, from the first, that these peers hold in some order of theirs.
    """
    ends = [0, *accumulate(sizes)]
    reach = [0] * (1 << len(peers))
    last = [0] * (1 << len(peers))
    for subset in range(1, len(reach)):
        reach[subset] = -1
        for index, peer in enumerate(peers):
            if subset >> index & 1:
                before = reach[subset ^ (1 << index)]
                held = bisect_right(ends, ends[before] + peer.usable_bytes) - 1
                if held > reach[subset]:
                    reach[subset], last[subset] = held, index
    order: list[PeerCapacity] = []
    subset = len(reach) - 1
    while subset:
        order.append(peers[last[subset]])
        subset ^= 1 << last[subset]
    return order[::-1]


def _split(
    sizes: Sequence[int], peers: Sequence[PeerCapacity]
) -> tuple[float, list[PlannedStage]] | None:
    """The split over `peers` in this order whose fullest worker is least full; None if none fits.

    `fullness[k][n]`: the least possible fullness with the first n layers on the first k + 1 peers.
    """
    num_layers = len(sizes)
    ends = [0, *accumulate(sizes)]
    infinite = float("inf")
    fullness = [[infinite] * (num_layers + 1) for _ in peers]
    cuts = [[0] * (num_layers + 1) for _ in peers]
    for k, peer in enumerate(peers):
        for stop in range(k + 1, num_layers + 1):
            for start in range(k, stop):
                if k == 0 and start > 0:
                    break
                needed = ends[stop] - ends[start]
                if needed > peer.usable_bytes:
                    continue
                before = 0.0 if k == 0 else fullness[k - 1][start]
                candidate = max(before, needed / max(peer.usable_bytes, 1))
                if candidate < fullness[k][stop]:
                    fullness[k][stop], cuts[k][stop] = candidate, start
    if fullness[-1][num_layers] == infinite:
        return None
    stages: list[PlannedStage] = []
    stop = num_layers
    for k in range(len(peers) - 1, -1, -1):
        start = cuts[k][stop]
        stages.append(PlannedStage(peers[k].peer_id, start, stop, ends[stop] - ends[start]))
        stop = start
    return fullness[-1][num_layers], stages[::-1]


def _does_not_fit(sizes: Sequence[int], peers: Sequence[PeerCapacity]) -> CapacityError:
    needed, available = sum(sizes), sum(peer.usable_bytes for peer in peers)
    largest, roomiest = max(sizes), max(peer.usable_bytes for peer in peers)
    if largest > roomiest:
        detail = f"one layer alone takes {largest:,} B, and the roomiest has {roomiest:,} B"
    else:
        detail = "add workers, give them more memory, or lower --max-seq-len"
    return CapacityError(
        f"the layers do not fit: {needed:,} B needed, {available:,} B available on "
        f"{len(peers)} worker{'s' if len(peers) != 1 else ''} ({detail})",
        needed=needed,
        available=available,
    )
