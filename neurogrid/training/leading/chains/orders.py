"""Orders to the members of an arrangement, until all of them have the layers and the state of their stages."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Final

import trio

from neurogrid.training.leading.chains.chain import Chain, ChainBroken
from neurogrid.training.leading.chains.members import ChainMembers
from neurogrid.training.leading.chains.step_deadline import StepDeadline
from neurogrid.training.leading.chains.weights import ChainWeights
from neurogrid.training.leading.facts import RunFacts
from neurogrid.training.leading.hiring import HEARTBEAT
from neurogrid.training.stages.holdings import FIRST, LAST, state_pieces
from neurogrid.training.wire.runs import RunMessage, StageOrder

__all__ = ["StageOrders"]

_LOADING: Final = 900.0
"""Seconds for a piece of the weights or the state to come, and processes to start."""


class StageOrders:
    """Tells members which stage they are.

    Args:
        members: that there are.
        facts: of the run.
        weights: what stages begin with.
    """

    def __init__(self, members: ChainMembers, facts: RunFacts, weights: ChainWeights) -> None:
        self._members, self._facts, self._weights = members, facts, weights
        self._number = 0

    def draw_number(self) -> int:
        """Draw a number for an arrangement or an attempt at a round: above all before, also of earlier leaders."""
        self._number = max(time.time_ns() // 1000, self._number + 1)
        return self._number

    def words(self, chain: Chain) -> list[str]:
        """Members and layers of the stages, for people: a line for each stage."""
        words = []
        for index, stage in enumerate(chain.stages):
            names = " and ".join(map(self._members.called, stage))
            have = "has" if len(stage) == 1 else "have"
            start, stop = chain.bounds[index], chain.bounds[index + 1]
            words.append(f"{names} {have} layers {start} to {stop - 1}")
        return words

    def order(self, chain: Chain, peer_id: str, *, is_preparation: bool = False) -> StageOrder:
        """Make the order that tells one member of its stage in an arrangement.

        Args:
            is_preparation: it loads the layers, while others do not know of it.
        """
        index = next(i for i, stage in enumerate(chain.stages) if peer_id in stage)
        pieces = self._weights.pieces(chain.bounds, index)
        wanted = set(state_pieces(chain.bounds, index))
        if LAST in wanted:
            # Of tied embeddings the last stage has what the first one has.
            wanted.add(FIRST)
        if peer_id not in chain.holders:
            pieces |= {name: blob_id for name, blob_id in chain.pieces.items() if name in wanted}
        return StageOrder(
            run=self._facts.run_id,
            chain=chain.number,
            step=chain.begun,
            index=chain.peers.index(peer_id),
            peers=chain.peers,
            addresses=tuple(map(self._members.address_of, chain.peers)),
            bounds=chain.bounds,
            names=tuple(pieces),
            blobs=tuple(pieces.values()),
            providers=chain.providers,
            quantization=self._weights.quantization,
            widths=chain.widths,
            is_preparation=is_preparation,
        )

    def deadline(self, orders: Mapping[str, StageOrder]) -> StepDeadline:
        """The deadline of those that load what they are ordered: each piece of the weights that one asks for moves it.

        All have the leader's line together, and nobody knows how much that carries.
        """
        self._weights.count_asked(orders)
        num_pieces = sum(len(order.names) for order in orders.values())
        return StepDeadline(trio.current_time(), _LOADING, num_pieces)

    def has_run_out(self, deadline: StepDeadline, peers: Iterable[str]) -> bool:
        """Whether those that load have stood still for too long."""
        now = trio.current_time()
        deadline.look(now, self._weights.num_asked(peers))
        return now > deadline.at

    async def begin(self, chain: Chain, *, is_preparation: bool = False) -> None:
        """Tell all members of an arrangement, and wait until they are ready.

        Raises:
            ChainBroken: one of them is lost, has failed, or took too long.
        """
        orders = {
            peer: self.order(chain, peer, is_preparation=is_preparation) for peer in chain.peers
        }
        deadline = self.deadline(orders)
        while True:
            for peer, order in orders.items():
                if not self._members.has_heard(peer, chain.number):
                    await self._members.tell(peer, RunMessage.STAGE, order.encode())
            with trio.move_on_after(HEARTBEAT) as scope:
                await self._members.wait(
                    chain, lambda: all(self._members.is_ready(p, chain.number) for p in orders)
                )
            if not scope.cancelled_caught:
                return
            if self.has_run_out(deadline, orders):
                late = [p for p in orders if not self._members.is_ready(p, chain.number)]
                names = ", ".join(map(self._members.called, late))
                raise ChainBroken(
                    f"{names}: not ready, and nothing was asked for in {_LOADING:g} s"
                )
