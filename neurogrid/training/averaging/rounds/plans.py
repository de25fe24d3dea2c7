"""The plan of a round: who reduces what, and its form on the wire."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.maps import MAX_U32
from neurogrid.training.averaging.plan import ReductionPlan, Way
from neurogrid.training.averaging.shares import fair_shares
from neurogrid.training.wire import Decision, GroupSettings, Plan, peers_at, place_peers
from neurogrid.training.wire.types import MAX_CHUNK_BYTES

__all__ = [
    "MIN_CHUNK_ELEMENTS",
    "UNMEASURED",
    "Shape",
    "cut_chunks",
    "make_plan",
    "read_plan",
    "write_plan",
]

# A reducer begins to answer when it has the first of its chunks.
_CHUNKS_OF_A_PART: Final = 4

# What a row hands on is in float32, and fits a message.
_MOST_OF_A_SUM: Final = MAX_CHUNK_BYTES // 4

MIN_CHUNK_ELEMENTS: Final = 4096
"""Elements of a chunk, where the vector has as many and the settings allow it."""

UNMEASURED: Final = 1.0
"""Bytes a second that stand for a bandwidth that is not known yet."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The vector that a group averages.

    Attributes:
        num_elements: float32 elements.
        block: elements of which a chunk has a multiple, for the codecs of the group.
    """

    num_elements: int
    block: int = 1


def cut_chunks(num_chunks: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Cut chunks into the parts of reducers, in proportion to what each can carry.

    Args:
        num_chunks: chunks of the vector.
        shares: of each reducer, not negative, at least one above zero.

    Returns:
        One number more than `shares`, from 0 to `num_chunks`, rising.
    """
    total = sum(shares)
    cuts, sum_so_far = [0], 0.0
    for share in shares[:-1]:
        sum_so_far += share
        cuts.append(min(num_chunks, round(num_chunks * sum_so_far / total)))
    return (*cuts, num_chunks)


