"""Members that took each slice to train on, and so may have it still. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["SliceTakers"]

# Of each slice, members that are remembered: the last ones.
_MAX_TAKERS: Final = 4


class SliceTakers:
    """The last members that took each slice."""

    def __init__(self) -> None:
        # By slice, the latest last; keys only, a dict keeps their order.
        self._takers: dict[int, dict[str, None]] = {}

    def note(self, peer_id: str, slices: Iterable[int]) -> None:
        """A member takes slices, by their numbers."""
        for number in slices:
            takers = self._takers.setdefault(number, {})
            takers.pop(peer_id, None)
            takers[peer_id] = None
            if len(takers) > _MAX_TAKERS:
                del takers[next(iter(takers))]

    def of(self, number: int) -> tuple[str, ...]:
        """The peer ids of those that took a slice, the latest first."""
        return tuple(reversed(self._takers.get(number, ())))
