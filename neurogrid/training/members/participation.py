"""A member's part in one run: it joins the group, and does one work after the other until there are none.

    work -> batches -> trainer (a process of its own) -> what was learned -> average with the others -> common weights

What it is told comes in orders, what it tells goes into reports; both are states, so that one that is lost or comes
twice does no harm. What a member has learned and no round has yet stays on top of the common weights, and counts in the
next. More than 600 lines, since the way of a work from its order to the common weights is one sequence over the same
state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import trio
from torch import Tensor

from neurogrid.errors import (
    CheckpointError,
    ConfigurationError,
    NeuroGridError,
    PeerRefusedError,
    RemoteProtocolError,
    ResponseTimeout,
    TransportError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.p2p.exchange.counters import Direction
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.transfer import BlobUnavailableError
from neurogrid.p2p.wire import MessageCode, TensorMessage
from neurogrid.renewed_event import RenewedEvent
from neurogrid.temporary import temporary_directory
from neurogrid.training.averaging.groups import (
    Group,
    NotAMemberError,
    Outcome,
    RoundTimeout,
    open_group,
)
from neurogrid.training.data.blob_files import fetch_file
from neurogrid.training.data.blobs import fetch_manifest
from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.members.failures import one_line, telling_failure
from neurogrid.training.members.member_blobs import MemberBlobs
from neurogrid.training.members.saved_state import add_weights, take_weights
from neurogrid.training.members.settings import MemberSettings
from neurogrid.training.members.slices_ahead import fetch_ahead
from neurogrid.training.members.sources import reach_sources
from neurogrid.training.members.status import PartStatus
from neurogrid.training.runs.common_steps import CommonSteps
from neurogrid.training.runs.estimate import saved_bytes
from neurogrid.training.runs.methods import weights_by
from neurogrid.training.runs.outer_state import OuterState, RunWeights
from neurogrid.training.runs.round_trace import Timeline, after_round, round_trace
from neurogrid.training.runs.run_file import RunFile, parse_kept_run_file
from neurogrid.training.runs.trainers import cut_batches, trainer_settings, work_seed
from neurogrid.training.trainer import (
    BatchDone,
    FileRange,
    Trainer,
    TrainerError,
    open_trainer,
)
from neurogrid.training.wire.runs import (
    MAX_HELD_SLICES,
    Order,
    Report,
    RunMessage,
    Start,
    Work,
)

__all__ = ["KeepModel", "Participation"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

KeepModel = Callable[[Path, str], Awaitable[None]]
"""Takes the trained model out of its directory, for a run of that name."""

_JOIN_TIMEOUT: Final = 120.0
_PAUSE: Final = 1.0
_FETCH_TIMEOUT: Final = 600.0
# Of an optimiser that was saved: it has time to come at this pace, as slices have.
_SENT_PER_SECOND: Final = 64 * 1024
# Seconds until those that have slices are asked again.
_RETRY: Final = 3.0
# Of what a batch takes: how much the last one counts in the moving mean.
_LATEST: Final = 0.3
# Times that a member begins anew before it says that it cannot.
_MAX_RESTARTS: Final = 3
# Saved optimisers that the leader may still fetch.
_NUM_SAVED: Final = 2


@dataclass(slots=True)
class _Totals:
    """Totals of the member's training since it joined."""

    loss_sum: float = 0.0
    num_tokens: int = 0
    num_samples: int = 0
    last_loss: float | None = None


