"""Rates, in amounts a second, over a sliding window, in bounded memory.

Two ways to know: count as it happens (`RateWindow`), or look at a total now and then (`TotalRate`).
"""

from __future__ import annotations

from collections import deque

__all__ = ["RateWindow", "TotalRate"]


class RateWindow:
    """Counts in buckets of `bucket` seconds.

    Args:
        seconds: of the window that `rate` looks at.
        bucket: seconds.
        num_kept: buckets that `history` knows.
    """

    def __init__(self, *, seconds: float = 5.0, bucket: float = 0.5, num_kept: int = 120) -> None:
        self._num_window = max(round(seconds / bucket), 1)
        self._bucket = bucket
        self._num_kept = num_kept
        self._counts: deque[tuple[int, float]] = deque(maxlen=num_kept)  # index of the bucket, sum
        self._first = 0.0  # when the burst began that is going on

    def add(self, now: float, amount: float = 1.0) -> None:
        """`amount` more, now. Times never go back."""
        index = int(now / self._bucket)
        if not self._counts or self._counts[-1][0] < index - self._num_window:
            self._first = now
        if self._counts and self._counts[-1][0] >= index:
            self._counts[-1] = (self._counts[-1][0], self._counts[-1][1] + amount)
        else:
            self._counts.append((index, amount))

    def rate(self, now: float) -> float:
        """A second, over the window, or since the burst began if that is shorter."""
        index = int(now / self._bucket)
        total = sum(amount for at, amount in self._counts if at > index - self._num_window)
        began = max(self._first, (index - self._num_window + 1) * self._bucket)
        return total / max(now - began, self._bucket)

    def history(self, now: float, num: int) -> tuple[float, ...]:
        """A second, in each of the last `num` whole buckets, oldest first."""
        index = int(now / self._bucket)
        by_index = dict(self._counts)
        wanted = range(index - min(num, self._num_kept), index)
        return tuple(by_index.get(at, 0.0) / self._bucket for at in wanted)


class TotalRate:
    """Makes a rate of a total that never falls, looked at now and then.

    Args:
        seconds: of the window.
    """

    def __init__(self, *, seconds: float = 3.0) -> None:
        self._seconds = seconds
        self._seen: deque[tuple[float, float]] = deque()

    def update(self, now: float, total: float) -> float:
        """The rate at `total`, now; 0 at the first look, and after none for ten windows."""
        seen = self._seen
        if seen and (total < seen[-1][1] or now - seen[-1][0] > 10 * self._seconds):
            seen.clear()
        while len(seen) > 1 and seen[1][0] <= now - self._seconds:
            seen.popleft()
        # Somebody who looks all the time must not fill memory.
        if len(seen) < 2 or now - seen[-1][0] >= self._seconds / 20:
            seen.append((now, total))
        began, first = seen[0]
        return (total - first) / (now - began) if now > began else 0.0
