"""Suspicion of members whose results point elsewhere than others': their claims are drawn sooner than by chance. Pure.

    cosines that members tell of a round -> of each seat the median -> a watch over rounds -> the oddest

A figure accuses nobody: it says whose claims are drawn sooner, within the share that the run file gives. It is that of
all members, so that one that lies about it changes little.

Source: protocol_spec/training/witnessed.md, "Suspicion".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from statistics import median
from typing import Final

from neurogrid.training.checks import Watch
from neurogrid.training.checks.plausibility import LEAST_FIGURES

__all__ = ["StandingOut", "Suspicion"]

# Standing out less than this, in units of the median distance from the median, nobody is watched.
_LEAST_ODDNESS: Final = 2.0
# Rounds over which a seat is seen before it is watched.
_LEAST_ROUNDS: Final = 3
_NUM_WATCHED: Final = 4
# Rounds of which cosines may come in any order.
_NUM_KEPT: Final = 4


class StandingOut:
    """Figures of seats over rounds; the lower beside the others', the more a seat stands out."""

    def __init__(self) -> None:
        self._watch = Watch()
        self._num_rounds: dict[int, int] = {}

    def add(self, figures: Mapping[int, float]) -> None:
        """The figures of a round, by seat; of fewer than three nothing comes."""
        self._watch.add(figures)
        for seat in figures if len(figures) >= LEAST_FIGURES else ():
            self._num_rounds[seat] = self._num_rounds.get(seat, 0) + 1

    def watched(self, seats: Collection[int]) -> tuple[int, ...]:
        """Seats of these that stand out, the oddest first."""
        odd = [
            seat
            for seat in self._watch.oddest(len(self._num_rounds))
            if seat in seats
            and self._num_rounds.get(seat, 0) >= _LEAST_ROUNDS
            and self._watch.oddness(seat) >= _LEAST_ODDNESS
        ]
        return tuple(odd[:_NUM_WATCHED])


class Suspicion:
    """Cosines that members have told of each other's results, and the seats that stand out by them."""

    def __init__(self) -> None:
        self._cosines = StandingOut()
        self._told: dict[int, dict[str, Mapping[int, float]]] = {}
        self._done = 0

    def told(self, peer: str, step: int, cosines: Mapping[int, float]) -> None:
        """A member tells of the results in the last of so many rounds, by seat; its first word counts."""
        if cosines and step > self._done:
            self._told.setdefault(step, {}).setdefault(peer, cosines)

    def look(self, members: Collection[str]) -> None:
        """Take in rounds of which more than half of these members have told."""
        for step in sorted(self._told):
            told = [each for peer, each in self._told[step].items() if peer in members]
            if 2 * len(told) <= len(members):
                continue
            seats = {seat for each in told for seat in each}
            figures = {
                seat: median(each[seat] for each in told if seat in each)
                for seat in seats
                if 2 * sum(seat in each for each in told) > len(told)
            }
            self._cosines.add(figures)
            self._done = step
        self._told = {
            step: told
            for step, told in self._told.items()
            if step > self._done and step > max(self._told) - _NUM_KEPT
        }

    def watched(self, seats: Collection[int]) -> tuple[int, ...]:
        """Seats of these that stand out, the oddest first."""
        return self._cosines.watched(seats)
