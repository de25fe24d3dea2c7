"""The payloads by which members are told what to do, and tell what they did.

Each says the whole state of its sender, as far as the other needs it: one that is lost or comes twice does no harm.

Source: protocol_spec/training/runs.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

from neurogrid.p2p.wire.blob_id import BLOB_ID_BYTES
from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.forms import (
    BOOLEAN,
    Form,
    Map,
    array,
    binary,
    line,
    nullable,
    one_of,
    optional,
    text,
    uint,
)
from neurogrid.p2p.wire.limits import MAX_ERROR_CHARS, MAX_PEER_ID_CHARS
from neurogrid.p2p.wire.maps import MAX_U32, MAX_U64
from neurogrid.training.wire.forms import number as real
from neurogrid.training.wire.group import MAX_GROUP_MEMBERS
from neurogrid.training.wire.runs.forms import ADDRESS, ADDRESSES, COUNT, RUN

__all__ = [
    "MAX_HELD_SLICES",
    "MAX_RANGES",
    "MAX_RUN_SOURCES",
    "MAX_WORKS",
    "MEMBER_STATES",
    "Order",
    "RANGES",
    "Report",
    "SYNC_SHARE",
    "SampleRange",
    "Work",
]

MEMBER_STATES: Final = frozenset(
    {"starting", "ready", "training", "averaging", "waiting", "failed"}
)
"""States of a member."""

MAX_RANGES: Final = 4096
"""Ranges of samples in one work."""

MAX_WORKS: Final = 4
"""Works in one order: the one at hand, and those after it."""

MAX_HELD_SLICES: Final = 65_536
"""Slices in one report."""

MAX_RUN_SOURCES: Final = 64
"""Addresses in one order of peers that have slices."""

MAX_WEIGHT: Final = 2**53
"""Weight of a work: weights are added as float64, and are exact up to here."""

SYNC_SHARE: Final = 2.0**-20
"""Weight that each unit of a work without samples adds to a contribution: a round of nothing else weighs less than 1,
by which all see that nothing was trained for it."""

_MAX_VALUE: Final = 1e30
_DIGEST_BYTES: Final = 32
# Ranges of three integers of 5 bytes, and 4 KiB for the other keys.
_MAX_NESTED: Final = 64 * 1024


class SampleRange(NamedTuple):
    """Samples of one slice.

    Attributes:
        slice: u32, its number in the manifest.
        start, stop: u32, the samples [start, stop) of it; at least one.
    """

    slice: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        """Number of samples in the range."""
        return self.stop - self.start


def _read_ranges(flat: tuple[int, ...]) -> tuple[SampleRange, ...]:
    if len(flat) % 3:
        raise violation("ranges must be triples of slice, start and stop")
    ranges = tuple(map(SampleRange, flat[::3], flat[1::3], flat[2::3]))
    for r in ranges:
        if r.start >= r.stop:
            raise violation(f"a range of samples from {r.start} to {r.stop} has none")
    return ranges


def _write_ranges(ranges: Any) -> list[int]:
    return [bound for r in ranges for bound in (r.slice, r.start, r.stop)]


RANGES: Final = replace(
    array(uint(MAX_U32), 3 * MAX_RANGES), read=_read_ranges, write=_write_ranges
)
"""Samples in order."""


def _nested(decode: Callable[[bytes], ControlPayload], max_items: int) -> Form:
    """An array of maps as byte strings."""
    return replace(
        optional(array(binary(_MAX_NESTED, smallest=1), max_items)),
        read=lambda items: tuple(map(decode, items)),
        write=lambda items: [item.encode() for item in items],
    )


@dataclass(frozen=True, slots=True)
class Work(ControlPayload):
    """Work of a member: samples to train on, and to contribute then.

    Attributes:
        number: u64, from 1, of those of its seat.
        position: inner steps behind its first batch: the place in the schedule.
        stride: inner steps that each of its batches counts for.
        batch_samples: u32, from 1: of each batch; the last may have fewer.
        weight: u64, from 1: what it adds to the weight of the contribution, by `SYNC_SHARE` where it has no samples.
        ranges: the samples in order; none where only what is there is to be contributed.
    """

    number: int
    position: float
    stride: float
    batch_samples: int
    weight: int
    ranges: tuple[SampleRange, ...] = ()

    _map = Map(
        "a work",
        {
            "number": uint(MAX_U64, smallest=1),
            "position": real(0.0, _MAX_VALUE),
            "stride": real(0.0, _MAX_VALUE),
            "batch_samples": uint(MAX_U32, smallest=1),
            "weight": uint(MAX_WEIGHT, smallest=1),
            "ranges": RANGES,
        },
        max_bytes=_MAX_NESTED,
    )

    @property
    def share(self) -> float:
        """Weight that the work adds to that of the contribution."""
        return float(self.weight) if self.ranges else self.weight * SYNC_SHARE


@dataclass(frozen=True, slots=True)
class Order(ControlPayload):
    """Order of a leader: the whole of what a member is to do.

    Attributes:
        run: the id of the run.
        number: u64, from 1, greater than in any order before.
        incarnation: u64, from 1: of the group's member that it is for; another one does nothing of it.
        works: the work at hand and those after it; none while there is nothing to do.
        sources: multiaddrs of peers that have slices, with their peer ids.
        ends: nothing comes after these works.
        term: u64, of the leader; 0 of the first one.
        seat: u32, that the works are of; None for that of the `Start`.
        expects: peer ids of those that have works, for a member that leads the group: rounds wait for them.
    """

    run: bytes
    number: int
    incarnation: int
    works: tuple[Work, ...] = ()
    sources: tuple[str, ...] = ()
    ends: bool = False
    term: int = 0
    seat: int | None = None
    expects: tuple[str, ...] = ()

    _map = Map(
        "Order",
        {
            "run": RUN,
            "number": uint(MAX_U64, smallest=1),
            "incarnation": uint(MAX_U64, smallest=1),
            "works": _nested(Work.decode, MAX_WORKS),
            "sources": optional(array(ADDRESS, MAX_RUN_SOURCES)),
            "ends": optional(BOOLEAN),
            "term": COUNT,
            "seat": nullable(uint(MAX_U32)),
            "expects": optional(array(text(MAX_PEER_ID_CHARS, smallest=1), MAX_GROUP_MEMBERS)),
        },
    )

    def _check(self) -> None:
        if not all(first.number < second.number for first, second in pairwise(self.works)):
            raise violation("works of an order must be in order, and none twice")


@dataclass(frozen=True, slots=True)
class Report(ControlPayload):
    """Report of a member to its leader: the whole of how it stands.

    Attributes:
        run: the id of the run.
        seat: u32, the member's.
        state: one of `MEMBER_STATES`.
        reason: why it failed, or what it waits for; one line, for people.
        incarnation: u64, of this process in the group; 0 before it has joined and has the others' weights.
        round: u64, the last that is in its weights.
        done: u64, the number of the last work that it has trained; 0 for none.
        batches_done: u32, of the work at hand.
        batch_seconds: a moving mean of what a batch takes; 0 while it is not known.
        loss_sum: over the label tokens since it joined.
        num_tokens: u64, label tokens since it joined.
        num_samples: u64, the same in samples.
        held: slices that it has, by their numbers, rising.
        group_addresses: multiaddrs at which members of the group can dial it.
        saved_round, saved: the round after which its optimiser was saved last, and the blob that it is; 0 and empty
            for none.
        memory_bytes: that its trainer has taken at most.
        micro_batch: samples that it computes at once; 0 while it is not known.
        gradient_norm: of the last batch, before clipping; None where there is none.
        difference_norm: of the last difference; None where there is none.
        cosine: between the last difference and the aggregate of its round; None where there is none.
        digest: BLAKE3 of the common weights after `round`, as float32 in little endian; empty while it has none.
        sent_bytes, received_bytes: u64, of its averaging since it joined.
    """

    run: bytes
    seat: int
    state: str
    reason: str = ""
    incarnation: int = 0
    round: int = 0
    done: int = 0
    batches_done: int = 0
    batch_seconds: float = 0.0
    loss_sum: float = 0.0
    num_tokens: int = 0
    num_samples: int = 0
    held: tuple[int, ...] = ()
    group_addresses: tuple[str, ...] = ()
    saved_round: int = 0
    saved: bytes = b""
    memory_bytes: int = 0
    micro_batch: int = 0
    gradient_norm: float | None = None
    difference_norm: float | None = None
    cosine: float | None = None
    digest: bytes = b""
    sent_bytes: int = 0
    received_bytes: int = 0

    _map = Map(
        "Report",
        {
            "run": RUN,
            "seat": uint(MAX_U32),
            "state": one_of(MEMBER_STATES),
            "reason": optional(line(MAX_ERROR_CHARS)),
            "incarnation": COUNT,
            "round": COUNT,
            "done": COUNT,
            "batches_done": optional(uint(MAX_U32)),
            "batch_seconds": optional(real(0.0, 86_400.0)),
            "loss_sum": optional(real(-_MAX_VALUE, _MAX_VALUE)),
            "num_tokens": COUNT,
            "num_samples": COUNT,
            "held": optional(array(uint(MAX_U32), MAX_HELD_SLICES)),
            "group_addresses": ADDRESSES,
            "saved_round": COUNT,
            "saved": optional(binary(BLOB_ID_BYTES)),
            "memory_bytes": COUNT,
            "micro_batch": optional(uint(MAX_U32)),
            "gradient_norm": nullable(real(0.0, _MAX_VALUE)),
            "difference_norm": nullable(real(0.0, _MAX_VALUE)),
            "cosine": nullable(real(-1.0, 1.0)),
            "digest": optional(binary(_DIGEST_BYTES)),
            "sent_bytes": COUNT,
            "received_bytes": COUNT,
        },
    )

    def _check(self) -> None:
        if not all(first < second for first, second in pairwise(self.held)):
            raise violation("held of Report must rise")
        if len(self.saved) not in (0, BLOB_ID_BYTES) or bool(self.saved) != bool(self.saved_round):
            raise violation("Report has a saved state without its round, or a round without it")
        if len(self.digest) not in (0, _DIGEST_BYTES):
            raise violation(f"digest of Report must have {_DIGEST_BYTES} bytes")
        if self.state == "failed" and not self.reason:
            raise violation("Report has failed without a reason")
