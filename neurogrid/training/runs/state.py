"""What a run has come to. Pure: entries of its journal are applied, and nothing else changes it.

Whoever reads a journal from its beginning has the state that its writer had. A state says who sits where, which work
each seat has, and which samples are used; which entry comes next is decided in `machine`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from neurogrid.errors import ConfigurationError
from neurogrid.training.data.dealing import Dealer, SampleRange

__all__ = [
    "Assignment",
    "Began",
    "Dealt",
    "Decided",
    "Ended",
    "Entry",
    "Joined",
    "Left",
    "Phase",
    "Resumed",
    "RunState",
    "Seat",
    "Stopping",
    "parse_entry",
]

# Rounds before which the state is kept, for a run that is resumed there.
_MAX_SNAPSHOTS: Final = 1024


class Phase(StrEnum):
    """What a run does."""

    WAITING = "waiting"
    TRAINING = "training"
    FINISHING = "finishing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one seat is to train on, and to contribute when it is done.

    Attributes:
        number: from 1, of those of its seat.
        position: inner steps behind its first batch: the place in the schedule.
        stride: inner steps that each of its batches counts for.
        weight: what it adds to the weight of the contribution.
        ranges: of samples, in order; none where only what is there is contributed.
    """

    number: int
    position: float
    stride: float
    weight: int
    ranges: tuple[SampleRange, ...] = ()

    @property
    def num_samples(self) -> int:
        """Samples of all ranges."""
        return sum(each.num_samples for each in self.ranges)

    def to_json(self) -> list[Any]:
        return [
            self.number,
            self.position,
            self.stride,
            self.weight,
            [part for each in self.ranges for part in each],
        ]

    @classmethod
    def of_json(cls, value: Any) -> Assignment:
        number, position, stride, weight, flat = value
        ranges = tuple(map(SampleRange, flat[::3], flat[1::3], flat[2::3]))
        return cls(int(number), float(position), float(stride), int(weight), ranges)


class _Entry:
    """An entry of the journal; `kind` names it there."""

    kind: str

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Joined(_Entry):
    """A member has taken a seat.

    Attributes:
        seat: its number.
        peer, incarnation: of the group's member.
        name: what people call the machine.
    """

    seat: int
    peer: str
    incarnation: int
    name: str = ""
    kind = "joined"

    def to_json(self) -> dict[str, Any]:
        return {
            "seat": self.seat,
            "peer": self.peer,
            "incarnation": self.incarnation,
            "name": self.name,
        }


@dataclass(frozen=True, slots=True)
class Left(_Entry):
    """A seat is empty, for good; what it had and did not contribute is dealt again."""

    seat: int
    reason: str
    kind = "left"

    def to_json(self) -> dict[str, Any]:
        return {"seat": self.seat, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Began(_Entry):
    """Training begins, with so many members: the schedule counts on as many.

    Attributes:
        num_members: that there are.
        num_samples: of the whole run; 0 where that is not known beforehand.
    """

    num_members: int
    num_samples: int
    kind = "began"

    def to_json(self) -> dict[str, Any]:
        return {"num_members": self.num_members, "num_samples": self.num_samples}


@dataclass(frozen=True, slots=True)
class Dealt(_Entry):
    """Works were dealt, in the order of the seats."""

    works: tuple[tuple[int, Assignment], ...]
    kind = "dealt"

    def to_json(self) -> dict[str, Any]:
        return {"works": [[seat, work.to_json()] for seat, work in self.works]}


@dataclass(frozen=True, slots=True)
class Decided(_Entry):
    """A round was decided.

    Attributes:
        index: of the group's decision.
        round: its number, from 1.
        digest: of the aggregate, in hex.
        contributions: seats, with the works of each that are in it, from the first that it had.
        ranges: samples that are used now, for those who read the journal.
    """

    index: int
    round: int
    digest: str
    contributions: tuple[tuple[int, int], ...]
    ranges: tuple[SampleRange, ...]
    kind = "round"

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "round": self.round,
            "digest": self.digest,
            "contributions": [list(each) for each in self.contributions],
            "ranges": [part for each in self.ranges for part in each],
        }


@dataclass(frozen=True, slots=True)
class Stopping(_Entry):
    """Nothing is dealt any more."""

    reason: str
    kind = "stopping"

    def to_json(self) -> dict[str, Any]:
        return {"reason": self.reason}


@dataclass(frozen=True, slots=True)
class Resumed(_Entry):
    """The run goes on from a checkpoint; rounds after it are taken back.

    Attributes:
        round: of the checkpoint; 0 for the beginning.
    """

    round: int
    kind = "resumed"

    def to_json(self) -> dict[str, Any]:
        return {"round": self.round}


@dataclass(frozen=True, slots=True)
class Ended(_Entry):
    """The run is over."""

    reason: str
    kind = "ended"

    def to_json(self) -> dict[str, Any]:
        return {"reason": self.reason}


Entry = Joined | Left | Began | Dealt | Decided | Stopping | Resumed | Ended


def parse_entry(kind: str, told: Mapping[str, Any]) -> Entry | None:
    """The entry of this kind; None for a kind that changes no state.

    Raises:
        ConfigurationError: it is malformed.
    """
    try:
        return _parse(kind, told)
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigurationError(f"an entry {kind!r} of the journal cannot be read: {exc}") from exc


