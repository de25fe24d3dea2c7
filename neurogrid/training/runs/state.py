"""The state of a run. Pure: entries of its journal are applied, and nothing else changes it.

Whoever reads a journal from its beginning has the state that its writer had. A state says who sits where, which work
each seat has, and which samples are used; which entry comes next is decided in `machine`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from neurogrid.errors import ConfigurationError
from neurogrid.training.data.dealing import Dealer, SampleRange
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

__all__ = ["Occupant", "Phase", "RunState", "Seat", "spans_of"]

# Rounds before which the state is kept, for a run that is resumed there.
_MAX_SNAPSHOTS: Final = 1024


class Phase(StrEnum):
    """The phase of a run."""

    WAITING = "waiting"
    TRAINING = "training"
    FINISHING = "finishing"
    ENDED = "ended"


class Occupant(NamedTuple):
    """The occupant of a seat: a member of the group that averages."""

    peer: str
    incarnation: int


@dataclass
class Seat:
    """A place in the run, with what its member is to do.

    Attributes:
        number: from 0.
        occupant: None where it is vacant: whoever takes it goes on with its works.
        peer: who sat there last.
        name: what people call its machine.
        works: that were dealt and are in no round, in order.
        num_works: that were dealt since the run began.
        num_samples: that it has contributed.
    """

    number: int
    occupant: Occupant | None = None
    peer: str = ""
    name: str = ""
    works: list[Assignment] = field(default_factory=list)
    num_works: int = 0
    num_samples: int = 0


def spans_of(numbers: Iterable[int], limit: int) -> Iterator[tuple[int, int]]:
    """Spans of numbers that rise, those of them that are below `limit`: from the first to before the second."""
    start = stop = 0
    for number in numbers:
        if number >= limit:
            break
        if number != stop and start < stop:
            yield start, stop
        if number != stop or start == stop:
            start = number
        stop = number + 1
    if start < stop:
        yield start, stop


class RunState:
    """The state of a run.

    Args:
        sizes: samples of each slice of its data.
        seed: of the run: the order of the data comes of it.
        num_epochs: at most; None for no end.
        resumable: rounds after which it can be resumed; None for the last thousand. Each costs a copy of the state.

    Attributes:
        phase: what it does.
        seats: by number; without those that are empty for good.
        num_seats: that there have been.
        index, round: of the last decision, and the last round.
        num_members: that it began with; 0 before it has begun.
        num_samples: of the whole run; 0 where that is not known.
        num_used: samples that are in the weights.
        num_trained: rounds for which something was trained; others only sync.
        reason: why it stops, or has ended.
        num_slices: of its data.
        holds: by seat, slices that its member has on its own disk.
        changes: of its run file.
        bans: of peers that were banned, in order, by peer: what is resumed takes none back.
        dealt_before: by the round of a change, how many rounds' works were dealt by then to one seat, and of how many
            samples.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        seed: int,
        num_epochs: int | None = None,
        resumable: Collection[int] | None = None,
    ) -> None:
        self.dealer = Dealer(sizes, seed=seed, num_epochs=num_epochs)
        self._resumable = resumable
        self.num_slices = len(sizes)
        self.holds: dict[int, frozenset[int]] = {}
        self.phase = Phase.WAITING
        self.seats: dict[int, Seat] = {}
        self.num_seats = 0
        self.index = 0
        self.round = 0
        self.num_members = 0
        self.num_samples = 0
        self.num_used = 0
        self.num_trained = 0
        self.reason = ""
        self.changes = Changes()
        self.bans: dict[str, list[BannedEntry]] = {}
        self.dealt_before: dict[int, tuple[int, int]] = {}
        self._snapshots: dict[int, dict[str, Any]] = {}
        self._snapshots[0] = self._snapshot()

    @property
    def num_dealt(self) -> int:
        """Samples that are used, or that somebody has."""
        return self.num_used + sum(
            work.num_samples for seat in self.seats.values() for work in seat.works
        )

    def occupied(self) -> list[Seat]:
        """Seats with a member, by their numbers."""
        return [seat for _, seat in sorted(self.seats.items()) if seat.occupant is not None]

    def vacant(self) -> list[Seat]:
        """Seats that wait for a member, by their numbers."""
        return [seat for _, seat in sorted(self.seats.items()) if seat.occupant is None]

    def seat_of(self, peer: str) -> Seat | None:
        """The seat of a peer, if it has one."""
        for seat in self.seats.values():
            if seat.occupant is not None and seat.occupant.peer == peer:
                return seat
        return None

    def ban_of(self, peer: str, now: float) -> BannedEntry | None:
        """The ban of a peer that is in force at a moment, in seconds since 1970; None where none is."""
        bans = self.bans.get(peer, ())
        return bans[-1] if bans and bans[-1].is_in_force(now) else None

    def keep_all(self) -> None:
        """Let the run be resumable after each round from here on, until `forget_before` says otherwise."""
        self._resumable = None

    def forget_before(self, round_number: int) -> None:
        """Rounds before this one are not gone back to any more."""
        self._snapshots = {r: kept for r, kept in self._snapshots.items() if r >= round_number}

    def apply(self, entry: Entry) -> None:
        """Go on by one entry.

        Raises:
            ConfigurationError: it does not follow from what was before: the journal is of other data, or was altered.
        """
        if isinstance(entry, JoinedEntry):
            seat = self.seats.setdefault(entry.seat, Seat(entry.seat))
            seat.occupant = Occupant(entry.peer, entry.incarnation)
            seat.peer, seat.name = entry.peer, entry.name
            self._take_held(entry)
            self.num_seats = max(self.num_seats, entry.seat + 1)
        elif isinstance(entry, LeftEntry):
            self.seats.pop(entry.seat)
            self.holds.pop(entry.seat, None)
            self.dealer.lost(str(entry.seat))
        elif isinstance(entry, ReturnedEntry):
            self.seats[entry.seat].works.clear()
            self.dealer.lost(str(entry.seat))
        elif isinstance(entry, BannedEntry):
            self.bans.setdefault(entry.peer, []).append(entry)
        elif isinstance(entry, BeganEntry):
            self.phase = Phase.TRAINING
            self.num_members, self.num_samples = entry.num_members, entry.num_samples
        elif isinstance(entry, DealtEntry):
            for number, work in entry.works:
                self._deal(number, work)
        elif isinstance(entry, RoundEntry):
            self._decide(entry)
        elif isinstance(entry, ChangedEntry):
            self.changes.take(entry)
            ahead = max((len(seat.works) for seat in self.seats.values()), default=0)
            self.dealt_before[entry.round] = self.round + ahead, self.num_dealt
        elif isinstance(entry, StoppingEntry):
            self.phase, self.reason = Phase.FINISHING, entry.reason
        elif isinstance(entry, ResumedEntry):
            self._resume(entry.round)
        elif isinstance(entry, EndEntry):
            self.phase, self.reason = Phase.ENDED, entry.reason
        else:
            # They change nothing here.
            nothing = (
                RunEntry | CheckpointEntry | EpochEntry | DeputyEntry | LedEntry | InvitedEntry
            )
            assert isinstance(entry, nothing)

    def deal(
        self,
        seat: int,
        num_samples: int,
        *,
        position: float = 0.0,
        stride: float = 0.0,
        weight: int | None = None,
        max_ranges: int | None = None,
    ) -> Assignment:
        """Deal a work to a seat, of so many samples or as many as there are; an entry says so afterwards.

        Args:
            weight: of the contribution; None for one a sample.
            max_ranges: that the samples may be of; None for any number, as for what was dealt before.
        """
        held = self.seats[seat]
        holds = self.holds.get(seat, frozenset())
        ranges: tuple[SampleRange, ...] = ()
        if num_samples:
            ranges = self.dealer.deal(str(seat), num_samples, holds=holds, max_ranges=max_ranges)
        dealt = sum(each.num_samples for each in ranges)
        work = Assignment(
            held.num_works + 1, position, stride, dealt if weight is None else weight, ranges
        )
        if work.weight:
            held.works.append(work)
            held.num_works = work.number
        return work

    def _take_held(self, entry: JoinedEntry) -> None:
        self.holds.pop(entry.seat, None)
        if not entry.held:
            return
        if entry.held[-1][1] > self.num_slices:
            raise ConfigurationError(
                f"seat {entry.seat} has slice {entry.held[-1][1] - 1} by the journal, and the data have "
                f"{self.num_slices}"
            )
        self.holds[entry.seat] = frozenset(
            number for start, stop in entry.held for number in range(start, stop)
        )

    def _deal(self, seat: int, work: Assignment) -> None:
        again = self.deal(
            seat,
            work.num_samples,
            position=work.position,
            stride=work.stride,
            weight=work.weight,
        )
        if again != work:
            raise ConfigurationError(
                f"work {work.number} of seat {seat} is about other samples than the data and the seed give"
            )

    def _decide(self, entry: RoundEntry) -> None:
        self.index, self.round = entry.index, entry.round
        self.num_trained += bool(entry.ranges)
        contributors = []
        for number, num_works in entry.contributions:
            seat = self.seats[number]
            ranges = [each for work in seat.works[:num_works] for each in work.ranges]
            del seat.works[:num_works]
            seat.num_samples += sum(each.num_samples for each in ranges)
            self.dealer.contributed(str(number), entry.round, ranges)
            contributors.append(str(number))
        used = self.dealer.committed(entry.round, contributors)
        self.num_used += sum(each.num_samples for each in used)
        if self._resumable is None or self.round in self._resumable:
            self._snapshots[self.round] = self._snapshot()
        while len(self._snapshots) > _MAX_SNAPSHOTS:
            del self._snapshots[min(self._snapshots)]

    def _snapshot(self) -> dict[str, Any]:
        return {
            "dealer": copy.deepcopy(self.dealer),
            "phase": self.phase,
            "seats": copy.deepcopy(self.seats),
            "holds": dict(self.holds),
            "num_seats": self.num_seats,
            "round": self.round,
            "num_members": self.num_members,
            "num_samples": self.num_samples,
            "num_used": self.num_used,
            "num_trained": self.num_trained,
            "reason": self.reason,
        }

    def _resume(self, round_number: int) -> None:
        if round_number not in self._snapshots:
            raise ConfigurationError(f"the journal has no round {round_number} to go on from")
        kept = self._snapshots[round_number]
        for name, value in copy.deepcopy(kept).items():
            setattr(self, name, value)
        self._snapshots = {r: kept for r, kept in self._snapshots.items() if r <= round_number}
        self.changes.take_back(round_number)
        self.index = 0  # of another group
        for seat in self.seats.values():
            seat.occupant = None
