"""State of a witnessed run: its rules, its members, its phase. Pure.

Source: protocol_spec/training/witnessed.md.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from neurogrid.training.witnessed.commitments import Commitment, WitnessProof
from neurogrid.training.witnessed.json_fields import Fields, time_json

__all__ = [
    "MAX_BARRED",
    "MAX_MEMBERS",
    "MAX_PENDING",
    "MAX_TRIALS",
    "EpochEnd",
    "EpochMember",
    "EpochPhase",
    "EpochRules",
    "EpochState",
    "Health",
]

# With so many results, a filter says of another one in forty that it is in it.
MAX_MEMBERS: Final = 128
# Peers that wait for the next epoch.
MAX_PENDING: Final = 1024
# Peers that were ejected, of which the state knows; the one that was ejected first is forgotten first.
MAX_BARRED: Final = 1024
# Peers that take part at weight zero.
MAX_TRIALS: Final = 128
MAX_BATCHES: Final = 65_536
MAX_PEER_CHARS: Final = 128
MAX_REASON_CHARS: Final = 1024
_SEED: Final = 32
# What a state has in its JSON only where it is not empty.
_OPTIONAL: Final[dict[str, object]] = {
    key: [] for key in ("trials", "trial_seats", "tried", "leaving", "taken_back")
}
_DOMAIN: Final = b"neurogrid epoch state 1\0"


class EpochPhase(StrEnum):
    """Phase of a witnessed run."""

    WAITING_FOR_MEMBERS = "waiting_for_members"
    WARMUP = "warmup"
    ROUND_TRAIN = "round_train"
    ROUND_WITNESS = "round_witness"
    COOLDOWN = "cooldown"
    FINISHED = "finished"
    PAUSED = "paused"


class Health(StrEnum):
    """Whether a member is one, and why not."""

    HEALTHY = "healthy"
    DROPPED = "dropped"
    WITHDRAWN = "withdrawn"
    EJECTED = "ejected"


class EpochEnd(StrEnum):
    """Reason that the rounds of an epoch are over; NONE while they are not."""

    NONE = ""
    ROUNDS = "rounds"
    MEMBERS = "members"
    QUORUM = "quorum"
    NOTHING_AGREED = "nothing_agreed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EpochRules:
    """Rules of epochs, as a run file has them.

    Attributes:
        min_members: below which an epoch does not begin, and a running one ends with the round.
        max_members: more wait.
        rounds: of an epoch.
        batches: of a round, all members together; 0: one for each trainer.
        warmup: seconds, at most, of the phase; the next three, too.
        train: the same.
        witness: the same.
        cooldown: the same.
        witnesses: of a round; 0: all members.
        auditors: members of a round that compute again what others have, in place of batches of their own.
        max_rounds: of the run; None for no such end.

    Raises:
        ValueError: a value is out of its range.
    """

    min_members: int
    max_members: int
    rounds: int
    batches: int
    warmup: float
    train: float
    witness: float
    cooldown: float
    witnesses: int = 0
    auditors: int = 0
    max_rounds: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.min_members <= self.max_members <= MAX_MEMBERS:
            raise ValueError(
                f"1 <= min_members <= max_members <= {MAX_MEMBERS} does not hold for "
                f"{self.min_members} and {self.max_members}"
            )
        if self.rounds < 1 or (self.max_rounds is not None and self.max_rounds < 1):
            raise ValueError("rounds and max_rounds are at least 1")
        if not 0 <= self.batches <= MAX_BATCHES:
            raise ValueError(f"batches must be from 0 to {MAX_BATCHES}, not {self.batches}")
        if self.witnesses < 0 or self.auditors < 0:
            raise ValueError("witnesses and auditors are at least 0")
        for seconds in (self.warmup, self.train, self.witness, self.cooldown):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"a phase lasts a time above 0, not {seconds}")

    def limit(self, phase: EpochPhase) -> float | None:
        """Seconds after which time alone ends a phase; None where it does not."""
        return {
            EpochPhase.WARMUP: self.warmup,
            EpochPhase.ROUND_TRAIN: self.train,
            EpochPhase.ROUND_WITNESS: self.witness,
            EpochPhase.COOLDOWN: self.cooldown,
        }.get(phase)


@dataclass(frozen=True, slots=True)
class EpochMember:
    """A member of an epoch.

    Attributes:
        seat: that it has in the run; seats are counted from 0, and none is given again.
        peer: its peer id.
        incarnation: its process, u64.
        health: whether it is still a member.
    """

    seat: int
    peer: str
    incarnation: int
    health: Health = Health.HEALTHY

    def json(self) -> list[object]:
        """Form for JSON; `read` takes it."""
        return [self.seat, self.peer, self.incarnation, str(self.health)]

    @classmethod
    def read(cls, value: object) -> EpochMember:
        """Read what `json` gave.

        Raises:
            ValueError: it is something else.
        """
        if not isinstance(value, list) or len(value) != 4:
            raise ValueError("a member has a seat, a peer, an incarnation and a health")
        seat, peer, incarnation, health = value
        return cls(_u32(seat), *_pending([peer, incarnation]), Health(health))


@dataclass(frozen=True, slots=True)
class EpochState:
    """State of a witnessed run: all that `tick` needs to go on.

    Attributes:
        phase: what it is about.
        began: time at which the phase began, in seconds of the clock that `tick` is told of.
        epoch: of members, from 0.
        round: of the run, from 1: rounds made, and 1 more while one is under way.
        round_of_epoch: of the epoch, from 1; 0 before its first.
        seed: of the round, 32 bytes; zeros before the first.
        members: of the epoch, by seat; those that left it stay until it is over.
        pending: peers with their incarnations that wait, in the order in which they came.
        ready: seats that are warm, in this epoch.
        commitments: of the round, by seat.
        proofs: of the round, by seat.
        agreed: of the round before: to be applied, in this order, in the round under way or in the cooldown.
        paused: the phase that a pause keeps; None where there is none.
        reason: why the run is to end, for people; empty while it is not.
        elapsed: seconds of the paused phase that were over when it was paused.
        seats: healthy when the round began, ascending: among them trainers, auditors and witnesses are chosen.
        first_batch: of the round, counted over the run.
        num_batches: of the round.
        next_batch: the first of the next round that is made, or of the one under way.
        next_seat: the one that the next member gets.
        checkpointed: seats that have kept the weights of the epoch.
        complaints: of the round, who cannot reach whom: pairs of seats, ascending.
        barred: peers that were ejected, and are taken no more; in the order in which that happened.
        ended: why the rounds of the epoch are over.
        trials: peers that are on trial, in the order in which they came: what they give has the weight zero.
        trial_seats: of healthy members on trial when the round began, ascending.
        tried: results of trial seats that enough witnesses had, of the round before: not to be applied.
        leaving: seats whose results leave the weights when the next round is made, each with the first round of which.
        taken_back: those whose results leave with `agreed`, once that is applied.
    """

    phase: EpochPhase = EpochPhase.WAITING_FOR_MEMBERS
    began: float = 0.0
    epoch: int = 0
    round: int = 0
    round_of_epoch: int = 0
    seed: bytes = bytes(_SEED)
    members: tuple[EpochMember, ...] = ()
    pending: tuple[tuple[str, int], ...] = ()
    ready: frozenset[int] = frozenset()
    commitments: tuple[Commitment, ...] = ()
    proofs: tuple[WitnessProof, ...] = ()
    agreed: tuple[Commitment, ...] = ()
    paused: EpochPhase | None = None
    reason: str = ""
    elapsed: float = 0.0
    seats: tuple[int, ...] = ()
    first_batch: int = 0
    num_batches: int = 0
    next_batch: int = 0
    next_seat: int = 0
    checkpointed: frozenset[int] = frozenset()
    complaints: tuple[tuple[int, int], ...] = ()
    barred: tuple[str, ...] = ()
    ended: EpochEnd = EpochEnd.NONE
    trials: tuple[str, ...] = ()
    trial_seats: tuple[int, ...] = ()
    tried: tuple[Commitment, ...] = ()
    leaving: tuple[tuple[int, int], ...] = ()
    taken_back: tuple[tuple[int, int], ...] = ()

    @property
    def going(self) -> EpochPhase:
        """The phase, or the one that a pause keeps."""
        return self.phase if self.paused is None else self.paused

    @property
    def has_round(self) -> bool:
        """Whether a round is under way, paused or not."""
        return self.going in (EpochPhase.ROUND_TRAIN, EpochPhase.ROUND_WITNESS)

    @property
    def made(self) -> int:
        """Rounds of the run in which something was agreed."""
        return self.round - self.has_round

    @property
    def healthy(self) -> tuple[int, ...]:
        """Seats of healthy members, ascending."""
        return tuple(each.seat for each in self.members if each.health is Health.HEALTHY)

    @property
    def counted(self) -> tuple[int, ...]:
        """Seats of healthy members that are not on trial, ascending."""
        return tuple(
            each.seat
            for each in self.members
            if each.health is Health.HEALTHY and each.peer not in self.trials
        )

    def member(self, seat: int) -> EpochMember | None:
        """The member on a seat, healthy or not; None if there is none."""
        return next((each for each in self.members if each.seat == seat), None)

    def json(self) -> dict[str, Any]:
        """Form for JSON; `read` takes it."""
        optional = {
            "trials": list(self.trials),
            "trial_seats": list(self.trial_seats),
            "tried": [each.json() for each in self.tried],
            "leaving": [list(each) for each in self.leaving],
            "taken_back": [list(each) for each in self.taken_back],
        }
        return {
            "phase": str(self.phase),
            "began": time_json(self.began),
            "epoch": self.epoch,
            "round": self.round,
            "round_of_epoch": self.round_of_epoch,
            "seed": self.seed.hex(),
            "members": [each.json() for each in self.members],
            "pending": [list(each) for each in self.pending],
            "ready": sorted(self.ready),
            "commitments": [each.json() for each in self.commitments],
            "proofs": [each.json() for each in self.proofs],
            "agreed": [each.json() for each in self.agreed],
            "paused": "" if self.paused is None else str(self.paused),
            "reason": self.reason,
            "elapsed": time_json(self.elapsed),
            "seats": list(self.seats),
            "first_batch": self.first_batch,
            "num_batches": self.num_batches,
            "next_batch": self.next_batch,
            "next_seat": self.next_seat,
            "checkpointed": sorted(self.checkpointed),
            "complaints": [list(each) for each in self.complaints],
            "barred": list(self.barred),
            "ended": str(self.ended),
            **{key: each for key, each in optional.items() if each},
        }

    @classmethod
    def read(cls, value: object) -> EpochState:
        """Read what `json` gave.

        Raises:
            ValueError: it is something else.
        """
        fields = Fields({**_OPTIONAL, **value} if isinstance(value, dict) else value)
        paused = fields.text("paused")
        found = cls(
            phase=EpochPhase(fields.text("phase")),
            began=fields.time("began"),
            epoch=fields.number("epoch"),
            round=fields.number("round"),
            round_of_epoch=fields.number("round_of_epoch"),
            seed=fields.binary("seed", _SEED),
            members=fields.array("members", EpochMember.read),
            pending=fields.array("pending", _pending),
            ready=frozenset(fields.array("ready", _u32)),
            commitments=fields.array("commitments", Commitment.read),
            proofs=fields.array("proofs", WitnessProof.read),
            agreed=fields.array("agreed", Commitment.read),
            paused=EpochPhase(paused) if paused else None,
            reason=fields.text("reason", MAX_REASON_CHARS),
            elapsed=fields.time("elapsed"),
            seats=fields.array("seats", _u32),
            first_batch=fields.number("first_batch"),
            num_batches=fields.number("num_batches"),
            next_batch=fields.number("next_batch"),
            next_seat=fields.number("next_seat"),
            checkpointed=frozenset(fields.array("checkpointed", _u32)),
            complaints=fields.array("complaints", _complaint),
            barred=fields.array("barred", _peer),
            ended=EpochEnd(fields.text("ended")),
            trials=fields.array("trials", _peer),
            trial_seats=fields.array("trial_seats", _u32),
            tried=fields.array("tried", Commitment.read),
            leaving=fields.array("leaving", _complaint),
            taken_back=fields.array("taken_back", _complaint),
        )
        fields.end()
        return found

    def digest(self) -> bytes:
        """SHA-256 of the whole state, 32 bytes: who folded the same journal has the same."""
        text = json.dumps(self.json(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(_DOMAIN + text.encode()).digest()


def _u32(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**32:
        raise ValueError("a seat is no u32")
    return value


def _peer(value: object) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_PEER_CHARS:
        raise ValueError(f"a peer is no text of 1 to {MAX_PEER_CHARS} characters")
    return value


def _pending(value: object) -> tuple[str, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("who waits is a peer with its incarnation")
    peer, incarnation = value
    if type(incarnation) is not int or not 0 <= incarnation < 2**64:
        raise ValueError("an incarnation is no u64")
    return _peer(peer), incarnation


def _complaint(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("a complaint is of one seat about another")
    return _u32(value[0]), _u32(value[1])
