"""The payloads by which a witnessed run goes through its phases: what the leader says, and what members say and sign.

An Epoch says the whole of what members need to know, so that one that is lost or comes twice does no harm. What a
member commits itself to, and what a witness says that it has, is signed by its identity. When each is sent, and what
becomes of it, is not known here.

Source: protocol_spec/training/witnessed.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.forms import (
    BOOLEAN,
    Form,
    Map,
    array,
    binary,
    fixed,
    line,
    optional,
    text,
    uint,
)
from neurogrid.p2p.wire.limits import MAX_ERROR_CHARS, MAX_PEER_ID_CHARS
from neurogrid.p2p.wire.maps import MAX_U32, MAX_U64
from neurogrid.training.wire.forms import number as real
from neurogrid.training.wire.runs.audits import CLAIM_FORM_BYTES
from neurogrid.training.wire.runs.forms import ADDRESS, BLOB, COUNT, RUN, visible
from neurogrid.training.wire.runs.stages import check_once
from neurogrid.training.wire.runs.types import DEFAULT_RUN_LIMITS
from neurogrid.training.wire.runs.work import MAX_RUN_SOURCES, RANGES, SampleRange

__all__ = [
    "EPOCH_PHASES",
    "EPOCH_STATES",
    "FILTER_BYTES",
    "MAX_EPOCH_PIECES",
    "MAX_EPOCH_SEATS",
    "MEMBER_HEALTH",
    "AgreedResult",
    "Epoch",
    "EpochReport",
    "EpochSeat",
    "RoundCommitment",
    "RoundHealth",
    "RoundProof",
    "RoundWork",
]

EPOCH_PHASES: Final = frozenset(
    {
        "waiting_for_members",
        "warmup",
        "round_train",
        "round_witness",
        "cooldown",
        "finished",
        "paused",
    }
)
"""Phases of a witnessed run."""

MEMBER_HEALTH: Final = frozenset({"healthy", "dropped", "withdrawn", "ejected"})
"""States of health of a member of an epoch."""

EPOCH_STATES: Final = frozenset({"starting", "waiting", "loading", "warm", "training", "kept"})
"""States of a member of a witnessed run."""

MAX_EPOCH_SEATS: Final = 128
"""Members of an epoch."""

MAX_EPOCH_PIECES: Final = 1024
"""Pieces of the weights: of 64 MiB each, 16 billion parameters in float32."""

FILTER_BYTES: Final = 128
"""Bytes of a Bloom filter of 1,024 bits."""

_MAX_SECONDS: Final = 7 * 86_400.0
_MAX_NAME_CHARS: Final = 32
_MAX_PIECE_CHARS: Final = 64
_SEED_BYTES: Final = 32
_DIGEST_BYTES: Final = 32
_SIGNATURE_BYTES: Final = 64
# Of a member: some addresses that can be dialled.
_MAX_SEAT_ADDRESSES: Final = 4
_MAX_SEAT_BYTES: Final = 4 * 1024
_MAX_WORK_BYTES: Final = 64 * 1024
_MAX_AGREED_BYTES: Final = 256
# As long as a signed invitation may be (joining.md).
_MAX_INVITATION_BYTES: Final = 12 * 1024

_EPOCH: Final = optional(uint(MAX_U32))
_ROUND: Final = uint(MAX_U32, smallest=1)
_LATEST: Final = optional(uint(MAX_U32))
_SEATS: Final = optional(array(uint(MAX_U32), MAX_EPOCH_SEATS))
_NAMES: Final = optional(array(visible(_MAX_PIECE_CHARS), MAX_EPOCH_PIECES))
_BLOBS: Final = optional(array(BLOB, MAX_EPOCH_PIECES))
_DIGEST: Final = optional(binary(_DIGEST_BYTES))
_COSINES: Final = replace(
    optional(array(real(-1.0, 1.0), MAX_EPOCH_SEATS)),
    read=lambda items: tuple(map(float, items)),
    write=lambda items: [float(each) for each in items],
)


def _one_of(names: frozenset[str]) -> Form:
    return replace(text(_MAX_NAME_CHARS), names=names)


def _nested(decode: Callable[[bytes], ControlPayload], max_bytes: int) -> Form:
    """An array of maps as byte strings, one a member at most."""
    return replace(
        optional(array(binary(max_bytes, smallest=1), MAX_EPOCH_SEATS)),
        read=lambda items: tuple(map(decode, items)),
        write=lambda items: [item.encode() for item in items],
    )


def _check_digest(what: str, value: bytes) -> None:
    if len(value) not in (0, _DIGEST_BYTES):
        raise violation(f"digest of {what} must have {_DIGEST_BYTES} bytes")


def _check_seats(what: str, seats: list[int]) -> None:
    if not all(first < second for first, second in pairwise(seats)):
        raise violation(f"seats of {what} must rise")


def _check_pieces(what: str, names: tuple[str, ...], blobs: tuple[bytes, ...]) -> None:
    if len(names) != len(blobs):
        raise violation(f"{what} has {len(names)} names of pieces and {len(blobs)} blobs")
    check_once(what, names)


@dataclass(frozen=True, slots=True)
class EpochSeat(ControlPayload):
    """A member of an epoch.

    Attributes:
        seat: u32.
        peer: its peer id.
        incarnation: u64, from 1: of its process.
        addresses: multiaddrs at which it can be dialled, at most 4.
        health: one of `MEMBER_HEALTH`.
        has_pieces: it has the pieces of the weights, for others.
    """

    seat: int
    peer: str
    incarnation: int
    addresses: tuple[str, ...] = ()
    health: str = "healthy"
    has_pieces: bool = False

    _map = Map(
        "a member of an epoch",
        {
            "seat": uint(MAX_U32),
            "peer": text(MAX_PEER_ID_CHARS, smallest=1),
            "incarnation": uint(MAX_U64, smallest=1),
            "addresses": optional(array(ADDRESS, _MAX_SEAT_ADDRESSES)),
            "health": _one_of(MEMBER_HEALTH),
            "has_pieces": optional(BOOLEAN),
        },
        max_bytes=_MAX_SEAT_BYTES,
    )


@dataclass(frozen=True, slots=True)
class RoundWork(ControlPayload):
    """Work of a member in a round: the samples that it trains on.

    Attributes:
        seat: u32.
        first_batch, num_batches: u64, of those of the run.
        ranges: the samples, in order.
    """

    seat: int
    first_batch: int
    num_batches: int
    ranges: tuple[SampleRange, ...]

    _map = Map(
        "work of a round",
        {
            "seat": uint(MAX_U32),
            "first_batch": uint(MAX_U64),
            "num_batches": uint(MAX_U32, smallest=1),
            "ranges": RANGES,
        },
        max_bytes=_MAX_WORK_BYTES,
    )

    def _check(self) -> None:
        if not self.ranges:
            raise violation("work of a round has no samples")


@dataclass(frozen=True, slots=True)
class AgreedResult(ControlPayload):
    """A result that witnesses have agreed on.

    Attributes:
        seat: u32, of whoever it is by.
        first_batch, num_batches: u64, that it is of.
        result: the blob that it is.
    """

    seat: int
    first_batch: int
    num_batches: int
    result: bytes

    _map = Map(
        "an agreed result",
        {
            "seat": uint(MAX_U32),
            "first_batch": uint(MAX_U64),
            "num_batches": uint(MAX_U32, smallest=1),
            "result": BLOB,
        },
        max_bytes=_MAX_AGREED_BYTES,
    )


@dataclass(frozen=True, slots=True)
class Epoch(ControlPayload):
    """Phase of a witnessed run: where the run is, and all that members need to know to do their part.

    Attributes:
        run: the id of the run.
        number: u64, from 1, greater than in any Epoch before.
        phase: one of `EPOCH_PHASES`.
        epoch: u32, of members, from 0.
        round: u32, of the leader's count; 0 before the first.
        step: u64, rounds that are in the weights once `agreed` are applied: the place in the schedule of this round.
        left: seconds until the phase ends at the latest; 0 where it has no end.
        seed: 32 bytes, of the round; empty before the first.
        seats: that were healthy when the round began, rising: among them witnesses are chosen.
        batch_samples: u32, samples of a batch.
        members: of the epoch, their seats rising.
        works: of the round, one a seat at most.
        agreed: results of the round before, in the order in which they are applied; none where they are applied, or
            where nothing was agreed.
        pieces_step: u64, rounds that are in the weights of the pieces.
        pieces_digest: of these weights; empty where there are no pieces.
        names, blobs: pieces of the weights, in order.
        sources: multiaddrs of peers that have slices.
        ends: nothing comes after this round.
        tried: results of members on trial in the round before, which are looked at and not applied.
        taken_back: seats whose results leave the weights once `agreed` is applied, each followed by the first round of
            which.
        watched: seats that stood out, the oddest first, by whom the claims of the last agreed round are drawn.
    """

    run: bytes
    number: int
    phase: str
    epoch: int = 0
    round: int = 0
    step: int = 0
    left: float = 0.0
    seed: bytes = b""
    seats: tuple[int, ...] = ()
    batch_samples: int = 0
    members: tuple[EpochSeat, ...] = ()
    works: tuple[RoundWork, ...] = ()
    agreed: tuple[AgreedResult, ...] = ()
    pieces_step: int = 0
    pieces_digest: bytes = b""
    names: tuple[str, ...] = ()
    blobs: tuple[bytes, ...] = ()
    sources: tuple[str, ...] = ()
    ends: bool = False
    tried: tuple[AgreedResult, ...] = ()
    taken_back: tuple[int, ...] = ()
    watched: tuple[int, ...] = ()

    _map = Map(
        "Epoch",
        {
            "run": RUN,
            "number": uint(MAX_U64, smallest=1),
            "phase": _one_of(EPOCH_PHASES),
            "epoch": _EPOCH,
            "round": _LATEST,
            "step": COUNT,
            "left": optional(real(0.0, _MAX_SECONDS)),
            "seed": optional(binary(_SEED_BYTES)),
            "seats": _SEATS,
            "batch_samples": optional(uint(MAX_U32)),
            "members": _nested(EpochSeat.decode, _MAX_SEAT_BYTES),
            "works": _nested(RoundWork.decode, _MAX_WORK_BYTES),
            "agreed": _nested(AgreedResult.decode, _MAX_AGREED_BYTES),
            "pieces_step": COUNT,
            "pieces_digest": _DIGEST,
            "names": _NAMES,
            "blobs": _BLOBS,
            "sources": optional(array(ADDRESS, MAX_RUN_SOURCES)),
            "ends": optional(BOOLEAN),
            "tried": _nested(AgreedResult.decode, _MAX_AGREED_BYTES),
            "taken_back": optional(array(uint(MAX_U32), 2 * MAX_EPOCH_SEATS)),
            "watched": optional(array(uint(MAX_U32), MAX_EPOCH_SEATS)),
        },
        max_bytes=DEFAULT_RUN_LIMITS.epoch,
    )

    def _check(self) -> None:
        if len(self.seed) not in (0, _SEED_BYTES):
            raise violation(f"seed of Epoch must have {_SEED_BYTES} bytes")
        _check_digest("Epoch", self.pieces_digest)
        if bool(self.pieces_digest) != bool(self.names):
            raise violation("Epoch has pieces without their digest, or a digest without pieces")
        _check_pieces("Epoch", self.names, self.blobs)
        _check_seats("Epoch", list(self.seats))
        _check_seats("Epoch", [each.seat for each in self.members])
        check_once("Epoch", tuple(each.peer for each in self.members))
        for named in (self.works, self.agreed, self.tried):
            seats = [each.seat for each in named]
            if len(set(seats)) != len(seats):
                raise violation("Epoch names a seat twice in one list")
        if len(self.taken_back) % 2:
            raise violation("Epoch takes back results of a seat without a round")
        if self.works and not self.batch_samples:
            raise violation("Epoch has works without batch_samples")


@dataclass(frozen=True, slots=True)
class RoundCommitment(ControlPayload):
    """A member has a result of a round, says which blob it is, and signs that.

    Attributes:
        run: the id of the run.
        seat: u32, its own.
        epoch, round: u32.
        first_batch: u64, the first of the batches that it is of.
        num_batches: u32; 0 of a member without batches, which shows by it that it is there.
        result: the blob that it is; zeros where there are no batches.
        signature: Ed25519, by the member's identity.
        claim: what it has computed, signed (`checks`); empty where a run has no audits, or there are no batches.
    """

    run: bytes
    seat: int
    epoch: int
    round: int
    first_batch: int
    num_batches: int
    result: bytes
    signature: bytes = bytes(_SIGNATURE_BYTES)
    claim: bytes = b""

    _map = Map(
        "Commitment",
        {
            "run": RUN,
            "seat": uint(MAX_U32),
            "epoch": _EPOCH,
            "round": _ROUND,
            "first_batch": COUNT,
            "num_batches": _LATEST,
            "result": BLOB,
            "signature": fixed(_SIGNATURE_BYTES),
            "claim": optional(binary(CLAIM_FORM_BYTES)),
        },
    )

    def _check(self) -> None:
        if len(self.claim) not in (0, CLAIM_FORM_BYTES):
            raise violation(f"claim of Commitment must have {CLAIM_FORM_BYTES} bytes")


@dataclass(frozen=True, slots=True)
class RoundProof(ControlPayload):
    """A witness of a round says what it has, and signs that.

    Attributes:
        run: the id of the run.
        seat: u32, its own.
        epoch, round: u32.
        participants: a filter of the seats whose results it has.
        results: a filter of the digests of commitments whose results it has.
        root: of the tree over these digests.
        signature: Ed25519, by the member's identity.
    """

    run: bytes
    seat: int
    epoch: int
    round: int
    participants: bytes
    results: bytes
    root: bytes
    signature: bytes = bytes(_SIGNATURE_BYTES)

    _map = Map(
        "Witness",
        {
            "run": RUN,
            "seat": uint(MAX_U32),
            "epoch": _EPOCH,
            "round": _ROUND,
            "participants": fixed(FILTER_BYTES),
            "results": fixed(FILTER_BYTES),
            "root": fixed(_DIGEST_BYTES),
            "signature": fixed(_SIGNATURE_BYTES),
        },
    )


@dataclass(frozen=True, slots=True)
class RoundHealth(ControlPayload):
    """A member cannot reach others.

    Attributes:
        run: the id of the run.
        seat: u32, its own.
        epoch, round: u32, as it has been told.
        seats: of those that it cannot reach, rising.
    """

    run: bytes
    seat: int
    epoch: int
    round: int
    seats: tuple[int, ...] = ()

    _map = Map(
        "Health",
        {
            "run": RUN,
            "seat": uint(MAX_U32),
            "epoch": _EPOCH,
            "round": _LATEST,
            "seats": _SEATS,
        },
    )

    def _check(self) -> None:
        _check_seats("Health", list(self.seats))


@dataclass(frozen=True, slots=True)
class EpochReport(ControlPayload):
    """Report of a member of a witnessed run: its state, its weights, and what the results in these were like.

    Attributes:
        run: the id of the run.
        incarnation: u64, from 1: of this process.
        state: one of `EPOCH_STATES`.
        reason: what it waits for, or why it began anew; one line, for people.
        number: u64, of the last Epoch that it has taken in; 0 for none.
        has_weights: whether it has weights that others had, too.
        step: u64, rounds that are in its weights.
        digest: BLAKE3 of its weights; empty where they are not the common ones.
        names, blobs: pieces of its weights that others may fetch, in order; none where it offers none.
        invitation: of the leader, signed, by which it comes into an open run; empty where it has none.
        seats, cosines: of the last round that is in its weights: what each seat gave beside what the others did.
    """

    run: bytes
    incarnation: int
    state: str
    reason: str = ""
    number: int = 0
    has_weights: bool = False
    step: int = 0
    digest: bytes = b""
    names: tuple[str, ...] = ()
    blobs: tuple[bytes, ...] = ()
    invitation: bytes = b""
    seats: tuple[int, ...] = ()
    cosines: tuple[float, ...] = ()

    _map = Map(
        "EpochReport",
        {
            "run": RUN,
            "incarnation": uint(MAX_U64, smallest=1),
            "state": _one_of(EPOCH_STATES),
            "reason": optional(line(MAX_ERROR_CHARS)),
            "number": COUNT,
            "has_weights": optional(BOOLEAN),
            "step": COUNT,
            "digest": _DIGEST,
            "names": _NAMES,
            "blobs": _BLOBS,
            "invitation": optional(binary(_MAX_INVITATION_BYTES)),
            "seats": _SEATS,
            "cosines": _COSINES,
        },
    )

    def _check(self) -> None:
        _check_digest("EpochReport", self.digest)
        _check_pieces("EpochReport", self.names, self.blobs)
        if self.names and not self.digest:
            raise violation("EpochReport has pieces without a digest of them")
        _check_seats("EpochReport", list(self.seats))
        if len(self.seats) != len(self.cosines):
            raise violation("EpochReport has not as many cosines as seats")
