"""Sets of samples, as spans of their numbers. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import TypeAlias

__all__ = ["Span", "Spans"]

Span: TypeAlias = tuple[int, int]
"""Numbers from the first to before the second: [start, stop)."""


class Spans:
    """A set of numbers. Spans that touch are one: a whole epoch takes no more room than its first half.

    Args:
        spans: none of them empty, no two with a number in common; in any order.

    Raises:
        ValueError: they are not like that.
    """

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        # Ascending, with a gap between any two.
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._num = 0
        for start, stop in sorted(spans):
            self.add(start, stop)

    def __len__(self) -> int:
        """Return the count of the numbers in all spans."""
        return self._num

    def __iter__(self) -> Iterator[Span]:
        return zip(self._starts, self._stops, strict=True)

    def add(self, start: int, stop: int) -> None:
        """Put a span in.

        Raises:
            ValueError: it is empty, or some of it is in already.
        """
        first = bisect_left(self._stops, start)
        if first < len(self._stops) and self._stops[first] == start:
            left, first = first, first + 1
        else:
            left = first
        if start >= stop or (first < len(self._starts) and self._starts[first] < stop):
            raise ValueError(f"[{start}, {stop}) is empty, or in part here already")
        right = first
        if right < len(self._starts) and self._starts[right] == stop:
            right += 1
        from_start = self._starts[left] if left < first else start
        to_stop = self._stops[right - 1] if right > first else stop
        self._starts[left:right] = [from_start]
        self._stops[left:right] = [to_stop]
        self._num += stop - start

    def take(
        self, start: int, stop: int, limit: int | None = None, *, max_spans: int | None = None
    ) -> list[Span]:
        """Take out what is here of a span, from its front on: at most `limit` numbers, and `max_spans` spans of them;
        what was taken."""
        taken: list[Span] = []
        left = stop - start if limit is None else min(limit, stop - start)
        index = bisect_right(self._stops, start)
        while left > 0 and index < len(self._starts) and self._starts[index] < stop:
            if len(taken) == max_spans:
                break
            here_start, here_stop = self._starts[index], self._stops[index]
            cut_start = max(start, here_start)
            cut_stop = min(stop, here_stop, cut_start + left)
            rest = [(here_start, cut_start), (cut_stop, here_stop)]
            rest = [(a, b) for a, b in rest if a < b]
            self._starts[index : index + 1] = [a for a, _ in rest]
            self._stops[index : index + 1] = [b for _, b in rest]
            taken.append((cut_start, cut_stop))
            left -= cut_stop - cut_start
            self._num -= cut_stop - cut_start
            # Of what is left before and behind the cut, only the part behind may be in reach.
            index += here_start < cut_start
        return taken

    def count(self, start: int, stop: int) -> int:
        """Count the numbers of [start, stop) that are here."""
        total = 0
        index = bisect_right(self._stops, start)
        while index < len(self._starts) and self._starts[index] < stop:
            total += min(stop, self._stops[index]) - max(start, self._starts[index])
            index += 1
        return total

    def copy(self) -> Spans:
        """Return other spans of the same numbers."""
        other = Spans()
        other._starts, other._stops = list(self._starts), list(self._stops)
        other._num = self._num
        return other
