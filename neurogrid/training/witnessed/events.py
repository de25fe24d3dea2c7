"""Events of a witnessed run: all that `tick` is told, and its form in a journal. Pure.

Source: protocol_spec/training/witnessed.md, "Events".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from neurogrid.training.witnessed.commitments import Commitment, WitnessProof
from neurogrid.training.witnessed.json_fields import Fields
from neurogrid.training.witnessed.phases import (
    MAX_MEMBERS,
    MAX_PEER_CHARS,
    MAX_REASON_CHARS,
    Health,
)

__all__ = [
    "MAX_EVIDENCE_BYTES",
    "Admitted",
    "Checkpointed",
    "Committed",
    "Eject",
    "Event",
    "Gone",
    "Joined",
    "Left",
    "Pause",
    "Refused",
    "Resume",
    "Stop",
    "Trial",
    "Unhealthy",
    "Warm",
    "Witnessed",
    "event_json",
    "event_of",
]

MAX_EVIDENCE_BYTES: Final = 65_536
# Of RSA with 4,096 bits; Ed25519 has 64.
MAX_SIGNATURE_BYTES: Final = 512
_U32: Final = 2**32
_U64: Final = 2**64


@dataclass(frozen=True, slots=True)
class Joined:
    """A peer wants to be a member, in a process with this incarnation, a u64."""

    peer: str
    incarnation: int

    def __post_init__(self) -> None:
        _check_peer(self.peer, self.incarnation)


@dataclass(frozen=True, slots=True)
class Gone:
    """A peer with this incarnation, that waits or is a member, is there no more: nobody need know its seat."""

    peer: str
    incarnation: int

    def __post_init__(self) -> None:
        _check_peer(self.peer, self.incarnation)


@dataclass(frozen=True, slots=True)
class Left:
    """A member is one no more: WITHDRAWN by itself, or DROPPED, as when its connection is lost."""

    seat: int
    why: Health = Health.DROPPED

    def __post_init__(self) -> None:
        _check_u32("seat", self.seat)
        if self.why not in (Health.DROPPED, Health.WITHDRAWN):
            raise ValueError(f"a member leaves as dropped or withdrawn, not as {self.why}")


@dataclass(frozen=True, slots=True)
class Warm:
    """A member has the weights that this epoch begins with, and can train."""

    seat: int
    epoch: int

    def __post_init__(self) -> None:
        _check_u32("seat", self.seat)
        _check_u32("epoch", self.epoch)


@dataclass(frozen=True, slots=True)
class Committed:
    """A member has committed to a result. Its signature is checked already, and stays for who reads the journal."""

    commitment: Commitment
    signature: bytes = b""

    def __post_init__(self) -> None:
        _check_signature(self.signature)


@dataclass(frozen=True, slots=True)
class Witnessed:
    """A witness has sent its proof. Its signature is checked already, and stays for who reads the journal."""

    proof: WitnessProof
    signature: bytes = b""

    def __post_init__(self) -> None:
        _check_signature(self.signature)


@dataclass(frozen=True, slots=True)
class Unhealthy:
    """A member cannot reach those on these seats, in this epoch and this round, as the state counts them."""

    by_seat: int
    seats: tuple[int, ...]
    epoch: int
    round: int

    def __post_init__(self) -> None:
        for value in (self.by_seat, self.epoch, self.round, *self.seats):
            _check_u32("seat, epoch or round", value)
        if len(self.seats) > MAX_MEMBERS:
            raise ValueError(f"a member complains about at most {MAX_MEMBERS} seats")


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A member has kept the weights that this epoch ended with."""

    seat: int
    epoch: int

    def __post_init__(self) -> None:
        _check_u32("seat", self.seat)
        _check_u32("epoch", self.epoch)


@dataclass(frozen=True, slots=True)
class Pause:
    """Phases go on no more until `Resume`."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The phase goes on, with the rest of its time."""


@dataclass(frozen=True, slots=True)
class Eject:
    """A member has lied, as the evidence shows: nothing of it counts, and its peer is taken no more.

    Attributes:
        seat: that it has or had.
        evidence: for who reads the journal, at most 64 KiB.
        peer: who had the seat, where that may be over; empty: whoever has it.
        since: the first round whose result of the seat leaves the weights; 0 for none.
    """

    seat: int
    evidence: bytes = b""
    peer: str = ""
    since: int = 0

    def __post_init__(self) -> None:
        _check_u32("seat", self.seat)
        if len(self.evidence) > MAX_EVIDENCE_BYTES:
            raise ValueError(f"evidence has at most {MAX_EVIDENCE_BYTES} bytes")
        _check_u32("since", self.since)
        if len(self.peer) > MAX_PEER_CHARS:
            raise ValueError(f"a peer has at most {MAX_PEER_CHARS} characters")


