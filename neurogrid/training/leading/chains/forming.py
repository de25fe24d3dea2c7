"""Replicas that are about to be: put together of members that are in none, which load their layers meanwhile.

    free members -> a cut -> layers -> ready for the next round

The others go on with their steps; a replica that is ready waits until it is taken, between two rounds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

import trio

from neurogrid.training.leading.chains.chain import Chain, ChainBroken
from neurogrid.training.leading.chains.members import ChainMembers
from neurogrid.training.leading.chains.orders import StageOrders
from neurogrid.training.leading.hiring import HEARTBEAT
from neurogrid.training.runs.run_file import LayoutSection
from neurogrid.training.stages.chain_estimate import rooms_of
from neurogrid.training.stages.cutting import StageSizes
from neurogrid.training.stages.placement import AreApart, contacts
from neurogrid.training.stages.replica_cuts import ReplicaCut, cut_replicas

__all__ = ["Forming"]

logger = logging.getLogger(__name__)

# Seconds for which the same members are free, before they are cut: several come at about the same time.
_SETTLING: Final = 1.0


class Forming:
    """Forming of replicas from members that are in none. Keep `run` running.

    Args:
        members: that there are.
        orders: tells them.
        sizes: what stages take.
        layout: of the run file.
        placed: peer ids of members that are in replicas.
        num_replicas: that there are.
        is_tied: whether the first and the last stage of one send each other something.
        say: is told what people may want to see.
    """

    def __init__(
        self,
        members: ChainMembers,
        orders: StageOrders,
        sizes: StageSizes,
        layout: LayoutSection,
        placed: Callable[[], Collection[str]],
        num_replicas: Callable[[], int],
        *,
        is_tied: bool,
        say: Callable[[str], None],
    ) -> None:
        self._members, self._orders, self._sizes, self._layout = members, orders, sizes, layout
        self._placed, self._num_replicas, self._is_tied = placed, num_replicas, is_tied
        self._say, self._said_apart = say, set[frozenset[str]]()
        self._chains: dict[int, Chain] = {}
        self._ready: set[int] = set()

    @property
    def num_ready(self) -> int:
        """Replicas that can be taken."""
        self._look_after()
        return len(self._ready)

    @property
    def is_busy(self) -> bool:
        """Whether there are replicas that are ready, or soon will be."""
        return bool(self._chains)

    @property
    def is_loading(self) -> bool:
        """Whether there are some that will be ready soon."""
        return len(self._chains) > len(self._ready)

    def take(self) -> list[Chain]:
        """The replicas that are ready, which are no more the matter of this one."""
        self._look_after()
        taken = [self._chains.pop(number) for number in sorted(self._ready)]
        self._ready.clear()
        return taken

    async def run(self) -> None:
        """Put replicas together, until this is cancelled."""
        async with trio.open_nursery() as nursery:
            seen: frozenset[str] = frozenset()
            since = trio.current_time()
            while True:
                self._look_after()
                if (free := self._free()) != seen:
                    seen, since = free, trio.current_time()
                if free and trio.current_time() - since >= _SETTLING:
                    for chain in self._cut(free):
                        nursery.start_soon(self._prepare, chain)
                changed = self._members.changed.next
                with trio.move_on_after(HEARTBEAT / 4):
                    await changed.wait()

    def _free(self) -> frozenset[str]:
        placed = {*self._placed(), *(p for chain in self._chains.values() for p in chain.peers)}
        return frozenset(peer for peer in self._members.usable() if peer not in placed)

    def _cut(self, free: Collection[str]) -> list[Chain]:
        # In the order in which they came.
        peers = [peer for peer in self._members.usable() if peer in free]
        lent = [self._layout.tiered(self._members.get(peer).memory) for peer in peers]
        most = self._layout.replicas - self._num_replicas() - len(self._chains)

        def cut(are_apart: AreApart) -> list[ReplicaCut]:
            return cut_replicas(
                dict(zip(peers, rooms_of(lent), strict=True)),
                self._sizes,
                most=most,
                stages=self._layout.stages,
                are_apart=are_apart,
                is_tied=self._is_tied,
            )

        found = cut(self._members.are_apart)
        self._say_apart(cut(lambda peer, other: False), found)
        chains = [
            Chain(
                self._orders.draw_number(),
                tuple((peer,) for peer in cut.peers),
                cut.bounds,
                begun=0,
            )
            for cut in found
        ]
        self._chains |= {chain.number: chain for chain in chains}
        return chains

    def _say_apart(self, usual: Sequence[ReplicaCut], found: Sequence[ReplicaCut]) -> None:
        """Say once of those that have lost each other that they are put apart."""
        lost, left = self._lost_in(usual), self._lost_in(found)
        for pair in lost - left - self._said_apart:
            self._said_apart.add(pair)
            names = " and ".join(sorted(map(self._members.called, pair)))
            self._say(f"{names} cannot reach each other: they are put where they need not")

    def _lost_in(self, cuts: Sequence[ReplicaCut]) -> set[frozenset[str]]:
        return {
            frozenset(pair)
            for cut in cuts
            for pair in contacts([(peer,) for peer in cut.peers], is_tied=self._is_tied)
            if self._members.are_apart(*pair)
        }

    async def _prepare(self, chain: Chain) -> None:
        try:
            await self._orders.begin(chain, is_preparation=True)
        except ChainBroken as exc:
            logger.info("a replica is not ready: %s", exc)
            self._chains.pop(chain.number, None)
        else:
            self._ready.add(chain.number)
        self._members.changed.set()

    def _look_after(self) -> None:
        """Drop those that are ready and have lost a member since."""
        for number in list(self._ready):
            if any(self._members.is_out(peer, number) for peer in self._chains[number].peers):
                self._ready.discard(number)
                del self._chains[number]
