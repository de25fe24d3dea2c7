"""Claims: what a member says that it computed in a round, so that somebody else can compute it again.

"From the common weights with this digest and my own momentum with this digest, on these samples, with these settings,
came this result, and my momentum afterwards has this digest." The digests of the momentum make a chain from claim to
claim: whoever knows one vector of it can compute the next.

A momentum afterwards there are two of: what the member sent leaves it if the result is agreed on, and stays if not.
Which of them the next claim begins with, everybody knows.

Pure: bytes and digests, no tensors.

Source: protocol_spec/training/checks.md.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.wire.maps import MAX_U32, MAX_U64
from neurogrid.training.checks.signed import VERSION, Purpose, malformed

__all__ = ["CLAIM_BYTES", "Claim", "Samples", "Settings", "open_claim", "sign_claim"]

DIGEST_BYTES: Final = 32
RUN_BYTES: Final = 16

# Version, run, seat, incarnation, number, round, and seven digests.
_BODY: Final = struct.Struct("<B16sIQQQ32s32s32s32s32s32s32s")
_PURPOSE: Final = Purpose("claim", _BODY.size)
CLAIM_BYTES: Final = _PURPOSE.num_bytes
"""Bytes of a signed claim."""

_MAX_RANGES: Final = 4096
_MAX_TENSORS: Final = 65_536
_MAX_DIMS: Final = 16


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim of a member about what it computed in a round.

    Attributes:
        run: 16 bytes.
        seat: of the member in the run.
        incarnation: of its process; not 0.
        number: of the claim among those of this seat and incarnation, from 1, without gaps.
        round: of the run, from 1.
        weights: digest of the common weights that it began from.
        settings: digest of how gradients become results, as of `Settings`.
        samples: digest of what it trained on, as of `Samples`.
        before: blob id of its momentum before the round.
        kept: of its momentum with the gradient in it, before anything left.
        sent: of the same, without what the member sent.
        result: blob id of the result.
    """

    run: bytes
    seat: int
    incarnation: int
    number: int
    round: int
    weights: bytes
    settings: bytes
    samples: bytes
    before: bytes
    kept: bytes
    sent: bytes
    result: bytes

    def __post_init__(self) -> None:
        if len(self.run) != RUN_BYTES:
            raise ValueError(f"a run is {RUN_BYTES} bytes, not {len(self.run)}")
        for digest in self._digests:
            if len(digest) != DIGEST_BYTES:
                raise ValueError(f"a digest is {DIGEST_BYTES} bytes, not {len(digest)}")
        if not 0 <= self.seat <= MAX_U32:
            raise ValueError(f"no seat is {self.seat}")
        if not all(1 <= each <= MAX_U64 for each in (self.incarnation, self.number, self.round)):
            raise ValueError(
                f"incarnation, number and round are at least 1, not {self.incarnation}, {self.number} and {self.round}"
            )

    @property
    def _digests(self) -> tuple[bytes, ...]:
        return (
            self.weights,
            self.settings,
            self.samples,
            self.before,
            self.kept,
            self.sent,
            self.result,
        )

    def encode(self) -> bytes:
        """The body."""
        return _BODY.pack(
            VERSION,
            self.run,
            self.seat,
            self.incarnation,
            self.number,
            self.round,
            *self._digests,
        )

    @classmethod
    def decode(cls, body: bytes) -> Claim:
        """The claim of a body.

        Raises:
            RemoteProtocolError: it is none.
        """
        if len(body) != _BODY.size:
            raise malformed(f"a claim has {_BODY.size} B, and this one {len(body)}")
        version, *values = _BODY.unpack(body)
        if version != VERSION:
            raise malformed(f"the claim is of version {version}; this program reads {VERSION}")
        try:
            return cls(*values)
        except ValueError as exc:
            raise malformed(f"the claim is none: {exc}") from exc

    def digest(self) -> bytes:
        """SHA-256 of the body, with a domain: what findings name a claim by."""
        return hashlib.sha256(b"neurogrid/checks/1/claim digest\0" + self.encode()).digest()

    @property
    def left(self) -> tuple[bytes, ...]:
        """Blob ids that the momentum may have after it, that of before among them: a round not agreed on is undone."""
        return self.before, self.kept, self.sent

    def momentum_after(self, *, is_agreed: bool) -> bytes:
        """The blob id of the momentum that the next claim begins with."""
        return self.sent if is_agreed else self.kept


