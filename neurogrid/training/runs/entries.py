"""Entries of a run's journal, as they are written and read. Pure.

More than 600 lines, since each kind of entry is a few fields and nothing else.

Source: protocol_spec/training/runs.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Final

from neurogrid.training.data.dealing import SampleRange
from neurogrid.training.wire.runs import SYNC_SHARE

__all__ = [
    "Assignment",
    "BannedEntry",
    "BeganEntry",
    "ChangedEntry",
    "CheckpointEntry",
    "DealtEntry",
    "DeputyEntry",
    "EndEntry",
    "Entry",
    "EpochEntry",
    "InvitedEntry",
    "JoinedEntry",
    "LedEntry",
    "LeftEntry",
    "ResumedEntry",
    "ReturnedEntry",
    "RoundEntry",
    "RunEntry",
    "StoppingEntry",
    "entry_of",
]

_DIGEST: Final = 32
_RUN_ID: Final = 16
_SIGNATURE: Final = 64
_MAX_CHARS: Final = 1024


class _Fields:
    """Fields of a JSON object, of which each key is asked for once and none is left over.

    Raises:
        ValueError: from each method, where the entry is not there or not what it must be.
    """

    def __init__(self, value: object) -> None:
        if not isinstance(value, dict):
            raise ValueError("it is no object")
        self._value: dict[str, object] = dict(value)

    def end(self) -> None:
        if self._value:
            raise ValueError(f"it has {min(self._value)}, which is not known")

    def take(self, key: str) -> object:
        if key not in self._value:
            raise ValueError(f"it has no {key}")
        return self._value.pop(key)

    def has(self, key: str) -> bool:
        return key in self._value

    def number(self, key: str, smallest: int = 0) -> int:
        return _number(key, self.take(key), smallest)

    def text(self, key: str) -> str:
        return _text(key, self.take(key))

    def binary(self, key: str, num_bytes: int) -> bytes:
        value = bytes.fromhex(self.text(key))
        if len(value) != num_bytes:
            raise ValueError(f"{key} is not {num_bytes} bytes in hex")
        return value

    def boolean(self, key: str) -> bool:
        value = self.take(key)
        if not isinstance(value, bool):
            raise ValueError(f"{key} is neither true nor false")
        return value

    def array(self, key: str) -> list[object]:
        value = self.take(key)
        if not isinstance(value, list):
            raise ValueError(f"{key} is no array")
        return value

    def spans(self, key: str) -> tuple[tuple[int, int], ...]:
        flat = [_number(key, value, 0) for value in self.array(key)]
        if not flat or len(flat) % 2 or any(a >= b for a, b in pairwise(flat)):
            raise ValueError(f"{key} are not pairs of numbers, all of them rising")
        return tuple(zip(flat[::2], flat[1::2], strict=True))

    def ranges(self, key: str) -> tuple[SampleRange, ...]:
        flat = [_number(key, value, 0) for value in self.array(key)]
        return _ranges(key, flat)


def _ranges(key: str, flat: list[int]) -> tuple[SampleRange, ...]:
    if len(flat) % 3:
        raise ValueError(f"{key} has {len(flat)} numbers, and each range has three")
    ranges = tuple(map(SampleRange, flat[::3], flat[1::3], flat[2::3]))
    if any(each.start >= each.stop for each in ranges):
        raise ValueError(f"{key} has a range without samples")
    return ranges


def _number(key: str, value: object, smallest: int) -> int:
    if type(value) is not int or not smallest <= value < 2**64:
        raise ValueError(f"{key} is no integer from {smallest}")
    return value


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or len(value) > _MAX_CHARS:
        raise ValueError(f"{key} is no text of at most {_MAX_CHARS} characters")
    return value


def _real(key: str, value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{key} is no number of at least 0")
    return float(value)  # type: ignore[arg-type]


def _flat(ranges: tuple[SampleRange, ...]) -> list[int]:
    return [bound for each in ranges for bound in each]


@dataclass(frozen=True, slots=True)
class Assignment:
    """A work of a seat: samples to train on, or none, and the weight that they add to the contribution.

    Attributes:
        number: from 1, of those of its seat.
        position: inner steps behind its first batch: the place in the schedule.
        stride: inner steps that each of its batches counts for.
        weight: what it adds to the weight of the contribution, by `SYNC_SHARE` where it has no samples.
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

    @property
    def share(self) -> float:
        """The weight that the work adds to the contribution."""
        return float(self.weight) if self.ranges else self.weight * SYNC_SHARE

    def json(self) -> list[object]:
        """Return the work as JSON has it; `read` takes it."""
        return [self.number, self.position, self.stride, self.weight, _flat(self.ranges)]

    @classmethod
    def read(cls, value: object) -> Assignment:
        """Read what `json` gave.

        Raises:
            ValueError: it is something else.
        """
        if not (isinstance(value, list) and len(value) == 5 and isinstance(value[4], list)):
            raise ValueError("a work has a number, a position, a stride, a weight and ranges")
        number, position, stride, weight, flat = value
        return cls(
            _number("number", number, 1),
            _real("position", position),
            _real("stride", stride),
            _number("weight", weight, 1),
            _ranges("ranges", [_number("ranges", each, 0) for each in flat]),
        )


