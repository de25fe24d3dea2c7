"""Division of one set of workers' memory among several models: sessions of each, and what it leaves to the others.

First the weights of all have to fit, with the caches of one session each: none gets more before that. What is left goes
to further sessions, one after the other, to the model of which most was asked for each session that it has (D'Hondt).

What comes out is a packing of each model, layers in their order on as few workers as will do. It is no plan: a model is
planned over all that the packings of the others leave (`Division.left_for`), so that its plan may be a better one, and
theirs exist whatever it is.

Pure: no clock, no socket, no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Final

from neurogrid.errors import CapacityError
from neurogrid.planner.sizes import format_bytes
from neurogrid.planner.world import RESERVED_FRACTION

__all__ = ["Division", "Room", "SharedLayer", "SharedModel", "divide", "taken_bytes"]

# Of all sessions that a model may get, the part that it gets at a time; where there are many, one more is none.
_SESSION_STEPS: Final = 16
# Memory that is planned with is a whole number of bytes below it.
_ROUNDING: Final = 1


def taken_bytes(num_bytes: int, workspace_bytes: int) -> int:
    """Memory of a worker that has to be free for layers and caches of `num_bytes`: with the workspace, and with the
    reserve that no plan touches."""
    return ceil((num_bytes + workspace_bytes) / (1 - RESERVED_FRACTION)) + _ROUNDING


@dataclass(frozen=True)
class SharedLayer:
    """A layer's bytes: of weights and what stands beside them, and of each session's cache."""

    fixed_bytes: int
    session_bytes: int = 0


@dataclass(frozen=True)
class SharedModel:
    """A model that is to get memory.

    Attributes:
        layers: first to last.
        workspace_bytes: that each of its workers needs for a moment while it computes.
        max_sessions: more than so many are of no use to it.
        asked: tokens that were asked of it lately; only how they compare counts.
        num_stages: on so many workers exactly; None for as few as will do.
        num_local_layers: so many layers, the first ones, lie in the room that is `last`; None for what does not fit
            elsewhere.
        is_quantised: whether its checkpoint is, so that `--quantize` makes nothing smaller.
    """

    name: str
    layers: tuple[SharedLayer, ...]
    workspace_bytes: int = 0
    max_sessions: int = 1
    asked: float = 0.0
    num_stages: int | None = None
    num_local_layers: int | None = None
    is_quantised: bool = False

    def needed_bytes(self, num_sessions: int) -> int:
        """Return the bytes that all layers take with so many sessions."""
        return sum(self.layer_bytes(num_sessions))

    def layer_bytes(self, num_sessions: int) -> list[int]:
        """Bytes of each layer with so many sessions."""
        return [each.fixed_bytes + num_sessions * each.session_bytes for each in self.layers]


@dataclass(frozen=True)
class Room:
    """Memory of one worker that nobody has.

    Attributes:
        is_last: used for what the others have no room for: the coordinator's own.
    """

    peer_id: str
    free_bytes: int
    is_last: bool = False


@dataclass(frozen=True)
class Division:
    """Division of the memory of workers among models.

    Attributes:
        num_sessions: of each, by name.
        packed: bytes that each would take at least, with those sessions, by name and peer id.
    """

    num_sessions: Mapping[str, int]
    packed: Mapping[str, Mapping[str, int]]

    def left_for(self, name: str, rooms: Sequence[Room]) -> dict[str, int]:
        """Return the bytes that a model may plan with, by peer id: all that the others' packings leave."""
        return {
            room.peer_id: room.free_bytes - self.beside(name).get(room.peer_id, 0) for room in rooms
        }

    def beside(self, name: str) -> Counter[str]:
        """Bytes that are kept for the other models, by peer id."""
        kept: Counter[str] = Counter()
        for other, by_peer in self.packed.items():
            if other != name:
                kept.update(by_peer)
        return kept


