"""Dealing of samples to members: each of an epoch is used exactly once. Pure: no clock, no files, no torch.

A sample of an epoch is AVAILABLE, ASSIGNED to a member, or USED. What a member has computed counts once a round that it
contributed to is decided with it among the contributors; until then its samples are ASSIGNED, whatever happens to the
member. What it had not contributed when it was lost is AVAILABLE again, and dealt before anything else.

An epoch that has nothing left to deal does not hold up the next one: several are under way when members are slow, and
each ends when the last of its samples is USED. The same samples of two epochs are alike, so a range does not say of
which epoch it is: of those that its member has, it is of the oldest.

Members stay with a slice: a member goes on with those that it began, then come those that it holds and that nobody
began, then new ones; only when there are none does it help with those of others.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Final

from neurogrid.errors import ConfigurationError, LocalProtocolError, RemoteProtocolError
from neurogrid.training.data.epoch import Epoch
from neurogrid.training.data.spans import Span, Spans
from neurogrid.training.wire.runs import SampleRange

__all__ = ["Dealer", "SampleRange", "SampleState"]

# Of decided rounds, those whose contributors are remembered: a member's report may come that much later.
MAX_DECIDED: Final = 256


class SampleState(StrEnum):
    """State of a sample of an epoch."""

    AVAILABLE = "available"
    ASSIGNED = "assigned"
    USED = "used"


@dataclass
class _Held:
    """Samples that a member has, by epoch."""

    by_epoch: dict[int, Spans] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self.by_epoch.values()))

    def __iter__(self) -> Iterator[tuple[int, Span]]:
        """Epoch and span, the oldest epoch first."""
        for epoch in sorted(self.by_epoch):
            for span in self.by_epoch[epoch]:
                yield epoch, span

    def add(self, epoch: int, span: Span) -> None:
        self.by_epoch.setdefault(epoch, Spans()).add(*span)

    def take(self, span: Span) -> tuple[list[tuple[int, Span]], list[Span]]:
        """Take out what is here of a span, each number once, of the oldest epoch that has it; and what is not here."""
        taken, missing = [], [span]
        for epoch in sorted(self.by_epoch):
            here = self.by_epoch[epoch]
            still = []
            for start, stop in missing:
                for got in here.take(start, stop):
                    taken.append((epoch, got))
                    if start < got[0]:
                        still.append((start, got[0]))
                    start = got[1]
                if start < stop:
                    still.append((start, stop))
            missing = still
            if not len(here):
                del self.by_epoch[epoch]
        return taken, missing

    def copy(self) -> _Held:
        return _Held({epoch: spans.copy() for epoch, spans in self.by_epoch.items()})


@dataclass
class _Contribution:
    """Samples of a contribution that a member reported to a round that is not decided.

    Attributes:
        is_orphan: the member was lost since: if the round is decided without it, nobody has these samples.
    """

    samples: _Held
    is_orphan: bool = False


class Dealer:
    """Deals the samples of slices to members, epoch by epoch.

    Args:
        sizes: samples of each slice, at least 1.
        seed: 0 to 2^64 - 1; the order of slices in each epoch comes of it.
        num_epochs: how many are dealt; None for no end.

    Raises:
        ConfigurationError: there are no slices, or one has no samples.
    """

    def __init__(self, sizes: Sequence[int], *, seed: int, num_epochs: int | None = None) -> None:
        if not sizes or min(sizes) < 1:
            raise ConfigurationError(
                "data have at least one slice, and a slice at least one sample"
            )
        if not 0 <= seed < 2**64:
            raise ConfigurationError(f"a seed is a number from 0 to 2^64 - 1, not {seed}")
        self._starts = (0, *accumulate(sizes))
        self._seed = seed
        self._num_epochs = num_epochs
        # Those under way; all before `_next_epoch` that are not here are wholly USED.
        self._epochs: dict[int, Epoch] = {}
        self._next_epoch = 0
        self._assigned: dict[str, _Held] = {}
        self._contributed: dict[str, dict[int, _Contribution]] = {}
        # Of each decided round, which contributors had reported what they contributed.
        self._decided: dict[int, dict[str, bool]] = {}

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return self._starts[-1]

    @property
    def epoch(self) -> int:
        """The oldest epoch that is not wholly USED, from 0; as many are behind us."""
        return min(self._epochs, default=self._next_epoch)

    @property
    def num_used(self) -> int:
        """Samples that are USED, of all epochs."""
        whole = self._next_epoch - len(self._epochs)
        return whole * self.num_samples + sum(len(epoch.used) for epoch in self._epochs.values())

    def counts(self) -> dict[SampleState, int]:
        """Samples of the epoch `epoch` by what they are."""
        epoch = self._epochs.get(self.epoch)
        available, used = (epoch.num_available, len(epoch.used)) if epoch else (self.num_samples, 0)
        return {
            SampleState.AVAILABLE: available,
            SampleState.ASSIGNED: self.num_samples - available - used,
            SampleState.USED: used,
        }

    def assigned(self, member: str) -> tuple[SampleRange, ...]:
        """Return the samples assigned to a member that it has not contributed to a round yet."""
        held = self._assigned.get(member, _Held())
        return tuple(self._ranges(span for _, span in held))

    def deal(
        self,
        member: str,
        num_samples: int,
        *,
        holds: Collection[int] = (),
        max_ranges: int | None = None,
    ) -> tuple[SampleRange, ...]:
        """Assign samples to a member, in the order in which it is to use them.

        Args:
            num_samples: how many; fewer are dealt only at the end of the last epoch, and where they would be of more
                ranges than may be.
            holds: numbers of slices that the member has on its disk.
            max_ranges: how many ranges at most; None for as many as it takes.
        """
        if not member or num_samples < 0:
            raise ValueError(f"{num_samples} samples for member {member!r}")
        dealt: list[Span] = []
        for epoch in self._with_samples() if num_samples else ():
            # Each span is of one slice: there are no more ranges than spans.
            left = None if max_ranges is None else max_ranges - len(dealt)
            for span in epoch.deal(member, num_samples, holds, left):
                self._assigned.setdefault(member, _Held()).add(epoch.number, span)
                dealt.append(span)
                num_samples -= span[1] - span[0]
            if not num_samples or len(dealt) == max_ranges:
                break
        return tuple(self._ranges(dealt))

    def contributed(
        self, member: str, round_number: int, ranges: Iterable[SampleRange]
    ) -> tuple[SampleRange, ...]:
        """A member reports what is in its contribution to a round; its last report counts.

        The member has what it reports; what it had reported for another round that is not decided moves to this one.

        Returns:
            What is newly USED, where the round was decided with this member before the report came. A report that was
            counted, or of a round decided without the member, changes nothing.

        Raises:
            RemoteProtocolError: the member does not have all of it; nothing has changed.
        """
        spans = [self._span(each, member) for each in ranges]
        if round_number in self._decided:
            return self._contributed_late(member, round_number, spans)
        if self._decided and round_number < min(self._decided):
            return ()
        assigned = self._assigned.get(member, _Held()).copy()
        theirs = self._contributed.get(member, {})
        others = {
            number: _Contribution(each.samples.copy(), each.is_orphan)
            for number, each in theirs.items()
        }
        before = others.pop(round_number, None)
        for epoch, span in before.samples if before else ():
            assigned.add(epoch, span)
        samples = _Held()
        for span in spans:
            missing = [span]
            for held in (assigned, *(each.samples for each in others.values())):
                still = []
                for piece in missing:
                    taken, rest = held.take(piece)
                    still += rest
                    for epoch, got in taken:
                        samples.add(epoch, got)
                missing = still
            if missing:
                raise self._not_theirs(member, missing[0], f"contributes to round {round_number}")
        others[round_number] = _Contribution(samples)
        self._set_member(member, assigned, others)
        return ()

    def committed(
        self, round_number: int, contributors: Collection[str]
    ) -> tuple[SampleRange, ...]:
        """A round is decided: what its contributors had reported for it is USED.

        Others keep what they had reported for it, for a later round; what a lost member had is AVAILABLE again. Of a
        contributor that has not reported yet, `contributed` tells when it does.

        Returns:
            What is newly USED.

        Raises:
            LocalProtocolError: the round was decided before, with other contributors.
        """
        if round_number in self._decided:
            if self._decided[round_number].keys() != set(contributors):
                raise LocalProtocolError(
                    f"round {round_number} was decided with {sorted(self._decided[round_number])}, "
                    f"and now with {sorted(contributors)}"
                )
            return ()
        used: list[Span] = []
        reported = dict.fromkeys(sorted(contributors), False)
        for member in sorted(self._contributed):
            theirs = self._contributed[member]
            contribution = theirs.pop(round_number, None)
            if contribution is None:
                continue
            if member in reported:
                reported[member] = True
                used += self._use(contribution.samples)
            elif contribution.is_orphan:
                self._return(contribution.samples)
            else:
                held = self._assigned.setdefault(member, _Held())
                for epoch, span in contribution.samples:
                    held.add(epoch, span)
            if not theirs:
                del self._contributed[member]
        self._decided[round_number] = reported
        while len(self._decided) > MAX_DECIDED:
            del self._decided[min(self._decided)]
        return tuple(self._ranges(used))

    def lost(self, member: str) -> tuple[SampleRange, ...]:
        """A member is lost: what it has not contributed is AVAILABLE again, and the rest once its round is decided
        without it.

        Returns:
            What is AVAILABLE again now.
        """
        for contribution in self._contributed.get(member, {}).values():
            contribution.is_orphan = True
        for epoch in self._epochs.values():
            epoch.disown(member)
        held = self._assigned.pop(member, _Held())
        self._return(held)
        return tuple(self._ranges(span for _, span in held))

    def _with_samples(self) -> Iterator[Epoch]:
        """Epochs that have something to deal, the oldest first, and new ones without end."""
        yield from [self._epochs[number] for number in sorted(self._epochs)]
        while self._num_epochs is None or self._next_epoch < self._num_epochs:
            epoch = Epoch(self._next_epoch, self._starts, self._order(self._next_epoch))
            self._epochs[self._next_epoch] = epoch
            self._next_epoch += 1
            yield epoch

    def _order(self, epoch: int) -> list[int]:
        """Slices in the order of SHA-256 of seed, epoch and number."""
        start = b"neurogrid epoch 1\0" + struct.pack("<QQ", self._seed, epoch)
        keys = [
            hashlib.sha256(start + struct.pack("<Q", slice_)).digest()
            for slice_ in range(len(self._starts) - 1)
        ]
        return sorted(range(len(keys)), key=keys.__getitem__)

    def _span(self, given: SampleRange, member: str) -> Span:
        slice_, start, stop = given
        if not 0 <= slice_ < len(self._starts) - 1:
            raise RemoteProtocolError(
                f"{member} names slice {slice_}: there are {len(self._starts) - 1}"
            )
        size = self._starts[slice_ + 1] - self._starts[slice_]
        if not 0 <= start < stop <= size:
            raise RemoteProtocolError(
                f"{member} names samples {start} to {stop} of slice {slice_}, which has {size}"
            )
        return self._starts[slice_] + start, self._starts[slice_] + stop

    def _ranges(self, spans: Iterable[Span]) -> Iterator[SampleRange]:
        """Spans as ranges of slices; neighbours in one slice are one."""
        last: SampleRange | None = None
        for start, stop in spans:
            for slice_, first, end in _by_slice(self._starts, start, stop):
                if last is not None and (last.slice, last.stop) == (slice_, first):
                    last = SampleRange(slice_, last.start, end)
                    continue
                if last is not None:
                    yield last
                last = SampleRange(slice_, first, end)
        if last is not None:
            yield last

    def _not_theirs(self, member: str, span: Span, what: str) -> RemoteProtocolError:
        first = next(self._ranges([span]))
        return RemoteProtocolError(
            f"{member} {what} samples {first.start} to {first.stop} of slice {first.slice}, "
            "which it does not have"
        )

    def _contributed_late(
        self, member: str, round_number: int, spans: list[Span]
    ) -> tuple[SampleRange, ...]:
        reported = self._decided[round_number]
        if reported.get(member, True):
            return ()
        assigned = self._assigned.get(member, _Held()).copy()
        samples = _Held()
        for span in spans:
            taken, missing = assigned.take(span)
            if missing:
                raise self._not_theirs(member, missing[0], f"contributed to round {round_number}")
            for epoch, got in taken:
                samples.add(epoch, got)
        reported[member] = True
        self._set_member(member, assigned, self._contributed.get(member, {}))
        return tuple(self._ranges(self._use(samples)))

    def _set_member(
        self, member: str, assigned: _Held, contributed: dict[int, _Contribution]
    ) -> None:
        self._assigned[member] = assigned
        if not len(assigned):
            del self._assigned[member]
        self._contributed[member] = {
            number: each for number, each in contributed.items() if len(each.samples)
        }
        if not self._contributed[member]:
            del self._contributed[member]

    def _use(self, samples: _Held) -> list[Span]:
        used = []
        for number, span in samples:
            epoch = self._epochs[number]
            epoch.used.add(*span)
            used.append(span)
            if len(epoch.used) == self.num_samples:
                del self._epochs[number]
        return used

    def _return(self, samples: _Held) -> None:
        for number, span in samples:
            self._epochs[number].returned.add(*span)


def _by_slice(starts: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Slice, start and stop in it, of what each slice has of a span."""
    slice_ = bisect_right(starts, start) - 1
    while start < stop:
        end = min(stop, starts[slice_ + 1])
        yield slice_, start - starts[slice_], end - starts[slice_]
        start, slice_ = end, slice_ + 1