def make_plan(
    settings: GroupSettings,
    shape: Shape,
    *,
    leader: str,
    weights: Mapping[str, float],
    bandwidths: Mapping[str, float],
    reduction: int,
) -> ReductionPlan:
    """The plan of one attempt at a round.

    Args:
        leader: its peer id, which reduces all where it is a server, or where nobody else can.
        weights: of each contributor, by peer id, in order.
        bandwidths: bytes a second of those that could reduce; 0 for those that nobody can dial, `UNMEASURED` where it
            is not known, which counts as the mean of the others.
        reduction: u64, by which the attempt is known.
    """
    if settings.way == "grid":
        grid = _grid(settings, shape, weights, bandwidths, reduction)
        if grid is not None:
            return grid
    if settings.way == "everybody":
        shares: dict[str, float] = {}
    elif settings.way == "server":
        shares = {leader: 1.0}
    else:
        shares = _shares(weights, bandwidths) or {leader: 1.0}
    chunk_elements = _chunk_elements(settings, shape, len(shares) or len(weights))
    num_chunks = -(-shape.num_elements // chunk_elements)
    return ReductionPlan(
        reduction=reduction,
        members=tuple(weights),
        weights=tuple(weights.values()),
        reducers=tuple(shares),
        cuts=cut_chunks(num_chunks, tuple(shares.values())) if shares else (),
        num_elements=shape.num_elements,
        chunk_elements=chunk_elements,
        codec=settings.codec,
        result_codec=settings.result_codec,
        aggregator=settings.aggregator,
        way=Way.EVERYBODY if settings.way == "everybody" else Way.BUTTERFLY,
    )


def _grid(
    settings: GroupSettings,
    shape: Shape,
    weights: Mapping[str, float],
    bandwidths: Mapping[str, float],
    reduction: int,
) -> ReductionPlan | None:
    """A plan with as many rows as the root of the number of members; None for few, or where a row could reduce nothing.

    Who can reduce is dealt to the rows, so that each has some.
    """
    num_rows = math.isqrt(len(weights))
    if num_rows < 2:
        return None
    in_turn = sorted(weights, key=lambda peer: (not bandwidths.get(peer, 0.0), peer))
    rows = [sorted(in_turn[row::num_rows]) for row in range(num_rows)]
    shares = [_shares(row, bandwidths) for row in rows]
    if not all(shares):
        return None
    chunk_elements = _chunk_elements(settings, shape, max(map(len, shares)))
    num_chunks = -(-shape.num_elements // chunk_elements)
    members = [peer for row in rows for peer in row]
    cuts = [cut_chunks(num_chunks, tuple(its.values())) for its in shares]
    return ReductionPlan(
        reduction=reduction,
        members=tuple(members),
        weights=tuple(weights[peer] for peer in members),
        reducers=tuple(peer for its in shares for peer in its),
        cuts=tuple(cut for its in cuts for cut in its),
        num_elements=shape.num_elements,
        chunk_elements=chunk_elements,
        codec=settings.codec,
        result_codec=settings.result_codec,
        aggregator=settings.aggregator,
        way=Way.GRID,
        rows=(0, *accumulate(map(len, rows))),
        row_reducers=(0, *accumulate(map(len, shares))),
    )


def _shares(members: Iterable[str], bandwidths: Mapping[str, float]) -> dict[str, float]:
    """Shares of the vector that members reduce, by peer id; without members that reduce nothing."""
    known = {peer: bandwidths.get(peer, 0.0) for peer in members}
    measured = [speed for speed in known.values() if speed > UNMEASURED]
    typical = sum(measured) / len(measured) if measured else 1.0
    speeds = [round(typical if speed == UNMEASURED else speed) for speed in known.values()]
    shares = zip(known, fair_shares(speeds), strict=True)
    return {peer: float(share) for peer, share in shares if share > 0}


def _chunk_elements(settings: GroupSettings, shape: Shape, num_parts: int) -> int:
    """Elements of a chunk: a part has some, and none is larger than the settings say."""
    wanted = -(-shape.num_elements // (num_parts * _CHUNKS_OF_A_PART))
    wanted = min(max(wanted, MIN_CHUNK_ELEMENTS), settings.chunk_elements)
    if settings.way == "grid":
        wanted = min(wanted, _MOST_OF_A_SUM // shape.block * shape.block)
    return max(1, -(-wanted // shape.block)) * shape.block


def write_plan(plan: ReductionPlan, table: Sequence[str]) -> Plan:
    """The plan of a round, as it is announced beside the decision; `table` is the decision's (`table_of`)."""
    return Plan(
        reduction=plan.reduction,
        reducers=place_peers(plan.reducers, table),
        cuts=plan.cuts,
        codec=plan.codec,
        aggregator=plan.aggregator,
        way=plan.way.value,
        rows=plan.rows,
        row_reducers=plan.row_reducers,
    )


def read_plan(plan: Plan, decision: Decision, table: Sequence[str]) -> ReductionPlan:
    """The plan of a round, as it was announced.

    Raises:
        RemoteProtocolError: it is none of that decision.
    """
    read = ReductionPlan(
        reduction=plan.reduction,
        members=decision.contributors,
        weights=decision.weights,
        reducers=peers_at(plan.reducers, table),
        cuts=plan.cuts,
        num_elements=decision.num_elements,
        chunk_elements=decision.chunk_elements,
        codec=plan.codec,
        result_codec=decision.codec,
        aggregator=plan.aggregator,
        way=Way(plan.way),
        rows=plan.rows,
        row_reducers=plan.row_reducers,
    )
    if not decision.is_round or decision.digest or not any(read.weights):
        raise violation(
            "a plan is of no round, of one that was computed, or has no weight above zero"
        )
    if read.num_chunks > MAX_U32:
        raise violation(f"a plan has {read.num_chunks} chunks; at most {MAX_U32} can be told apart")
    if read.cuts and read.cuts[-1] != read.num_chunks:
        raise violation("a plan does not give each chunk to one reducer")
    if len({*read.reducers}) != len(read.reducers):
        raise violation("a plan names a peer twice")
    if read.way is Way.GRID:
        if read.rows[-1] != len(read.members):
            raise violation("a grid does not give each member to one row")
        if not all({*row.reducers} <= {*row.members} for row in read.row_plans):
            raise violation("a row of a grid has a reducer that is no member of it")
    return read
