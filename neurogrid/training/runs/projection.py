"""Projection of a round: how far its members will be, and how much work makes them finish together. Pure.

Time is counted in whole nanoseconds, so that what is equal is equal, on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["EVEN_WITHIN", "Pace", "Projection", "project", "seconds_left", "share_batches"]

EVEN_WITHIN: Final = 0.15
"""Members count as equally fast where the slowest batch takes at most so much longer than the fastest: what is measured
wavers, and equal numbers make a run that can be repeated."""

_NANOS: Final = 1_000_000_000
# Of what batches have taken: so much the next ones take at least.
_SURELY: Final = 0.8


@dataclass(frozen=True, slots=True)
class Pace:
    """The speed of a member.

    Attributes:
        batch_samples: of each batch, from 1.
        batch_seconds: that a batch takes, above 0.
    """

    batch_samples: int
    batch_seconds: float


@dataclass(frozen=True, slots=True)
class Projection:
    """Progress that members will have made at the end of a batch.

    Attributes:
        seconds: from now, to the end of a batch.
        samples_left: that will not be done by then, of those that are left now.
        batches: that each member will have done.
        is_capped: a bound was reached before all samples were done.
    """

    seconds: float
    samples_left: int
    batches: tuple[int, ...]
    is_capped: bool


def project(
    members: Sequence[Pace],
    samples_left: int,
    *,
    max_seconds: float | None = None,
    max_batches: int | None = None,
) -> Projection:
    """Project members to the moment at which no samples are left, or to a bound that is reached before.

    Args:
        members: at least one; each begins a batch now.
        samples_left: that all are to do together.
        max_seconds: the end is the last batch that ends by then.
        max_batches: the end is when the first member has done so many.

    Raises:
        ValueError: there is no member, or one without samples or time.
    """
    if not members or any(each.batch_samples < 1 for each in members):
        raise ValueError("a projection needs a member, and each a batch of at least one sample")
    spans = [_nanos(each.batch_seconds) for each in members]
    sizes = [each.batch_samples for each in members]

    def done(end: int) -> int:
        return sum(size * (end // span) for size, span in zip(sizes, spans, strict=True))

    # The fastest member alone would have done it by then.
    latest = min(
        math.ceil(samples_left / size) * span for size, span in zip(sizes, spans, strict=True)
    )
    needed = _first(lambda end: done(end) >= samples_left, latest)
    end = needed
    if max_batches is not None:
        end = min(end, max_batches * min(spans))
    if max_seconds is not None:
        bound = math.floor(max_seconds * _NANOS)
        if end > bound:
            end = max(span * (bound // span) for span in spans)
    return Projection(
        seconds=end / _NANOS,
        samples_left=max(0, samples_left - done(end)),
        batches=tuple(end // span for span in spans),
        is_capped=end < needed,
    )


def share_batches(
    batch_seconds: Sequence[float | None], num_batches: int, *, num_pieces: int = 1
) -> tuple[int, ...]:
    """Share pieces of batches among members, so that all finish together, as early as can be.

    Each does at least one. Members that are equally fast (`EVEN_WITHIN`) do the same number of whole batches each, the
    nearest to an even share; else all together do `num_batches`, where those have as many pieces as there are members.

    Args:
        batch_seconds: that a batch takes each member, above 0; None where it is not known yet: such a member counts as
            the mean of the others.
        num_batches: of all members.
        num_pieces: of a batch, in equal parts of its time: the last batch of a member may have fewer.

    Raises:
        ValueError: a time is not above 0.
    """
    if not batch_seconds:
        return ()
    known = [each for each in batch_seconds if each is not None]
    if not known:
        return (num_pieces * _even_share(num_batches, len(batch_seconds)),) * len(batch_seconds)
    # The mean of speeds: in a time in which the others do so many batches on the average.
    mean = len(known) / sum(1 / (_nanos(each) / _NANOS) for each in known)
    spans = [_nanos(mean if each is None else each) for each in batch_seconds]
    if max(spans) <= (1 + EVEN_WITHIN) * min(spans):
        return (num_pieces * _even_share(num_batches, len(spans)),) * len(spans)
    # What counts is how their times compare: from here on, they are those of pieces.
    num_batches *= num_pieces

    def by(end: int) -> list[int]:
        return [max(1, end // span) for span in spans]

    # By the end of the first moment at which there is too much, one piece each is what may be taken back.
    over = _first(lambda end: sum(by(end)) > num_batches, (num_batches + 1) * max(spans))
    shares, then = by(max(over - 1, 0)), by(over)
    more = [number for number in range(len(spans)) if then[number] > shares[number]]
    more.sort(key=lambda number: (spans[number], number))
    for number in more[: max(0, num_batches - sum(shares))]:
        shares[number] += 1
    return tuple(shares)


def seconds_left(
    num_samples: int, batch_samples: int, *, batches_done: int, batch_seconds: float
) -> float:
    """Seconds that a member takes at least for the rest of a work: a bit less than at the speed it had so far.

    Args:
        num_samples: of the work; its last batch may have fewer than the others.
        batch_samples: of a batch, from 1.
        batches_done: of the work.
        batch_seconds: that a batch takes the member; 0 where that is not known, and neither is the rest.
    """
    return _SURELY * max(0.0, num_samples / batch_samples - batches_done) * batch_seconds


def _even_share(num_batches: int, num_members: int) -> int:
    return max(1, (2 * num_batches + num_members) // (2 * num_members))


def _nanos(seconds: float) -> int:
    if not 0 < seconds < math.inf:
        raise ValueError(f"a batch takes a time above 0, not {seconds} s")
    return max(1, round(seconds * _NANOS))


def _first(is_there: Callable[[int], bool], latest: int) -> int:
    """The first moment, from 0 to `latest`, from which on something is there."""
    low, high = 0, latest
    while low < high:
        middle = (low + high) // 2
        if is_there(middle):
            high = middle
        else:
            low = middle + 1
    return low
