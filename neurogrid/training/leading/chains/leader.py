"""The leader of a run whose model lies in a chain of stages: finds members, arranges them, and has them make steps.

    members -> an arrangement -> steps, until one of them is lost -> the next arrangement, from the state that is kept

Which samples a step has, and when the run is over, is the matter of `runs.machine`, in which the whole chain is one
member. A step is decided as soon as its gradients are known: what a chain does after a state and a batch is the same
whenever it is done. So what was lost with a stage is computed again from the state that is kept here, by any cut. More
than 600 lines, since all that a step is told of, and what breaks it off, is one sequence over the same state. Who is in
which stage is the matter of `arranging`.

Source: protocol_spec/training/stages.md.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
import trio
from torch import Tensor

from neurogrid.errors import NeuroGridError, TooLargeForPeerError, TransportError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.node.roles import Table, authorise
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.transfer import Transfers
from neurogrid.p2p.trust import COORDINATOR, RUN_ROLES
from neurogrid.p2p.wire import MessageType, TensorMessage
from neurogrid.training.data.evaluating import HeldOut, eval_figures, held_out_samples
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.leading.chains.arranging import Arranger
from neurogrid.training.leading.chains.chain import Chain, ChainBroken
from neurogrid.training.leading.chains.keeper import ChainKeeper
from neurogrid.training.leading.chains.members import ChainMembers, ChainWorker
from neurogrid.training.leading.chains.numbers import pieces_that_learn
from neurogrid.training.leading.chains.orders import StageOrders
from neurogrid.training.leading.chains.rates import StepRates
from neurogrid.training.leading.chains.state import ChainState
from neurogrid.training.leading.chains.step_deadline import StepDeadlines
from neurogrid.training.leading.chains.sums import sum_of
from neurogrid.training.leading.chains.weights import ChainWeights
from neurogrid.training.leading.changes import WantedChanges
from neurogrid.training.leading.data import LeaderSlices
from neurogrid.training.leading.facts import RunFacts
from neurogrid.training.leading.look import LeaderLook, StageLook
from neurogrid.training.leading.settings import LeaderProgress
from neurogrid.training.runs.changes import run_at
from neurogrid.training.runs.machine import Outcome, RunMachine
from neurogrid.training.runs.round_trace import Timeline, step_trace
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.state import Occupant, Phase
from neurogrid.training.stages.chain_estimate import (
    ChainNumbers,
    fitting_micro_batches,
    is_tied,
)
from neurogrid.training.stages.cutting import StageSizes
from neurogrid.training.stages.holdings import state_pieces
from neurogrid.training.stages.pace import PaceWatch
from neurogrid.training.stages.routing import lanes_of, routes
from neurogrid.training.stages.schedule import bubble, bubble_of_members
from neurogrid.training.trainer import FileRange
from neurogrid.training.trainer.batches import Batch, BatchReader
from neurogrid.training.wire.runs import (
    MAX_MICRO_BATCHES,
    Applied,
    Apply,
    Committed,
    RunMessage,
    SampleRange,
    StageTensor,
    Step,
    StepDone,
    session_of,
)

__all__ = ["CHAIN_LEADER_TAKES", "ChainLeader", "loss_of", "norm_of"]


CHAIN_LEADER_TAKES: Final[Table] = {
    RunMessage.REPORT: RUN_ROLES,
    RunMessage.STAGE_REPORT: RUN_ROLES,
    RunMessage.STEP_DONE: RUN_ROLES,
    RunMessage.APPLIED: RUN_ROLES,
    RunMessage.AVERAGED: RUN_ROLES,
    RunMessage.COMMITTED: RUN_ROLES,
    RunMessage.FOLLOW: frozenset({COORDINATOR}),
    MessageType.TRANSFER_REQUEST: RUN_ROLES,
    MessageType.TRANSFER_OFFER: RUN_ROLES,
    MessageType.WEIGHTS: RUN_ROLES,
}
"""The roles that the leader of a chain takes each message from."""

_SLICE_TIMEOUT: Final = 120.0
# How much the last step counts in what a micro-batch takes a member.
_LATEST: Final = 0.3
# Seconds between looks at how long the run may take.
_HOURS_LOOK: Final = 10.0
# Bytes that a state has beside each number that learns: the moments of AdamW, and of replicas the outer momentum.
_MOST_KEPT_BYTES: Final = 12
# Micro-batches for each member that are evaluated at once.
_EVALUATED: Final = 4
# Steps in a row that may come to nothing.
_MAX_NOT_FINITE: Final = 5


class ChainLeader:
    """Leads a run in stages with the members of a host's cluster. Keep `run` running; it returns when it is over.

    Args:
        host: this peer's.
        exchange: of runs, on it.
        transfers: of that.
        facts: what members are told.
        machine: what decides.
        weights: what stages begin with.
        state: what is kept of stages.
        keeper: journal, figures, checkpoints.
        slices, manifest: the data.
        reader: of batches.
        sizes: what stages take.
        numbers: of the model.
        changes: that somebody wants.
        rates: of steps.
        progress: is told what people may want to see.
        total_steps: of the run file's schedule.
        wait: seconds that members are waited for.
    """

    def __init__(
        self,
        host: Host,
        exchange: Exchange,
        transfers: Transfers,
        facts: RunFacts,
        machine: RunMachine,
        weights: ChainWeights,
        state: ChainState,
        keeper: ChainKeeper,
        slices: LeaderSlices,
        manifest: Manifest,
        reader: BatchReader,
        sizes: StageSizes,
        numbers: ChainNumbers,
        changes: WantedChanges,
        rates: StepRates,
        progress: LeaderProgress,
        *,
        total_steps: int,
        wait: float,
    ) -> None:
        self._host, self._exchange, self._transfers = host, exchange, transfers
        self._facts, self._machine = facts, machine
        self._state, self._keeper = state, keeper
        self._slices, self._manifest, self._reader = slices, manifest, reader
        self._changes, self._rates = changes, rates
        self._progress, self._numbers, self._patience = progress, numbers, wait
        self._members = ChainMembers(
            host,
            exchange,
            facts,
            progress,
            total_steps=total_steps,
            most=facts.run_file.members.max,
            on_no_memory=self._take_smaller,
        )
        self._orders = StageOrders(self._members, facts, weights)
        self._arranger = Arranger(
            self._members,
            facts,
            self._orders,
            state,
            sizes,
            progress,
            is_tied=is_tied(facts.run_file, numbers),
            wait=wait,
        )
        self._chain: Chain | None = None
        # Of the steps after the state that is kept: they may have to be made again.
        self._since: dict[int, tuple[SampleRange, ...]] = {}
        self._deadlines = StepDeadlines()
        self._num_not_finite = 0
        self._num_micro_batches = 0
        self._timeline = Timeline({"neurogrid.run": facts.run_file.name})
        self._session = session_of(facts.run_id)
        authorise(exchange, CHAIN_LEADER_TAKES)
        for code, handler in (
            (RunMessage.STEP_DONE, self._on_done),
            (RunMessage.APPLIED, self._on_applied),
        ):
            exchange.on_message(code, handler)

    def look(self) -> LeaderLook:
        """State of the run, its workers and its stages at this moment, for display."""
        return LeaderLook(
            peer_id=self._host.peer_id,
            state=self._machine.state,
            rules=self._machine.rules,
            peers=self._members.looks(),
            seconds=self._keeper.seconds,
            num_parameters=self._facts.num_parameters,
            applied=self._machine.state.round,
            stages=self._stage_looks(),
            waits=self._waits(),
        )

    def _stage_looks(self) -> list[StageLook]:
        chain = self._chain or self._arranger.last
        return [] if chain is None else self._looks_of(chain)

    def _looks_of(self, chain: Chain) -> list[StageLook]:
        looks = []
        for index, stage in enumerate(chain.stages):
            for peer_id in stage:
                worker = self._members.get(peer_id)
                told = worker.stage
                is_current = told is not None and told.chain == chain.number
                looks.append(
                    StageLook(
                        peer_id,
                        index + 1,
                        chain.bounds[index],
                        chain.bounds[index + 1],
                        report=told if is_current else None,
                        waited=worker.waited,
                    )
                )
        return looks

    def _waits(self) -> str:
        """Reason why no steps are made at the moment; empty where they are."""
        if self._chain is not None:
            return ""
        wanted = self._facts.run_file.layout.stages
        here = len(self._members.usable())
        if here < wanted:
            return f"waits for members: {here} of {wanted} are here"
        return "waits until all stages have their layers"

    # The run

    async def run(self) -> None:
        """Lead the run to its end.

        Raises:
            NeuroGridError: it cannot go on; says why.
        """
        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._members.run)
                nursery.start_soon(self._watch_hours)
                self._begin()
                while not self._is_over:
                    await self._go_on()
                # A leader that died after it had kept the last state has yet to make it a checkpoint.
                if not self._keeper.has_checkpoint(self._state.step):
                    await self._keeper.write_checkpoint(self._state, self._machine.state)
                await self._members.dismiss_all(self._machine.state.reason or "the run is over")
                nursery.cancel_scope.cancel()

    @property
    def _is_over(self) -> bool:
        """Whether the run has ended, and the state after its last step is kept."""
        state = self._machine.state
        return state.phase is Phase.ENDED and self._state.step >= state.round

    def _begin(self) -> None:
        machine = self._machine
        if machine.state.num_seats:
            machine.resume(self._state.step)
            self._keeper.figures.resumed(self._state.step)
        own = self._host.peer_id
        # A leader that begins again is another process of the same seat.
        occupant = Occupant(own, time.time_ns())
        machine.joined(machine.reserve(own), occupant, "the chain")
        self._keeper.write(machine.drain())

    async def _go_on(self) -> None:
        """Arrange stages, and have them make steps until one of them is lost."""
        # Of the state after the last step members tell where they make that step: it is yet to be kept.
        has_ended = self._machine.state.phase is Phase.ENDED
        try:
            self._chain = await self._arranger.arrange(from_kept=has_ended)
            while not self._is_over:
                self._chain = await self._train(self._chain)
        except ChainBroken as exc:
            self._progress.warn(f"{exc}. The stages are arranged anew")
        finally:
            self._chain = None

    async def _train(self, chain: Chain) -> Chain:
        """Have a chain make steps until the run is over, or members join in; the chain that goes on.

        Raises:
            ChainBroken: a member of it is lost, or has failed.
        """
        state = self._machine.state
        for step in itertools.count(chain.begun):
            if step >= state.round:
                if state.phase is Phase.ENDED:
                    break
                self._take_changes()
                (work, *_) = self._machine.works(state.occupied()[0].number)
                self._since[state.round] = work.ranges
            await self._arranger.prepare(chain)
            joined = await self._make_step(chain, step, is_new=step == state.round)
            if joined:
                providers = self._providers(chain, joined)
                pieces = {
                    name: blob_id
                    for peer in providers
                    for name, (_, blob_id) in self._pieces_of(
                        chain, peer, chain.applied[step, peer]
                    ).items()
                }
                names = ", ".join(map(self._members.called, joined))
                self._progress.say(f"after step {step + 1} there joins in {names}")
                return await self._arranger.hand_over(chain, list(joined), pieces, providers)
        return chain

    def _take_changes(self) -> None:
        """Have what is changed hold from the next step on."""
        if self._changes.take():
            self._keeper.write(self._machine.drain())
        self._members.grace = self._run_at(self._machine.state.round + 1).outer.grace

    def _run_at(self, round_: int) -> RunFile:
        """The run file as it holds in a round."""
        return run_at(self._facts.run_file, self._machine.state.changes, round_)

    # A step

    async def _make_step(self, chain: Chain, step: int, *, is_new: bool) -> dict[str, int]:
        """Have a step made; who joins in after it, and in which stage."""
        began = trio.current_time()
        self._timeline.begin()
        with self._timeline.during("training.read"):
            batch = await self._read(self._since[step])
        with self._timeline.during("training.compute"):
            await self._compute(chain, step, batch, is_evaluation=False)
        self._check_digests(chain, step)
        done = [chain.done[step, peer] for peer in chain.peers]
        norm, faults = norm_of(chain, step)
        if is_new:
            self._decide(step, done, norm, faults)
            figures = _figures(chain, step, norm)
            self._keeper.told[step + 1] = {**figures, "lr": self._rates.rate(step)}
        is_last = self._machine.state.phase is Phase.ENDED and step + 1 == self._machine.state.round
        run = self._run_at(step + 1)
        every = run.layout.steps_between_states(has_adapter=run.adapter.r > 0)
        is_due = (step + 1) % every == 0 or (step + 1) % run.checkpoints.every == 0
        keeps = is_last or is_due
        joined = {} if is_last else self._arranger.ready_joiners()
        await self._tell_apply(chain, step, 0.0 if faults else norm, not faults, keeps, joined)
        if keeps:
            with self._timeline.during("training.keep"):
                await self._keep(chain, step)
        if joined:
            providers = self._providers(chain, joined)
            await self._members.wait(chain, lambda: chain.all_applied(step, providers))
        self._deadlines.made(chain.peers, trio.current_time() - began)
        if is_new or step + 1 in self._keeper.told:
            await self._note_step(chain, step, is_last=is_last)
        self._tell_step(chain, step)
        if not is_last:
            self._watch_paces(chain, step)
        return joined

    def _tell_step(self, chain: Chain, step: int) -> None:
        """Tell of a step in a trace, in which its members tell of theirs."""
        told = {
            "neurogrid.chain": chain.number,
            "neurogrid.step": step + 1,
            "neurogrid.stages": len(chain.stages),
            "neurogrid.members": len(chain.peers),
            "neurogrid.micro_batches": chain.num_micro_batches,
        }
        ids = step_trace(self._facts.run_id, chain.number, step)
        self._timeline.end(ids, "training.step", told, is_root=True)

    async def _tell_apply(
        self,
        chain: Chain,
        step: int,
        norm: float,
        is_applied: bool,
        keeps: bool,
        joined: Mapping[str, int],
    ) -> None:
        """Tell all what becomes of a step. From here on each of them has the state after it."""
        chain.is_decided = True
        broken: ChainBroken | None = None
        offering = chain.peers if keeps else self._providers(chain, joined)
        rate, clip = self._rates.changed(step)
        for peer_id in chain.peers:
            apply = Apply(
                run=self._facts.run_id,
                chain=chain.number,
                step=step,
                norm=norm,
                is_applied=is_applied,
                keeps=peer_id in offering,
                rate=rate,
                clip=clip,
            )
            try:
                await self._tell(peer_id, RunMessage.APPLY, apply.encode())
            except ChainBroken as exc:
                broken = exc  # the others go on from the state after the step
        if broken is not None:
            raise broken

    def _providers(self, chain: Chain, joined: Mapping[str, int]) -> tuple[str, ...]:
        """The members whose state those need who join in: of the last stage, what is tied is the first one's."""
        wanted = set(joined.values())
        if len(chain.stages) - 1 in wanted:
            wanted.add(0)
        return tuple(chain.stages[index][0] for index in sorted(wanted))

    def _check_digests(self, chain: Chain, step: int) -> None:
        """Raises ChainBroken where members of a stage do not have the same gradients: of them nothing is applied."""
        for stage in chain.stages:
            first = chain.done[step, stage[0]].digest
            others = [peer for peer in stage if chain.done[step, peer].digest != first]
            if others:
                for peer_id in others:
                    self._members.count_failure(
                        peer_id, f"it came to other gradients in step {step + 1}"
                    )
                raise ChainBroken(
                    f"{', '.join(map(self._members.called, others))} came to other gradients than "
                    f"{self._members.called(stage[0])} in step {step + 1}"
                )

    def _watch_paces(self, chain: Chain, step: int) -> None:
        """Arrange the stages anew where one has become slow, and another member could take its place.

        In a stage of several members a slow one is given less.

        Raises:
            ChainBroken: so it is.
        """
        spare = [
            peer
            for peer in self._members.usable()
            if peer not in chain.peers and not self._members.get(peer).is_slow
        ]
        for index, stage in enumerate(chain.stages):
            if len(stage) > 1:
                continue
            (peer_id,) = stage
            seconds = chain.done[step, peer_id].seconds
            slow = chain.paces.setdefault(index, PaceWatch()).told(seconds)
            if slow is not None and spare:
                self._members.get(peer_id).is_slow = True
                (now, usual), called = slow, self._members.called(peer_id)
                raise ChainBroken(
                    f"{called} has become slow: it takes {now:.2f} s for a step, and took {usual:.2f}"
                )

    async def _compute(self, chain: Chain, step: int, batch: Batch, *, is_evaluation: bool) -> None:
        """Send a batch through the chain, and wait until all stages have told."""
        run = self._run_at(step if is_evaluation else step + 1)
        num_samples = self._machine.rules.batch_samples if is_evaluation else batch.num_samples
        wanted = min(self._wanted_micro_batches(run, chain), num_samples)
        pieces = list(batch.pieces(-(-num_samples // wanted)))
        chain.step, chain.is_decided = step, False
        for peer in chain.peers:
            chain.done.pop((step, peer), None)
        paces = [[self._members.get(peer).pace for peer in stage] for stage in chain.stages]
        route = routes(len(pieces), paces) if chain.widths else b""
        lanes = [lanes_of(route, number, len(chain.stages)) for number in range(len(pieces))]
        chain.counts = Counter(
            chain.stages[index][lane] for each in lanes for index, lane in enumerate(each)
        )
        if not is_evaluation:
            chain.num_micro_batches = len(pieces)
            chain.bubble = _bubble_of(chain.stages, lanes)
        told = Step(
            run=self._facts.run_id,
            chain=chain.number,
            step=step,
            micro_batches=len(pieces),
            labels=batch.num_labels,
            is_evaluation=is_evaluation,
            routes=route,
        )
        # A forward and a backward of each micro-batch, in each stage.
        num_operations = 2 * len(pieces) * len(chain.stages)
        deadline = self._deadlines.begin(trio.current_time(), chain.peers, num_operations)

        def is_done() -> bool:
            deadline.look(trio.current_time(), self._members.operations_done(chain, step))
            scope.deadline = deadline.at
            return chain.all_done(step)

        try:
            with trio.fail_at(deadline.at) as scope, unwrap_errors():
                async with trio.open_nursery() as nursery:
                    for peer in chain.peers:
                        await self._tell(peer, RunMessage.STEP, told.encode())
                    for code, index, part in self._ways(len(chain.stages)):
                        for lane, peer in enumerate(chain.stages[index]):
                            tensors = [
                                (number, each[part])
                                for number, each in enumerate(pieces)
                                if lanes[number][index] == lane
                            ]
                            nursery.start_soon(self._send_tensors, chain, code, peer, step, tensors)
                    await self._members.wait(chain, is_done)
        except trio.TooSlowError:
            self._deadlines.ran_out(chain.peers, deadline)
            late = [p for p in chain.peers if (step, p) not in chain.done]
            names = ", ".join(map(self._members.called, late))
            raise ChainBroken(
                f"step {step + 1} has stood still for {deadline.seconds:.0f} s: {names} did not end it"
            ) from None
        if not is_evaluation:
            self._note_paces(chain, step)

    def _ways(self, num_stages: int) -> list[tuple[RunMessage, int, int]]:
        """Messages of each micro-batch to stages: code, index of the stage, and part (0 the inputs, 1 the labels)."""
        is_for_all = self._facts.run_file.layout.subspace > 0
        tokens = range(num_stages) if is_for_all else (0,)
        return [
            *((RunMessage.TOKENS, index, 0) for index in tokens),
            (RunMessage.LABELS, num_stages - 1, 1),
        ]

    def _note_paces(self, chain: Chain, step: int) -> None:
        """Update the seconds that a micro-batch takes each member, for the routes of the next step."""
        for peer_id in chain.peers:
            told, worker = chain.done[step, peer_id], self._members.get(peer_id)
            if (num := chain.counts.get(peer_id, 0)) and told.seconds > 0:
                now = told.seconds / num
                before = worker.pace
                worker.pace = now if before is None else before + _LATEST * (now - before)

    @property
    def _piece_bytes(self) -> int:
        """Bytes of the largest piece of a state at most."""
        return (4 + _MOST_KEPT_BYTES) * self._numbers.largest_piece

    def _wanted_micro_batches(self, run: RunFile, chain: Chain) -> int:
        """Micro-batches of a whole batch: as many as leave room in what members lend, more once memory was full."""
        lent = [
            min((m for peer in stage if (m := self._members.get(peer).memory)), default=0)
            for stage in chain.stages
        ]
        widths = list(map(len, chain.stages))
        fitting = fitting_micro_batches(run, self._numbers, chain.bounds, lent, widths)
        return max(fitting, self._num_micro_batches)

    async def _send_tensors(
        self,
        chain: Chain,
        code: RunMessage,
        peer_id: str,
        step: int,
        tensors: Sequence[tuple[int, Tensor]],
    ) -> None:
        for number, tensor in tensors:
            data = tensor.to(torch.int32).contiguous().numpy().tobytes()
            message = StageTensor(
                code, self._session, chain.number, step, number, "I32", tuple(tensor.shape), data
            ).message()
            await self._send(peer_id, message)

    def _decide(
        self, step: int, done: Sequence[StepDone], norm: float, faults: Sequence[str]
    ) -> None:
        """A step is in the run: whatever becomes of the chain, it ends up with what these gradients give."""
        self._note_faults(step, faults)
        state = self._machine.state
        (seat,) = state.occupied()
        assert seat.occupant is not None
        (work, *_) = self._machine.works(seat.number)
        told = struct.pack(f"<{len(done) + 1}d", norm, *(each.loss or 0.0 for each in done))
        wrong = self._machine.decided(
            Outcome(
                index=state.index + 1,
                round=step + 1,
                digest=hashlib.sha256(told).digest(),
                weights={seat.occupant.peer: work.share},
                members=frozenset({seat.occupant}),
            )
        )
        assert not wrong
        self._keeper.figures.decided(state)
        self._keeper.write(self._machine.drain())

    def _note_faults(self, step: int, faults: Sequence[str]) -> None:
        """Say that a step comes to nothing; too many in a row end the run."""
        if not faults:
            self._num_not_finite = 0
            return
        self._num_not_finite += 1
        self._progress.warn(
            f"step {step + 1}: {faults[0]} is not finite, so no step was made of it"
        )
        if self._num_not_finite >= _MAX_NOT_FINITE:
            raise NeuroGridError(
                f"{_MAX_NOT_FINITE} steps in a row came to nothing: {faults[0]} is not finite. Lower the learning "
                "rate, or compute in float32"
            )

    async def _keep(self, chain: Chain, step: int) -> None:
        await self._members.wait(chain, lambda: chain.all_applied(step, chain.peers))
        pieces: dict[str, tuple[str, bytes]] = {}
        for peer in chain.firsts:
            pieces |= self._pieces_of(chain, peer, chain.applied[step, peer])
        try:
            with unwrap_errors():
                await self._state.keep(
                    step + 1, pieces, self._transfers, piece_bytes=self._piece_bytes
                )
        except TransportError as exc:
            raise ChainBroken(f"the state after step {step + 1} cannot be fetched: {exc}") from exc
        self._members.note_done(chain.peers)
        self._since = {s: ranges for s, ranges in self._since.items() if s > step}
        self._compare_weights(chain, step)

    def _pieces_of(
        self, chain: Chain, peer_id: str, told: Applied | Committed
    ) -> dict[str, tuple[str, bytes]]:
        """Pieces of state that a member gives, by name: the member's peer id and the blob id of each.

        Raises:
            ChainBroken: its stage has no such piece, or one more.
        """
        index = next(i for i, stage in enumerate(chain.stages) if peer_id in stage)
        own = state_pieces(chain.bounds, index)
        due = pieces_that_learn(self._facts.run_file, self._numbers, chain.bounds, index)
        what = ""
        if others := [name for name in told.names if name not in own]:
            what = f"gives a piece of state {others[0]!r}, which its stage does not have"
        elif missing := sorted(due.difference(told.names)):
            what = f"gives no piece of state {missing[0]!r}, which its stage has"
        if what:
            self._members.count_failure(peer_id, f"it {what}")
            raise ChainBroken(f"{self._members.called(peer_id)} {what}")
        return {
            name: (peer_id, blob_id) for name, blob_id in zip(told.names, told.blobs, strict=True)
        }

    def _applied_pieces(self, chain: Chain, step: int, peer_id: str) -> dict[str, bytes]:
        told = chain.applied[step, peer_id]
        return dict(zip(told.names, told.blobs, strict=True))

    def _compare_weights(self, chain: Chain, step: int) -> None:
        """Say once of each member that its state is not that of the others of its stage."""
        for stage in chain.stages:
            first = self._applied_pieces(chain, step, stage[0])
            for peer_id in stage[1:]:
                worker = self._members.get(peer_id)
                if self._applied_pieces(chain, step, peer_id) != first and not worker.is_apart:
                    worker.is_apart = True
                    self._progress.warn(
                        f"{self._members.called(peer_id)} has other weights than {self._members.called(stage[0])} "
                        f"after step {step + 1}, as processors may that are not alike: [layout] weights_every keeps "
                        "them together"
                    )

    async def _note_step(self, chain: Chain, step: int, *, is_last: bool) -> None:
        """Figures of a step, evaluation and checkpoint."""
        run, round_ = self._run_at(step + 1), step + 1
        is_evaluated = run.eval.every and self._manifest.held_out
        if is_evaluated and (is_last or round_ % run.eval.every == 0):
            with self._timeline.during("training.evaluate"):
                figures = await self._evaluate(chain, round_, is_last=is_last)
            self._keeper.told[round_] |= figures
        await self._keeper.note(round_)
        chain.forget_before(step - 1)
        if is_last or round_ % run.checkpoints.every == 0:
            with self._timeline.during("training.checkpoint"):
                await self._keeper.write_checkpoint(self._state, self._machine.state)

    async def _evaluate(self, chain: Chain, step: int, *, is_last: bool) -> Mapping[str, float]:
        """The mean losses of the held-out samples, as figures; none where they are not to be had."""
        found, sums = [], []
        try:
            for each in held_out_samples(self._manifest, self._run_at(step).eval.samples):
                total, labels = await self._sum_losses(chain, step, each)
                sums.append(total)
                if not labels or not math.isfinite(sum_of(sums)):
                    return {}
                found.append((each, total / labels, labels))
        except ChainBroken:
            if not is_last:
                raise
            # Its state is kept; nobody is to begin anew for a figure.
            self._progress.warn("the last step was not evaluated: a stage was lost")
            return {}
        return eval_figures(found)

    async def _sum_losses(self, chain: Chain, step: int, held_out: HeldOut) -> tuple[float, int]:
        """The losses of all labels together, and how many labels these are."""
        total, labels = 0.0, 0
        whole = self._machine.rules.batch_samples
        wanted = self._wanted_micro_batches(self._run_at(step), chain)
        # No backward pass holds a stage up: one that is slow has all that those before it give waiting in its memory.
        at_once = min(whole, -(-whole // wanted) * _EVALUATED * len(chain.peers))
        for info, count in held_out.samples:
            path = await self._slices.fetch(info, _SLICE_TIMEOUT)
            for start in range(0, count, at_once):
                part = FileRange(path, start, min(start + at_once, count))
                batch = await trio.to_thread.run_sync(self._reader.read, [part])
                await self._compute(chain, step, batch, is_evaluation=True)
                total += loss_of(chain, step)
                labels += batch.num_labels
        return total, labels

    async def _read(self, ranges: Sequence[SampleRange]) -> Batch:
        self._need_only(ranges)
        files = await self._files(ranges)
        return await trio.to_thread.run_sync(self._reader.read, files)

    def _need_only(self, ranges: Iterable[SampleRange]) -> None:
        """Let go of slices that were fetched for steps before: each is a file that is held open."""
        numbers = {each.slice for each in ranges}
        self._slices.need_only([self._manifest.slices[number] for number in sorted(numbers)])

    async def _files(self, ranges: Sequence[SampleRange]) -> list[FileRange]:
        files = []
        for each in ranges:
            path = await self._slices.fetch(self._manifest.slices[each.slice], _SLICE_TIMEOUT)
            files.append(FileRange(path, each.start, each.stop))
        return files

    def _take_smaller(self, worker: ChainWorker) -> bool:
        """The memory of a member is full: have a batch cut into twice as many micro-batches; whether it can be."""
        most = min(self._machine.rules.batch_samples, MAX_MICRO_BATCHES)
        chain = self._chain_with(worker)
        run = self._run_at(self._machine.state.round + 1)
        if chain is None or (now := self._wanted_micro_batches(run, chain)) >= most:
            return False
        self._num_micro_batches = min(2 * now, most)
        self._progress.say(f"a batch goes in {self._num_micro_batches} micro-batches from here on")
        return True

    def _chain_with(self, worker: ChainWorker) -> Chain | None:
        """The chain that a worker is in, or was in last."""
        return self._chain or self._arranger.last

    async def _tell(self, peer_id: str, code: RunMessage, data: bytes) -> None:
        await self._send(peer_id, TensorMessage(code, data=data))

    async def _send(self, peer_id: str, message: TensorMessage) -> None:
        called = self._members.called(peer_id)
        try:
            await self._exchange.send(peer_id, message)
        except TransportError as exc:
            raise ChainBroken(f"{called} cannot be reached: {exc}") from exc
        except TooLargeForPeerError as exc:
            # How much a peer takes is its own word: it costs its place, and no run.
            self._members.count_failure(peer_id, str(exc))
            raise ChainBroken(f"{called} takes too little at once: {exc}") from exc

    # What members tell

    def _on_done(self, message: TensorMessage) -> None:
        done, peer_id = StepDone.decode(message.data), sender_of(message)
        worker = self._members.heard(message)
        if (chain := self._chain_of(done, peer_id)) is not None:
            chain.done[done.step, peer_id] = done
            if worker is not None and (total := done.seconds + done.waited):
                worker.waited = done.waited / total

    def _on_applied(self, message: TensorMessage) -> None:
        applied, peer_id = Applied.decode(message.data), sender_of(message)
        self._members.heard(message)
        if (chain := self._chain_of(applied, peer_id)) is not None:
            chain.applied[applied.step, peer_id] = applied

    def _chain_of(self, told: StepDone | Applied, peer_id: str) -> Chain | None:
        """The chain that a stage tells of; None where it tells of another, or of another step."""
        chain = self._chain
        if chain is None or (told.run, told.chain) != (self._facts.run_id, chain.number):
            return None
        return chain if peer_id in chain.peers and told.step == chain.step else None

    async def _watch_hours(self) -> None:
        while True:
            hours = self._run_at(self._machine.state.round + 1).stop.hours
            left = math.inf if hours is None else 3600 * hours - self._keeper.seconds
            if left <= 0:
                break
            await trio.sleep(min(left, _HOURS_LOOK))
        self._machine.stop(f"{hours:g} hours are over")
        self._keeper.write(self._machine.drain())


def _figures(chain: Chain, step: int, norm: float) -> dict[str, float]:
    """Figures of a step, from what the members of its stages have told, and the norm of the gradient."""
    done = [chain.done[step, peer] for peer in chain.peers]
    total = math.fsum(each.seconds + each.waited for each in done)
    waited = math.fsum(each.waited for each in done)
    figures: dict[str, float] = {
        "stages": len(chain.stages),
        "waited": round(waited / total, 4) if total else 0.0,
        "bubble": round(chain.bubble, 4),
    }
    if chain.widths:
        figures["members"] = len(chain.peers)
    told = {"gradient_norm": norm, "loss": loss_of(chain, step)}
    return figures | {name: round(each, 6) for name, each in told.items() if math.isfinite(each)}


def _bubble_of(stages: Sequence[Sequence[str]], lanes: Sequence[Sequence[int]]) -> float:
    """The share of a step in which members wait by the order alone, by the lanes of each micro-batch."""
    if all(len(peers) == 1 for peers in stages):
        return bubble(len(stages), len(lanes))
    return bubble_of_members(
        [
            [
                [n for n, each in enumerate(lanes) if each[index] == lane]
                for lane in range(len(peers))
            ]
            for index, peers in enumerate(stages)
        ]
    )


def loss_of(chain: Chain, step: int) -> float:
    """The loss of all members of the last stage together; infinite or NaN where it is no number."""
    losses = [chain.done[step, peer].loss for peer in chain.stages[-1] if chain.counts.get(peer, 0)]
    return sum_of(math.nan if loss is None else loss for loss in losses)


def norm_of(chain: Chain, step: int) -> tuple[float, list[str]]:
    """The norm of the gradients of all stages, and what of the step is not finite: where something is not, nothing is
    applied."""
    norm = math.sqrt(sum_of(chain.done[step, peer].squared_norm for peer in chain.firsts))
    faults = [told.not_finite for p in chain.peers if (told := chain.done[step, p]).not_finite]
    if not faults and not math.isfinite(norm):
        faults.append("the norm of all gradients")
    if not faults and not math.isfinite(loss_of(chain, step)):
        faults.append("the loss")
    return norm, faults
