"""The leader of a run whose model lies in a chain of stages: finds members, arranges them, and has them make steps.

    members -> an arrangement -> steps, until one of them is lost -> the next arrangement, from the state that is kept

Which samples a step has, and when the run is over, is the matter of `runs.machine`, in which the whole chain is one
member. A step is decided as soon as its gradients are known: what a chain does after a state and a batch is the same
whenever it is done. So what was lost with a stage is computed again from the state that is kept here, by any cut. More
than 600 lines, since a step and an arrangement are told of and broken off by the same messages.

Source: protocol_spec/training/stages.md.
"""

from __future__ import annotations

import hashlib
import logging
import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import trio
from torch import Tensor

from neurogrid.errors import ConfigurationError, NeuroGridError, NoRouteError, TransportError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.node.roles import Table, authorise
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.transfer import Transfers
from neurogrid.p2p.trust import WORKER
from neurogrid.p2p.wire import MessageType, TensorMessage
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.leading.chains.keeper import ChainKeeper
from neurogrid.training.leading.chains.members import ChainMembers, ChainWorker
from neurogrid.training.leading.chains.state import ChainState
from neurogrid.training.leading.chains.weights import ChainWeights
from neurogrid.training.leading.data import LeaderSlices
from neurogrid.training.leading.facts import RunFacts
from neurogrid.training.leading.hiring import HEARTBEAT
from neurogrid.training.leading.look import LeaderLook, StageLook
from neurogrid.training.leading.settings import LeaderProgress
from neurogrid.training.runs.machine import Outcome, RunMachine
from neurogrid.training.runs.state import Occupant, Phase
from neurogrid.training.stages.chain_estimate import rooms_of
from neurogrid.training.stages.cutting import StageSizes, cut_layers
from neurogrid.training.stages.pace import PaceWatch
from neurogrid.training.trainer import FileRange
from neurogrid.training.trainer.batches import Batch, BatchReader
from neurogrid.training.wire.runs import (
    Applied,
    Apply,
    RunMessage,
    SampleRange,
    StageOrder,
    StageTensor,
    Step,
    StepDone,
    session_of,
)

__all__ = ["CHAIN_LEADER_TAKES", "ChainLeader"]

logger = logging.getLogger(__name__)

_WORKERS: Final = frozenset({WORKER})

CHAIN_LEADER_TAKES: Final[Table] = {
    RunMessage.REPORT: _WORKERS,
    RunMessage.STAGE_REPORT: _WORKERS,
    RunMessage.STEP_DONE: _WORKERS,
    RunMessage.APPLIED: _WORKERS,
    MessageType.TRANSFER_REQUEST: _WORKERS,
    MessageType.TRANSFER_OFFER: _WORKERS,
    MessageType.WEIGHTS: _WORKERS,
}
"""The roles that the leader of a chain takes each message from."""

_RETRY: Final = 1.0
_GOODBYE: Final = 5.0
_SLICE_TIMEOUT: Final = 120.0
# Seconds for weights to come and processes to start.
_LOADING: Final = 900.0
# A step may take so many times what the longest has taken, and so many seconds at least.
_LONGEST_STEPS: Final = 10.0
_STEP_SECONDS: Final = 120.0
# Seconds for which a stage that was lost is waited for, before fewer stages go on.
_UNTIL_FEWER: Final = 30.0
# Times that a member may fail before it is not asked again, and steps in a row that may come to nothing.
_MAX_FAILURES: Final = 5
_MAX_NOT_FINITE: Final = 5
_NO_MEMORY: Final = "no memory left"


class _ChainBroken(NeuroGridError):
    """A stage of the chain is lost, or has failed; the text says which and why."""


