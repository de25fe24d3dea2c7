"""Which members become replicas of a model, and how it is cut for each. Pure.

Those that have most room come first: one that has room for all of it is a replica by itself, others are as few stages
as have room for it together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from neurogrid.errors import ConfigurationError
from neurogrid.training.stages.cutting import StageSizes, cut_layers

__all__ = ["ReplicaCut", "cut_replicas"]


class ReplicaCut(NamedTuple):
    """A replica that there can be.

    Attributes:
        peers: the members that are its stages, in order.
        bounds: stage i has the layers [bounds[i], bounds[i + 1]).
    """

    peers: tuple[str, ...]
    bounds: tuple[int, ...]


def cut_replicas(
    rooms: Mapping[str, int], sizes: StageSizes, *, most: int, stages: int
) -> list[ReplicaCut]:
    """Replicas of members that are in none.

    Args:
        rooms: bytes for a stage at each member, by peer id; 0 for any.
        sizes: what stages take.
        most: replicas.
        stages: of a replica at most.
    """
    free = sorted(rooms, key=lambda peer: -(rooms[peer] or math.inf))
    found: list[ReplicaCut] = []
    while len(found) < most:
        for num in range(1, min(stages, len(free), len(sizes.layers)) + 1):
            cut = _cut(free[:num], rooms, sizes)
            if cut is not None:
                found.append(cut)
                del free[:num]
                break
        else:
            break
    return found


def _cut(peers: Sequence[str], rooms: Mapping[str, int], sizes: StageSizes) -> ReplicaCut | None:
    # Whether the ends or the layers take more, the member with most room is where that is.
    for order in (peers, [peers[-1], *peers[:-1]]):
        try:
            return ReplicaCut(tuple(order), cut_layers(sizes, [rooms[peer] for peer in order]))
        except ConfigurationError:
            continue
    return None