def sign_claim(claim: Claim, identity: Identity) -> bytes:
    """The signed form of a claim, `CLAIM_BYTES` long."""
    return _PURPOSE.sign(claim.encode(), identity)


def open_claim(data: bytes, signer: str) -> Claim:
    """Read a signed claim.

    Args:
        signer: the peer id of the member on its seat.

    Raises:
        RemoteProtocolError: not signed by that peer (UNAUTHORIZED), or malformed.
    """
    return Claim.decode(_PURPOSE.open(data, signer))


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples that a member trains on in a round, with the seed of all that is random in it.

    Attributes:
        ranges: number of a slice in the manifest, and the samples [start, stop) of it, in the order of training.
        step: the place in the schedule.
        seed: of the random numbers.
    """

    ranges: tuple[tuple[int, int, int], ...]
    step: int
    seed: int

    def digest(self) -> bytes:
        """SHA-256 of all of it.

        Raises:
            ValueError: a value is out of its range.
        """
        if not 1 <= len(self.ranges) <= _MAX_RANGES:
            raise ValueError(f"{len(self.ranges)} ranges: there are 1 to {_MAX_RANGES}")
        if not all(0 <= each <= MAX_U64 for each in (self.step, self.seed)):
            raise ValueError(
                f"step and seed must fit into 64 bits, not be {self.step}, {self.seed}"
            )
        packed = struct.pack("<QQI", self.step, self.seed, len(self.ranges))
        for slice_, start, stop in self.ranges:
            if not (0 <= slice_ <= MAX_U32 and 0 <= start < stop <= MAX_U32):
                raise ValueError(f"samples {start} to {stop} of slice {slice_} are none")
            packed += struct.pack("<III", slice_, start, stop)
        return hashlib.sha256(b"neurogrid/checks/1/samples\0" + packed).digest()


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings by which a gradient becomes a result: the same for all members of a run.

    Attributes:
        shapes: of the tensors in the vector of the weights, in order.
        top_k, max_side, decay, is_one_bit: as of `neurogrid.training.optimizers.Distro`.
    """

    shapes: tuple[tuple[int, ...], ...]
    top_k: int
    max_side: int = 64
    decay: float = 0.999
    is_one_bit: bool = False

    @property
    def num_elements(self) -> int:
        """Elements of the vector."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def sizes(self) -> list[int]:
        """Elements of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    def digest(self, lr: float) -> bytes:
        """SHA-256 of the settings of a round.

        Args:
            lr: the learning rate of the round.

        Raises:
            ValueError: a value is out of its range.
        """
        if not (math.isfinite(lr) and lr > 0):
            raise ValueError(f"the learning rate must be finite and above 0, not {lr}")
        if not all(1 <= each <= MAX_U32 for each in (self.top_k, self.max_side)):
            raise ValueError(
                f"top_k and max_side must be at least 1, not {self.top_k}, {self.max_side}"
            )
        if not 0 <= self.decay <= 1:
            raise ValueError(f"the decay must be in [0, 1], not {self.decay}")
        if any(not 0 <= side <= MAX_U32 for shape in self.shapes for side in shape):
            raise ValueError("a tensor has a side that no tensor has")
        if len(self.shapes) > _MAX_TENSORS or any(len(shape) > _MAX_DIMS for shape in self.shapes):
            raise ValueError("more tensors, or dimensions of one, than a model has")
        packed = struct.pack(
            "<IIddBI", self.top_k, self.max_side, self.decay, lr, self.is_one_bit, len(self.shapes)
        )
        return hashlib.sha256(
            b"neurogrid/checks/1/settings\0" + packed + _packed_shapes(self.shapes)
        ).digest()


def _packed_shapes(shapes: Sequence[Sequence[int]]) -> bytes:
    return b"".join(struct.pack(f"<I{len(shape)}Q", len(shape), *shape) for shape in shapes)
