"""One pass over all samples: what is left to deal of it, and what is used. Pure.

Samples are numbered through all slices; what a member has is its dealer's affair.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from neurogrid.training.data.spans import Span, Spans

__all__ = ["Epoch"]

# In place of a member: a slice that was begun, by none that is there.
_NOBODY = ""


class Epoch:
    """An epoch.

    Args:
        number: from 0.
        starts: the number of each slice's first sample, and that of all samples.
        order: slices in the order in which they are begun.

    Attributes:
        used: samples that are USED.
        returned: samples that were dealt, and are to be dealt again.
        fresh: slices of which nothing was dealt, in order; keys only.
    """

    def __init__(self, number: int, starts: Sequence[int], order: Sequence[int]) -> None:
        self.number = number
        self._starts = starts
        self._places = {slice_: place for place, slice_ in enumerate(order)}
        self.used = Spans()
        self.returned = Spans()
        self.fresh: dict[int, None] = dict.fromkeys(order)
        # Never dealt.
        self._left = Spans([(0, starts[-1])])
        # Slices of which something was dealt and something is left, with the member that began them.
        self._begun: dict[int, str] = {}

    @property
    def num_available(self) -> int:
        """Samples that can be dealt."""
        return len(self._left) + len(self.returned)

    @property
    def owners(self) -> set[str]:
        """Members that have begun slices."""
        return set(self._begun.values()) - {_NOBODY}

    def begun_by(self, member: str) -> list[int]:
        """Slices that a member began, and of which something is left."""
        return [slice_ for slice_, owner in self._begun.items() if owner == member]

    def disown(self, member: str) -> None:
        """A member does not go on with the slices that it began."""
        for slice_ in self.begun_by(member):
            self._begun[slice_] = _NOBODY

    def deal(self, member: str, num_samples: int, holds: Collection[int]) -> list[Span]:
        """Take out at most `num_samples` for a member, fewer where there are not as many."""
        dealt: list[Span] = []
        while num_samples > 0 and self.num_available:
            if len(self.returned):
                spans = self.returned.take(*self._choose_returned(holds), num_samples)
            else:
                spans = self._begin(self._choose(member, holds), member, num_samples)
            dealt += spans
            num_samples -= sum(stop - start for start, stop in spans)
        return dealt

    def claim(self, start: int, stop: int) -> None:
        """Take out samples that a member has, as a state says.

        Raises:
            ValueError: they are not there to be had.
        """
        taken = self._left.take(start, stop) if start < stop else []
        if taken != [(start, stop)]:
            raise ValueError(f"samples {start} to {stop} of epoch {self.number} are there twice")

    def state(self) -> dict[str, Any]:
        """The epoch for JSON."""
        return {
            "number": self.number,
            "used": [list(span) for span in self.used],
            "returned": [list(span) for span in self.returned],
            "begun": [[slice_, owner] for slice_, owner in self._begun.items()],
        }

    @classmethod
    def restored(cls, state: dict[str, Any], starts: Sequence[int], order: Sequence[int]) -> Epoch:
        """The epoch of a state. What members have is claimed next, and then `find_fresh` is called.

        Raises:
            ValueError, LookupError, TypeError: it is no state of an epoch.
        """
        epoch = cls(int(state["number"]), starts, order)
        for spans, listed in ((epoch.used, state["used"]), (epoch.returned, state["returned"])):
            for start, stop in listed:
                epoch.claim(start, stop)
                spans.add(start, stop)
        epoch._begun = {epoch._known(slice_): str(owner) for slice_, owner in state["begun"]}
        return epoch

    def find_fresh(self) -> None:
        """Slices that are whole are fresh.

        Raises:
            ValueError: others than those that were begun have a part left.
        """
        left = {slice_: self._left.count(*self._span(slice_)) for slice_ in self.fresh}
        sizes = {slice_: self._starts[slice_ + 1] - self._starts[slice_] for slice_ in self.fresh}
        if {slice_ for slice_ in left if 0 < left[slice_] < sizes[slice_]} != self._begun.keys():
            raise ValueError(f"the slices of epoch {self.number} were begun otherwise")
        self.fresh = {slice_: None for slice_ in left if left[slice_] == sizes[slice_]}

    def _span(self, slice_: int) -> Span:
        return self._starts[slice_], self._starts[slice_ + 1]

    def _known(self, slice_: int) -> int:
        if slice_ not in self._places:
            raise ValueError(f"there is no slice {slice_}")
        return slice_

    def _choose_returned(self, holds: Collection[int]) -> Span:
        """A slice of which something was returned, one that the member holds if there is one."""
        for slice_ in sorted(self._places.keys() & set(holds)):
            if self.returned.count(*self._span(slice_)):
                return self._span(slice_)
        return next(iter(self.returned))

    def _choose(self, member: str, holds: Collection[int]) -> int:
        """The slice that a member takes samples of next."""
        if own := self.begun_by(member):
            return own[0]
        abandoned = self.begun_by(_NOBODY)
        held = [each for each in abandoned if each in holds]
        held += sorted(self.fresh.keys() & set(holds), key=self._places.__getitem__)
        if held:
            return held[0]
        if abandoned:
            return abandoned[0]
        if self.fresh:
            return next(iter(self.fresh))
        # The one that its owner takes longest for; that is held, if there is one.
        left = {each: self._left.count(*self._span(each)) for each in self._begun}
        return max(left, key=lambda each: (each in holds, left[each]))

    def _begin(self, slice_: int, member: str, num_samples: int) -> list[Span]:
        spans = self._left.take(*self._span(slice_), num_samples)
        self.fresh.pop(slice_, None)
        if not self._left.count(*self._span(slice_)):
            self._begun.pop(slice_, None)
        elif self._begun.get(slice_, _NOBODY) == _NOBODY:
            self._begun[slice_] = member
        return spans
