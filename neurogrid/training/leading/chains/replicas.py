"""The leader of several replicas of a model: each a chain of stages, or a machine that holds all of it.

    replicas -> a round: steps of each by itself -> an attempt to average -> Commit -> the next round, with newcomers

In the run's machine each replica is a member, and a round is a round. Steps within a round are nobody else's: a replica
that is lost in one costs what it has learned in it, and its samples are given out again. What a replica begins with is
the state that is kept here, after a round; so one is taken in where that is the state of all.

Source: protocol_spec/training/stages.md, "Replicas".
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import trio

from neurogrid.errors import NeuroGridError, NoRouteError, TransportError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import TensorMessage
from neurogrid.training.leading.chains.chain import Chain, ChainBroken
from neurogrid.training.leading.chains.forming import Forming
from neurogrid.training.leading.chains.leader import ChainLeader, loss_of, norm_of
from neurogrid.training.leading.chains.members import ChainWorker
from neurogrid.training.leading.chains.replica import Replica, figures_of
from neurogrid.training.leading.hiring import HEARTBEAT
from neurogrid.training.leading.look import StageLook
from neurogrid.training.runs.machine import Outcome
from neurogrid.training.runs.state import Occupant, Phase
from neurogrid.training.runs.trainers import cut_batches
from neurogrid.training.stages.chain_estimate import is_tied
from neurogrid.training.stages.holdings import holdings_of
from neurogrid.training.trainer import FileRange
from neurogrid.training.wire.runs import (
    Applied,
    Average,
    Averaged,
    Commit,
    Committed,
    RunMessage,
    StepDone,
)

__all__ = ["ReplicasLeader"]

# Seconds in which the leader may hear who was lost, after a member has said that an attempt came to nothing.
_UNTIL_HEARD: Final = 3.0
# Seconds that an attempt may take beyond what each member gives it.
_MARGIN: Final = 10.0
# Times that an attempt is made again with the same replicas, before one of them is done without.
_MAX_AGAIN: Final = 1


class ReplicasLeader(ChainLeader):
    """Leads a run of several replicas. Arguments, and how it is run, are those of `ChainLeader`."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        run = self._facts.run_file
        self._every = run.outer.every
        self._replicas: dict[int, Replica] = {}
        self._taking: list[Chain] = []
        self._attempt = 0
        self._has_lost = False
        self._has_begun = False
        self._forming = Forming(
            self._members,
            self._orders,
            self._arranger.sizes,
            run.layout,
            lambda: [p for chain in self._chains() for p in chain.peers],
            lambda: len(self._chains()),
            is_tied=is_tied(run, self._numbers),
            say=self._progress.say,
        )
        self._exchange.on_message(RunMessage.AVERAGED, self._on_averaged)
        self._exchange.on_message(RunMessage.COMMITTED, self._on_committed)

    def _chains(self) -> list[Chain]:
        return [*(each.chain for each in self._replicas.values()), *self._taking]

    def _stage_looks(self) -> list[StageLook]:
        return [look for chain in self._chains() for look in self._looks_of(chain)]

    def _waits(self) -> str:
        if len(self._replicas) >= self._least:
            return ""
        return f"waits for replicas: {len(self._replicas)} of {self._least} are here"

    @property
    def _least(self) -> int:
        """Replicas without which there is no round."""
        return max(self._machine.rules.min_members, self._facts.run_file.outer.quorum)

    # The run

    @property
    def _is_over(self) -> bool:
        state = self._machine.state
        return state.phase is Phase.ENDED and self._state.step >= self._step

    @property
    def _step(self) -> int:
        """Steps that the state of all has made."""
        return self._machine.state.round * self._every

    def _begin(self) -> None:
        self._machine.state.keep_all()
        if self._machine.state.num_seats and not self._is_over:
            self._take_back()

    def _take_back(self) -> None:
        """Go on from the state that is kept: rounds since are nobody's."""
        kept = self._state.step // self._every
        if kept < self._machine.state.round and self._has_begun:
            self._progress.say(
                f"the replicas go on from the state after round {kept}: what came after it is computed again"
            )
        self._machine.resume(kept)
        self._keeper.figures.resumed(kept)
        hours = self._run_at(self._machine.state.round + 1).stop.hours
        if self._has_begun and hours is not None and self._keeper.seconds >= 3600 * hours:
            self._machine.stop(f"{hours:g} hours are over")
        self._keeper.write(self._machine.drain())

    async def _go_on(self) -> None:
        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._forming.run)
                while not self._is_over:
                    await self._gather()
                    await self._make_round()
                nursery.cancel_scope.cancel()

    # Who is there

    async def _gather(self) -> None:
        """Take in the replicas that are ready, and wait until there are enough for a round.

        Raises:
            NoRouteError: there were too few for too long.
        """
        began, said = trio.current_time(), ""
        while True:
            self._look_after()
            if self._machine.state.phase is Phase.ENDED or len(self._replicas) < self._least:
                self._come_back()
            if self._state.step == self._step:
                await self._take_in()
            if len(self._replicas) >= self._least:
                for seat in self._machine.state.vacant():
                    self._machine.left(seat.number, "nobody has taken its place")
                self._keeper.write(self._machine.drain())
                self._has_begun = True
                return
            num = len(self._replicas) + self._forming.num_ready
            text = f"waiting for replicas: {num} of {self._least} are here"
            if text != said:
                self._progress.say(text)
                said = text
            if trio.current_time() - began >= self._patience:
                here = "; ".join(self._members.refusals())
                others = f". These are here and take no part: {here}" if here else ""
                raise NoRouteError(
                    f"{text}, after {self._patience:g} s: have more join with the run's ticket, or lower [members] min "
                    f"and [outer] quorum. --resume goes on with it, and --wait waits longer{others}"
                )
            with trio.move_on_after(HEARTBEAT):
                await self._members.changed.wait()

    def _come_back(self) -> None:
        """Give up all replicas, and go on from the state that is kept; do nothing where that is the last state."""
        if self._state.step == self._step:
            return
        for replica in list(self._replicas.values()):
            self._lose(replica, "too few are left")
        self._take_back()

    def _look_after(self) -> None:
        """Do without replicas that were lost between two rounds."""
        for replica in list(self._replicas.values()):
            try:
                self._members.check(replica.chain)
            except ChainBroken as exc:
                self._lose(replica, str(exc))

    async def _take_in(self) -> None:
        """Give the replicas that are ready the state of all, and seats."""
        # At the beginning those that are about to be ready are waited for; later ones come in after a round.
        missing = self._least - len(self._replicas) - self._forming.num_ready
        if missing > 0 or (not self._has_begun and self._forming.is_loading):
            return
        prepared = self._forming.take()
        pieces = self._state.blobs if self._step else {}
        self._taking = [
            Chain(self._orders.draw_number(), each.stages, each.bounds, self._step, pieces=pieces)
            for each in prepared
        ]
        begun: list[Chain] = []

        async def begin(chain: Chain) -> None:
            try:
                await self._orders.begin(chain)
                begun.append(chain)
            except ChainBroken as exc:
                self._progress.warn(f"{exc}. The run goes on without it")

        try:
            async with trio.open_nursery() as nursery:
                for chain in self._taking:
                    nursery.start_soon(begin, chain)
        finally:
            self._taking = []
        # Those first that have their own seats of before.
        peers = {seat.peer for seat in self._machine.state.vacant()}
        for chain in sorted(begun, key=lambda each: (each.peers[0] not in peers, each.number)):
            self._seat(chain)
        self._keeper.write(self._machine.drain())

    def _seat(self, chain: Chain) -> None:
        name = " and ".join(map(self._members.called, chain.peers))
        peer = chain.peers[0]
        self._machine.joined(self._machine.reserve(peer), Occupant(peer, chain.number), name)
        seat = self._machine.state.seat_of(peer)
        if seat is None:  # the run has ended
            return
        self._replicas[chain.number] = Replica(chain, seat.number, name)
        self._progress.say("a replica: " + ", ".join(self._orders.words(chain)))

    def _lose(self, replica: Replica, reason: str) -> None:
        """Go on without a replica; its members may be another."""
        if self._replicas.pop(replica.chain.number, None) is None:
            return
        self._has_lost = True
        self._progress.warn(f"replica of {replica.name}: {reason}. The others go on")
        state = self._machine.state
        seat = state.seats.get(replica.seat)
        if (
            state.phase is not Phase.ENDED
            and seat is not None
            and seat.occupant == replica.occupant
        ):
            self._machine.left(replica.seat, reason)
            self._keeper.write(self._machine.drain())

    # A round

    async def _make_round(self) -> None:
        """Have all replicas take their steps, average what they have learned, and take it over."""
        step, replicas = self._step, list(self._replicas.values())
        if self._machine.state.phase is Phase.ENDED:
            return
        self._take_changes()
        for replica in replicas:
            replica.begin(next(iter(self._machine.works(replica.seat)), None))
        if not any(replica.work for replica in replicas):
            raise NeuroGridError(
                "nothing is left to learn from, and the run has not come to its end"
            )
        works = [replica.work for replica in replicas if replica.work is not None]
        self._need_only(each for work in works for each in work.ranges)
        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                for replica in replicas:
                    nursery.start_soon(self._take_steps, replica, step)
                await self._wait_for(replicas)
                nursery.cancel_scope.cancel()
        for replica in replicas:
            if not replica.is_ready:
                self._lose(
                    replica, replica.fault or "it is late, and the round is decided without it"
                )
        ready = await self._agree([each for each in replicas if each.is_ready], step)
        if ready:
            await self._conclude(ready)
            return
        for replica in list(self._replicas.values()):
            self._lose(replica, "its round has no quorum")

    async def _wait_for(self, replicas: Sequence[Replica]) -> None:
        """Wait until all have taken their steps, or those are late that have not."""
        outer = self._run_at(self._machine.state.round + 1).outer
        working = [each for each in replicas if each.work is not None]
        quorum = min(outer.quorum, len(working))
        began, until = trio.current_time(), math.inf
        while any(not (each.is_ready or each.fault) for each in replicas):
            now = trio.current_time()
            if until == math.inf and sum(each.is_ready for each in working) >= quorum:
                # Those that take twice as long are waited for: a machine and a chain are not equally fast.
                until = now + max(outer.grace, now - began)
            if now >= until:
                return
            changed = self._members.changed.next
            with trio.move_on_at(min(until, now + HEARTBEAT)):
                await changed.wait()

    async def _take_steps(self, replica: Replica, step: int) -> None:
        ranges = replica.work.ranges if replica.work is not None else ()
        try:
            files = await self._files(ranges)
            batches = cut_batches(files, self._machine.rules.batch_samples) if files else []
            for number, batch in enumerate(batches):
                await self._take_step(replica, step + number, batch)
            replica.is_ready = True
        except ChainBroken as exc:
            replica.fault = str(exc)
        self._members.changed.set()

    async def _take_step(self, replica: Replica, step: int, files: Sequence[FileRange]) -> None:
        began, chain = trio.current_time(), replica.chain
        batch = await trio.to_thread.run_sync(self._reader.read, files)
        await self._compute(chain, step, batch, is_evaluation=False)
        done = [chain.done[step, peer] for peer in chain.peers]
        norm, faults = norm_of(chain, step)
        self._note_faults(step, faults)
        await self._tell_apply(chain, step, 0.0 if faults else norm, not faults, False, {})
        replica.note(loss_of(chain, step), batch.num_labels, norm, done)
        chain.forget_before(step - 1)
        self._deadlines.made(chain.peers, trio.current_time() - began)

    # What replicas have learned

    async def _agree(self, replicas: Sequence[Replica], step: int) -> list[Replica]:
        """Have replicas average what they have learned, and write the round down; those that have, or nobody."""
        left, again = list(replicas), 0
        while self._is_quorum(left):
            self._attempt = self._orders.draw_number()
            faults = await self._try(left, step)
            if faults is None:
                self._decide_round(left)
                return left
            if not faults:
                again += 1
                faults = {} if again <= _MAX_AGAIN else self._blamed(left)
            for number, reason in faults.items():
                if number in self._replicas:
                    self._lose(self._replicas[number], reason)
            left = [each for each in left if each.chain.number in self._replicas]
        return []

    def _is_quorum(self, replicas: Sequence[Replica]) -> bool:
        # Where data end not all have work, and those that have are enough.
        return len(replicas) >= self._least and any(each.weight for each in replicas)

    async def _try(self, replicas: Sequence[Replica], step: int) -> dict[int, str] | None:
        """One attempt: None where all have the same; else replicas that are to be done without, and why."""
        for replica in replicas:
            replica.begin_attempt()
        chains = [each.chain for each in replicas]
        told = Average(
            run=self._facts.run_id,
            chain=1,
            step=0,
            attempt=self._attempt,
            peers=tuple(peer for chain in chains for peer in chain.peers),
            addresses=tuple(self._members.address_of(p) for chain in chains for p in chain.peers),
            stages=tuple(len(chain.peers) for chain in chains),
            bounds=tuple(bound for chain in chains for bound in chain.bounds),
            weights=tuple(each.weight for each in replicas),
        )
        for replica in replicas:
            chain = replica.chain
            made = replica.num_steps
            own = replace(told, chain=chain.number, step=step + made)
            try:
                for peer in chain.peers:
                    await self._tell(peer, RunMessage.AVERAGE, own.encode())
            except ChainBroken as exc:
                return {chain.number: str(exc)}
        return await self._hear(replicas)

    async def _hear(self, replicas: Sequence[Replica]) -> dict[int, str] | None:
        """Wait for the answers to an attempt, and return what it comes to, as `_try` does."""
        until = trio.current_time() + self._facts.run_file.outer.attempt_timeout + _MARGIN
        while True:
            changed = self._members.changed.next
            for replica in replicas:
                try:
                    self._members.check(replica.chain)
                except ChainBroken as exc:
                    return {replica.chain.number: str(exc)}
            now = trio.current_time()
            answers = [each for replica in replicas for each in replica.averaged.values()]
            if any(each.reason for each in answers):
                until = min(until, now + _UNTIL_HEARD)
            elif all(len(each.averaged) == len(each.chain.peers) for each in replicas):
                return self._compare(replicas)
            if now >= until:
                if any(each.reason for each in answers):
                    return {}
                return {
                    each.chain.number: "it does not say what an attempt has come to"
                    for each in replicas
                    if len(each.averaged) < len(each.chain.peers)
                }
            with trio.move_on_at(min(until, now + HEARTBEAT)):
                await changed.wait()

    def _compare(self, replicas: Sequence[Replica]) -> dict[int, str] | None:
        """Faults of replicas with a member whose average is not that of most, by chain number; None for no fault."""
        faults: dict[int, str] = {}
        digests = {
            peer: list(told.digests) for each in replicas for peer, told in each.averaged.items()
        }
        of_peer = {peer: each.chain.number for each in replicas for peer in each.chain.peers}
        for holding in holdings_of([each.cut for each in replicas]):
            found = {p: digests[p].pop(0) if digests[p] else b"" for p in holding.members}
            ((most, _), *_) = Counter(found.values()).most_common(1)
            for peer, digest in found.items():
                if digest != most:
                    called = self._members.called(peer)
                    faults[of_peer[peer]] = f"{called} has come to another average than the others"
        return faults or None

    def _blamed(self, replicas: Sequence[Replica]) -> dict[int, str]:
        """The replica that most others name, or the last of those that say that it came to nothing."""
        of_peer = {peer: each for each in replicas for peer in each.chain.peers}
        answers = [told for each in replicas for told in each.averaged.values() if told.reason]
        named = Counter(of_peer[t.lost].chain.number for t in answers if t.lost in of_peer)
        if named:
            ((number, _), *_) = named.most_common(1)
        else:
            number = max(
                each.chain.number
                for each in replicas
                if any(told.reason for told in each.averaged.values())
            )
        reason = answers[0].reason if answers else "an attempt came to nothing"
        return {number: f"nothing can be averaged with it: {reason}"}

    def _decide_round(self, replicas: Sequence[Replica]) -> None:
        """The round is in the run: whoever is lost from here on, the others have it."""
        state = self._machine.state
        digests = hashlib.sha256()
        for replica in replicas:
            for peer in replica.chain.peers:
                for digest in replica.averaged[peer].digests:
                    digests.update(digest)
        wrong = self._machine.decided(
            Outcome(
                index=state.index + 1,
                round=state.round + 1,
                digest=digests.digest(),
                weights={each.occupant.peer: each.weight for each in replicas if each.weight},
                members=frozenset(each.occupant for each in replicas),
            )
        )
        assert not wrong
        self._keeper.figures.decided(state)
        self._keeper.told[state.round] = dict(figures_of(replicas))
        self._keeper.write(self._machine.drain())

    async def _conclude(self, replicas: Sequence[Replica]) -> None:
        """Have replicas take over a round that is decided; keep the state, and say how it went."""
        state = self._machine.state
        number, is_last = state.round, state.phase is Phase.ENDED
        run = self._run_at(number)
        is_due = self._step % run.steps_between_states == 0
        is_due = is_due or number % run.checkpoints.every == 0
        # Whoever comes in begins with it.
        keeps = is_last or is_due or self._has_lost or self._forming.is_busy
        # One is enough, but at the end: there is no round after it that could be kept.
        keeping = list(replicas) if is_last else list(replicas[:1]) if keeps else []
        for replica in replicas:
            try:
                await self._commit(replica, keeps=replica in keeping)
            except ChainBroken as exc:
                self._lose(replica, str(exc))
        for replica in replicas:
            if replica.chain.number not in self._replicas:
                continue
            try:
                await self._members.wait(replica.chain, replica.has_committed)
            except ChainBroken as exc:
                self._lose(replica, str(exc))
        for replica in keeping:
            if replica.chain.number in self._replicas and await self._keep_state(replica):
                break
        for replica in self._replicas.values():
            if replica.has_committed():
                self._members.note_done(replica.chain.peers)
        is_kept = self._state.step == self._step
        if is_kept:
            self._has_lost = False
            state.forget_before(number)
        await self._note_round(number, is_last=is_last)
        if is_kept and (is_last or number % run.checkpoints.every == 0):
            await self._keeper.write_checkpoint(self._state, state)

    async def _commit(self, replica: Replica, *, keeps: bool) -> None:
        chain = replica.chain
        told = Commit(self._facts.run_id, chain.number, self._attempt, self._step, keeps)
        for peer in chain.peers:
            await self._tell(peer, RunMessage.COMMIT, told.encode())

    async def _keep_state(self, replica: Replica) -> bool:
        """Fetch the state of one replica; whether it is here."""
        pieces: dict[str, tuple[str, bytes]] = {}
        try:
            for peer, told in replica.committed.items():
                pieces |= self._pieces_of(replica.chain, peer, told)
            with unwrap_errors():
                await self._state.keep(
                    self._step, pieces, self._transfers, piece_bytes=self._piece_bytes
                )
        except ChainBroken as exc:
            self._lose(replica, str(exc))
            return False
        except TransportError as exc:
            self._progress.warn(f"the state after step {self._step} cannot be fetched: {exc}")
            return False
        return True

    async def _note_round(self, number: int, *, is_last: bool) -> None:
        """Figures of a round, and evaluation by one of the replicas."""
        run = self._run_at(number)
        is_due = run.eval.every and (is_last or number % run.eval.every == 0)
        for replica in list(self._replicas.values()) if is_due and self._manifest.held_out else ():
            try:
                figures = await self._evaluate(replica.chain, self._step, is_last=is_last)
            except ChainBroken as exc:
                self._lose(replica, str(exc))
                continue
            self._keeper.told[number] |= figures
            break
        await self._keeper.note(number)

    # What members tell

    def _on_averaged(self, message: TensorMessage) -> None:
        told = Averaged.decode(message.data)
        if (replica := self._told_by(message, told)) is not None:
            replica.averaged[sender_of(message)] = told

    def _on_committed(self, message: TensorMessage) -> None:
        told = Committed.decode(message.data)
        if (replica := self._told_by(message, told)) is not None:
            replica.committed[sender_of(message)] = told

    def _told_by(self, message: TensorMessage, told: Averaged | Committed) -> Replica | None:
        """The replica that a member tells of; None where it is of another attempt than the last."""
        self._members.heard(message)
        replica = self._replicas.get(told.chain)
        if replica is None or sender_of(message) not in replica.chain.peers:
            return None
        is_meant = (told.run, told.attempt) == (self._facts.run_id, self._attempt)
        return replica if is_meant else None

    def _chain_with(self, worker: ChainWorker) -> Chain | None:
        found = [
            chain
            for chain in self._chains()
            if any(self._members.get(peer) is worker for peer in chain.peers)
        ]
        return found[0] if found else None

    def _chain_of(self, told: StepDone | Applied, peer_id: str) -> Chain | None:
        replica = self._replicas.get(told.chain)
        if replica is None or told.run != self._facts.run_id:
            return None
        chain = replica.chain
        return chain if peer_id in chain.peers and told.step == chain.step else None
