"""Entries of a run's journal, as they are written and read. Pure.

Source: protocol_spec/training/runs.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

__all__ = [
    "CheckpointEntry",
    "Contributor",
    "EndEntry",
    "Entry",
    "MemberEntry",
    "ResumedEntry",
    "RoundEntry",
    "RunEntry",
    "UsedEntry",
    "UsedRange",
    "entry_of",
]

_DIGEST: Final = 32
_RUN_ID: Final = 16
_MAX_CHARS: Final = 1024


class UsedRange(NamedTuple):
    """Samples [start, stop) of slice number `slice`, used in epoch number `epoch`; all from 0."""

    epoch: int
    slice: int
    start: int
    stop: int


class _Fields:
    """What an object of JSON says, each key asked for once and none besides.

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

    def number(self, key: str, smallest: int = 0) -> int:
        return _number(key, self.take(key), smallest)

    def text(self, key: str) -> str:
        value = self.take(key)
        if not isinstance(value, str) or len(value) > _MAX_CHARS:
            raise ValueError(f"{key} is no text of at most {_MAX_CHARS} characters")
        return value

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

    def ranges(self, key: str) -> tuple[UsedRange, ...]:
        flat = [_number(key, value, 0) for value in self.array(key)]
        if len(flat) % 4:
            raise ValueError(f"{key} has {len(flat)} numbers, and each range has four")
        ranges = tuple(map(UsedRange, flat[::4], flat[1::4], flat[2::4], flat[3::4]))
        if any(each.start >= each.stop for each in ranges):
            raise ValueError(f"{key} has a range without samples")
        return ranges


def _number(key: str, value: object, smallest: int) -> int:
    if type(value) is not int or not smallest <= value < 2**64:
        raise ValueError(f"{key} is no integer from {smallest}")
    return value


def _flat(ranges: tuple[UsedRange, ...]) -> list[int]:
    return [bound for each in ranges for bound in each]


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
    """

    run: bytes
    leader: str
    run_file: bytes
    manifest: bytes
    slices: tuple[int, ...]

    kind: ClassVar[str] = "run"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "run", self.run.hex()
        yield "leader", self.leader
        yield "run_file", self.run_file.hex()
        yield "manifest", self.manifest.hex()
        yield "slices", list(self.slices)

    @classmethod
    def read(cls, fields: _Fields) -> RunEntry:
        return cls(
            fields.binary("run", _RUN_ID),
            fields.text("leader"),
            fields.binary("run_file", _DIGEST),
            fields.binary("manifest", _DIGEST),
            tuple(_number("slices", size, 1) for size in fields.array("slices")),
        )


@dataclass(frozen=True, slots=True)
class Contributor:
    """What a member put into a round.

    Attributes:
        member: its name in the run.
        samples: how many samples its difference comes of.
        ranges: those of them that are used by this; none where the member has yet to report them (`UsedEntry`).
    """

    member: str
    samples: int
    ranges: tuple[UsedRange, ...]


@dataclass(frozen=True, slots=True)
class RoundEntry(Entry):
    """A round was decided.

    Attributes:
        round: its number, from 1.
        digest: of the aggregate, 32 bytes.
        contributors: whose differences are in it, in their order.
    """

    round: int
    digest: bytes
    contributors: tuple[Contributor, ...]

    kind: ClassVar[str] = "round"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "round", self.round
        yield "digest", self.digest.hex()
        yield (
            "contributors",
            [
                {"member": each.member, "samples": each.samples, "ranges": _flat(each.ranges)}
                for each in self.contributors
            ],
        )

    @classmethod
    def read(cls, fields: _Fields) -> RoundEntry:
        contributors = []
        number, digest = fields.number("round", 1), fields.binary("digest", _DIGEST)
        for each in map(_Fields, fields.array("contributors")):
            contributors.append(
                Contributor(each.text("member"), each.number("samples"), each.ranges("ranges"))
            )
            each.end()
        return cls(number, digest, tuple(contributors))


@dataclass(frozen=True, slots=True)
class UsedEntry(Entry):
    """A contributor of a round that was decided before has reported what it had contributed.

    Attributes:
        round: of the contribution.
        member: its name in the run.
        ranges: of the samples that are used by this.
    """

    round: int
    member: str
    ranges: tuple[UsedRange, ...]

    kind: ClassVar[str] = "used"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "round", self.round
        yield "member", self.member
        yield "ranges", _flat(self.ranges)

    @classmethod
    def read(cls, fields: _Fields) -> UsedEntry:
        return cls(fields.number("round", 1), fields.text("member"), fields.ranges("ranges"))


@dataclass(frozen=True, slots=True)
class MemberEntry(Entry):
    """A member joined or left.

    Attributes:
        member: its name in the run: one that comes back under another is another member.
        seat: its number.
        joined: whether it joined; else it left, or was lost.
        reason: for people; empty for none.
    """

    member: str
    seat: int
    joined: bool
    reason: str = ""

    kind: ClassVar[str] = "member"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "member", self.member
        yield "seat", self.seat
        yield "joined", self.joined
        yield "reason", self.reason

    @classmethod
    def read(cls, fields: _Fields) -> MemberEntry:
        return cls(
            fields.text("member"),
            fields.number("seat"),
            fields.boolean("joined"),
            fields.text("reason"),
        )


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
class ResumedEntry(Entry):
    """The run goes on from a round: those after it are taken back, with all that was used in them.

    Attributes:
        round: the last round that counts; 0 for none.
    """

    round: int

    kind: ClassVar[str] = "resumed"

    def fields(self) -> Iterator[tuple[str, object]]:
        yield "round", self.round

    @classmethod
    def read(cls, fields: _Fields) -> ResumedEntry:
        return cls(fields.number("round"))


@dataclass(frozen=True, slots=True)
class EndEntry(Entry):
    """The run has come to its end; it may be resumed all the same.

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


_READ: Final[Mapping[str, Callable[[_Fields], Entry]]] = {
    RunEntry.kind: RunEntry.read,
    RoundEntry.kind: RoundEntry.read,
    UsedEntry.kind: UsedEntry.read,
    MemberEntry.kind: MemberEntry.read,
    CheckpointEntry.kind: CheckpointEntry.read,
    ResumedEntry.kind: ResumedEntry.read,
    EndEntry.kind: EndEntry.read,
}


def entry_of(value: Any) -> Entry:
    """The entry that `json` was of.

    Raises:
        ValueError: it is none, or of a kind that is not known.
    """
    fields = _Fields(value)
    kind = fields.text("kind")
    if kind not in _READ:
        raise ValueError(f"it is of the kind {kind!r}, which is not known")
    entry = _READ[kind](fields)
    fields.end()
    return entry