@dataclass(frozen=True, slots=True)
class Trial:
    """A peer that nobody answers for may take part at weight zero: it is on trial."""

    peer: str

    def __post_init__(self) -> None:
        _check_peer(self.peer, 0)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A claim of a peer on trial was computed again, and holds: it counts from the next round.

    Attributes:
        peer: that was on trial.
        evidence: its signed claim and signed findings, for who reads the journal, at most 64 KiB.
    """

    peer: str
    evidence: bytes = b""

    def __post_init__(self) -> None:
        _check_peer(self.peer, 0)
        if len(self.evidence) > MAX_EVIDENCE_BYTES:
            raise ValueError(f"evidence has at most {MAX_EVIDENCE_BYTES} bytes")


@dataclass(frozen=True, slots=True)
class Refused:
    """A trial is over, and the peer is not taken.

    Attributes:
        peer: that was on trial.
        reason: why, for people.
        evidence: where a claim of its does not hold, as with `Eject`; at most 64 KiB.
    """

    peer: str
    reason: str
    evidence: bytes = b""

    def __post_init__(self) -> None:
        _check_peer(self.peer, 0)
        if not 1 <= len(self.reason) <= MAX_REASON_CHARS:
            raise ValueError(f"a reason has 1 to {MAX_REASON_CHARS} characters")
        if len(self.evidence) > MAX_EVIDENCE_BYTES:
            raise ValueError(f"evidence has at most {MAX_EVIDENCE_BYTES} bytes")


@dataclass(frozen=True, slots=True)
class Stop:
    """The run is to end with the round under way; why, for people."""

    reason: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.reason) <= MAX_REASON_CHARS:
            raise ValueError(f"a reason has 1 to {MAX_REASON_CHARS} characters")


Event = (
    Joined
    | Gone
    | Left
    | Warm
    | Committed
    | Witnessed
    | Unhealthy
    | Checkpointed
    | Pause
    | Resume
    | Eject
    | Trial
    | Admitted
    | Refused
    | Stop
)


def event_json(event: Event) -> dict[str, Any]:
    """An event for JSON; `event_of` reads it."""
    match event:
        case Joined(peer, incarnation) | Gone(peer, incarnation):
            fields: dict[str, Any] = {"peer": peer, "incarnation": incarnation}
        case Left(seat, why):
            fields = {"seat": seat, "why": str(why)}
        case Warm(seat, epoch) | Checkpointed(seat, epoch):
            fields = {"seat": seat, "epoch": epoch}
        case Committed(commitment, signature):
            fields = {"commitment": commitment.json(), "signature": signature.hex()}
        case Witnessed(proof, signature):
            fields = {"proof": proof.json(), "signature": signature.hex()}
        case Unhealthy(by_seat, seats, epoch, number):
            fields = {"by_seat": by_seat, "seats": list(seats), "epoch": epoch, "round": number}
        case Eject(seat, evidence, peer, since):
            fields = {"seat": seat, "evidence": evidence.hex(), "peer": peer}
            fields |= {"since": since} if since else {}
        case Trial(peer):
            fields = {"peer": peer}
        case Admitted(peer, evidence):
            fields = {"peer": peer, "evidence": evidence.hex()}
        case Refused(peer, reason, evidence):
            fields = {"peer": peer, "reason": reason, "evidence": evidence.hex()}
        case Stop(reason):
            fields = {"reason": reason}
        case Pause() | Resume():
            fields = {}
    return {"kind": type(event).__name__.lower(), **fields}


def event_of(value: object) -> Event:
    """The event that `event_json` was of.

    Raises:
        ValueError: it is none, and why.
    """
    fields = Fields(value)
    kind = fields.text("kind")
    if kind not in _READERS:
        raise ValueError(f"there is no event called {kind[:40]!r}")
    event = _READERS[kind](fields)
    fields.end()
    return event


_READERS: Final[Mapping[str, Callable[[Fields], Event]]] = {
    "joined": lambda of: Joined(of.text("peer"), of.number("incarnation")),
    "gone": lambda of: Gone(of.text("peer"), of.number("incarnation")),
    "left": lambda of: Left(of.number("seat"), Health(of.text("why"))),
    "warm": lambda of: Warm(of.number("seat"), of.number("epoch")),
    "committed": lambda of: Committed(
        Commitment.read(of.take("commitment")), of.binary("signature", 0, MAX_SIGNATURE_BYTES)
    ),
    "witnessed": lambda of: Witnessed(
        WitnessProof.read(of.take("proof")), of.binary("signature", 0, MAX_SIGNATURE_BYTES)
    ),
    "unhealthy": lambda of: Unhealthy(
        of.number("by_seat"),
        of.array("seats", _seat),
        of.number("epoch"),
        of.number("round"),
    ),
    "checkpointed": lambda of: Checkpointed(of.number("seat"), of.number("epoch")),
    "pause": lambda of: Pause(),
    "resume": lambda of: Resume(),
    "eject": lambda of: Eject(
        of.number("seat"),
        of.binary("evidence", 0, MAX_EVIDENCE_BYTES),
        of.text("peer"),
        of.number("since") if of.has("since") else 0,
    ),
    "trial": lambda of: Trial(of.text("peer")),
    "admitted": lambda of: Admitted(of.text("peer"), of.binary("evidence", 0, MAX_EVIDENCE_BYTES)),
    "refused": lambda of: Refused(
        of.text("peer"), of.text("reason"), of.binary("evidence", 0, MAX_EVIDENCE_BYTES)
    ),
    "stop": lambda of: Stop(of.text("reason")),
}


def _seat(value: object) -> int:
    if type(value) is not int:
        raise ValueError("a seat is no integer")
    return value


def _check_peer(peer: str, incarnation: int) -> None:
    if not 1 <= len(peer) <= MAX_PEER_CHARS:
        raise ValueError(f"a peer has 1 to {MAX_PEER_CHARS} characters")
    if not 0 <= incarnation < _U64:
        raise ValueError("an incarnation is no u64")


def _check_signature(signature: bytes) -> None:
    if len(signature) > MAX_SIGNATURE_BYTES:
        raise ValueError(f"a signature has at most {MAX_SIGNATURE_BYTES} bytes")


def _check_u32(name: str, value: int) -> None:
    if not 0 <= value < _U32:
        raise ValueError(f"{name} is no u32")
