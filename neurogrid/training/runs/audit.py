"""An audit of a run by its journal alone: was each sample of an epoch used exactly once, in rounds without gaps. Pure.

What a journal says is checked twice. First by counting: works are dealt to seats, rounds are made of them, and a sample
is dealt again only when each other one was dealt as often, or when it came back. If that is in order, the run is gone
through as its leader did: dealing follows from the data and the seed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from neurogrid.errors import NeuroGridError
from neurogrid.training.data.dealing import SampleRange
from neurogrid.training.data.spans import Span, Spans
from neurogrid.training.runs.changes import Changes
from neurogrid.training.runs.entries import (
    Assignment,
    BannedEntry,
    BeganEntry,
    ChangedEntry,
    CheckpointEntry,
    DealtEntry,
    DeputyEntry,
    EndEntry,
    Entry,
    EpochEntry,
    InvitedEntry,
    JoinedEntry,
    LedEntry,
    LeftEntry,
    ResumedEntry,
    ReturnedEntry,
    RoundEntry,
    RunEntry,
    StoppingEntry,
)
from neurogrid.training.runs.state import Occupant, RunState
from neurogrid.training.runs.terms import are_most

__all__ = ["Audit", "audit"]

# Of a journal in which all is wrong the first hundred say enough.
_MAX_PROBLEMS: Final = 100


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit of a journal: what it proves.

    Attributes:
        rounds: how many count, from 1 on without gaps.
        num_samples: of one epoch.
        num_used: samples that are used, of all epochs.
        epochs: how many are whole: each sample was used at least so often.
        missing: how many samples are not used yet, of each epoch of which some are: by its number, from 0.
        joined, left: how often members did.
        has_ended: the run is over.
        problems: what must not be, each with the round or the work; none in a sound journal.
        line: the number of the entry, from 1, at which the first of them was seen; None where there is none, or only
            all entries together are wrong.
    """

    rounds: int
    num_samples: int
    num_used: int
    epochs: int
    missing: dict[int, int]
    joined: int
    left: int
    has_ended: bool
    problems: tuple[str, ...]
    line: int | None = None

    @property
    def is_sound(self) -> bool:
        """No sample of an epoch was used twice, no round is missing or there twice, and all of it fits together."""
        return not self.problems


def audit(entries: Iterable[Entry]) -> Audit:
    """Prove by the entries of a journal that each sample of each epoch was used exactly once, or name what is wrong."""
    entries = list(entries)
    if not entries or not isinstance(entries[0], RunEntry):
        kind = entries[0].kind if entries else "nothing"
        problem = f"a journal begins with its run, not with {kind}"
        return Audit(0, 0, 0, 0, {}, 0, 0, has_ended=False, problems=(problem,), line=1)
    run, resumed = entries[0], {each.round for each in entries if isinstance(each, ResumedEntry)}
    books = _Books(run, resumed)
    for entry in entries[1:]:
        books.take(entry)
    books.close()
    if not books.problems:
        books.replay(run, entries, resumed)
    used = books.state.used
    return Audit(
        rounds=books.state.round,
        num_samples=used.num,
        num_used=used.num * used.num_whole + sum(map(len, used.levels)),
        epochs=used.num_whole,
        missing={
            epoch: used.num - len(level) for epoch, level in enumerate(used.levels, used.num_whole)
        },
        joined=books.joined,
        left=books.left,
        has_ended=books.state.has_ended,
        problems=tuple(books.problems[:_MAX_PROBLEMS]),
        line=books.line,
    )


class _Counts:
    """Counts of all samples, which are numbered through all slices.

    Args:
        num: samples that there are.

    Attributes:
        num: the same.
        num_whole: how often all were.
        levels: those that were so often and once more, twice more, ...: each is part of the one before, not all.
    """

    def __init__(self, num: int) -> None:
        self.num = num
        self.num_whole = 0
        self.levels: list[Spans] = []

    @property
    def most(self) -> int:
        """The highest count of any sample."""
        return self.num_whole + len(self.levels)

    def add(self, span: Span) -> None:
        """Count each sample of a span once more."""
        spans = [span]
        for level in self.levels:
            spans = list(_moved(level, spans))
        while spans:
            self.levels.append(Spans())
            spans = list(_moved(self.levels[-1], spans))
        while self.levels and len(self.levels[0]) == self.num:
            del self.levels[0]
            self.num_whole += 1

    def copy(self) -> _Counts:
        """The same counts."""
        other = _Counts(self.num)
        other.num_whole, other.levels = self.num_whole, [level.copy() for level in self.levels]
        return other