@dataclass(frozen=True, slots=True)
class Entry(ABC):
    """One entry of a journal."""

    kind: ClassVar[str]

    @abstractmethod
    def fields(self) -> Iterator[tuple[str, object]]:
        """Its keys and what stands under them, for JSON."""

    def json(self) -> dict[str, object]:
        """The entry for JSON; `entry_of` reads it."""
        return {"kind": self.kind, **dict(self.fields())}


@dataclass(frozen=True, slots=True)
class RunEntry(Entry):
    """A run begins: the first entry, and no other.

    Attributes:
        run: its id, 16 bytes.
        leader: the peer id of its leader, which signs the journal.
        run_file: SHA-256 of the run file with all defaults filled in.
        manifest: the blob that is the manifest of the data, 32 bytes.
        slices: samples of each slice.
        seed: of the run: the order of the data comes of it.
    """

    run: bytes
    leader: str
    run_file: bytes
    manifest: bytes
    slices: tuple[int, ...]
    seed: int

    kind: ClassVar[str] = "run"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "run", self.run.hex()
        yield "leader", self.leader
        yield "run_file", self.run_file.hex()
        yield "manifest", self.manifest.hex()
        yield "slices", list(self.slices)
        yield "seed", self.seed

    @classmethod
    def read(cls, fields: _Fields) -> RunEntry:
        entry = cls(
            fields.binary("run", _RUN_ID),
            fields.text("leader"),
            fields.binary("run_file", _DIGEST),
            fields.binary("manifest", _DIGEST),
            tuple(_number("slices", size, 1) for size in fields.array("slices")),
            fields.number("seed"),
        )
        if not entry.slices:
            raise ValueError("slices are none: a run has data")
        return entry


@dataclass(frozen=True, slots=True)
class JoinedEntry(Entry):
    """A member has taken a seat.

    Attributes:
        seat: its number.
        peer, incarnation: of the group's member.
        name: what people call the machine.
        held: slices that it has on its own disk, and is dealt first: from each first number to before the second.
    """

    seat: int
    peer: str
    incarnation: int
    name: str = ""
    held: tuple[tuple[int, int], ...] = ()

    kind: ClassVar[str] = "joined"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "seat", self.seat
        yield "peer", self.peer
        yield "incarnation", self.incarnation
        yield "name", self.name
        if self.held:
            yield "held", [bound for span in self.held for bound in span]

    @classmethod
    def read(cls, fields: _Fields) -> JoinedEntry:
        return cls(
            fields.number("seat"),
            fields.text("peer"),
            fields.number("incarnation"),
            fields.text("name"),
            fields.spans("held") if fields.has("held") else (),
        )


