"""Members of a reduction on a network in memory, and what they should get, computed in one process."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import torch
import trio
from torch import Tensor

from neurogrid.p2p import Identity
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.memory import MemoryHost, MemoryNetwork, open_memory_network
from neurogrid.training.averaging.plan import ReductionPlan, Way
from neurogrid.training.averaging.reductions import MembersLostError, Reductions, Result
from neurogrid.training.wire.types import training_table

DEADLINE = 30
IDENTITIES = sorted((Identity.generate() for _ in range(7)), key=lambda one: one.peer_id)


class F32:
    block = 1

    def num_bytes(self, num_elements: int) -> int:
        return 4 * num_elements

    def encode(self, values: Tensor) -> memoryview:
        return values.numpy().data.cast("B")

    def decode(self, data, num_elements: int) -> Tensor:
        return torch.frombuffer(data, dtype=torch.float32)


class F16(F32):
    def num_bytes(self, num_elements: int) -> int:
        return 2 * num_elements

    def encode(self, values: Tensor) -> memoryview:
        return values.half().numpy().data.cast("B")

    def decode(self, data, num_elements: int) -> Tensor:
        return torch.frombuffer(data, dtype=torch.float16).float()


class Sum:
    def __init__(self, n):
        self.total = 0.0
        self.acc = torch.zeros(n)

    def add(self, row, weight):
        self.acc.add_(row, alpha=weight)
        self.total += weight

    def finish(self):
        return self.acc.div_(self.total)


class Mean:
    def begin(self, n):
        return Sum(n)

    def aggregate(self, rows, weights):
        acc = Sum(len(rows[0]))
        for row, weight in zip(rows, weights, strict=True):
            acc.add(row, weight)
        return acc.finish()


class Median:
    def aggregate(self, rows, weights):
        return torch.stack(list(rows)).median(0).values


def parse_codec(name):
    return {"f32": F32, "f16": F16}[name]()


def parse_aggregator(name):
    return {"mean": Mean, "median": Median}[name]()


@dataclass
class Peer:
    """One host with its reductions."""

    host: MemoryHost
    exchange: Exchange
    reductions: Reductions
    admitted: set[str]

    @property
    def peer_id(self) -> str:
        return self.host.peer_id


@dataclass
class Group:
    network: MemoryNetwork
    peers: list[Peer]


@asynccontextmanager
async def open_group(num_peers: int, *, early_timeout: float = 30) -> AsyncIterator[Group]:
    """Peers that are all connected and admit each other."""
    with trio.fail_after(DEADLINE):
        async with AsyncExitStack() as stack:
            network = await stack.enter_async_context(open_memory_network())
            peers = []
            everybody = {identity.peer_id for identity in IDENTITIES[:num_peers]}
            for identity in IDENTITIES[:num_peers]:
                host = await stack.enter_async_context(network.open_host(identity=identity))
                exchange = Exchange(host, training_table())
                admitted = set(everybody)
                reductions = Reductions(
                    exchange,
                    admit=admitted.__contains__,
                    parse_codec=parse_codec,
                    parse_aggregator=parse_aggregator,
                    early_timeout=early_timeout,
                )
                for peer in peers:
                    await host.connect(peer.host.addresses[0])
                peers.append(Peer(host, exchange, reductions, admitted))
            yield Group(network, peers)


def plan_of(
    members: Sequence[str],
    num_elements: int,
    *,
    reducers: Sequence[str] | None = None,
    cuts: Sequence[int] | None = None,
    chunk_elements: int = 100,
    weights: Sequence[float] | None = None,
    **fields,
) -> ReductionPlan:
    """A plan of equal parts, where nothing else is said."""
    num_chunks = -(-num_elements // chunk_elements)
    if fields.get("way") is Way.EVERYBODY:
        reducers, cuts = (), (0,)
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


def vectors(num: int, num_elements: int, *, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_elements, generator=generator) for _ in range(num)]


def expected(plan: ReductionPlan, values: Sequence[Tensor]) -> Tensor:
    """The aggregate, chunk by chunk in one process."""
    codec, result_codec = parse_codec(plan.codec), parse_codec(plan.result_codec)
    aggregator = parse_aggregator(plan.aggregator)
    out = torch.empty(plan.num_elements)
    for chunk in range(plan.num_chunks):
        start, stop = plan.chunk_span(chunk)
        rows = [codec.decode(codec.encode(row[start:stop]), stop - start) for row in values]
        aggregate = aggregator.aggregate(rows, plan.weights)
        out[start:stop] = result_codec.decode(result_codec.encode(aggregate), stop - start)
    return out


@dataclass
class Outcome:
    """What became of a reduction at one peer."""

    result: Result | None = None
    error: MembersLostError | None = None
    seconds: float = 0.0
    waiting: list[frozenset[str]] = field(default_factory=list)


async def reduce_all(
    peers: Sequence[Peer],
    plan: ReductionPlan,
    values: Sequence[Tensor | None],
    *,
    timeout: float = DEADLINE,
    before: Callable[[], None] | None = None,
) -> list[Outcome]:
    """Let peers carry out a plan at once; their outcomes, in order."""
    outcomes = [Outcome() for _ in peers]

    async def one(peer: Peer, own: Tensor | None, outcome: Outcome) -> None:
        begun = trio.current_time()
        try:
            outcome.result = await peer.reductions.reduce(
                plan, own, timeout=timeout, on_waiting=outcome.waiting.append
            )
        except MembersLostError as error:
            outcome.error = error
        outcome.seconds = trio.current_time() - begun

    async with trio.open_nursery() as nursery:
        for peer, own, outcome in zip(peers, values, outcomes, strict=True):
            nursery.start_soon(one, peer, own, outcome)
    return outcomes


__all__ = [name for name in dir() if not name.startswith("_")]
_ = replace
