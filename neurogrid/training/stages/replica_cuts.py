"""Choice of the members that become replicas of a model, and of the cut for each. Pure.

Those that have most room come first: one that has room for all of it is a replica by itself, others are as few stages
as have room for it together. Two that cannot reach each other are in different replicas, or stages that need not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from neurogrid.errors import ConfigurationError
from neurogrid.training.stages.cutting import StageSizes, cut_layers
from neurogrid.training.stages.placement import AreApart, contacts, place_apart

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
    rooms: Mapping[str, int],
    sizes: StageSizes,
    *,
    most: int,
    stages: int,
    are_apart: AreApart = lambda peer, other: False,
    is_tied: bool = True,
) -> list[ReplicaCut]:
    """Replicas of members that are in none.

    Args:
        rooms: bytes for a stage at each member, by peer id; 0 for any.
        sizes: what stages take.
        most: replicas.
        stages: of a replica at most.
        are_apart: whether two members cannot reach each other; where there is no other way, it counts for nothing.
        is_tied: whether the first and the last stage send each other something.
    """
    free = sorted(rooms, key=lambda peer: -(rooms[peer] or math.inf))
    found: list[ReplicaCut] = []
    while len(found) < most:
        cut = _first_cut(free, rooms, sizes, stages, are_apart, is_tied)
        if cut is None:
            cut = _first_cut(free, rooms, sizes, stages, lambda peer, other: False, is_tied)
        if cut is None:
            break
        found.append(cut)
        free = [peer for peer in free if peer not in cut.peers]
    return found


def _first_cut(
    free: Sequence[str],
    rooms: Mapping[str, int],
    sizes: StageSizes,
    stages: int,
    are_apart: AreApart,
    is_tied: bool,
) -> ReplicaCut | None:
    """The replica of as few members as can be, of those that come first."""
    for num in range(1, min(stages, len(free), len(sizes.layers)) + 1):
        # Whether the ends or the layers take more, the member with most room is where that is.
        peers = free[:num]
        orders: list[Sequence[str]] = [peers, [peers[-1], *peers[:-1]]]
        orders = [each for each in orders if not _are_any_apart(each, are_apart, is_tied)]
        if not orders and (stages_apart := place_apart((), free, num, are_apart, is_tied=is_tied)):
            orders = [[peer for (peer,) in stages_apart]]
        for order in orders:
            with suppress(ConfigurationError):
                return ReplicaCut(tuple(order), cut_layers(sizes, [rooms[peer] for peer in order]))
    return None


def _are_any_apart(order: Sequence[str], are_apart: AreApart, is_tied: bool) -> bool:
    stages = [(peer,) for peer in order]
    return any(are_apart(*pair) for pair in contacts(stages, is_tied=is_tied))