def _moved(level: Spans, spans: Iterable[Span]) -> Iterator[Span]:
    """Put spans into a level; those that were there already go on to the next."""
    for span in spans:
        there = level.take(*span)
        level.add(*span)
        yield from there


@dataclass
class _Seat:
    """A seat, with the works that were dealt to it and are in no round."""

    peer: str | None
    num_works: int = 0
    works: list[Assignment] = field(default_factory=list)
    incarnation: int = 0


@dataclass
class _State:
    """The state of a run after a line of its journal; a run that is resumed comes back to it.

    Attributes:
        begun: in how many epochs each sample was dealt at least once.
        returned: in how many of these it was given back, and not dealt again.
        used: how often it was used.
    """

    begun: _Counts
    returned: list[Spans]
    used: _Counts
    round: int = 0
    index: int = 0
    num_planned: int = 0
    has_begun: bool = False
    is_stopping: bool = False
    has_ended: bool = False
    seats: dict[int, _Seat] = field(default_factory=dict)
    emptied: set[int] = field(default_factory=set)

    def copy(self) -> _State:
        state = copy.copy(self)
        state.begun, state.used = self.begun.copy(), self.used.copy()
        state.returned = [level.copy() for level in self.returned]
        state.seats = {
            number: _Seat(seat.peer, seat.num_works, list(seat.works), seat.incarnation)
            for number, seat in self.seats.items()
        }
        state.emptied = set(self.emptied)
        return state


