"""Commitments to what members computed in a round, and proofs of what witnesses have of others. Pure.

Source: protocol_spec/training/witnessed.md, "Commitments" and "Witness proofs".
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from neurogrid.training.witnessed.filters import FILTER_BYTES, BloomFilter
from neurogrid.training.witnessed.json_fields import Fields
from neurogrid.training.witnessed.merkle import merkle_root

__all__ = ["Commitment", "WitnessProof", "filter_salt", "seat_item"]

_COMMITMENT: Final = b"neurogrid commitment 1\0"
_WITNESS: Final = b"neurogrid witness 1\0"
_SIGNED: Final = b"neurogrid signed 1\0"
_DIGEST: Final = 32
_RUN: Final = 16
_U32: Final = 2**32
_U64: Final = 2**64


@dataclass(frozen=True, slots=True)
class Commitment:
    """Commitment of a member to its result, signed before it gives that to anybody.

    Attributes:
        seat: of the member, u32.
        epoch: of members, u32.
        round: of the run, u32.
        first_batch: the first of the batches that it computed, u64; 0 where there are none.
        num_batches: how many, u32; 0 of a member without batches, which shows by it that it is there.
        result: the blob that is the result, 32 bytes.

    Raises:
        ValueError: a value is out of its range.
    """

    seat: int
    epoch: int
    round: int
    first_batch: int
    num_batches: int
    result: bytes

    def __post_init__(self) -> None:
        _check(self.seat, self.epoch, self.round, self.num_batches)
        if not 0 <= self.first_batch < _U64:
            raise ValueError("first_batch is no u64")
        if len(self.result) != _DIGEST:
            raise ValueError(f"a result is known by {_DIGEST} bytes, not {len(self.result)}")

    def digest(self) -> bytes:
        """SHA-256 of all that it says: what filters and trees have, 32 bytes."""
        numbers = struct.pack(
            "<IIIQI", self.seat, self.epoch, self.round, self.first_batch, self.num_batches
        )
        return hashlib.sha256(_COMMITMENT + numbers + self.result).digest()

    def signed_bytes(self, run: bytes) -> bytes:
        """Bytes that the member signs, in a run of this id of 16 bytes."""
        return _signed(run, self.digest())

    def json(self) -> dict[str, object]:
        """Form for JSON; `read` takes it."""
        return {
            "seat": self.seat,
            "epoch": self.epoch,
            "round": self.round,
            "first_batch": self.first_batch,
            "num_batches": self.num_batches,
            "result": self.result.hex(),
        }

    @classmethod
    def read(cls, value: object) -> Commitment:
        """Read what `json` gave.

        Raises:
            ValueError: it is something else.
        """
        fields = Fields(value)
        found = cls(
            fields.number("seat"),
            fields.number("epoch"),
            fields.number("round"),
            fields.number("first_batch"),
            fields.number("num_batches"),
            fields.binary("result", _DIGEST),
        )
        fields.end()
        return found


@dataclass(frozen=True, slots=True)
class WitnessProof:
    """Proof of a witness: filters of the seats and results that it has, and a root that binds it to just these results.

    Attributes:
        seat: of the witness, u32.
        epoch: of members, u32.
        round: of the run, u32.
        participants: a filter of the seats that took part, itself among them, 128 bytes: those whose results it has,
            and of those without batches, those that it heard of.
        results: a filter of the commitments to results that it has, 128 bytes.
        root: of the tree over these commitments, 32 bytes.

    Raises:
        ValueError: a value is out of its range.
    """

    seat: int
    epoch: int
    round: int
    participants: bytes
    results: bytes
    root: bytes

    def __post_init__(self) -> None:
        _check(self.seat, self.epoch, self.round)
        for each in (self.participants, self.results):
            if len(each) != FILTER_BYTES:
                raise ValueError(f"a filter has {FILTER_BYTES} bytes, not {len(each)}")
        if len(self.root) != _DIGEST:
            raise ValueError(f"a root has {_DIGEST} bytes, not {len(self.root)}")

    @classmethod
    def of(
        cls,
        seat: int,
        seed: bytes,
        epoch: int,
        round_number: int,
        commitments: Iterable[Commitment],
        participants: Iterable[int] = (),
    ) -> WitnessProof:
        """The proof of a witness that has these results.

        Args:
            seat: of the witness.
            seed: of the round.
            epoch: of members.
            round_number: of the run.
            commitments: to results that it has; and those to nothing, of members without batches, that it heard of.
            participants: more seats, of members without batches, that it heard of.
        """
        salt = filter_salt(seed, seat)
        had = list(commitments)
        digests = [each.digest() for each in had if each.num_batches]
        seats = {seat, *participants, *(each.seat for each in had)}
        return cls(
            seat,
            epoch,
            round_number,
            bytes(BloomFilter.of(salt, map(seat_item, seats))),
            bytes(BloomFilter.of(salt, digests)),
            merkle_root(digests),
        )

    def digest(self) -> bytes:
        """SHA-256 of all that it says, 32 bytes."""
        numbers = struct.pack("<III", self.seat, self.epoch, self.round)
        data = _WITNESS + numbers + self.participants + self.results + self.root
        return hashlib.sha256(data).digest()

    def signed_bytes(self, run: bytes) -> bytes:
        """Bytes that the witness signs, in a run of this id of 16 bytes."""
        return _signed(run, self.digest())

    def participants_filter(self, seed: bytes) -> BloomFilter:
        """The filter of seats, to be asked for `seat_item`; seed: of the round."""
        return BloomFilter(filter_salt(seed, self.seat), self.participants)

    def results_filter(self, seed: bytes) -> BloomFilter:
        """The filter of commitments, to be asked for their digests; seed: of the round."""
        return BloomFilter(filter_salt(seed, self.seat), self.results)

    def json(self) -> dict[str, object]:
        """Form for JSON; `read` takes it."""
        return {
            "seat": self.seat,
            "epoch": self.epoch,
            "round": self.round,
            "participants": self.participants.hex(),
            "results": self.results.hex(),
            "root": self.root.hex(),
        }

    @classmethod
    def read(cls, value: object) -> WitnessProof:
        """Read what `json` gave.

        Raises:
            ValueError: it is something else.
        """
        fields = Fields(value)
        found = cls(
            fields.number("seat"),
            fields.number("epoch"),
            fields.number("round"),
            fields.binary("participants", FILTER_BYTES),
            fields.binary("results", FILTER_BYTES),
            fields.binary("root", _DIGEST),
        )
        fields.end()
        return found


def filter_salt(seed: bytes, seat: int) -> bytes:
    """The salt of the filters of a witness on this seat, in a round of this seed: 36 bytes."""
    return seed + struct.pack("<I", seat)


def seat_item(seat: int) -> bytes:
    """A seat as it is put into a filter: 4 bytes."""
    return struct.pack("<I", seat)


def _signed(run: bytes, digest: bytes) -> bytes:
    if len(run) != _RUN:
        raise ValueError(f"a run has {_RUN} bytes, not {len(run)}")
    return _SIGNED + run + digest


def _check(*values: int) -> None:
    if not all(0 <= value < _U32 for value in values):
        raise ValueError("seat, epoch, round and num_batches are u32")