@dataclass(frozen=True, slots=True)
class LeftEntry(Entry):
    """A seat is empty, for good; what it had and did not contribute is dealt again.

    Attributes:
        seat: its number.
        reason: for people.
    """

    seat: int
    reason: str

    kind: ClassVar[str] = "left"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "seat", self.seat
        yield "reason", self.reason

    @classmethod
    def read(cls, fields: _Fields) -> LeftEntry:
        return cls(fields.number("seat"), fields.text("reason"))


@dataclass(frozen=True, slots=True)
class BannedEntry(Entry):
    """A peer may not take part any more, or not for a while; as `joining.Ban` says it to others.

    Attributes:
        peer: its peer id.
        number: of the bans of the run, from 1.
        at: when it was made, in whole seconds since 1970.
        until: it is in force before that; 0 for as long as the run lasts.
        evidence: SHA-256 of the evidence that it goes by, 32 bytes; empty where its leader saw it.
        reason: for people.
    """

    peer: str
    number: int
    at: int
    until: int
    evidence: bytes
    reason: str

    kind: ClassVar[str] = "banned"

    def is_in_force(self, now: float) -> bool:
        """Whether it holds at this moment, in seconds since 1970."""
        return not self.until or now < self.until

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "peer", self.peer
        yield "number", self.number
        yield "at", self.at
        yield "until", self.until
        yield "evidence", self.evidence.hex()
        yield "reason", self.reason

    @classmethod
    def read(cls, fields: _Fields) -> BannedEntry:
        peer, number = fields.text("peer"), fields.number("number", 1)
        at, until = fields.number("at"), fields.number("until")
        if until and until <= at:
            raise ValueError("a ban ends before it begins")
        evidence = bytes.fromhex(fields.text("evidence"))
        if len(evidence) not in (0, _DIGEST):
            raise ValueError(f"evidence is neither empty nor {_DIGEST} bytes in hex")
        return cls(peer, number, at, until, evidence, fields.text("reason"))


@dataclass(frozen=True, slots=True)
class InvitedEntry(Entry):
    """A peer has come by an invitation that a number of peers may come by: one use of it is spent.

    Attributes:
        peer: its peer id.
        serial: of the invitation, u64.
    """

    peer: str
    serial: int

    kind: ClassVar[str] = "invited"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "peer", self.peer
        yield "serial", self.serial

    @classmethod
    def read(cls, fields: _Fields) -> InvitedEntry:
        return cls(fields.text("peer"), fields.number("serial"))


@dataclass(frozen=True, slots=True)
class BeganEntry(Entry):
    """Training begins.

    Attributes:
        num_members: that there are: the schedule counts on as many.
        num_samples: of the whole run; 0 where that is not known beforehand.
    """

    num_members: int
    num_samples: int

    kind: ClassVar[str] = "began"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "num_members", self.num_members
        yield "num_samples", self.num_samples

    @classmethod
    def read(cls, fields: _Fields) -> BeganEntry:
        return cls(fields.number("num_members", 1), fields.number("num_samples"))


@dataclass(frozen=True, slots=True)
class DealtEntry(Entry):
    """Works were dealt.

    Attributes:
        works: of seats, in the order in which they were dealt.
    """

    works: tuple[tuple[int, Assignment], ...]

    kind: ClassVar[str] = "dealt"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "works", [[seat, work.json()] for seat, work in self.works]

    @classmethod
    def read(cls, fields: _Fields) -> DealtEntry:
        works = []
        for each in fields.array("works"):
            if not (isinstance(each, list) and len(each) == 2):
                raise ValueError("works are pairs of a seat and a work")
            works.append((_number("seat", each[0], 0), Assignment.read(each[1])))
        return cls(tuple(works))


