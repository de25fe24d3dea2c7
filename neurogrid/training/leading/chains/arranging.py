"""Arrangements of a chain: who is in which stage, with which layers, from which state; and members that join in.

    members -> stages and a cut -> orders -> all are ready

Whoever holds the state goes on at once. Where a stage has nobody left who does, all go on from the state that the
leader keeps; so they do where no step is to come after the one that they hold, and where two that have lost each other
can be put apart. A member more loads the layers of a stage while the others go on, and is given the state between two
steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import trio

from neurogrid.errors import ConfigurationError, NoRouteError
from neurogrid.training.leading.chains.chain import Chain, Pieces
from neurogrid.training.leading.chains.members import ChainMembers
from neurogrid.training.leading.chains.orders import StageOrders
from neurogrid.training.leading.chains.state import ChainState
from neurogrid.training.leading.chains.step_deadline import StepDeadline
from neurogrid.training.leading.facts import RunFacts
from neurogrid.training.leading.hiring import HEARTBEAT
from neurogrid.training.leading.settings import LeaderProgress
from neurogrid.training.stages.chain_estimate import rooms_of
from neurogrid.training.stages.cutting import StageSizes, cut_layers
from neurogrid.training.stages.placement import contacts, fill, place, place_apart
from neurogrid.training.wire.runs import RunMessage, StageOrder

__all__ = ["Arranger"]

logger = logging.getLogger(__name__)

Stages = tuple[tuple[str, ...], ...]

# Seconds for which a stage that was lost is waited for, before fewer stages go on.
_UNTIL_FEWER: Final = 30.0
# Seconds after the last one that came, before the first arrangement: several are started at about the same time.
_UNTIL_ALL: Final = 2.0
# Seconds in which members do what they were told before one was lost.
_SETTLING: Final = 3.0


@dataclass(frozen=True, slots=True)
class _Joiner:
    """A member that loads the layers of a stage while the others go on.

    Attributes:
        stage: which one.
        order: that it was told.
        deadline: for it to be ready.
    """

    stage: int
    order: StageOrder
    deadline: StepDeadline

    @property
    def number(self) -> int:
        """Number of the arrangement that it was told of."""
        return self.order.chain


class Arranger:
    """Makes the arrangements of a run.

    Args:
        members: that there are.
        facts: of the run.
        orders: tells members.
        state: what the leader keeps of them.
        sizes: what stages take.
        progress: is told what people may want to see.
        is_tied: whether the first and the last stage send each other something.
        wait: seconds that members are waited for.

    Attributes:
        sizes: as given.
        last: the arrangement that there is, or was before; None for none.
    """

    def __init__(
        self,
        members: ChainMembers,
        facts: RunFacts,
        orders: StageOrders,
        state: ChainState,
        sizes: StageSizes,
        progress: LeaderProgress,
        *,
        is_tied: bool,
        wait: float,
    ) -> None:
        self._members, self._orders, self._state = members, orders, state
        self._is_tied = is_tied
        self.sizes, self._progress, self._patience = sizes, progress, wait
        self._layout = facts.run_file.layout
        self._joiners: dict[str, _Joiner] = {}
        self._has_begun = False
        self._said_apart: set[str] = set()
        self.last: Chain | None = None

    async def arrange(self, *, from_kept: bool = False) -> Chain:
        """Tell members which stage they are in, and wait until all are ready.

        Args:
            from_kept: they begin with the state that the leader keeps, whatever they hold.

        Raises:
            NoRouteError: there were too few for too long.
            ChainBroken: one of them failed meanwhile.
        """
        self._joiners.clear()
        if not from_kept and (held := await self._held()) is not None:
            if self._lost_in(held.stages):
                await self._wait_lost(held.stages)
                held = await self._held()
            if held is not None and not self._may_be_apart(held.stages):
                return await self._begin(held)
        stages, bounds = await self._choose()
        self._say_apart(stages)
        return await self._begin(
            Chain(
                self._orders.draw_number(),
                stages,
                bounds,
                self._state.step,
                pieces=self._state.blobs,
            )
        )

    async def hand_over(
        self, chain: Chain, joined: Sequence[str], pieces: Pieces, providers: Sequence[str]
    ) -> Chain:
        """The next arrangement, with members that have loaded their layers.

        Args:
            chain: that there is, between two steps.
            joined: those of `ready_joiners`.
            pieces: of the state of their stages.
            providers: members that have them.
        """
        stages = tuple(
            (*stage, *(peer for peer in joined if self._joiners[peer].stage == index))
            for index, stage in enumerate(chain.stages)
        )
        for peer in joined:
            del self._joiners[peer]
        return await self._begin(
            Chain(
                self._orders.draw_number(),
                stages,
                chain.bounds,
                chain.state_step,
                holders=frozenset(chain.peers),
                pieces=pieces,
                providers=tuple(providers),
            )
        )

    async def _begin(self, chain: Chain) -> Chain:
        """Tell all their orders, and wait until they are ready."""
        made = self.last.state_step if self.last is not None else 0
        if chain.begun < made:
            self._progress.say(
                f"the stages go on from the state after step {chain.begun}: what came after it is computed again"
            )
        self._progress.say("stages: " + ", ".join(self._orders.words(chain)))
        self.last = chain
        await self._orders.begin(chain)
        self._has_begun = True
        return chain

    # Those that hold the state

    async def _held(self) -> Chain | None:
        """The stages of before, of those alone that hold its state; None where a stage has nobody who does."""
        last = self.last
        if last is None:
            return None
        step = last.state_step

        def holds(peer: str) -> bool:
            return self._members.holds(peer, last.number, step, is_holder=peer in last.holders)

        def holders() -> Stages:
            usable = {p for p in self._members.usable() if not self._members.get(p).is_slow}
            return tuple(
                tuple(p for p in stage if p in usable and holds(p)) for stage in last.stages
            )

        def is_settled() -> bool:
            there = {peer for stage in holders() for peer in stage}
            return all(
                peer in there or self._members.is_out(peer, last.number) for peer in last.peers
            )

        with trio.move_on_after(_SETTLING):
            while not is_settled():
                changed = self._members.changed.next
                with trio.move_on_after(HEARTBEAT):
                    await changed.wait()
        stages = holders()
        if not all(stages):
            return None
        stages = self._thinned(stages)
        here = frozenset(peer for stage in stages for peer in stage)
        return Chain(self._orders.draw_number(), stages, last.bounds, step, holders=here)

    # Those that have lost each other

    def _lost_in(self, stages: Stages) -> list[tuple[str, str]]:
        """Pairs of members that are to send each other something, of which one has told that it lost the other."""
        found = contacts(stages, is_tied=self._is_tied)
        return [pair for pair in found if self._members.are_apart(*pair)]

    async def _wait_lost(self, stages: Stages) -> None:
        """Wait until one of two that have lost each other is lost here, too: one that was killed is, in a moment."""
        with trio.move_on_after(HEARTBEAT):
            while lost := self._lost_in(stages):
                if not {*self._members.usable()}.issuperset(peer for pair in lost for peer in pair):
                    return
                await self._members.changed.wait()

    def _thinned(self, stages: Stages) -> Stages:
        """The same without one of two that have lost each other, where its stage has others."""
        found = [list(stage) for stage in stages]
        for pair in self._lost_in(stages):
            own = [stage for peer in reversed(pair) for stage in found if peer in stage]
            widest = max(own, key=len)
            if len(own) == 2 and len(widest) > 1:
                widest.remove(next(peer for peer in reversed(pair) if peer in widest))
        return tuple(map(tuple, found))

    def _may_be_apart(self, stages: Stages) -> bool:
        """Whether two have lost each other in these stages, and there are others now in which none has."""
        usable = self._members.usable()
        if not self._lost_in(stages) or len(usable) < len(stages):
            return False
        try:
            others, _ = self._fitting(usable, len(stages))
        except ConfigurationError:
            return False
        return not self._lost_in(others)

    def _say_apart(self, stages: Stages) -> None:
        """Say once of those that had lost each other that they are put apart."""
        usable, lost = {*self._members.usable()}, {*map(frozenset, self._lost_in(stages))}
        for pair in self._lost_in(self.last.stages) if self.last is not None else ():
            if usable.issuperset(pair) and frozenset(pair) not in lost:
                names = " and ".join(sorted(map(self._members.called, pair)))
                text = f"{names} cannot reach each other: they are put where they need not"
                if text not in self._said_apart:
                    self._said_apart.add(text)
                    self._progress.say(text)

    # Those that are here

    async def _choose(self) -> tuple[Stages, tuple[int, ...]]:
        """Choose stages and cut when enough members are here: each keeps its stage, and the cut stays, where it can."""
        began, said = trio.current_time(), ""
        wanted = self._layout.stages
        while True:
            usable = self._members.usable()
            waited = trio.current_time() - began
            num_stages = wanted
            if self._has_begun and waited > min(_UNTIL_FEWER, self._patience) and usable:
                num_stages = min(wanted, len(usable))
            if len(usable) >= num_stages:
                await self._wait_for_more(num_stages)
                usable = self._members.usable()
            if len(usable) >= num_stages:
                try:
                    return self._fitting(usable, num_stages)
                except ConfigurationError as exc:
                    text = str(exc)
            else:
                text = f"waiting for members: {len(usable)} of {wanted} are here"
            if text != said:
                self._progress.say(text)
                said = text
            if waited >= self._patience:
                here = "; ".join(self._members.refusals())
                others = f". These are here and take no part: {here}" if here else ""
                raise NoRouteError(
                    f"{text}, after {self._patience:g} s: have more join with the run's ticket, or lower [layout] "
                    f"stages. --resume goes on with it, and --wait waits longer{others}"
                )
            with trio.move_on_after(HEARTBEAT):
                await self._members.changed.wait()

    async def _wait_for_more(self, num_stages: int) -> None:
        """Wait, before the first arrangement of stages of several members, while more members come."""
        if self._has_begun or self._layout.stage_members == 1:
            return
        most, here = num_stages * self._layout.stage_members, -1
        while here < len(self._members.usable()) < most:
            here = len(self._members.usable())
            await trio.sleep(_UNTIL_ALL)

    def _fitting(self, usable: Sequence[str], num_stages: int) -> tuple[Stages, tuple[int, ...]]:
        """Stages and a cut that fit their members.

        Raises:
            ConfigurationError: there are none.
        """
        quick = [peer for peer in usable if not self._members.get(peer).is_slow]
        *ways, last = self._ways(usable, quick, num_stages)
        for stages in ways:
            with suppress(ConfigurationError):
                bounds = self._cut(stages)
                return self._filled(stages, bounds, quick), bounds
        bounds = self._cut(last)
        return self._filled(last, bounds, quick), bounds

    def _ways(
        self, usable: Sequence[str], quick: Sequence[str], num_stages: int
    ) -> Iterator[Stages]:
        """Stages that there may be, those to be preferred first: whoever was in one stays there, or those come that
        have most room. Such in which two have lost each other come last."""
        before = self.last.stages if self.last is not None else ()
        first = usable[: max(num_stages, len(quick))]
        largest = sorted(usable, key=lambda peer: self._members.get(peer).memory or math.inf)
        usual = place(before, first, num_stages), tuple((p,) for p in largest[-num_stages:])

        def apart(before: Stages, peers: Sequence[str]) -> Stages | None:
            are_apart = self._members.are_apart
            return place_apart(before, peers, num_stages, are_apart, is_tied=self._is_tied)

        if not self._lost_in(usual[0]):
            yield usual[0]
        else:
            yield from filter(None, (apart(before, each) for each in (first, usable)))
        if not self._lost_in(usual[1]):
            yield usual[1]
        elif found := apart((), largest[::-1]):
            yield found
        yield from filter(self._lost_in, usual)

    def _filled(self, stages: Stages, bounds: Sequence[int], peers: Sequence[str]) -> Stages:
        """The same with those who are free, as far as the run file and their memory let them."""
        needed = [self.sizes.needed(start, stop) for start, stop in pairwise(bounds)]

        def fits(peer_id: str, index: int) -> bool:
            (room,) = self._rooms([peer_id])
            return not room or needed[index] <= room

        most = self._layout.stage_members
        are_apart = self._members.are_apart
        return fill(stages, peers, most, fits, needed, are_apart, is_tied=self._is_tied)

    def _cut(self, stages: Stages) -> tuple[int, ...]:
        last = self.last
        rooms = [min(filter(None, self._rooms(stage)), default=0) for stage in stages]
        if last is not None and len(last.stages) == len(stages):
            needed = [self.sizes.needed(a, b) for a, b in pairwise(last.bounds)]
            if all(not room or need <= room for need, room in zip(needed, rooms, strict=True)):
                return last.bounds
        return cut_layers(self.sizes, rooms)

    def _rooms(self, peers: Sequence[str]) -> list[int]:
        """Bytes for stages, of what members lend; 0 for whatever there is."""
        return rooms_of([self._layout.tiered(self._members.get(peer).memory) for peer in peers])

    # Those that join in

    async def prepare(self, chain: Chain) -> None:
        """Have members that are here, and in no stage, load the layers of one that may have more."""
        if self._layout.stage_members == 1:
            return
        await self._look_after_joiners()
        free = [
            peer
            for peer in self._members.usable()
            if peer not in chain.peers
            and peer not in self._joiners
            and not self._members.get(peer).is_slow
        ]
        if not free:
            return
        stages = tuple(
            (*stage, *(peer for peer, joiner in self._joiners.items() if joiner.stage == index))
            for index, stage in enumerate(chain.stages)
        )
        for index, stage in enumerate(self._filled(stages, chain.bounds, free)):
            for peer in stage:
                if peer in free:
                    await self._prepare(chain, peer, index)

    async def _prepare(self, chain: Chain, peer_id: str, index: int) -> None:
        stages = tuple(
            (*stage, peer_id) if i == index else stage for i, stage in enumerate(chain.stages)
        )
        # The state comes when it joins in: whatever there is now will be another one then.
        prepared = Chain(self._orders.draw_number(), stages, chain.bounds, 0)
        order = self._orders.order(prepared, peer_id, is_preparation=True)
        self._joiners[peer_id] = _Joiner(index, order, self._orders.deadline({peer_id: order}))
        await self._members.tell(peer_id, RunMessage.STAGE, order.encode())

    def ready_joiners(self) -> dict[str, int]:
        """Members that have loaded their layers, and the stage of each."""
        return {
            peer: joiner.stage
            for peer, joiner in self._joiners.items()
            if self._members.is_ready(peer, joiner.number)
            and not self._members.is_out(peer, joiner.number)
        }

    async def _look_after_joiners(self) -> None:
        """Drop those that are lost or have failed; what one has not heard of is told again."""
        for peer_id, joiner in list(self._joiners.items()):
            reason = self._members.note_failed(peer_id, joiner.number)
            is_here = peer_id in self._members.usable()
            is_ready = self._members.is_ready(peer_id, joiner.number)
            is_late = not is_ready and self._orders.has_run_out(joiner.deadline, [peer_id])
            if reason or not is_here or is_late:
                called = self._members.called(peer_id)
                logger.info(
                    "%s does not join in: %s",
                    called,
                    reason or "it is not here, or asks for nothing",
                )
                del self._joiners[peer_id]
            elif not self._members.has_heard(peer_id, joiner.number):
                await self._members.tell(peer_id, RunMessage.STAGE, joiner.order.encode())