def divide(models: Sequence[SharedModel], rooms: Sequence[Room]) -> Division:
    """Divide the rooms. The same for any order of models and rooms.

    Raises:
        CapacityError: not even their weights fit, with one session each; says what each needs and what there is.
    """
    wanted = {model.name: max(model.max_sessions, 1) for model in models}
    if (packed := _pack_all(models, rooms, wanted)) is not None:
        return Division(wanted, packed)
    have = dict.fromkeys(wanted, 1)
    packed = _pack_all(models, rooms, have)
    if packed is None:
        raise _do_not_fit(models, rooms)
    growing = {model.name: model for model in models if wanted[model.name] > 1}
    while growing:
        name = min(growing, key=lambda name: (-_claim(growing[name], have[name]), name))
        step = max(wanted[name] // _SESSION_STEPS, 1)
        more = {**have, name: min(have[name] + step, wanted[name])}
        found = _pack_all(models, rooms, more)
        if found is None:
            del growing[name]
            continue
        have, packed = more, found
        if have[name] == wanted[name]:
            del growing[name]
    return Division(have, packed)


def _claim(model: SharedModel, num_sessions: int) -> float:
    # One token for each, so that those of which nothing was asked share alike.
    return (model.asked + 1) / (num_sessions + 1)


def _pack_all(
    models: Sequence[SharedModel], rooms: Sequence[Room], num_sessions: Mapping[str, int]
) -> dict[str, dict[str, int]] | None:
    """A packing of every model; None where they were not found one. The largest have their choice first."""
    left = {room.peer_id: room.free_bytes for room in rooms}
    packed: dict[str, dict[str, int]] = {}
    for model in sorted(models, key=lambda model: (-model.needed_bytes(1), model.name)):
        now = [Room(room.peer_id, left[room.peer_id], room.is_last) for room in rooms]
        taken = _pack(model, now, num_sessions[model.name])
        if taken is None:
            return None
        packed[model.name] = taken
        for peer_id, num_bytes in taken.items():
            left[peer_id] -= num_bytes
    return packed


def _pack(model: SharedModel, rooms: Sequence[Room], num_sessions: int) -> dict[str, int] | None:
    layers = model.layer_bytes(num_sessions)
    if model.num_local_layers is not None:
        own = [room for room in rooms if room.is_last]
        first, rest = layers[: model.num_local_layers], layers[model.num_local_layers :]
        others = [room for room in rooms if not room.is_last]
        stages = None if model.num_stages is None else max(model.num_stages - bool(first), 1)
        here = _spread(first, own, model.workspace_bytes, None) if first else {}
        there = _spread(rest, others, model.workspace_bytes, stages) if rest else {}
        return None if here is None or there is None else {**here, **there}
    workers = [room for room in rooms if not room.is_last]
    found = _spread(layers, workers, model.workspace_bytes, model.num_stages)
    if found is None and len(workers) < len(rooms):
        found = _spread(layers, rooms, model.workspace_bytes, model.num_stages)
    return found


def _spread(
    layers: Sequence[int], rooms: Sequence[Room], workspace: int, num_stages: int | None
) -> dict[str, int] | None:
    """Bytes of a run of layers on as few of these as will do, or exactly so many; None where none was found."""
    needed = taken_bytes(sum(layers), workspace)
    if num_stages is None or num_stages == 1:
        alone = [room for room in rooms if room.free_bytes >= needed]
        if alone:  # the tightest, so that what takes more finds more
            room = min(alone, key=lambda room: (room.is_last, room.free_bytes, room.peer_id))
            return {room.peer_id: needed}
    roomiest = sorted(rooms, key=lambda room: (-room.free_bytes, room.peer_id))
    if num_stages is not None:
        if num_stages > min(len(rooms), len(layers)):
            return None
        roomiest = roomiest[:num_stages]
        # Where machines or layers differ much: the roomiest have the first ones, or the last.
        return (
            _evenly(layers, roomiest, workspace)
            or _in_order(layers, roomiest, workspace, on_each=True)
            or _in_order(layers[::-1], roomiest, workspace, on_each=True)
        )
    for count in range(2, min(len(rooms), len(layers)) + 1):
        if (found := _in_order(layers, roomiest[:count], workspace)) is not None:
            return found
    return None


def _in_order(
    layers: Sequence[int], rooms: Sequence[Room], workspace: int, *, on_each: bool = False
) -> dict[str, int] | None:
    """Fill one after the other; with `on_each`, there has to be a layer on each of them."""
    taken, start = {}, 0
    for num_left, room in zip(range(len(rooms) - 1, -1, -1), rooms, strict=True):
        most = len(layers) - num_left if on_each else len(layers)
        stop, num_bytes = start, 0
        while stop < most and taken_bytes(num_bytes + layers[stop], workspace) <= room.free_bytes:
            num_bytes += layers[stop]
            stop += 1
        if stop > start:
            taken[room.peer_id] = taken_bytes(num_bytes, workspace)
        elif on_each:
            return None
        start = stop
    return taken if start == len(layers) else None


def _evenly(layers: Sequence[int], rooms: Sequence[Room], workspace: int) -> dict[str, int] | None:
    """Divide layers evenly, up to one, among rooms, the most bytes to the roomiest, the first; None if none fit."""
    cuts = [index * len(layers) // len(rooms) for index in range(len(rooms) + 1)]
    parts = sorted((sum(layers[start:stop]) for start, stop in pairwise(cuts)), reverse=True)
    taken = {}
    for room, num_bytes in zip(rooms, parts, strict=True):
        taken[room.peer_id] = taken_bytes(num_bytes, workspace)
        if taken[room.peer_id] > room.free_bytes:
            return None
    return taken


def _do_not_fit(models: Sequence[SharedModel], rooms: Sequence[Room]) -> CapacityError:
    each = {
        model.name: taken_bytes(model.needed_bytes(1), model.workspace_bytes) for model in models
    }
    needed, available = sum(each.values()), sum(max(room.free_bytes, 0) for room in rooms)
    needs = " and ".join(f"{name} needs {format_bytes(num)}" for name, num in each.items())
    roomiest = max((room.free_bytes for room in rooms), default=0)
    where = f"{len(rooms)} machine{'s' if len(rooms) != 1 else ''}"
    if all(model.is_quantised for model in models):
        advice = "add workers, or lower --max-seq-len"
    else:
        advice = "add workers, lower --max-seq-len, or make the layers smaller with --quantize"
    return CapacityError(
        f"{needs} with one session{' each' if len(each) > 1 else ''}, and there are "
        f"{format_bytes(available)} on {where}, {format_bytes(max(roomiest, 0))} on the roomiest: serve fewer models "
        f"at once, {advice}",
        needed=needed,
        available=available,
    )
