"""How fast the members of a fleet are in fact, against what they said of themselves.

Pure. What makes all of them slower (a long context, much company, a busy machine that they share) makes none of them
the slower one: only what sets a member apart from the others counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median_low
from typing import Final

from neurogrid.inference.planner import ModelSize, PeerSpeed
from neurogrid.inference.progress import WorkerInfo

__all__ = ["MIN_DRIFT", "drifts", "with_drifts"]

# By this factor a member has to be faster or slower than it should be: steps of one speed differ by half as much.
MIN_DRIFT: Final = 2.0


def drifts(
    infos: Sequence[WorkerInfo], seen: Mapping[str, float], size: ModelSize
) -> dict[str, float]:
    """How many times slower than it said each member is, of those that differ from the others by `MIN_DRIFT`.

    Args:
        infos: what the members said.
        seen: seconds that one token takes for a layer, by peer id, where that is known.
    """
    read_bytes = sum(layer.read_bytes for layer in size.layers) / len(size.layers)
    factors = {
        info.peer_id: seen[info.peer_id] / _layer_seconds(info.speed, read_bytes)
        for info in infos
        if info.speed is not None and info.peer_id in seen
    }
    if len(factors) < 2:
        return {}
    usual = median_low(sorted(factors.values()))
    found = {peer_id: factor / usual for peer_id, factor in factors.items()}
    return {p: f for p, f in found.items() if f >= MIN_DRIFT or f <= 1 / MIN_DRIFT}


def with_drifts(infos: Sequence[WorkerInfo], found: Mapping[str, float]) -> list[WorkerInfo]:
    """What the members would say of themselves, had they measured what was seen."""
    return [
        replace(info, speed=_slower(info.speed, found[info.peer_id]))
        if info.speed is not None and info.peer_id in found
        else info
        for info in infos
    ]


def _layer_seconds(speed: PeerSpeed, read_bytes: float) -> float:
    return read_bytes / speed.bytes_per_second + speed.layer_seconds


def _slower(speed: PeerSpeed, factor: float) -> PeerSpeed:
    return PeerSpeed(speed.bytes_per_second / factor, speed.layer_seconds * factor)