@dataclass(frozen=True, slots=True)
class RoundEntry(Entry):
    """A round was decided.

    Attributes:
        index: of the group's decision.
        round: its number, from 1.
        digest: of the aggregate, 32 bytes.
        contributions: seats, with how many works of each are in it, from the first that it had.
        ranges: samples that are used by this.
    """

    index: int
    round: int
    digest: bytes
    contributions: tuple[tuple[int, int], ...]
    ranges: tuple[SampleRange, ...]

    kind: ClassVar[str] = "round"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "index", self.index
        yield "round", self.round
        yield "digest", self.digest.hex()
        yield "contributions", [list(each) for each in self.contributions]
        yield "ranges", _flat(self.ranges)

    @classmethod
    def read(cls, fields: _Fields) -> RoundEntry:
        contributions = []
        index, number = fields.number("index"), fields.number("round", 1)
        digest = fields.binary("digest", _DIGEST)
        for each in fields.array("contributions"):
            if not (isinstance(each, list) and len(each) == 2):
                raise ValueError("contributions are pairs of a seat and a number of works")
            contributions.append((_number("seat", each[0], 0), _number("works", each[1], 0)))
        return cls(index, number, digest, tuple(contributions), fields.ranges("ranges"))


@dataclass(frozen=True, slots=True)
class CheckpointEntry(Entry):
    """A checkpoint is on the disk, whole.

    Attributes:
        step: inner steps that are behind it.
        round: the last round that is in it.
    """

    step: int
    round: int

    kind: ClassVar[str] = "checkpoint"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "step", self.step
        yield "round", self.round

    @classmethod
    def read(cls, fields: _Fields) -> CheckpointEntry:
        return cls(fields.number("step"), fields.number("round"))


@dataclass(frozen=True, slots=True)
class ChangedEntry(Entry):
    """Change of a run: from a round on it is led as if its run file had other values.

    Attributes:
        round: the first of these, which comes next.
        changes: keys with their sections, as "inner.lr", and their values as TOML has them; keys rise.
    """

    round: int
    changes: tuple[tuple[str, str], ...]

    kind: ClassVar[str] = "changed"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "round", self.round
        yield "changes", [list(each) for each in self.changes]

    @classmethod
    def read(cls, fields: _Fields) -> ChangedEntry:
        number, changes = fields.number("round", 1), []
        for each in fields.array("changes"):
            if not (isinstance(each, list) and len(each) == 2):
                raise ValueError("changes are pairs of a key and a value")
            changes.append((_text("a key", each[0]), _text("a value", each[1])))
        keys = [key for key, _ in changes]
        if not keys or keys != sorted(set(keys)):
            raise ValueError("changes are of one key at least, and keys rise")
        return cls(number, tuple(changes))


@dataclass(frozen=True, slots=True)
class StoppingEntry(Entry):
    """Nothing is dealt any more.

    Attributes:
        reason: for people.
    """

    reason: str

    kind: ClassVar[str] = "stopping"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "reason", self.reason

    @classmethod
    def read(cls, fields: _Fields) -> StoppingEntry:
        return cls(fields.text("reason"))


@dataclass(frozen=True, slots=True)
class ResumedEntry(Entry):
    """The run goes on from a checkpoint: rounds after it are taken back, with all that was used in them.

    Attributes:
        round: of the checkpoint; 0 for the beginning.
    """

    round: int

    kind: ClassVar[str] = "resumed"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "round", self.round

    @classmethod
    def read(cls, fields: _Fields) -> ResumedEntry:
        return cls(fields.number("round"))


@dataclass(frozen=True, slots=True)
class DeputyEntry(Entry):
    """The leader names its deputy, or nobody; the one before is none any more.

    Attributes:
        number: rises with each; members are told of the deputy by it.
        peer: peer id of the deputy; empty for nobody.
    """

    number: int
    peer: str

    kind: ClassVar[str] = "deputy"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "number", self.number
        yield "peer", self.peer

    @classmethod
    def read(cls, fields: _Fields) -> DeputyEntry:
        return cls(fields.number("number", 1), fields.text("peer"))


