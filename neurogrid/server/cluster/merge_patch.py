"""Changes between two JSON objects, as a merge patch (RFC 7396).

In a merge patch null means "remove", so the objects themselves have none: `without_nulls` leaves out what is not known.
"""

from __future__ import annotations

from neurogrid.fleet.board.status import Json

__all__ = ["merge_patch", "without_nulls"]


def without_nulls(value: Json) -> Json:
    """`value` without the members of objects that are null; what lists hold stays."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def merge_patch(before: dict[str, Json], after: dict[str, Json]) -> dict[str, Json]:
    """The patch that makes `after` of `before`; empty if they are equal. Neither has nulls; lists are sent whole."""
    patch: dict[str, Json] = {key: None for key in before if key not in after}
    for key, new in after.items():
        old = before.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            if inner := merge_patch(old, new):
                patch[key] = inner
        elif key not in before or old != new:
            patch[key] = new
    return patch
