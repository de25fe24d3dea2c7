"""Worth of results, as members measure it of each other: how much a result alone lowers the loss, and how much more it
does so where its member was to train. Pure.

    drawn by the next seed -> four losses of who was drawn -> gain and advantage -> a watch over rounds -> the oddest

What a member measures is its own word: it accuses nobody and refuses nothing. It is shown, and says whose claims are
looked at sooner. Who measures is drawn anew in each round, so that the word of one changes little.

Source: protocol_spec/training/witnessed.md, "Worth".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Final

from neurogrid.training.checks import Audit, Worth
from neurogrid.training.leading.look import WorthLook
from neurogrid.training.leading.witnessed.suspicion import StandingOut

__all__ = ["Worths"]

# Rounds that are waited for, until some who were drawn have told nothing: they are left out.
_NUM_OPEN: Final = 4
# Measurements of a seat, over which its means are.
_NUM_KEPT: Final = 20
_NUM_SEATS: Final = 1024


@dataclass(eq=False)
class _Measured:
    """A round that is measured: who is to tell, by the seat whose result it is; and what was told."""

    auditors: dict[int, int]
    told: dict[int, Worth] = field(default_factory=dict)


class Worths:
    """Measured worths of a run's results, and the seats that stand out by them."""

    def __init__(self) -> None:
        self._rounds: dict[int, _Measured] = {}
        self._kept: dict[int, deque[Worth]] = {}
        self._num: dict[int, int] = {}
        self._gains, self._advantages = StandingOut(), StandingOut()
        self._new: list[Worth] = []

    def drawn(self, step: int, measures: Sequence[Audit]) -> None:
        """Results of the round that began with so many rounds in the weights are measured by these members."""
        if measures:
            self._rounds[step] = _Measured({each.seat: each.auditor for each in measures})

    def told(self, step: int, auditor: int, seat: int, worth: Worth) -> None:
        """A member has measured what it was drawn for; its first word counts."""
        round_ = self._rounds.get(step)
        if round_ is None or round_.auditors.get(seat) != auditor or seat in round_.told:
            return
        round_.told[seat] = worth
        self._num[seat] = self._num.get(seat, 0) + 1
        self._kept.setdefault(seat, deque(maxlen=_NUM_KEPT)).append(worth)
        self._new.append(worth)
        while len(self._kept) > _NUM_SEATS:  # seats are never given again
            oldest = min(self._kept)
            del self._kept[oldest], self._num[oldest]

    def look(self, step: int) -> None:
        """Take in rounds of which all is told, or that began some rounds before this one."""
        for number, round_ in sorted(self._rounds.items()):
            is_whole = round_.told.keys() == round_.auditors.keys()
            if not is_whole and step - number <= _NUM_OPEN:
                continue
            del self._rounds[number]
            self._gains.add({seat: each.gain for seat, each in round_.told.items()})
            self._advantages.add({seat: each.advantage for seat, each in round_.told.items()})

    def take_figures(self) -> dict[str, float]:
        """Results that were measured since the last call, and what they are worth in the mean; empty for none."""
        new, self._new = self._new, []
        if not new:
            return {}
        return {
            "measured": len(new),
            "gain": round(fmean(each.gain for each in new), 6),
            "advantage": round(fmean(each.advantage for each in new), 6),
        }

    def watched(self, seats: Collection[int]) -> tuple[int, ...]:
        """Seats of these whose results stand out as worth less, the oddest first."""
        found = (*self._gains.watched(seats), *self._advantages.watched(seats))
        return tuple(dict.fromkeys(found))

    def looks(self, seats: Collection[int]) -> tuple[WorthLook, ...]:
        """Worths of these seats' results, for display; seats without measured results are left out."""
        watched = set(self.watched(seats))
        return tuple(
            WorthLook(
                seat,
                self._num[seat],
                fmean(each.gain for each in self._kept[seat]),
                fmean(each.advantage for each in self._kept[seat]),
                seat in watched,
            )
            for seat in sorted(seats)
            if seat in self._kept
        )
