"""The sources of a mixture, as `[data] mixture` of a run file has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from neurogrid.training.runs.run_file.values import (
    Kind,
    NotAllowed,
    Table,
    number,
    shown,
    text,
    written,
)

__all__ = ["MAX_REPEAT", "MIXTURE", "MixturePart"]

MAX_PARTS: Final = 64
MAX_REPEAT: Final = 1000
"""Times that a sample of a mixture may come in an epoch."""

_MAX_WEIGHT: Final = 10**6


@dataclass(frozen=True, slots=True)
class MixturePart(Table):
    """One source of a mixture.

    Attributes:
        path: of a data directory, or of what is prepared at the start.
        weight: how many samples of an epoch are from it, against those of the others.
    """

    path: str
    weight: float

    def written(self) -> str:
        """Write it as TOML has it, in one line."""
        return f"{{ path = {written(self.path)}, weight = {written(self.weight)} }}"


_KEYS: Final = {
    "path": text("a directory or a file", is_needed=True),
    "weight": number(f"above 0 and at most {_MAX_WEIGHT}", lambda value: 0 < value <= _MAX_WEIGHT),
}


def _read(value: object) -> tuple[MixturePart, ...]:
    if not isinstance(value, list | tuple) or len(value) not in (0, *range(2, MAX_PARTS + 1)):
        raise NotAllowed
    parts = tuple(_part(each, place) for place, each in enumerate(value, 1))
    paths = [part.path for part in parts]
    for path in paths:
        if paths.count(path) > 1:
            raise NotAllowed(f"has {shown(path)} twice: give it the sum of its weights")
    return parts


def _part(value: object, place: int) -> MixturePart:
    if isinstance(value, MixturePart):
        value = {"path": value.path, "weight": value.weight}
    if not isinstance(value, dict):
        raise NotAllowed
    for key in value:
        if key not in _KEYS:
            raise NotAllowed(f"has {shown(key)} in part {place}: each has {' and '.join(_KEYS)}")
    taken = {}
    for key, kind in _KEYS.items():
        if key not in value:
            raise NotAllowed(f"has no {key} in part {place}: it is {kind.says}")
        try:
            taken[key] = kind.read(value[key])
        except NotAllowed:
            raise NotAllowed(
                f"has {key} {shown(value[key])} in part {place}: it is {kind.says}"
            ) from None
    return MixturePart(**taken)


MIXTURE: Final = Kind(
    f'an array of 2 to {MAX_PARTS} parts, each as {{ path = "a/", weight = 3 }}, or none', _read
)