class _Books:
    """The books of a run: what its journal says, entry by entry.

    Args:
        run: its first entry.
        resumed: rounds after which it was resumed.
    """

    def __init__(self, run: RunEntry, resumed: set[int]) -> None:
        self._starts = (0, *accumulate(run.slices))
        num = self._starts[-1]
        self.state = _State(_Counts(num), [], _Counts(num))
        self._resumed = resumed
        self._kept = {0: self.state.copy()}
        self._changes = Changes()
        self._num_bans = 0
        # Who leads is not taken back.
        self._term, self._deputy, self._deputy_number = 0, "", 0
        self.joined = self.left = 0
        self.problems: list[str] = []
        self.line: int | None = None
        self._number: int | None = 1

    def take(self, entry: Entry) -> None:
        """Go on by one entry."""
        state = self.state
        assert self._number is not None
        self._number += 1
        may_follow = (
            *(LeftEntry, CheckpointEntry, ResumedEntry, EpochEntry),
            *(BannedEntry, DeputyEntry, LedEntry, InvitedEntry),
        )
        if state.has_ended and not isinstance(entry, may_follow):
            self._wrong(f"{entry.kind} comes after the end of the run")
        if isinstance(entry, BannedEntry):
            self._ban(entry)
        elif isinstance(entry, JoinedEntry):
            self._join(entry)
        elif isinstance(entry, LeftEntry):
            self._leave(entry)
        elif isinstance(entry, ReturnedEntry):
            self._give_back(entry)
        elif isinstance(entry, EpochEntry | InvitedEntry):
            pass  # what follows of it is said by the others
        elif isinstance(entry, BeganEntry):
            if state.has_begun:
                self._wrong("training begins twice")
            state.has_begun, state.num_planned = True, entry.num_samples
        elif isinstance(entry, DealtEntry):
            for number, work in entry.works:
                self._deal(number, work)
        elif isinstance(entry, RoundEntry):
            self._decide(entry)
        elif isinstance(entry, CheckpointEntry):
            if entry.round > state.round:
                self._wrong(f"a checkpoint has round {entry.round} after round {state.round}")
        elif isinstance(entry, ChangedEntry):
            if entry.round != state.round + 1:
                self._wrong(
                    f"what changed with round {entry.round} was changed after round {state.round}"
                )
            self._changes.take(entry)
        elif isinstance(entry, StoppingEntry):
            if state.is_stopping:
                self._wrong("the run stops twice")
            state.is_stopping = True
        elif isinstance(entry, ResumedEntry):
            self._resume(entry.round)
        elif isinstance(entry, EndEntry):
            for number, seat in sorted(state.seats.items()):
                if seat.works:
                    self._wrong(f"the run ended while seat {number} had work")
            state.has_ended = True
        elif isinstance(entry, DeputyEntry):
            if entry.number <= self._deputy_number:
                self._wrong(f"deputy {entry.number} was named after deputy {self._deputy_number}")
            self._deputy, self._deputy_number = entry.peer, entry.number
        elif isinstance(entry, LedEntry):
            self._take_over(entry)
        else:
            self._wrong("a second run begins in the journal")

    def _take_over(self, entry: LedEntry) -> None:
        if entry.term <= self._term:
            self._wrong(f"term {entry.term} comes after term {self._term}")
        if entry.leader != self._deputy:
            self._wrong(f"{entry.leader} leads in term {entry.term}, and was no deputy")
        members = {
            Occupant(seat.peer, seat.incarnation)
            for seat in self.state.seats.values()
            if seat.peer is not None
        }
        promised = {Occupant(peer, incarnation) for peer, incarnation, _ in entry.promises}
        if not are_most(members, promised):
            self._wrong(
                f"{entry.leader} leads in term {entry.term} with the promises of {len(members & promised)} of "
                f"{len(members)} members, which are not most"
            )
        self._term, self._deputy, self._deputy_number = entry.term, "", 0

    def close(self) -> None:
        """Look at all of it together."""
        self._number = None
        state, used = self.state, self.state.used
        if used.most > state.begun.most:
            self._wrong(
                f"a sample was used {used.most} times, where epochs that were begun are {state.begun.most}"
            )
        num_used = used.num * used.num_whole + sum(map(len, used.levels))
        is_by_epochs = num_used == state.num_planned and num_used % used.num == 0
        if state.has_ended and is_by_epochs and used.levels:
            self._wrong(
                f"{used.num - len(used.levels[0])} samples were used less often than others"
            )

    def replay(self, run: RunEntry, entries: Sequence[Entry], resumed: set[int]) -> None:
        """Go through the run as its leader did."""
        self._number = 1
        try:
            state = RunState(run.slices, seed=run.seed, resumable=resumed)
            for entry in entries:
                state.apply(entry)
                self._number += 1
        except NeuroGridError as exc:
            self._wrong(str(exc))

    def _wrong(self, problem: str) -> None:
        if not self.problems:
            self.line = self._number
        self.problems.append(problem)

    def _ban(self, entry: BannedEntry) -> None:
        self._num_bans += 1
        if entry.number != self._num_bans:
            self._wrong(f"ban {entry.number} comes after ban {self._num_bans - 1}")
            self._num_bans = entry.number

    def _join(self, entry: JoinedEntry) -> None:
        self.joined += 1
        seats = self.state.seats
        for number, seat in seats.items():
            if seat.peer == entry.peer:
                self._wrong(f"{entry.peer} joined on seat {entry.seat}, and sat on {number}")
        if entry.seat in self.state.emptied:
            self._wrong(f"seat {entry.seat} was empty for good, and {entry.peer} joined on it")
        seat = seats.setdefault(entry.seat, _Seat(None))
        if seat.peer is not None:
            self._wrong(f"{entry.peer} joined on seat {entry.seat}, where {seat.peer} sat")
        seat.peer, seat.incarnation = entry.peer, entry.incarnation

    def _leave(self, entry: LeftEntry) -> None:
        self.left += 1
        seat = self.state.seats.pop(entry.seat, None)
        if seat is None:
            self._wrong(f"seat {entry.seat} was left, and was not there")
            return
        self.state.emptied.add(entry.seat)
        for work in seat.works:
            for span in self._spans(work.ranges):
                self._return(span)

    def _give_back(self, entry: ReturnedEntry) -> None:
        seat = self.state.seats.get(entry.seat)
        if seat is None or not seat.works:
            self._wrong(f"seat {entry.seat} gave back what it did not have")
            return
        for work in seat.works:
            for span in self._spans(work.ranges):
                self._return(span)
        seat.works.clear()

    def _deal(self, number: int, work: Assignment) -> None:
        state, name = self.state, f"work {work.number} of seat {number}"
        seat = state.seats.get(number)
        if seat is None or seat.peer is None:
            self._wrong(f"{name} was dealt, and nobody sits there")
            seat = state.seats.setdefault(number, _Seat(None))
        if work.number != seat.num_works + 1:
            self._wrong(f"{name} comes after work {seat.num_works}")
        seat.num_works = work.number
        seat.works.append(work)
        if not work.ranges:
            return
        if state.is_stopping or not state.has_begun:
            when = "after the run stopped" if state.is_stopping else "before training began"
            self._wrong(f"{name} was dealt {when}")
        if work.weight != work.num_samples:
            self._wrong(f"{name} counts {work.weight}, and has {work.num_samples} samples")
        for each in work.ranges:
            for span in self._spans([each], name):
                for fresh in self._take_returned(span):
                    state.begun.add(fresh)
            if len(state.begun.levels) > 1:
                self._wrong(
                    f"{name}: of samples {each.start} to {each.stop} of slice {each.slice} some were dealt again "
                    "before others of the epoch were dealt"
                )

    def _decide(self, entry: RoundEntry) -> None:
        state, name = self.state, f"round {entry.round}"
        if entry.round != state.round + 1:
            self._wrong(f"{name} comes after round {state.round}")
        if entry.index <= state.index:
            self._wrong(f"{name} is decision {entry.index}, after decision {state.index}")
        if (due := self._changes.next_due(entry.round)) is not None:
            self._wrong(f"{name} was made without what changed with round {due.round}")
        state.round, state.index = entry.round, entry.index
        if not entry.contributions:
            self._wrong(f"{name} is made of nobody's works")
        ranges: list[SampleRange] = []
        seen = set()
        for number, num_works in entry.contributions:
            seat = state.seats.get(number)
            if seat is None or seat.peer is None:
                self._wrong(f"{name}: nobody sits on seat {number}")
                continue
            if number in seen:
                self._wrong(f"{name}: seat {number} contributed twice")
            seen.add(number)
            if not 0 < num_works <= len(seat.works):
                has = len(seat.works)
                self._wrong(f"{name}: seat {number} contributed {num_works} of {has} works")
            for work in seat.works[:num_works]:
                ranges += work.ranges
            del seat.works[:num_works]
        if tuple(ranges) != entry.ranges:
            self._wrong(f"{name}: its samples are not those of the works that are in it")
        for span in self._spans(entry.ranges, name):
            state.used.add(span)
        if entry.round in self._resumed:
            self._kept[entry.round] = state.copy()

    def _resume(self, number: int) -> None:
        if number > self.state.round:
            self._wrong(f"resumed after round {number}, with {self.state.round} decided")
        elif number in self._kept:
            self._changes.take_back(number)
            self.state = self._kept[number].copy()
            self.state.index = 0  # of another group
            for seat in self.state.seats.values():
                seat.peer = None

    def _spans(self, ranges: Iterable[SampleRange], name: str = "") -> Iterator[Span]:
        """Ranges in the numbers of samples through all slices; those that are of no slice are wrong, and left out."""
        for slice_, start, stop in ranges:
            if slice_ < len(self._starts) - 1:
                first, end = self._starts[slice_], self._starts[slice_ + 1]
                if first + stop <= end:
                    yield first + start, first + stop
                    continue
            if name:
                self._wrong(f"{name}: there are no samples {start} to {stop} of slice {slice_}")

    def _return(self, span: Span) -> None:
        spans = [span]
        for level in self.state.returned:
            spans = list(_moved(level, spans))
        if spans:
            self.state.returned.append(Spans(spans))

    def _take_returned(self, span: Span) -> Iterator[Span]:
        """Take what came back out of it; the rest of the span, which did not."""
        spans = [span]
        for level in reversed(self.state.returned):
            rest = []
            for start, stop in spans:
                for taken in level.take(start, stop):
                    if start < taken[0]:
                        rest.append((start, taken[0]))
                    start = taken[1]
                if start < stop:
                    rest.append((start, stop))
            spans = rest
        yield from spans
