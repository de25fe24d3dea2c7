"""Members of a reduction on a network in memory, and what they should get, computed in one process."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy
import torch
import trio
from torch import Tensor

from neurogrid.p2p import Identity, TensorMessage, new_request_id
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.memory import MemoryHost, MemoryNetwork, open_memory_network
from neurogrid.training.averaging.aggregators import parse_aggregator
from neurogrid.training.averaging.codecs import parse_codec
from neurogrid.training.averaging.plan import ReductionPlan, Way
from neurogrid.training.averaging.reductions import MembersLostError, Reductions, Result
from neurogrid.training.wire.types import TrainingMessage, training_table

__all__ = [
    "DEADLINE",
    "Group",
    "Outcome",
    "Peer",
    "assert_equal",
    "chunk_of",
    "expected",
    "open_group",
    "plan_of",
    "reduce_all",
    "vectors",
]

DEADLINE = 30.0
IDENTITIES = sorted((Identity.generate() for _ in range(9)), key=lambda one: one.peer_id)


@dataclass
class Peer:
    """One host with its reductions.

    Attributes:
        admitted: the peers that it takes chunks of.
        life: cancelled, the host is gone.
    """

    host: MemoryHost
    exchange: Exchange
    reductions: Reductions
    admitted: set[str]
    life: trio.CancelScope

    @property
    def peer_id(self) -> str:
        return self.host.peer_id


@dataclass
class Group:
    """Peers that are all connected and admit each other."""

    network: MemoryNetwork
    peers: list[Peer]

    @property
    def ids(self) -> list[str]:
        return [peer.peer_id for peer in self.peers]


@asynccontextmanager
async def open_group(num_peers: int, *, early_timeout: float = 30.0) -> AsyncIterator[Group]:
    """Hosts that live until the block is left, or their life is cancelled."""
    everybody = {identity.peer_id for identity in IDENTITIES[:num_peers]}
    with trio.fail_after(DEADLINE * 10):
        async with open_memory_network() as network, trio.open_nursery() as nursery:

            async def live(identity: Identity, task_status: trio.TaskStatus[Peer]) -> None:
                with trio.CancelScope() as life:
                    async with network.open_host(identity=identity) as host:
                        exchange = Exchange(host, training_table())
                        admitted = set(everybody)
                        reductions = Reductions(
                            exchange, admit=admitted.__contains__, early_timeout=early_timeout
                        )
                        task_status.started(Peer(host, exchange, reductions, admitted, life))
                        await trio.sleep_forever()

            peers: list[Peer] = []
            for identity in IDENTITIES[:num_peers]:
                peer = await nursery.start(live, identity)
                for other in peers:
                    await peer.host.connect(other.host.addresses[0])
                peers.append(peer)
            yield Group(network, peers)
            nursery.cancel_scope.cancel()


def plan_of(
    members: Sequence[str],
    num_elements: int,
    *,
    reducers: Sequence[str] | None = None,
    cuts: Sequence[int] | None = None,
    chunk_elements: int = 256,
    weights: Sequence[float] | None = None,
    **fields: Any,
) -> ReductionPlan:
    """A plan of equal parts, where nothing else is said."""
    num_chunks = math.ceil(num_elements / chunk_elements)
    if fields.get("way") is Way.EVERYBODY:
        reducers, cuts = (), (0,)
    if fields.get("way") is Way.GRID:
        fields |= grid_of(members, num_chunks)
        reducers, cuts = fields.pop("reducers"), fields.pop("cuts")
    reducers = members if reducers is None else reducers
    if cuts is None:
        cuts = [num_chunks * index // len(reducers) for index in range(len(reducers) + 1)]
    return ReductionPlan(
        reduction=random.getrandbits(64),
        members=tuple(members),
        weights=tuple(weights or [1.0] * len(members)),
        reducers=tuple(reducers),
        cuts=tuple(cuts),
        num_elements=num_elements,
        chunk_elements=chunk_elements,
        **fields,
    )


def grid_of(members: Sequence[str], num_chunks: int) -> dict[str, Any]:
    """Rows of members, the last of which may have fewer; all reduce, but for the last one of a row of three."""
    width = math.isqrt(len(members))
    rows = [list(members[at : at + width]) for at in range(0, len(members), width)]
    reducers = [row[:2] if len(row) == 3 else row for row in rows]
    cuts = [num_chunks * i // len(its) for its in reducers for i in range(len(its) + 1)]
    return {
        "reducers": [peer for its in reducers for peer in its],
        "cuts": cuts,
        "rows": (0, *accumulate(map(len, rows))),
        "row_reducers": (0, *accumulate(map(len, reducers))),
    }


def vectors(num: int, num_elements: int, *, seed: int = 0) -> list[Tensor]:
    """Float32 vectors, another for each member."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_elements, generator=generator) for _ in range(num)]