class Participation:
    """A member's part in one run. Keep `run` running.

    Args:
        host: this peer's.
        leader: the peer id of the leader of the run.
        start: what it has been told to begin with.
        blobs: what comes from other peers, and what they may fetch.
        settings: what may be used.
        tell: is called whenever the report has changed.
        keep: is given the directory with the trained model when the run has ended, and the run's name; None for nobody.
    """

    def __init__(
        self,
        host: Host,
        leader: str,
        start: Start,
        blobs: MemberBlobs,
        settings: MemberSettings,
        tell: Callable[[], None],
        keep: KeepModel | None = None,
    ) -> None:
        self.leader = leader
        self._keep, self._is_dismissed = keep, False
        self._host, self._start, self._blobs, self._settings = host, start, blobs, settings
        self._tell = tell
        self._run_file: RunFile = parse_kept_run_file(start.run_file)
        self._order: Order | None = None
        self._group: Group | None = None
        self._changed = RenewedEvent()
        self._totals = _Totals()
        self._report = Report(run=start.run, seat=start.seat, state="starting")
        self._tokens_per_sample = 0
        self._num_held = 0
        self._done = 0
        self._saving: Path | None = None

    @property
    def run_id(self) -> bytes:
        """Id of the run, 16 bytes."""
        return self._start.run

    @property
    def incarnation(self) -> int:
        """Incarnation of this member in the group; 0 while it has none."""
        return self._report.incarnation

    @property
    def is_dismissed(self) -> bool:
        """Whether the leader has said that it needs this member no more."""
        return self._is_dismissed

    def reports(self) -> list[tuple[MessageCode, bytes]]:
        """Reports to the leader, which are sent again and again."""
        return [(RunMessage.REPORT, self._report.encode())]

    def take_message(self, message: TensorMessage) -> None:
        """Messages of a chain are for members that are stages: here nothing becomes of them."""
        logger.debug(
            "a message of a chain for a member that holds the whole model: %s", message.msg_type
        )

    def status(self) -> PartStatus:
        """Status of the member in the run, for people."""
        report, works = self._report, self._order.works if self._order is not None else ()
        work = next((work for work in works if work.number > report.done), None)
        batch, samples = 0, 0
        if work is not None:
            batch, samples = work.batch_samples, sum(r.stop - r.start for r in work.ranges)
        speed = None
        if report.batch_seconds and batch:
            speed = batch * self._tokens_per_sample / report.batch_seconds
        return PartStatus(
            run=self._run_file.name,
            leader=self.leader,
            seat=report.seat,
            state=report.state,
            reason=report.reason,
            round=report.round,
            batches_done=report.batches_done if report.state == "training" else 0,
            batches=-(-samples // batch) if batch else 0,
            tokens_per_second=speed,
            loss=self._totals.last_loss,
            num_samples=report.num_samples,
            memory_bytes=report.memory_bytes,
            micro_batch=report.micro_batch,
            held_slices=self._num_held,
            sent_bytes=report.sent_bytes,
            received_bytes=report.received_bytes,
        )

    def take(self, order: Order) -> None:
        """The leader's order, unless a later one is there."""
        before = self._order
        # The clocks of two leaders, by which they number orders, may differ.
        if before is None or (order.term, order.number) > (before.term, before.number):
            self._order = order
            if order.incarnation == self.incarnation:
                # It sits: one that begins anew from here on gets another seat, of which nothing was saved.
                self._start = replace(self._start, state=b"")
                if self._group is not None:
                    # Before its own vector may be there.
                    self._group.expect(order.expects)
            self._changed.set()

    def dismiss(self) -> None:
        """The leader needs this member no more: it ends with what it has in its hands."""
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
                except (NotAMemberError, TrainerError) as exc:
                    if self._is_dismissed:
                        logger.info("the end of the run was not taken in: %s", exc)
                        return
                    num_failures += 1
                    if num_failures > _MAX_RESTARTS:
                        raise
                    logger.warning("this machine begins anew with the run: %s", exc)
                    self._note(state="starting", reason=one_line(exc), incarnation=0, done=0)

    def _fail(self, error: NeuroGridError) -> None:
        self._note(state="failed", reason=one_line(error))

    def _note(self, **changes: Any) -> None:
        self._report = replace(self._report, **changes)
        self._tell()

    async def _take_part(self) -> None:
        manifest = await _patiently(
            lambda: fetch_manifest(
                self._blobs.transfers, self._start.manifest, [self.leader], _FETCH_TIMEOUT
            )
        )
        self._tokens_per_sample = manifest.tokens_per_sample
        held = await self._blobs.own.look_for(manifest)
        self._num_held = len(held)
        self._note(held=held[:MAX_HELD_SLICES])
        settings = trainer_settings(
            self._run_file,
            self._start.config,
            total_steps=self._start.total_steps,
            device=self._settings.device,
            threads=self._settings.threads,
            memory_limit=self._settings.memory,
        )
        with temporary_directory("neurogrid-member-") as directory:
            async with open_trainer(settings) as trainer:
                if trainer.layout.num_elements != self._start.num_parameters:
                    raise ConfigurationError(
                        f"the model has {trainer.layout.num_elements} parameters here and "
                        f"{self._start.num_parameters} with the leader: versions of transformers differ"
                    )
                state = weights_by(self._run_file, trainer.layout, trainer.weights, settings)
                own = await self._take_saved(trainer, directory)
                async with open_group(
                    self._host,
                    state.group_layout,
                    join=self._start.group,
                    observes=True,
                    timeout=_JOIN_TIMEOUT,
                ) as group:
                    work = _Work(self, group, trainer, state, manifest, directory)
                    self._group = group
                    try:
                        with unwrap_errors():
                            async with trio.open_nursery() as nursery:
                                nursery.start_soon(work.fetch_ahead)
                                await work.run(own, nursery)
                                nursery.cancel_scope.cancel()
                    finally:
                        self._group = None
                if self._keep is not None and state.round:
                    # As the leader writes its last checkpoint: the same bits.
                    trainer.weights.copy_(state.common)
                    await trainer.save(directory / "trained")
                    await self._keep(directory / "trained", self._run_file.name)

    async def _take_saved(self, trainer: Trainer, directory: Path) -> Tensor | None:
        """Take over the optimiser of the seat, as it was saved; its own weights, where it had such."""
        blob_id = self._start.state
        if not blob_id:
            return None
        path = directory / "saved.safetensors"
        num_bytes = saved_bytes(self._run_file, self._start.num_parameters)
        timeout = _FETCH_TIMEOUT + num_bytes / _SENT_PER_SECOND
        await _patiently(
            lambda: fetch_file(self._blobs.transfers, blob_id, [self.leader], path, timeout=timeout)
        )
        try:
            weights = await trio.to_thread.run_sync(take_weights, path, trainer.layout.num_elements)
            await trainer.load_optimizer(path)
        except CheckpointError as exc:  # whoever had the seat has saved something else
            logger.warning("this machine begins with a new optimiser: %s", exc)
            return None
        return weights


class _Work:
    """A member while it is one: what it has in its hands."""

    def __init__(
        self,
        part: Participation,
        group: Group,
        trainer: Trainer,
        state: RunWeights,
        manifest: Manifest,
        directory: Path,
    ) -> None:
        self._part, self._group, self._trainer = part, group, trainer
        self._state, self._manifest, self._directory = state, manifest, directory
        self._weight = 0.0
        self._done = 0
        self._saved: list[Path] = []
        self._overlaps = part._run_file.outer.overlap
        # Set when no round of this member is under way.
        self._landed = trio.Event()
        self._landed.set()
        self._timeline = Timeline(
            {"neurogrid.run": part._run_file.name, "neurogrid.seat": part._start.seat}
        )

    async def run(self, own: Tensor | None, nursery: trio.Nursery) -> None:
        """Begin where the others are, and work until the run ends.

        Args:
            own: the weights that this seat had at the checkpoint that the run goes on from.
            nursery: for a round that is under way while the next work is trained.
        """
        group, state = self._group, self._state
        fetched = await group.fetch_state(state.sizes, timeout=_FETCH_TIMEOUT)
        if fetched is None:
            raise NotAMemberError("nobody else is in the group")
        await trio.to_thread.run_sync(state.load, fetched)
        if own is not None:
            assert isinstance(state, OuterState)
            state.take_own(own)
        group.show_state(state.state())
        self._part._note(
            state="ready",
            reason="",
            incarnation=group.incarnation,
            round=state.round,
            group_addresses=group.addresses[:16],
            digest=await trio.to_thread.run_sync(state.digest),
        )
        while (work := await self._next_work()) is not None:
            group.observe(False)
            # The leader knows it since the member sat down, and a report goes out several times a second.
            self._part._note(held=())
            if work.ranges:
                before = self._part._report.num_samples
                with self._timeline.during("training.train") as told:
                    await self._train(work)
                    told["neurogrid.samples"] = self._part._report.num_samples - before
            await self._landed.wait()
            if isinstance(state, OuterState):
                await trio.to_thread.run_sync(state.settle)
            self._weight += work.share
            self._done = work.number
            if self._overlaps and work.ranges:
                await self._take_off(nursery)
                continue
            await self._average()
            while self._weight and self._work_at_hand() is None and not self._is_over():
                await self._average()  # the last work was late
        await self._landed.wait()

    # Orders

    def _order(self) -> Order | None:
        order = self._part._order
        if order is None or order.incarnation != self._group.incarnation:
            return None
        return order

    @property
    def _seat(self) -> int:
        """Seat of the works that this member gets."""
        order = self._order()
        # One that began anew has another seat than it was started for.
        return self._part._start.seat if order is None or order.seat is None else order.seat

    def _work_at_hand(self) -> Work | None:
        order = self._order()
        if order is None:
            return None
        return next((work for work in order.works if work.number > self._done), None)

    def _is_over(self) -> bool:
        order = self._order()
        is_told = self._part._is_dismissed or (order is not None and order.ends)
        return is_told and self._work_at_hand() is None

    async def _next_work(self) -> Work | None:
        """The next work, when it is there; None at the end of the run. Rounds go on meanwhile."""
        work = self._work_at_hand()
        if work is not None or self._is_over():
            return work
        self._part._note(state="waiting")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_on)
            while (work := self._work_at_hand()) is None and not self._is_over():
                await self._part._changed.wait()
            nursery.cancel_scope.cancel()
        return work

    async def _look_on(self) -> None:
        """Take over what others learn."""
        await self._landed.wait()
        while True:
            try:
                outcome = await self._group.next_outcome(timeout=3600)
            except RoundTimeout:
                continue
            with trio.CancelScope(shield=True):
                await self._apply(outcome)

    # Training

    async def _train(self, work: Work) -> None:
        part = self._part
        part._note(state="training", batches_done=0)
        with self._timeline.during("training.fetch"):
            batches = await self._batches(work)

        def told(done: BatchDone) -> None:
            before = part._report.batch_seconds
            # A last batch may have less than the others.
            seconds = done.seconds * work.batch_samples * part._tokens_per_sample / done.tokens
            if before:
                seconds = before + _LATEST * (seconds - before)
            part._note(batches_done=done.batches, batch_seconds=seconds)

        seed = work_seed(part._run_file.seed, self._seat, work.number)
        if isinstance(self._state, CommonSteps):
            await self._add_gradients(self._state, work, batches, seed)
            return
        trained = await self._trainer.train(
            batches, step=work.position, stride=work.stride, seed=seed, on_batch=told
        )
        if trained.not_finite:
            raise TrainerError(trained.not_finite)
        self._count(trained.loss_sum, trained.labels, trained.samples)
        part._note(
            memory_bytes=trained.memory_bytes,
            micro_batch=trained.micro_batch,
            gradient_norm=trained.gradient_norm,
        )

    async def _add_gradients(
        self, state: CommonSteps, work: Work, batches: Sequence[Sequence[FileRange]], seed: int
    ) -> None:
        for number, batch in enumerate(batches):
            gradient = await self._trainer.gradient(
                batch, step=int(work.position) + number, seed=seed
            )
            if gradient.not_finite:
                raise TrainerError(gradient.not_finite)
            await trio.to_thread.run_sync(
                state.add, self._trainer.gradients, float(gradient.samples)
            )
            self._count(gradient.loss * gradient.labels, gradient.labels, gradient.samples)
            self._part._note(
                batches_done=number + 1,
                batch_seconds=gradient.seconds * work.batch_samples / gradient.samples,
                micro_batch=gradient.micro_batch,
            )

    def _count(self, loss_sum: float, num_tokens: int, num_samples: int) -> None:
        totals = self._part._totals
        totals.loss_sum += loss_sum
        if num_tokens:
            totals.last_loss = loss_sum / num_tokens
        totals.num_tokens += num_tokens
        totals.num_samples += num_samples
        self._part._note(
            loss_sum=totals.loss_sum,
            num_tokens=totals.num_tokens,
            num_samples=totals.num_samples,
        )

    async def fetch_ahead(self) -> None:
        """Fetch what the works after the one at hand need."""

        def needed() -> list[SliceInfo]:
            order = self._order()
            works = order.works if order is not None else ()
            numbers = {each.slice: None for work in works for each in work.ranges}
            known = self._manifest.slices
            return [known[number] for number in numbers if number < len(known)]

        await fetch_ahead(self._part._blobs.slices, needed, self._find_sources, self._part._changed)

    async def _batches(self, work: Work) -> list[list[FileRange]]:
        """The batches of a work, on this machine."""
        numbers = sorted({each.slice for each in work.ranges})
        if numbers[-1] >= len(self._manifest.slices):
            raise RemoteProtocolError(
                f"a work is about slice {numbers[-1]}, and the data have {len(self._manifest.slices)}"
            )
        infos = {number: self._manifest.slices[number] for number in numbers}
        self._part._blobs.slices.need_only([info.blob_id for info in infos.values()])
        paths = {number: await self._fetch_slice(info) for number, info in infos.items()}
        ranges = [FileRange(paths[each.slice], each.start, each.stop) for each in work.ranges]
        return cut_batches(ranges, work.batch_samples)

    async def _fetch_slice(self, info: SliceInfo) -> Path:
        """A slice, from whoever has it by now: a data node that went may come back, or another one."""
        part = self._part
        deadline = trio.current_time() + _FETCH_TIMEOUT
        while True:
            sources = await self._find_sources()
            left = deadline - trio.current_time()
            try:
                path = await part._blobs.slices.fetch(info, sources, max(left, 1.0))
                break
            except (BlobUnavailableError, ResponseTimeout) as exc:
                if left < _RETRY:
                    raise
                logger.warning("%s; asking again", exc)
                part._note(reason=f"waits for data: {one_line(exc)}"[:200])
            await trio.sleep(_RETRY)
        if part._report.reason:
            part._note(reason="")
        return path

    async def _find_sources(self) -> Sequence[str]:
        """Peers that may have slices, connected."""
        order, part = self._order(), self._part
        addresses = order.sources if order is not None else ()
        passed_over = part._blobs.slices.passed_over
        return await reach_sources(
            part._host, addresses, part.leader, part._start.seat, passed_over
        )

    # Rounds

    async def _average(self) -> None:
        """Contribute to the next round, and take over what comes of it."""
        vector, norm = await self._contribution()
        await self._average_these(vector, norm)
        if not self._overlaps:  # then it was saved before
            await self._save_if_due()

    async def _take_off(self, nursery: trio.Nursery) -> None:
        """Contribute to the next round, which goes on meanwhile."""
        vector, norm = await self._contribution()
        saved = await self._save(self._state.round + 1)
        self._landed = trio.Event()
        nursery.start_soon(self._fly, vector, norm, saved)

    async def _fly(self, vector: Tensor, norm: float, saved: Path | None) -> None:
        outcome = await self._average_these(vector, norm)
        if saved is not None and outcome.has_contributed:
            await self._offer_saved(saved, outcome.round)
        elif saved is not None:  # it is of another round, and of more samples than that one has
            saved.unlink()
        self._landed.set()

    async def _contribution(self) -> tuple[Tensor, float]:
        """Compute this member's contribution to the next round, and its norm."""
        self._part._note(state="averaging", done=self._done)
        vector = await trio.to_thread.run_sync(self._state.contribution)
        norm = float(vector.norm())
        # What is finite and very large has no norm either.
        if not math.isfinite(norm) and not bool(torch.isfinite(vector).all()):
            raise TrainerError("the weights are not finite any more")
        return vector, norm

    async def _average_these(self, vector: Tensor, norm: float) -> Outcome:
        with self._timeline.during("training.average"):
            outcome = await self._agree(vector)
        cosine = _cosine(vector, outcome.values, norm) if outcome.has_contributed else None
        await self._apply(outcome)
        if outcome.has_contributed:
            self._weight = 0.0
        self._part._note(difference_norm=norm, cosine=cosine)
        return outcome

    async def _agree(self, vector: Tensor) -> Outcome:
        """Contribute to the next round, and wait for its outcome, however long that takes."""
        while True:
            try:
                return await self._group.average(
                    vector,
                    weight=self._weight,
                    timeout=self._part._run_file.outer.attempt_timeout,
                )
            except RoundTimeout as exc:
                logger.warning("%s; still waiting", exc)

    async def _apply(self, outcome: Outcome) -> None:
        with self._timeline.during("training.apply"):
            self._group.take_state_back()
            await trio.to_thread.run_sync(partial(self._state.apply, outcome))
            self._group.show_state(self._state.state())
        logger.debug("the weights are those after round %d", outcome.round)
        told = {
            "neurogrid.round": outcome.round,
            "neurogrid.weight": self._weight,
            "neurogrid.contributed": outcome.has_contributed,
        }
        ids = round_trace(self._part.run_id, outcome.round)
        self._timeline.end(ids, "training.member", told)
        counters = self._group.counters
        self._part._note(
            round=outcome.round,
            digest=await trio.to_thread.run_sync(self._state.digest),
            sent_bytes=counters.total(Direction.SENT).num_bytes,
            received_bytes=counters.total(Direction.RECEIVED).num_bytes,
        )

    async def _save_if_due(self) -> None:
        """Keep the optimiser for the checkpoint of this round."""
        if self._weight:
            return
        if (path := await self._save(self._state.round)) is not None:
            await self._offer_saved(path, self._state.round)

    async def _save(self, round_: int) -> Path | None:
        """A file with the optimiser for the checkpoint of a round; None where the run file wants none."""
        checkpoints = self._part._run_file.checkpoints
        is_common = isinstance(self._state, CommonSteps)  # and with the leader
        if is_common or not checkpoints.optimizers or round_ % checkpoints.every:
            return None
        path = self._directory / f"optimizer-{round_}.safetensors"
        with after_round(self._part.run_id, round_, "training.save"):
            await self._trainer.save_optimizer(path)
            if self._part._run_file.outer.fragments > 1:
                await trio.to_thread.run_sync(add_weights, path, self._state.weights)
        return path

    async def _offer_saved(self, path: Path, round_: int) -> None:
        blob_id = await self._part._blobs.offered.offer(path)
        self._part._note(saved_round=round_, saved=blob_id)
        self._saved.append(path)
        while len(self._saved) > _NUM_SAVED:
            old = self._saved.pop(0)
            self._part._blobs.offered.withdraw(old)
            old.unlink()


async def _patiently(fetch: Callable[[], Awaitable[T]]) -> T:
    """Fetch something, again while nobody gives it: a leader that was killed comes back.

    Raises:
        TransportError: nobody has given it within `_FETCH_TIMEOUT` seconds.
    """
    until = trio.current_time() + _FETCH_TIMEOUT
    while True:
        try:
            return await fetch()
        except (TransportError, PeerRefusedError) as exc:
            if trio.current_time() >= until:
                raise
            logger.info("%s; trying again", exc)
            await trio.sleep(_PAUSE)


def _cosine(vector: Tensor, other: Tensor, norm: float) -> float | None:
    """The cosine between float32 vectors, `norm` being that of the first; None where one has none.

    Torch's own function makes vectors of their size on the way: in a worker it took 32 ms for 1.3 M elements, and this
    takes 1 ms.
    """
    norms = norm * float(other.norm())
    if not 0 < norms < math.inf:
        return None
    return min(1.0, max(-1.0, float(torch.dot(vector, other)) / norms))