def _parse(kind: str, told: Mapping[str, Any]) -> Entry | None:
    if kind == Joined.kind:
        return Joined(
            int(told["seat"]), str(told["peer"]), int(told["incarnation"]), str(told["name"])
        )
    if kind == Left.kind:
        return Left(int(told["seat"]), str(told["reason"]))
    if kind == Began.kind:
        return Began(int(told["num_members"]), int(told["num_samples"]))
    if kind == Dealt.kind:
        return Dealt(
            tuple((int(seat), Assignment.of_json(work)) for seat, work in told["works"])
        )
    if kind == Decided.kind:
        flat = told["ranges"]
        return Decided(
            int(told["index"]),
            int(told["round"]),
            str(told["digest"]),
            tuple((int(seat), int(number)) for seat, number in told["contributions"]),
            tuple(map(SampleRange, flat[::3], flat[1::3], flat[2::3])),
        )
    if kind == Stopping.kind:
        return Stopping(str(told["reason"]))
    if kind == Resumed.kind:
        return Resumed(int(told["round"]))
    if kind == Ended.kind:
        return Ended(str(told["reason"]))
    return None


class Occupant(NamedTuple):
    """Who sits on a seat: a member of the group that averages."""

    peer: str
    incarnation: int


@dataclass
class Seat:
    """A place in the run, with what its member is to do.

    Attributes:
        number: from 0.
        occupant: None where it is vacant: whoever takes it goes on with its works.
        name: what people call its machine.
        works: that were dealt and are in no round, in order.
        num_works: that were dealt since the run began.
        num_samples: that it has contributed.
    """

    number: int
    occupant: Occupant | None = None
    name: str = ""
    works: list[Assignment] = field(default_factory=list)
    num_works: int = 0
    num_samples: int = 0


class RunState:
    """The state of a run.

    Args:
        sizes: samples of each slice of its data.
        seed: of the run: the order of the data comes of it.
        num_epochs: at most; None for no end.

    Attributes:
        phase: what it does.
        seats: by number; without those that are empty for good.
        num_seats: that there have been.
        index, round: of the last decision, and the last round.
        num_members: that it began with; 0 before it has begun.
        num_samples: of the whole run; 0 where that is not known.
        num_used: samples that are in the weights.
        reason: why it stops, or has ended.
    """

    def __init__(self, sizes: Sequence[int], *, seed: int, num_epochs: int | None = None) -> None:
        self.dealer = Dealer(sizes, seed=seed, num_epochs=num_epochs)
        self.phase = Phase.WAITING
        self.seats: dict[int, Seat] = {}
        self.num_seats = 0
        self.index = 0
        self.round = 0
        self.num_members = 0
        self.num_samples = 0
        self.num_used = 0
        self.reason = ""
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

    def apply(self, entry: Entry) -> None:
        """Go on by one entry.

        Raises:
            ConfigurationError: it does not follow from what was before: the journal is of other data, or was altered.
        """
        if isinstance(entry, Joined):
            seat = self.seats.setdefault(entry.seat, Seat(entry.seat))
            seat.occupant, seat.name = Occupant(entry.peer, entry.incarnation), entry.name
            self.num_seats = max(self.num_seats, entry.seat + 1)
        elif isinstance(entry, Left):
            self.seats.pop(entry.seat)
            self.dealer.lost(str(entry.seat))
        elif isinstance(entry, Began):
            self.phase = Phase.TRAINING
            self.num_members, self.num_samples = entry.num_members, entry.num_samples
        elif isinstance(entry, Dealt):
            for number, work in entry.works:
                self._deal(number, work)
        elif isinstance(entry, Decided):
            self._decide(entry)
        elif isinstance(entry, Stopping):
            self.phase, self.reason = Phase.FINISHING, entry.reason
        elif isinstance(entry, Resumed):
            self._resume(entry.round)
        else:
            self.phase, self.reason = Phase.ENDED, entry.reason

    def deal(
        self,
        seat: int,
        num_samples: int,
        *,
        position: float = 0.0,
        stride: float = 0.0,
        weight: int | None = None,
    ) -> Assignment:
        """Deal a work to a seat, of so many samples or as many as there are; an entry says so afterwards.

        Args:
            weight: of the contribution; None for one a sample.
        """
        held = self.seats[seat]
        ranges = self.dealer.deal(str(seat), num_samples) if num_samples else ()
        dealt = sum(each.num_samples for each in ranges)
        work = Assignment(
            held.num_works + 1, position, stride, dealt if weight is None else weight, ranges
        )
        if work.weight:
            held.works.append(work)
            held.num_works = work.number
        return work

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

    def _decide(self, entry: Decided) -> None:
        self.index, self.round = entry.index, entry.round
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
        self._snapshots[self.round] = self._snapshot()
        while len(self._snapshots) > _MAX_SNAPSHOTS:
            del self._snapshots[min(self._snapshots)]

    def _snapshot(self) -> dict[str, Any]:
        return {
            "dealer": copy.deepcopy(self.dealer),
            "phase": self.phase,
            "seats": copy.deepcopy(self.seats),
            "num_seats": self.num_seats,
            "round": self.round,
            "num_members": self.num_members,
            "num_samples": self.num_samples,
            "num_used": self.num_used,
            "reason": self.reason,
        }

    def _resume(self, round_number: int) -> None:
        if round_number not in self._snapshots:
            raise ConfigurationError(f"the journal has no round {round_number} to go on from")
        kept = self._snapshots[round_number]
        for name, value in copy.deepcopy(kept).items():
            setattr(self, name, value)
        self._snapshots = {r: kept for r, kept in self._snapshots.items() if r <= round_number}
        self.index = 0  # of another group
        for seat in self.seats.values():
            seat.occupant = None