@dataclass(frozen=True, slots=True)
class LedEntry(Entry):
    """The deputy leads from here on, and signs this line and those after it.

    Attributes:
        term: greater than that of any leader before; the first one's is 0.
        leader: peer id of the deputy.
        promises: of members for this term: peer id, incarnation, and signature of each.
    """

    term: int
    leader: str
    promises: tuple[tuple[str, int, bytes], ...]

    kind: ClassVar[str] = "led"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "term", self.term
        yield "leader", self.leader
        yield (
            "promises",
            [[peer, number, signature.hex()] for peer, number, signature in self.promises],
        )

    @classmethod
    def read(cls, fields: _Fields) -> LedEntry:
        term, leader = fields.number("term", 1), fields.text("leader")
        promises = []
        for each in fields.array("promises"):
            if not (isinstance(each, list) and len(each) == 3):
                raise ValueError("promises have a peer, an incarnation and a signature")
            signature = bytes.fromhex(_text("signature", each[2]))
            if len(signature) != _SIGNATURE:
                raise ValueError(f"a signature is not {_SIGNATURE} bytes in hex")
            promises.append((_text("peer", each[0]), _number("incarnation", each[1], 0), signature))
        return cls(term, leader, tuple(promises))


@dataclass(frozen=True, slots=True)
class EndEntry(Entry):
    """The run is over.

    Attributes:
        reason: for people.
    """

    reason: str

    kind: ClassVar[str] = "end"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "reason", self.reason

    @classmethod
    def read(cls, fields: _Fields) -> EndEntry:
        return cls(fields.text("reason"))


@dataclass(frozen=True, slots=True)
class ReturnedEntry(Entry):
    """Works of a seat are given back, as they will be in no round: their samples are dealt again, and the seat stays.

    Attributes:
        seat: its number.
    """

    seat: int

    kind: ClassVar[str] = "returned"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "seat", self.seat

    @classmethod
    def read(cls, fields: _Fields) -> ReturnedEntry:
        return cls(fields.number("seat"))


@dataclass(frozen=True, slots=True)
class EpochEntry(Entry):
    """A witnessed run went on by what happened: whoever has all of these comes to the same state.

    Attributes:
        time: seconds, by the leader's clock.
        draw: 32 bytes by chance: the seed, if a round begins by this.
        batches: of the round that begins by this, or goes on.
        events: what happened, in order, as `witnessed.event_fields` has each.
        digest: of the state after it, 32 bytes.
    """

    time: float
    draw: bytes
    batches: int
    events: tuple[Mapping[str, object], ...]
    digest: bytes

    kind: ClassVar[str] = "epoch"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "time", self.time
        yield "draw", self.draw.hex()
        yield "batches", self.batches
        yield "events", [dict(each) for each in self.events]
        yield "digest", self.digest.hex()

    @classmethod
    def read(cls, fields: _Fields) -> EpochEntry:
        events: list[Mapping[str, object]] = []
        when, draw = _real("time", fields.take("time")), fields.binary("draw", _DIGEST)
        batches = fields.number("batches")
        for each in fields.array("events"):
            if not isinstance(each, dict) or not isinstance(each.get("kind"), str):
                raise ValueError("events are objects with a kind")
            events.append(each)
        return cls(when, draw, batches, tuple(events), fields.binary("digest", _DIGEST))


_READERS: Final[Mapping[str, Callable[[_Fields], Entry]]] = {
    cls.kind: cls.read
    for cls in (
        *(RunEntry, JoinedEntry, LeftEntry, BannedEntry, BeganEntry, DealtEntry, RoundEntry),
        *(CheckpointEntry, ChangedEntry, StoppingEntry, ResumedEntry, EndEntry),
        *(ReturnedEntry, EpochEntry, DeputyEntry, LedEntry, InvitedEntry),
    )
}


def entry_of(value: Any) -> Entry:
    """The entry that `Entry.json` was of.

    Raises:
        ValueError: it is none.
    """
    fields = _Fields(value)
    kind = fields.text("kind")
    if kind not in _READERS:
        raise ValueError(f"there is no entry called {kind[:40]!r}")
    entry = _READERS[kind](fields)
    fields.end()
    return entry
