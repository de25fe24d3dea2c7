"""A member's part in a witnessed run: it has the whole model, and goes by what the leader says of epochs and rounds.

    Epoch -> weights in pieces, or what was agreed -> gradient -> result -> commitment -> what witnesses agree on -> ...

An Epoch says the whole of where the run is, so that one that is lost or comes twice does no harm. What was agreed in
each round is kept until it is applied, so that a member that computes for long comes after. One that lacks a round, or
a result of one, gives its weights up and gets those of the others when the next epoch begins.

More than 600 lines, since the way from an Epoch to a result is one sequence over the same state.

Source: protocol_spec/training/witnessed.md.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import trio

from neurogrid.errors import (
    CheckpointError,
    ConfigurationError,
    NeuroGridError,
    NotFiniteError,
    RemoteProtocolError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import MessageCode, TensorMessage
from neurogrid.renewed_event import RenewedEvent
from neurogrid.temporary import temporary_directory
from neurogrid.training.checks import ClaimRules, Settings, cosines_of, start_of
from neurogrid.training.data.blobs import fetch_manifest
from neurogrid.training.members.failures import one_line, telling_failure
from neurogrid.training.members.member_blobs import MemberBlobs
from neurogrid.training.members.settings import MemberSettings
from neurogrid.training.members.status import PartStatus
from neurogrid.training.members.witnessed.auditing import Auditing, BrokenChainError
from neurogrid.training.members.witnessed.gradients import mean_gradient
from neurogrid.training.members.witnessed.neighbours import Neighbours
from neurogrid.training.members.witnessed.own_weights import OwnWeights, TakenBack
from neurogrid.training.members.witnessed.round_exchange import ResultMissingError, RoundExchange
from neurogrid.training.members.witnessed.samples import RoundSamples
from neurogrid.training.optimizers.distro import Coefficients
from neurogrid.training.runs.inner_optimizer import round_rates
from neurogrid.training.runs.run_file import RunFile, parse_kept_run_file
from neurogrid.training.runs.trainers import trainer_settings, work_seed
from neurogrid.training.trainer import FileRange, Gradient, Trainer, TrainerError, open_trainer
from neurogrid.training.wire.runs import (
    AgreedResult,
    Epoch,
    EpochReport,
    EpochSeat,
    Order,
    Report,
    RoundCommitment,
    RoundEvidence,
    RoundWork,
    RunMessage,
    Start,
)
from neurogrid.training.witnessed import ResultPlan

__all__ = ["WitnessedPart"]

logger = logging.getLogger(__name__)

_FETCH_TIMEOUT: Final = 600.0
# Of the seconds of a round, the part that samples may take which are here, or were.
_GATHERED_SHARE: Final = 0.1
# Times that a member begins anew before it says that it cannot.
_MAX_RESTARTS: Final = 3
# Rounds that a member may be behind.
_MAX_BEHIND: Final = 64
_STATES: Final = {"loading": "starting", "warm": "ready", "kept": "waiting"}


class _RoundOverError(NeuroGridError):
    """A round went on before this member was done with its work."""


class BehindError(NeuroGridError):
    """This member's weights are not those of the others any more; the text says why."""


