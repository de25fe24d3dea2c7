"""One pass over all samples: what is left to deal of it, and what is used. Pure.

Samples are numbered through all slices; what a member has is its dealer's affair.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

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

    def begun_by(self, member: str) -> list[int]:
        """Slices that a member began, and of which something is left."""
        return [slice_ for slice_, owner in self._begun.items() if owner == member]

    def disown(self, member: str) -> None:
        """A member does not go on with the slices that it began."""
        for slice_ in self.begun_by(member):
            self._begun[slice_] = _NOBODY

    def deal(
        self,
        member: str,
        num_samples: int,
        holds: Collection[int],
        max_spans: int | None = None,
    ) -> list[Span]:
        """Take out at most `num_samples` for a member, fewer where there are not as many.

        Args:
            max_spans: how many spans, none of them of two slices; None for as many as it takes.
        """
        dealt: list[Span] = []
        while num_samples > 0 and self.num_available:
            left = None if max_spans is None else max_spans - len(dealt)
            if left == 0:
                break
            if len(self.returned):
                where = self._choose_returned(holds)
                spans = self.returned.take(*where, num_samples, max_spans=left)
            else:
                # Of a slice the rest is what is behind the samples that were dealt: one span.
                spans = self._begin(self._choose(member, holds), member, num_samples)
            dealt += spans
            num_samples -= sum(stop - start for start, stop in spans)
        return dealt

    def _span(self, slice_: int) -> Span:
        return self._starts[slice_], self._starts[slice_ + 1]

    def _choose_returned(self, holds: Collection[int]) -> Span:
        """A slice of which something was returned, one that the member holds if there is one; of others the first span
        that was returned, as far as it is of one slice."""
        for start, stop in self.returned if holds else ():
            slice_ = bisect_right(self._starts, start) - 1
            while self._starts[slice_] < stop:
                if slice_ in holds:
                    return self._span(slice_)
                slice_ += 1
        start, stop = next(iter(self.returned))
        return start, min(stop, self._starts[bisect_right(self._starts, start)])

    def _choose(self, member: str, holds: Collection[int]) -> int:
        """The slice that a member takes samples of next."""
        if own := self.begun_by(member):
            return own[0]
        abandoned = self.begun_by(_NOBODY)
        held = (each for each in (*abandoned, *self.fresh) if each in holds)
        if holds and (first := next(held, None)) is not None:
            return first
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
