"""The payloads by which several chains of one run average what they have learned.

When each is sent, and what is done with it, is not known here.

Source: protocol_spec/training/stages.md, "Replicas".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Final

from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.forms import (
    BOOLEAN,
    Map,
    array,
    fixed,
    line,
    optional,
    text,
    uint,
)
from neurogrid.p2p.wire.limits import (
    MAX_ADDRESS_CHARS,
    MAX_ERROR_CHARS,
    MAX_LAYERS,
    MAX_PEER_ID_CHARS,
)
from neurogrid.p2p.wire.maps import MAX_U64
from neurogrid.training.wire.forms import number as real
from neurogrid.training.wire.group import DIGEST_BYTES
from neurogrid.training.wire.runs.forms import COUNT, RUN
from neurogrid.training.wire.runs.stages import (
    MAX_CHAIN_MEMBERS,
    MAX_CHAIN_STAGES,
    MAX_STATE_PIECES,
    PIECE_BLOBS,
    PIECE_NAMES,
    check_once,
    check_pieces,
)

__all__ = ["Average", "Averaged", "Commit", "Committed"]

_CHAIN: Final = uint(MAX_U64, smallest=1)
_STEP: Final = uint(MAX_U64)
_ATTEMPT: Final = uint(MAX_U64, smallest=1)
# Of samples; sums of them are finite.
_MAX_WEIGHT: Final = 1e30
_WEIGHTS: Final = replace(
    array(real(0.0, _MAX_WEIGHT), MAX_CHAIN_MEMBERS),
    read=lambda values: tuple(map(float, values)),
    write=lambda values: list(map(float, values)),
)
_DIGESTS: Final = optional(array(fixed(DIGEST_BYTES), MAX_STATE_PIECES))


@dataclass(frozen=True, slots=True)
class Average(ControlPayload):
    """A leader has the replicas of a round average what they have learned.

    Attributes:
        run: the id of the run.
        chain: u64, from 1, of the receiver.
        step: u64, steps that the receiver's state has made.
        attempt: u64, from 1: each has a greater number than the one before.
        peers: peer ids of the members of all replicas, stage by stage of each, 1 to `MAX_CHAIN_MEMBERS`.
        addresses: a multiaddr for each, where it can be dialled; empty where nobody can.
        stages: of each replica, which add up to `peers`.
        bounds: of each replica one more than it has stages, as in `StageOrder`.
        weights: of each replica, not negative; at least one above zero.
    """

    run: bytes
    chain: int
    step: int
    attempt: int
    peers: tuple[str, ...]
    addresses: tuple[str, ...]
    stages: tuple[int, ...]
    bounds: tuple[int, ...]
    weights: tuple[float, ...]

    _map = Map(
        "Average",
        {
            "run": RUN,
            "chain": _CHAIN,
            "step": _STEP,
            "attempt": _ATTEMPT,
            "peers": array(text(MAX_PEER_ID_CHARS, smallest=1), MAX_CHAIN_MEMBERS),
            "addresses": array(text(MAX_ADDRESS_CHARS), MAX_CHAIN_MEMBERS),
            "stages": array(uint(MAX_CHAIN_STAGES, smallest=1), MAX_CHAIN_MEMBERS),
            "bounds": array(uint(MAX_LAYERS), 2 * MAX_CHAIN_MEMBERS),
            "weights": _WEIGHTS,
        },
    )

    @property
    def chains(self) -> tuple[tuple[str, ...], ...]:
        """The members of each replica, by stage."""
        return tuple(self.peers[start:stop] for start, stop in _spans(self.stages))

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """The bounds of the stages of each replica."""
        spans = _spans([num + 1 for num in self.stages])
        return tuple(self.bounds[start:stop] for start, stop in spans)

    def _check(self) -> None:
        check_once("Average", self.peers)
        if len(self.addresses) != len(self.peers):
            raise violation("Average does not have one address for each member")
        if not self.peers or sum(self.stages) != len(self.peers):
            raise violation(
                f"stages of Average add up to {sum(self.stages)} of {len(self.peers)} members"
            )
        if len(self.weights) != len(self.stages) or not any(self.weights):
            raise violation("Average does not have a weight for each replica, and one above 0")
        if len(self.bounds) != sum(self.stages) + len(self.stages):
            raise violation("bounds of Average are not those of its stages")
        for cut in self.cuts:
            rises = all(start < stop for start, stop in pairwise(cut))
            if cut[0] != 0 or not rises or cut[-1] != self.bounds[-1]:
                raise violation("bounds of Average do not give each replica the same layers")


def _spans(counts: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(counts, initial=0)))


@dataclass(frozen=True, slots=True)
class Averaged(ControlPayload):
    """A member has the average of what it shares with others, or could not come to it.

    Attributes:
        run: the id of the run.
        chain: u64, from 1.
        attempt: u64, from 1, of the `Average`.
        digests: 32 bytes of each of its reductions, in their order; none where it came to nothing.
        reason: why it did; one line, for people.
        lost: the peer id of the member that is the cause; empty for none.
    """

    run: bytes
    chain: int
    attempt: int
    digests: tuple[bytes, ...] = ()
    reason: str = ""
    lost: str = ""

    _map = Map(
        "Averaged",
        {
            "run": RUN,
            "chain": _CHAIN,
            "attempt": _ATTEMPT,
            "digests": _DIGESTS,
            "reason": optional(line(MAX_ERROR_CHARS)),
            "lost": optional(text(MAX_PEER_ID_CHARS)),
        },
    )

    def _check(self) -> None:
        if bool(self.digests) == bool(self.reason):
            raise violation("Averaged has either digests or a reason")


@dataclass(frozen=True, slots=True)
class Commit(ControlPayload):
    """A round is made: its replicas take over what an attempt has come to.

    Attributes:
        run: the id of the run.
        chain: u64, from 1, of the receiver.
        attempt: u64, from 1, of the `Average`.
        step: u64, steps that the state has made after it.
        keeps: the state after it is to be offered.
    """

    run: bytes
    chain: int
    attempt: int
    step: int
    keeps: bool = False

    _map = Map(
        "Commit",
        {
            "run": RUN,
            "chain": _CHAIN,
            "attempt": _ATTEMPT,
            "step": _STEP,
            "keeps": optional(BOOLEAN),
        },
    )


@dataclass(frozen=True, slots=True)
class Committed(ControlPayload):
    """A member has done what `Commit` says.

    Attributes:
        run: the id of the run.
        chain: u64, from 1.
        attempt: u64, from 1, of the `Commit`.
        memory_bytes: u64, the most that it has taken.
        names, blobs: pieces of the state after it, as in `StageOrder`; none where it is not kept.
    """

    run: bytes
    chain: int
    attempt: int
    memory_bytes: int = 0
    names: tuple[str, ...] = ()
    blobs: tuple[bytes, ...] = ()

    _map = Map(
        "Committed",
        {
            "run": RUN,
            "chain": _CHAIN,
            "attempt": _ATTEMPT,
            "memory_bytes": COUNT,
            "names": PIECE_NAMES,
            "blobs": PIECE_BLOBS,
        },
    )

    def _check(self) -> None:
        check_pieces("Committed", self.names, self.blobs)