class WitnessedPart:
    """A member's part in one witnessed run. Keep `run` running.

    Args:
        host: this peer's.
        exchange: of runs.
        leader: the peer id of the leader of the run.
        start: what it has been told to begin with.
        blobs: what comes from other peers, and what they may fetch.
        settings: what may be used.
        tell: is called whenever a report has changed.
        keep: is given the directory with the trained model when the run has ended, and the run's name; None for nobody.
    """

    def __init__(
        self,
        host: Host,
        exchange: Exchange,
        leader: str,
        start: Start,
        blobs: MemberBlobs,
        settings: MemberSettings,
        tell: Callable[[], None],
        keep: Callable[[Path, str], Any] | None = None,
    ) -> None:
        self.leader = leader
        self._host, self._exchange, self._start = host, exchange, start
        self._blobs, self._settings, self._tell, self._keep = blobs, settings, tell, keep
        self._run_file: RunFile = parse_kept_run_file(start.run_file)
        self._is_dismissed = False
        self._told: Epoch | None = None
        self._changed = RenewedEvent()
        self._neighbours = Neighbours(host, exchange)
        self._round_exchange: RoundExchange | None = None
        self._auditing: Auditing | None = None
        # What was agreed, by the number of rounds that are in the weights then.
        self._agreed: dict[int, tuple[AgreedResult, ...]] = {}
        self._taken_back: dict[int, tuple[tuple[int, int], ...]] = {}
        self._loss: float | None = None
        self._report = Report(
            run=start.run, seat=start.seat, state="starting", group_addresses=host.addresses[:16]
        )
        self._epoch_report = EpochReport(
            start.run, _incarnation(), "starting", invitation=settings.invitation
        )

    @property
    def run_id(self) -> bytes:
        """Id of the run, 16 bytes."""
        return self._start.run

    @property
    def is_dismissed(self) -> bool:
        """Whether the leader has said that it needs this member no more."""
        return self._is_dismissed

    def reports(self) -> list[tuple[MessageCode, bytes]]:
        """Reports to the leader, which are sent again and again."""
        return [
            (RunMessage.REPORT, self._report.encode()),
            (RunMessage.EPOCH_REPORT, self._epoch_report.encode()),
        ]

    def status(self) -> PartStatus:
        """Status of the member in the run, for people."""
        report = self._report
        return PartStatus(
            run=self._run_file.name,
            leader=self.leader,
            seat=report.seat,
            state=report.state,
            reason=report.reason,
            round=report.round,
            batches_done=report.batches_done,
            batches=0,
            tokens_per_second=None,
            loss=self._loss,
            num_samples=report.num_samples,
            memory_bytes=report.memory_bytes,
            micro_batch=report.micro_batch,
            held_slices=0,
            sent_bytes=report.sent_bytes,
            received_bytes=report.received_bytes,
        )

    def take(self, order: Order) -> None:
        """Orders are for members of a group that averages: there is none here."""
        logger.debug("an order of work for a witnessed run, %s", order.run.hex())

    def take_message(self, message: TensorMessage) -> None:
        """A message of a witnessed run, whichever.

        Raises:
            RemoteProtocolError: it is none that its sender may send.
        """
        code, sender = message.msg_type, sender_of(message)
        if code is RunMessage.EPOCH:
            told = Epoch.decode(message.data)
            if sender == self.leader and told.run == self.run_id:
                self._take_epoch(told)
        elif code is RunMessage.COMMITMENT:
            said = RoundCommitment.decode(message.data)
            if self._round_exchange is not None:
                self._round_exchange.take_commitment(sender, said)
        elif code is RunMessage.EVIDENCE:
            shown = RoundEvidence.decode(message.data)
            is_ours = sender == self.leader and shown.run == self.run_id
            if is_ours and self._auditing is not None:
                self._auditing.judge(shown)

    def _take_epoch(self, told: Epoch) -> None:
        if self._told is not None and told.number <= self._told.number:
            return
        self._told = told
        if told.agreed:
            self._agreed[told.step] = told.agreed
            pairs = tuple(zip(told.taken_back[::2], told.taken_back[1::2], strict=True))
            self._taken_back[told.step] = pairs
            while len(self._agreed) > _MAX_BEHIND:
                self._taken_back.pop(min(self._agreed), None)
                del self._agreed[min(self._agreed)]
        elif told.phase in ("waiting_for_members", "warmup"):
            self._agreed.clear()
            self._taken_back.clear()
        self._neighbours.take(told)
        if self._auditing is not None:
            self._auditing.hear(told, self._epoch_report.incarnation)
        if self._round_exchange is not None:
            self._round_exchange.take(told)
        self._changed.set()

    def dismiss(self) -> None:
        """The leader needs this member no more."""
        self._is_dismissed = True
        self._changed.set()

    async def run(self) -> None:
        """Take part until the run ends.

        Raises:
            NeuroGridError: this machine cannot; the report says why.
        """
        num_failures = 0
        with telling_failure(self._fail):
            while True:
                try:
                    await self._take_part()
                    return
                except TrainerError as exc:
                    num_failures += 1
                    if self._is_dismissed or num_failures > _MAX_RESTARTS:
                        raise
                    logger.warning("this machine begins anew with the run: %s", exc)
                    self._begin_anew(exc, "starting")

    def _fail(self, error: NeuroGridError) -> None:
        self._report = replace(
            self._report, state="failed", reason=one_line(error, "it was too slow")
        )
        self._tell()

    def _begin_anew(self, error: NeuroGridError, state: str) -> None:
        """Be another member from here on, which has no weights yet."""
        self._epoch_report = EpochReport(
            self.run_id,
            _incarnation(),
            state,
            reason=one_line(error, "it was too slow"),
            number=self._number,
            invitation=self._settings.invitation,
        )
        self._note(state, reason=one_line(error, "it was too slow"))

    @property
    def _number(self) -> int:
        return self._told.number if self._told is not None else 0

    def _note(self, state: str, *, reason: str = "", **more: Any) -> None:
        """Tell the leader how this member stands."""
        if (exchange := self._round_exchange) is not None:
            more["sent_bytes"], more["received_bytes"] = (
                exchange.sent_bytes,
                exchange.received_bytes,
            )
        before = self._report, replace(self._epoch_report, number=0)
        self._report = replace(
            self._report,
            state=_STATES.get(state, state),
            reason=reason,
            incarnation=self._epoch_report.incarnation,
            group_addresses=self._host.addresses[:16],
            **more,
        )
        state = "training" if state == "averaging" else state
        self._epoch_report = replace(
            self._epoch_report, state=state, reason=reason, number=self._number
        )
        # Whatever else has changed is told with the next heartbeat.
        if before != (self._report, replace(self._epoch_report, number=0)):
            self._tell()

    async def _take_part(self) -> None:
        manifest = await fetch_manifest(
            self._blobs.transfers, self._start.manifest, [self.leader], _FETCH_TIMEOUT
        )
        await self._blobs.own.look_for(manifest)  # not fetched, where a work is about them
        run = self._run_file
        settings = trainer_settings(
            run,
            self._start.config,
            total_steps=self._start.total_steps,
            device=self._settings.device,
            threads=self._settings.threads,
            memory_limit=self._settings.memory,
        )
        samples = RoundSamples(
            self._host,
            self.leader,
            self._blobs,
            manifest,
            lambda: self._told.sources if self._told is not None else (),
            self._neighbours.with_slice,
        )
        with temporary_directory("neurogrid-member-") as directory:
            async with open_trainer(settings) as trainer:
                if trainer.layout.num_elements != self._start.num_parameters:
                    raise ConfigurationError(
                        f"the model has {trainer.layout.num_elements} parameters here and "
                        f"{self._start.num_parameters} with the leader: versions of transformers differ"
                    )
                weights = OwnWeights(
                    trainer.layout, trainer.weights, run.distro, self._blobs, directory / "pieces"
                )
                chunks = weights.distro.chunks
                plan = ResultPlan(
                    tuple((number, size) for number, size, _ in chunks),
                    run.distro.top_k,
                    run.distro.one_bit,
                )
                auditing = self._auditing = self._open_auditing(
                    trainer, weights, plan, directory / "audits", samples
                )
                exchange = self._round_exchange = RoundExchange(
                    self.run_id,
                    self.leader,
                    self._host.identity,
                    self._exchange,
                    self._blobs,
                    self._neighbours,
                    plan,
                    run.epochs.witnesses,
                    directory / "results",
                    auditing,
                )
                if self._told is not None:
                    if auditing is not None:
                        auditing.hear(self._told, self._epoch_report.incarnation)
                    exchange.take(self._told)
                member = _Member(self, trainer, weights, exchange, samples)
                try:
                    with unwrap_errors():
                        async with trio.open_nursery() as nursery:
                            nursery.start_soon(self._neighbours.run)
                            nursery.start_soon(exchange.run)
                            if auditing is not None:
                                nursery.start_soon(auditing.run)
                            await member.run()
                            nursery.cancel_scope.cancel()
                finally:
                    self._auditing = None
                    self._round_exchange = None  # it fetches nothing any more
                if self._keep is not None and weights.step:
                    await trainer.save(directory / "trained")
                    await self._keep(directory / "trained", run.name)

    def _open_auditing(
        self,
        trainer: Trainer,
        weights: OwnWeights,
        plan: ResultPlan,
        directory: Path,
        samples: RoundSamples,
    ) -> Auditing | None:
        run = self._run_file
        if not run.checks.audit:
            return None
        settings = Settings(
            tuple(trainer.layout.shapes),
            run.distro.top_k,
            run.distro.chunk,
            run.distro.decay,
            run.distro.one_bit,
        )
        rules = ClaimRules(
            self.run_id,
            settings,
            round_rates(run.inner, self._start.total_steps),
            partial(work_seed, run.seed),
            start_of(settings),
        )

        async def gather(told: Epoch, seat: int) -> None:
            await samples.gather(_work_of(told, seat).ranges, seat)

        return Auditing(
            rules,
            run.checks,
            self.leader,
            self._host.identity,
            self._exchange,
            self._blobs,
            self._neighbours,
            weights,
            plan,
            run.epochs.train,
            directory,
            gather,
            self._changed.set,
        )