def expected(plan: ReductionPlan, values: Sequence[Tensor]) -> Tensor:
    """The aggregate, chunk by chunk in one process."""
    if plan.way is Way.GRID:
        return _expected_of_rows(plan, values)
    codec, result_codec = parse_codec(plan.codec), parse_codec(plan.result_codec)
    aggregator = parse_aggregator(plan.aggregator)
    out = torch.empty(plan.num_elements)
    for chunk in range(plan.num_chunks):
        start, stop = plan.chunk_span(chunk)
        rows = [codec.decode(codec.encode(row[start:stop]), stop - start) for row in values]
        aggregate = aggregator.aggregate(rows, plan.weights)
        out[start:stop] = result_codec.decode(result_codec.encode(aggregate), stop - start)
    return out


def _expected_of_rows(plan: ReductionPlan, values: Sequence[Tensor]) -> Tensor:
    """The sums of the rows, each by its first weight, and the mean of that; by no code of reductions."""
    codec, result_codec = parse_codec(plan.codec), parse_codec(plan.result_codec)
    out = torch.empty(plan.num_elements)

    def sum_of(rows: Sequence[Tensor], weights: Sequence[float]) -> tuple[Tensor, list[float]]:
        ratios = [float(numpy.float32(weight / weights[0])) for weight in weights]
        total = rows[0].clone()
        for row, ratio in zip(rows[1:], ratios[1:], strict=True):
            total += row * ratio
        return total, ratios

    for chunk in range(plan.num_chunks):
        start, stop = plan.chunk_span(chunk)
        sums, firsts, divisors = [], [], []
        for row, (first, last) in zip(plan.row_plans, pairwise(plan.rows), strict=True):
            weights = [weight for weight in row.weights if weight]
            decoded = [
                codec.decode(codec.encode(its[start:stop]), stop - start)
                for its, weight in zip(values[first:last], row.weights, strict=True)
                if weight
            ]
            if plan.aggregator == "mean_of_signs":
                decoded = [its.sign() for its in decoded]
            if weights:
                total, ratios = sum_of(decoded, weights)
                sums.append(total)
                firsts.append(weights[0])
                divisors.append(sum(ratios))
        total, ratios = sum_of(sums, firsts)
        total /= float(numpy.float32(sum(r * d for r, d in zip(ratios, divisors, strict=True))))
        out[start:stop] = result_codec.decode(result_codec.encode(total), stop - start)
    return out


@dataclass
class Outcome:
    """What became of a reduction at one peer."""

    result: Result | None = None
    error: MembersLostError | None = None
    seconds: float = 0.0
    waiting: list[frozenset[str]] = field(default_factory=list)

    @property
    def lost(self) -> set[str]:
        return set(self.error.lost) if self.error else set()


async def reduce_one(
    peer: Peer, plan: ReductionPlan, values: Tensor | None, outcome: Outcome, timeout: float
) -> None:
    """Carry a plan out at one peer."""
    begun = trio.current_time()
    try:
        outcome.result = await peer.reductions.reduce(
            plan, values, timeout=timeout, on_waiting=outcome.waiting.append
        )
    except MembersLostError as error:
        outcome.error = error
    outcome.seconds = trio.current_time() - begun


async def reduce_all(
    peers: Sequence[Peer],
    plan: ReductionPlan,
    values: Sequence[Tensor | None],
    *,
    timeout: float = DEADLINE,
) -> list[Outcome]:
    """Let peers carry out a plan at once; their outcomes, in order."""
    outcomes = [Outcome() for _ in peers]
    async with trio.open_nursery() as nursery:
        for peer, own, outcome in zip(peers, values, outcomes, strict=True):
            nursery.start_soon(reduce_one, peer, plan, own, outcome, timeout)
    return outcomes


def assert_equal(outcomes: list[Outcome], wanted: torch.Tensor) -> None:
    """All have this result, the same digest, and wait for nobody any more."""
    for outcome in outcomes:
        assert outcome.error is None
        assert outcome.result is not None
        assert torch.equal(outcome.result.values, wanted)
        assert outcome.waiting[-1:] in ([], [frozenset()])
    assert len({outcome.result.digest for outcome in outcomes if outcome.result}) == 1


def chunk_of(plan: ReductionPlan, chunk: int, data: bytes) -> TensorMessage:
    """A CHUNK message with any bytes."""
    return TensorMessage(TrainingMessage.CHUNK, chunk, plan.reduction, new_request_id(), data)
