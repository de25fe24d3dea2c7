"""A count of late: what was counted long ago counts less and less. Times are given, in seconds."""

from __future__ import annotations

from typing import Final

__all__ = ["HALF_LIFE", "MovingCount"]

HALF_LIFE: Final = 300.0
"""Seconds after which half of an amount still counts."""


class MovingCount:
    """A sum in which each part is worth half as much every `half_life` seconds."""

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._half_life = half_life
        self._value = 0.0
        self._at = float("-inf")

    def add(self, now: float, amount: float) -> None:
        """Count `amount` more. `now` never goes back."""
        self._value = self.value(now) + amount
        self._at = now

    def value(self, now: float) -> float:
        """Value of the sum at this moment."""
        if not self._value:
            return 0.0
        return self._value * 2 ** ((self._at - now) / self._half_life)