class _Member:
    """A member while its trainer runs."""

    def __init__(
        self,
        part: WitnessedPart,
        trainer: Trainer,
        weights: OwnWeights,
        exchange: RoundExchange,
        samples: RoundSamples,
    ) -> None:
        self._part, self._trainer, self._weights = part, trainer, weights
        self._exchange, self._samples = exchange, samples
        self._rate = round_rates(part._run_file.inner, part._start.total_steps)
        self._auditing = part._auditing
        # The last round that this member has done its work for, and what came of it.
        self._done = (0, 0)
        self._own = b""
        self._kept: int | None = None
        # Rounds in the weights that could not be written for others.
        self._unoffered: int | None = None
        self._seats: tuple[int, ...] = ()
        self._cosines: list[float] = []
        self._loss_sum, self._num_tokens, self._num_samples = 0.0, 0, 0

    async def run(self) -> None:
        """Go by what the leader says, until the run ends."""
        part = self._part
        part._note("waiting")
        while not part._is_dismissed:
            told = part._told
            if told is not None and told.phase == "finished":
                break
            if told is not None:
                try:
                    await self._follow(told)
                except (BehindError, BrokenChainError, ResultMissingError, CheckpointError) as exc:
                    logger.warning("this member gives up its weights: %s", exc)
                    self._give_up(exc)
                if self._auditing is not None:
                    await self._auditing.work(self._gradient_at, self._losses_at)
            has_more = self._auditing is not None and self._auditing.has_work
            if part._told is told and not part._is_dismissed and not has_more:
                await part._changed.wait()

    def _give_up(self, error: NeuroGridError) -> None:
        self._weights.take_back()
        self._weights.withdraw()
        self._weights.step, self._weights.digest = None, b""
        self._part._begin_anew(error, "waiting")

    async def _follow(self, told: Epoch) -> None:
        part = self._part
        own = next((each for each in told.members if each.peer == part._host.peer_id), None)
        incarnation = part._epoch_report.incarnation
        if own is None or own.incarnation != incarnation or own.health != "healthy":
            self._weights.take_back()
            part._note("waiting", reason=part._report.reason)
            return
        if own.seat != part._report.seat:
            part._report = replace(part._report, seat=own.seat)
        if told.phase == "warmup":
            await self._warm_up(told, own)
        elif told.phase in ("round_train", "round_witness"):
            await self._catch_up(told)
            self._exchange.take_waiting()
            if told.phase == "round_train" and self._done < (told.epoch, told.round):
                await self._train(told, own)
        elif told.phase == "cooldown":
            await self._catch_up(told)
            await self._cool_down()

    # Weights

    async def _warm_up(self, told: Epoch, own: EpochSeat) -> None:
        """Have the weights that the epoch begins with."""
        weights, part = self._weights, self._part
        if not told.pieces_digest:
            return
        if (weights.step, weights.digest) != (told.pieces_step, told.pieces_digest):
            part._note("loading")
            others = [each for each in told.members if each.has_pieces and each.peer != own.peer]
            providers = await part._neighbours.reach([each.peer for each in others])
            called = {each.peer: f"seat {each.seat}" for each in others} | {
                part.leader: "the leader"
            }
            try:
                came = await weights.fetch(
                    told.names,
                    told.blobs,
                    providers,
                    part.leader,
                    step=told.pieces_step,
                    digest=told.pieces_digest,
                    first=own.seat,
                    timeout=part._run_file.epochs.warmup,
                )
            except CheckpointError:
                raise
            except NeuroGridError as exc:
                raise BehindError(f"the weights are not to be had: {exc}") from exc
            sources = ", ".join(f"{num} from {called.get(p, p)}" for p, num in sorted(came.items()))
            logger.info("took the weights after round %d in pieces: %s", weights.step, sources)
        else:
            await self._offer()
        self._tell_weights("warm")

    async def _catch_up(self, told: Epoch) -> None:
        """Apply what was agreed and is not in the weights yet.

        Raises:
            BehindError: what was agreed is not known any more.
            ResultMissingError: a result of it is not to be had.
        """
        weights, part = self._weights, self._part
        if weights.step is None:
            raise BehindError("it has no weights of this run")
        if weights.step > told.step:
            raise BehindError(
                f"it has {weights.step} rounds in its weights, and the run has {told.step}"
            )
        while weights.step < told.step:
            agreed = part._agreed.get(weights.step + 1)
            if agreed is None:
                raise BehindError(f"round {weights.step + 1} was agreed on while it was not there")
            timeout = part._run_file.epochs.train
            results = await self._exchange.results_of(agreed, told, timeout)
            has_own = weights.is_under_way and any(each.result == self._own for each in agreed)
            rate = self._rate(weights.step)
            weights.withdraw()
            if self._auditing is not None:
                found = {each.seat: each for each in agreed}
                seen = dict(zip(found, results, strict=True))
                seen |= await self._tried(told, timeout)
                await self._auditing.before_apply(seen)
                self._cosines = await trio.to_thread.run_sync(
                    cosines_of, results, weights.distro.theta.numel()
                )
                self._seats = tuple(found)
            leaving = self._leaving(part._taken_back.get(weights.step + 1, ()))
            try:
                await trio.to_thread.run_sync(
                    partial(weights.apply, results, rate, has_own=has_own, then=leaving)
                )
            except (ValueError, NotFiniteError) as exc:
                raise BehindError(f"what was agreed on cannot be applied: {exc}") from exc
            self._tell_weights("training")
        if weights.is_under_way and self._done != (told.epoch, told.round):
            weights.take_back()  # nobody has it: its samples are dealt again

    def _leaving(self, pairs: Sequence[tuple[int, int]]) -> list[TakenBack]:
        """Results of ejected members that leave the weights with the next round.

        Raises:
            BehindError: this member does not have them all.
        """
        if not pairs or self._auditing is None:
            return []
        try:
            found = self._auditing.take_back(pairs)
        except KeyError as exc:
            raise BehindError(f"what was applied in round {exc} is not here any more") from exc
        seats = ", ".join(f"seat {seat} from round {since} on" for seat, since in pairs)
        logger.info("%d results leave the weights: %s", len(found), seats)
        return found

    async def _tried(self, told: Epoch, timeout: float) -> dict[int, Coefficients]:
        """Results of members on trial, by seat, for whoever looks at them; as far as they are to be had."""
        if self._weights.step is None or told.step != self._weights.step + 1:
            return {}
        found = {}
        for each in told.tried:
            with suppress(ResultMissingError):
                (found[each.seat],) = await self._exchange.results_of([each], told, timeout)
        return found

    async def _cool_down(self) -> None:
        """Offer the weights to the leader, and to those that join."""
        self._weights.take_back()
        await self._offer()
        self._tell_weights("kept")

    async def _offer(self) -> None:
        """Let others fetch the weights. A disk that has no room for them is said once: others may have them."""
        weights = self._weights
        if weights.names or self._unoffered == weights.step:
            return
        try:
            await weights.offer()
        except CheckpointError as exc:
            self._unoffered = weights.step
            logger.warning("this member gives its weights to nobody: %s", exc)

    def _told_cosines(self) -> dict[str, Any]:
        """Report fields of the last applied round: its seats, rising, and each result's cosine to the others' sum."""
        told = sorted(zip(self._seats, self._cosines, strict=True))
        return {"seats": tuple(s for s, _ in told), "cosines": tuple(c for _, c in told)}

    def _tell_weights(self, state: str) -> None:
        weights, part = self._weights, self._part
        before = part._epoch_report
        part._epoch_report = replace(
            part._epoch_report,
            has_weights=weights.step is not None,
            step=weights.step or 0,
            digest=weights.digest,
            names=weights.names,
            blobs=weights.blobs,
            **self._told_cosines(),
        )
        if before != part._epoch_report:
            part._tell()
        part._note(state, round=weights.step or 0, digest=weights.digest)

    # A round

    async def _train(self, told: Epoch, own: EpochSeat) -> None:
        """Do this member's work of a round, and commit to what comes of it."""
        part, work = self._part, next((w for w in told.works if w.seat == own.seat), None)
        self._done, self._own = (told.epoch, told.round), b""
        if work is None:
            await self._exchange.publish(told, own.seat, None, None)
            part._note("averaging")
            return
        part._note("training", batches_done=0)
        try:
            gradient = await self._gradient(told, own, work)
            self._require_under_way(told)
        except _RoundOverError:
            logger.warning("round %d went on before this member was done with its work", told.round)
            return
        if self._auditing is not None:
            self._auditing.begin_chain()
        coefficients = await trio.to_thread.run_sync(
            self._weights.encode, gradient, self._rate(told.step)
        )
        if self._auditing is not None:
            await self._auditing.prepare()
        self._own = await self._exchange.publish(told, own.seat, work, coefficients)
        part._note("averaging")

    def _is_under_way(self, told: Epoch) -> bool:
        """Whether a round is the one that the leader has told of last, also while the run is paused in it."""
        now = self._part._told
        if now is None or now.phase not in ("round_train", "round_witness", "paused"):
            return False
        return (now.epoch, now.round) == (told.epoch, told.round)

    def _require_under_way(self, told: Epoch) -> None:
        if not self._is_under_way(told):
            raise _RoundOverError

    async def _batches(self, told: Epoch, own: EpochSeat, work: RoundWork) -> list[list[FileRange]]:
        """The samples of a work.

        Raises:
            _RoundOverError: the round was over before they were here.
        """
        with unwrap_errors():
            async with trio.open_nursery() as nursery:

                async def end_with_round() -> None:
                    part = self._part
                    while self._is_under_way(told) and not part._is_dismissed:
                        await part._changed.wait()
                    raise _RoundOverError

                nursery.start_soon(end_with_round)
                found = await self._samples.batches(work.ranges, told.batch_samples, own.seat)
                nursery.cancel_scope.cancel()
        return found

    async def _gradient(self, told: Epoch, own: EpochSeat, work: RoundWork) -> torch.Tensor:
        """The mean gradient over the samples of a work.

        Raises:
            _RoundOverError: the round was over before they were here.
        """
        part, batches = self._part, await self._batches(told, own, work)
        loss_sum, num_labels, num_samples = 0.0, 0, 0

        def note(number: int, found: Gradient) -> None:
            nonlocal loss_sum, num_labels, num_samples
            loss_sum += found.loss * found.labels
            num_labels += found.labels
            num_samples += found.samples
            part._note(
                "training",
                batches_done=number,
                batch_seconds=found.seconds * told.batch_samples / max(found.samples, 1),
                micro_batch=found.micro_batch,
            )

        mean = await mean_gradient(
            self._trainer,
            batches,
            run_seed=part._run_file.seed,
            seat=own.seat,
            round_number=told.round,
            step=told.step,
            on_batch=note,
        )
        self._loss_sum += loss_sum
        self._num_tokens += num_labels
        self._num_samples += num_samples
        part._loss = loss_sum / num_labels if num_labels else None
        norm = float(mean.norm())
        part._note(
            "training",
            loss_sum=self._loss_sum,
            num_tokens=self._num_tokens,
            num_samples=self._num_samples,
            gradient_norm=norm if math.isfinite(norm) else None,
        )
        return mean

    async def _gradient_at(self, told: Epoch, seat: int, weights: torch.Tensor) -> torch.Tensor:
        """The gradient of a seat's work in a round, at the weights of then; afterwards the trainer has its own."""
        batches = await self._gathered(told, seat)
        self._trainer.weights.copy_(weights)
        try:
            return await mean_gradient(
                self._trainer,
                batches,
                run_seed=self._part._run_file.seed,
                seat=seat,
                round_number=told.round,
                step=told.step,
            )
        finally:
            self._trainer.weights.copy_(self._weights.distro.theta)

    async def _losses_at(
        self, told: Epoch, seats: Sequence[int], weights: torch.Tensor
    ) -> list[float]:
        """The losses on the works of seats in a round, at these weights; afterwards the trainer has its own."""
        found = []
        for seat in seats:
            batches = await self._gathered(told, seat)
            self._trainer.weights.copy_(weights)
            try:
                ranges = [each for batch in batches for each in batch]
                found.append((await self._trainer.evaluate(ranges)).loss)
            finally:
                self._trainer.weights.copy_(self._weights.distro.theta)
        return found

    async def _gathered(self, told: Epoch, seat: int) -> list[list[FileRange]]:
        """The batches of a seat in a round, whose samples have come before; those that had to make room come again."""
        ranges = _work_of(told, seat).ranges
        timeout = self._part._run_file.epochs.train * _GATHERED_SHARE
        return await self._samples.batches(ranges, told.batch_samples, seat, timeout=timeout)


def _work_of(told: Epoch, seat: int) -> RoundWork:
    """The work of a seat in a round."""
    if (work := next((each for each in told.works if each.seat == seat), None)) is None:
        raise RemoteProtocolError(f"seat {seat} had no work in round {told.round}")
    return work


def _incarnation() -> int:
    """Draw an incarnation of this process, greater than any that it had."""
    return time.time_ns()
