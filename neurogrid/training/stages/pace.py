"""Whether a stage has become slow, by what its steps take. Pure.

A stage is held against itself: stages of a chain differ in what they compute and in what they are. A step may take long
for many reasons that pass; several one after the other do not.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

__all__ = ["PaceWatch"]

# Steps that a stage has to have made before it is judged, and that are remembered.
_NUM_KNOWN: Final = 8
_NUM_REMEMBERED: Final = 64
# Steps in a row that take so many times as long as usual, and seconds longer at least.
_NUM_SLOW: Final = 4
_SLOWER: Final = 3.0
_MOMENT: Final = 0.05


class PaceWatch:
    """Seconds that the steps of a stage take, by which it is judged. One for each stage of an arrangement."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._slow: list[float] = []

    def told(self, seconds: float) -> tuple[float, float] | None:
        """A step has taken so long, of which the stage computed.

        Returns:
            What a step takes now, and what it took before, where the stage has become slow; else None.
        """
        usual = median(self._usual) if len(self._usual) >= _NUM_KNOWN else None
        if usual is None or seconds <= max(_SLOWER * usual, usual + _MOMENT):
            self._usual.append(seconds)
            self._slow.clear()
            return None
        self._slow.append(seconds)
        return (median(self._slow), usual) if len(self._slow) >= _NUM_SLOW else None