@dataclass
class _Chain:
    """An arrangement of stages.

    Attributes:
        number: of it, greater than any before.
        peers: in order.
        step: that is under way; -1 before the first.
        done, applied: what stages have told, by step and peer.
        paces: of each, by peer.
    """

    number: int
    peers: tuple[str, ...]
    bounds: tuple[int, ...]
    step: int = -1
    done: dict[tuple[int, str], StepDone] = field(default_factory=dict)
    applied: dict[tuple[int, str], Applied] = field(default_factory=dict)
    paces: dict[str, PaceWatch] = field(default_factory=dict)


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
        progress: is told what people may want to see.
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
        progress: LeaderProgress,
        *,
        wait: float,
    ) -> None:
        self._host, self._exchange, self._transfers = host, exchange, transfers
        self._facts, self._machine, self._weights = facts, machine, weights
        self._state, self._keeper = state, keeper
        self._slices, self._manifest, self._reader = slices, manifest, reader
        self._sizes, self._progress, self._patience = sizes, progress, wait
        self._members = ChainMembers(
            host, exchange, facts, progress, total_steps=machine.rules.total_steps
        )
        self._chain: _Chain | None = None
        self._last: _Chain | None = None
        # Of the steps after the state that is kept: they may have to be made again.
        self._since: dict[int, tuple[SampleRange, ...]] = {}
        self._longest_step = 0.0
        self._num_not_finite = 0
        self._num_micro_batches = 0
        self._session = session_of(facts.run_id)
        authorise(exchange, CHAIN_LEADER_TAKES)
        for code, handler in (
            (RunMessage.STEP_DONE, self._on_done),
            (RunMessage.APPLIED, self._on_applied),
        ):
            exchange.on_message(code, handler)

    def look(self) -> LeaderLook:
        """How the run stands at this moment, for whoever shows it."""
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
        chain = self._chain or self._last
        if chain is None:
            return []
        looks = []
        for index, peer_id in enumerate(chain.peers):
            worker = self._members.get(peer_id)
            told = worker.stage
            is_current = told is not None and told.chain == chain.number
            looks.append(
                StageLook(
                    peer_id,
                    chain.bounds[index],
                    chain.bounds[index + 1],
                    report=told if is_current else None,
                    waited=worker.waited,
                )
            )
        return looks

    def _waits(self) -> str:
        """What is waited for before steps are made; empty where they are."""
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
        try:
            self._chain = await self._arrange()
            await self._train(self._chain)
        except _ChainBroken as exc:
            step = self._machine.state.round
            self._progress.warn(
                f"{exc}. The stages are arranged anew; step {step} goes on from the state after step {self._state.step}"
            )
        finally:
            self._last, self._chain = self._chain or self._last, None

    async def _train(self, chain: _Chain) -> None:
        state = self._machine.state
        for step in range(self._state.step, state.round):
            await self._make_step(chain, step, is_new=False)
        while state.phase is not Phase.ENDED:
            (work, *_) = self._machine.works(state.occupied()[0].number)
            self._since[state.round] = work.ranges
            await self._make_step(chain, state.round, is_new=True)

    # A step

    async def _make_step(self, chain: _Chain, step: int, *, is_new: bool) -> None:
        began = trio.current_time()
        batch = await self._read(self._since[step])
        await self._compute(chain, step, batch, is_evaluation=False)
        done = [chain.done[step, peer] for peer in chain.peers]
        norm = math.sqrt(math.fsum(each.squared_norm for each in done))
        faults = [each.not_finite for each in done if each.not_finite]
        if is_new:
            self._decide(step, done, norm, faults)
            self._keeper.told[step + 1] = _figures(chain, done, norm)
        is_last = self._machine.state.phase is Phase.ENDED and step + 1 == self._machine.state.round
        run = self._facts.run_file
        every = run.layout.steps_between_states(has_adapter=run.adapter.r > 0)
        is_due = (step + 1) % every == 0 or (step + 1) % run.checkpoints.every == 0
        keeps = is_last or is_due
        apply = Apply(
            run=self._facts.run_id,
            chain=chain.number,
            step=step,
            norm=0.0 if faults else norm,
            is_applied=not faults,
            keeps=keeps,
        )
        await self._tell_all(chain, RunMessage.APPLY, apply.encode())
        if keeps:
            await self._keep(chain, step)
        self._longest_step = max(self._longest_step, trio.current_time() - began)
        if is_new or step + 1 in self._keeper.told:
            await self._note_step(chain, step, is_last=is_last)
        if not is_last:
            self._watch_paces(chain, done)

    def _watch_paces(self, chain: _Chain, done: Sequence[StepDone]) -> None:
        """Arrange the stages anew where one has become slow, and another member could take its place.

        Raises:
            _ChainBroken: so it is.
        """
        spare = [
            peer
            for peer in self._members.usable()
            if peer not in chain.peers and not self._members.get(peer).is_slow
        ]
        for peer_id, told in zip(chain.peers, done, strict=True):
            slow = chain.paces.setdefault(peer_id, PaceWatch()).told(told.seconds)
            if slow is not None and spare:
                self._members.get(peer_id).is_slow = True
                (now, usual), called = slow, self._members.called(peer_id)
                raise _ChainBroken(
                    f"{called} has become slow: it takes {now:.2f} s for a step, and took {usual:.2f}"
                )

    async def _compute(
        self, chain: _Chain, step: int, batch: Batch, *, is_evaluation: bool
    ) -> None:
        """Send a batch through the chain, and wait until all stages have told."""
        run = self._facts.run_file
        wanted = self._num_micro_batches or run.layout.num_micro_batches(batch.num_samples)
        pieces = list(batch.pieces(-(-batch.num_samples // wanted)))
        chain.step = step
        for peer in chain.peers:
            chain.done.pop((step, peer), None)
        told = Step(
            run=self._facts.run_id,
            chain=chain.number,
            step=step,
            micro_batches=len(pieces),
            labels=batch.num_labels,
            is_evaluation=is_evaluation,
        )
        seconds = max(_STEP_SECONDS, _LONGEST_STEPS * self._longest_step)
        try:
            with trio.fail_after(seconds), unwrap_errors():
                async with trio.open_nursery() as nursery:
                    await self._tell_all(chain, RunMessage.STEP, told.encode())
                    first, last = chain.peers[0], chain.peers[-1]
                    for code, peer, part in (
                        (RunMessage.TOKENS, first, 0),
                        (RunMessage.LABELS, last, 1),
                    ):
                        tensors = [each[part] for each in pieces]
                        nursery.start_soon(self._send_tensors, chain, code, peer, step, tensors)
                    await self._wait(
                        chain, lambda: all((step, peer) in chain.done for peer in chain.peers)
                    )
        except trio.TooSlowError:
            late = [p for p in chain.peers if (step, p) not in chain.done]
            names = ", ".join(map(self._members.called, late))
            raise _ChainBroken(
                f"step {step + 1} has taken {seconds:.0f} s: {names} did not end it"
            ) from None

    async def _send_tensors(
        self, chain: _Chain, code: RunMessage, peer_id: str, step: int, tensors: Sequence[Tensor]
    ) -> None:
        for number, tensor in enumerate(tensors):
            data = tensor.to(torch.int32).contiguous().numpy().tobytes()
            message = StageTensor(
                code, self._session, chain.number, step, number, "I32", tuple(tensor.shape), data
            ).message()
            try:
                await self._exchange.send(peer_id, message)
            except TransportError as exc:
                raise _ChainBroken(
                    f"{self._members.called(peer_id)} cannot be reached: {exc}"
                ) from exc

    def _decide(
        self, step: int, done: Sequence[StepDone], norm: float, faults: Sequence[str]
    ) -> None:
        """A step is in the run: whatever becomes of the chain, it ends up with what these gradients give."""
        state = self._machine.state
        if faults:
            self._num_not_finite += 1
            self._progress.warn(
                f"step {step + 1}: {faults[0]} is not finite, so no step was made of it"
            )
            if self._num_not_finite >= _MAX_NOT_FINITE:
                raise NeuroGridError(
                    f"{_MAX_NOT_FINITE} steps in a row came to nothing: {faults[0]} is not finite. Lower the learning "
                    "rate, or compute in float32"
                )
        else:
            self._num_not_finite = 0
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

    async def _keep(self, chain: _Chain, step: int) -> None:
        await self._wait(chain, lambda: all((step, peer) in chain.applied for peer in chain.peers))
        pieces = {
            name: (peer, blob_id)
            for peer in chain.peers
            for name, blob_id in zip(
                chain.applied[step, peer].names, chain.applied[step, peer].blobs, strict=True
            )
        }
        try:
            with unwrap_errors():
                await self._state.keep(step + 1, pieces, self._transfers)
        except TransportError as exc:
            raise _ChainBroken(f"the state after step {step + 1} cannot be fetched: {exc}") from exc
        self._since = {s: ranges for s, ranges in self._since.items() if s > step}
        chain.applied = {k: v for k, v in chain.applied.items() if k[0] > step}

    async def _note_step(self, chain: _Chain, step: int, *, is_last: bool) -> None:
        """Figures of a step, evaluation and checkpoint."""
        chain.done = {k: v for k, v in chain.done.items() if k[0] > step}
        run, round_ = self._facts.run_file, step + 1
        is_evaluated = run.eval.every and self._manifest.held_out
        if is_evaluated and (is_last or round_ % run.eval.every == 0):
            loss = await self._evaluate(chain, round_, is_last=is_last)
            if loss is not None:
                self._keeper.told[round_]["eval_loss"] = round(loss, 6)
        await self._keeper.note(round_)
        if is_last or round_ % run.checkpoints.every == 0:
            await self._keeper.write_checkpoint(self._state, self._machine.state)

    async def _evaluate(self, chain: _Chain, step: int, *, is_last: bool) -> float | None:
        """The mean loss of the held-out samples; None where they are not to be had."""
        left, total, labels = self._facts.run_file.eval.samples, 0.0, 0
        at_once = self._machine.rules.batch_samples
        try:
            for info in self._manifest.held_out:
                path = await self._slices.fetch(info, _SLICE_TIMEOUT)
                count = min(left, info.num_samples)
                for start in range(0, count, at_once):
                    part = FileRange(path, start, min(start + at_once, count))
                    batch = await trio.to_thread.run_sync(self._reader.read, [part])
                    await self._compute(chain, step, batch, is_evaluation=True)
                    loss = chain.done[step, chain.peers[-1]].loss
                    total += math.nan if loss is None else loss
                    labels += batch.num_labels
                left -= count
        except _ChainBroken:
            if not is_last:
                raise
            # Its state is kept; nobody is to begin anew for a figure.
            self._progress.warn("the last step was not evaluated: a stage was lost")
            return None
        return total / labels if labels and math.isfinite(total) else None

    async def _read(self, ranges: Sequence[SampleRange]) -> Batch:
        files = []
        for each in ranges:
            path = await self._slices.fetch(self._manifest.slices[each.slice], _SLICE_TIMEOUT)
            files.append(FileRange(path, each.start, each.stop))
        return await trio.to_thread.run_sync(self._reader.read, files)

    # The chain

    async def _arrange(self) -> _Chain:
        """Wait for members, tell each its stage, and wait until all are ready.

        Raises:
            NoRouteError: there were too few for too long.
            _ChainBroken: one of them failed meanwhile.
        """
        peers, bounds = await self._choose()
        # Also greater than those of a leader before this one.
        number = max(time.time_ns() // 1000, self._last.number + 1 if self._last else 0)
        chain = _Chain(number, peers, bounds)
        self._progress.say(
            "stages: "
            + ", ".join(
                f"{self._members.called(peer)} has layers {start} to {stop - 1}"
                for peer, start, stop in zip(peers, bounds, bounds[1:], strict=False)
            )
        )
        orders = [self._order(chain, index) for index in range(len(peers))]
        until = trio.current_time() + _LOADING
        while True:
            for peer, order in zip(peers, orders, strict=True):
                if not self._has_heard(chain, peer):
                    await self._members.tell(peer, RunMessage.STAGE, order.encode())
            with trio.move_on_after(HEARTBEAT) as scope:
                await self._wait(chain, lambda: all(self._is_ready(chain, p) for p in peers))
            if not scope.cancelled_caught:
                return chain
            if trio.current_time() > until:
                late = [self._members.called(p) for p in peers if not self._is_ready(chain, p)]
                raise _ChainBroken(f"{', '.join(late)} did not load its layers in {_LOADING:g} s")

    def _order(self, chain: _Chain, index: int) -> StageOrder:
        num_layers = self._weights.num_layers
        start, stop = chain.bounds[index], chain.bounds[index + 1]
        pieces = self._weights.pieces(chain.bounds, index)
        wanted = [f"layer.{layer_id}" for layer_id in range(start, stop)]
        # Of tied embeddings the last stage has what the first one has.
        wanted += ["first"] if start == 0 or stop == num_layers else []
        wanted += ["last"] if stop == num_layers else []
        pieces |= {name: self._state.blobs[name] for name in wanted if name in self._state.blobs}
        return StageOrder(
            run=self._facts.run_id,
            chain=chain.number,
            step=self._state.step,
            index=index,
            peers=chain.peers,
            addresses=tuple(map(self._members.address_of, chain.peers)),
            bounds=chain.bounds,
            names=tuple(pieces),
            blobs=tuple(pieces.values()),
            quantization=self._weights.quantization,
        )

    async def _choose(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Who is which stage: whoever was stays in its place, and where the cut can stay, it does."""
        began, said = trio.current_time(), ""
        wanted = self._facts.run_file.layout.stages
        while True:
            usable = self._members.usable()
            waited = trio.current_time() - began
            num_stages = wanted
            if self._last is not None and waited > min(_UNTIL_FEWER, self._patience) and usable:
                num_stages = min(wanted, len(usable))
            if len(usable) >= num_stages:
                before = self._last.peers if self._last is not None else ()
                quick = [peer for peer in usable if not self._members.get(peer).is_slow]
                peers = _placed(before, usable[: max(num_stages, len(quick))], num_stages)
                largest = sorted(usable, key=lambda p: self._members.get(p).memory or math.inf)
                for chosen in (peers, tuple(largest[-num_stages:])):
                    try:
                        return chosen, self._cut(chosen)
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

    def _cut(self, peers: Sequence[str]) -> tuple[int, ...]:
        last = self._last
        rooms = rooms_of([self._members.get(peer).memory for peer in peers])
        if last is not None and len(last.peers) == len(peers):
            needed = [
                self._sizes.needed(a, b) for a, b in zip(last.bounds, last.bounds[1:], strict=False)
            ]
            if all(not room or need <= room for need, room in zip(needed, rooms, strict=True)):
                return last.bounds
        return cut_layers(self._sizes, rooms)

    def _has_heard(self, chain: _Chain, peer_id: str) -> bool:
        stage = self._members.get(peer_id).stage
        return stage is not None and stage.chain == chain.number

    def _is_ready(self, chain: _Chain, peer_id: str) -> bool:
        stage = self._members.get(peer_id).stage
        return stage is not None and stage.chain == chain.number and stage.state != "loading"

    async def _wait(self, chain: _Chain, is_so: Callable[[], bool]) -> None:
        """Wait until something is so.

        Raises:
            _ChainBroken: a stage is lost meanwhile, or has failed.
        """
        while True:
            self._check(chain)
            if is_so():
                return
            changed = self._members.changed.next
            with trio.move_on_after(HEARTBEAT):
                await changed.wait()

    def _check(self, chain: _Chain) -> None:
        for peer_id in chain.peers:
            worker = self._members.get(peer_id)
            if not self._host.is_connected(peer_id):
                raise _ChainBroken(f"{self._members.called(peer_id)} is lost")
            if self._members.is_silent(worker):
                raise _ChainBroken(f"{self._members.called(peer_id)} says nothing any more")
            if not worker.is_started:
                raise _ChainBroken(f"{self._members.called(peer_id)} takes part no more")
            stage = worker.stage
            if stage is not None and stage.chain == chain.number and stage.state == "failed":
                worker.num_failures += 1
                if _NO_MEMORY in stage.reason:
                    self._take_smaller(worker)
                raise _ChainBroken(f"{self._members.called(peer_id)} has failed: {stage.reason}")

    def _take_smaller(self, worker: ChainWorker) -> None:
        """Have a batch cut into twice as many micro-batches, if it can be."""
        samples = self._machine.rules.batch_samples
        now = self._num_micro_batches or self._facts.run_file.layout.num_micro_batches(samples)
        if now < samples:
            worker.num_failures -= 1
            self._num_micro_batches = min(2 * now, samples)
            self._progress.say(
                f"a batch goes in {self._num_micro_batches} micro-batches from here on"
            )

    async def _tell_all(self, chain: _Chain, code: RunMessage, data: bytes) -> None:
        try:
            for peer_id in chain.peers:
                await self._exchange.send(peer_id, TensorMessage(code, data=data))
        except TransportError as exc:
            raise _ChainBroken(f"{self._members.called(peer_id)} cannot be reached: {exc}") from exc

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

    def _chain_of(self, told: StepDone | Applied, peer_id: str) -> _Chain | None:
        """The chain that a stage tells of; None where it tells of another, or of another step."""
        chain = self._chain
        if chain is None or (told.run, told.chain) != (self._facts.run_id, chain.number):
            return None
        return chain if peer_id in chain.peers and told.step == chain.step else None

    async def _watch_hours(self) -> None:
        hours = self._facts.run_file.stop.hours
        if hours is None:
            return
        while (left := 3600 * hours - self._keeper.seconds) > 0:
            await trio.sleep(min(left, 60.0))
        self._machine.stop(f"{hours:g} hours are over")
        self._keeper.write(self._machine.drain())


def _figures(chain: _Chain, done: Sequence[StepDone], norm: float) -> dict[str, float]:
    """What stages tell of a step, as figures."""
    total = math.fsum(each.seconds + each.waited for each in done)
    waited = math.fsum(each.waited for each in done)
    figures: dict[str, float] = {
        "gradient_norm": round(norm, 6),
        "stages": len(chain.peers),
        "waited": round(waited / total, 4) if total else 0.0,
    }
    loss = done[-1].loss
    return figures if loss is None else figures | {"loss": round(loss, 6)}


def _placed(before: Sequence[str], usable: Sequence[str], num_stages: int) -> tuple[str, ...]:
    """Peers for the stages: those that were one stay in their places, and others take those that are free."""
    kept: Mapping[int, str] = {
        index: peer for index, peer in enumerate(before[:num_stages]) if peer in usable
    }
    free = [peer for peer in usable if peer not in kept.values()]
    return tuple(kept[index] if index in kept else free.pop(0) for index in range(num_stages))
