"""Holdings of a run's replicas: pieces that the same members have, and so average with each other. Pure.

Source: protocol_spec/training/stages.md, "Replicas".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["FIRST", "LAST", "TIED", "Cut", "Holding", "holdings_of", "layer_piece", "state_pieces"]

FIRST: Final = "first"
"""Name of the piece of what learns at the first stage outside the layers, and is not tied."""

TIED: Final = "tied"
"""Name of the piece of what both ends have as one, and learns."""

LAST: Final = "last"
"""Name of the piece of what learns at the last stage alone outside the layers."""


def layer_piece(layer_id: int) -> str:
    """Return the name of the piece that has what learns in a layer."""
    return f"layer.{layer_id}"


def state_pieces(bounds: Sequence[int], index: int) -> tuple[str, ...]:
    """The pieces that a stage may give of its state.

    Args:
        bounds: stage i has layers [bounds[i], bounds[i + 1]).
        index: of the stage.
    """
    pieces = [layer_piece(layer_id) for layer_id in range(bounds[index], bounds[index + 1])]
    if index == 0:
        pieces.append(FIRST)
    if index == len(bounds) - 2:
        pieces.append(LAST)
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class Cut:
    """One replica.

    Attributes:
        peers: peer ids of its stages.
        bounds: stage i has layers [bounds[i], bounds[i + 1]).
        weight: by which it counts.
    """

    peers: tuple[str, ...]
    bounds: tuple[int, ...]
    weight: float


@dataclass(frozen=True, slots=True)
class Holding:
    """Pieces that the same members have: they are averaged as one vector.

    Attributes:
        number: of the vector, from 0.
        pieces: names, in the order in which they stand in the vector.
        members: peer ids, in the order of the replicas.
        weights: by which each of them counts.
    """

    number: int
    pieces: tuple[str, ...]
    members: tuple[str, ...]
    weights: tuple[float, ...]


def holdings_of(replicas: Sequence[Cut]) -> tuple[Holding, ...]:
    """The vectors of a round, by the replicas that are in it.

    Args:
        replicas: at least one; all of the same layers.
    """
    found: dict[tuple[tuple[str, ...], tuple[float, ...]], list[str]] = {}
    for piece, members, weights in _pieces(replicas):
        found.setdefault((members, weights), []).append(piece)
    return tuple(
        Holding(number, tuple(pieces), members, weights)
        for number, ((members, weights), pieces) in enumerate(found.items())
    )


def _pieces(
    replicas: Sequence[Cut],
) -> Iterator[tuple[str, tuple[str, ...], tuple[float, ...]]]:
    weights = tuple(each.weight for each in replicas)
    for layer_id in range(replicas[0].bounds[-1]):
        members = tuple(each.peers[bisect_right(each.bounds, layer_id) - 1] for each in replicas)
        yield layer_piece(layer_id), members, weights
    yield FIRST, tuple(each.peers[0] for each in replicas), weights
    # The copy at the other end has the bits of the first one: it only listens.
    ends = [
        (peer, each.weight if peer == each.peers[0] else 0.0)
        for each in replicas
        for peer in dict.fromkeys((each.peers[0], each.peers[-1]))
    ]
    yield TIED, tuple(peer for peer, _ in ends), tuple(weight for _, weight in ends)
    yield LAST, tuple(each.peers[-1] for each in replicas), weights
