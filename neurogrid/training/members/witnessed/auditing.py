"""Audits, on a member: it says what it computed, and computes again what it was drawn to look at, or is to judge.

    result -> signed claim -> all others     the next seed -> momenta of who claimed -> gradient -> finding -> leader

Vectors and samples come while the member trains on its own; it computes for audits when its own result of a round is
out. What it is to give when its own claim was drawn, it gives without being asked. Who accuses, is the leader's to
hear: here nobody is put out. What results are worth it measures then, too, where it was drawn for that.

Source: protocol_spec/training/witnessed.md, "Audits".
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
import trio
from torch import Tensor

from neurogrid.errors import NeuroGridError, RemoteProtocolError, TransportError
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.transfer import DirectoryStore
from neurogrid.p2p.wire import ErrorCode, TensorMessage
from neurogrid.training.checks import (
    Band,
    Claim,
    ClaimConflictError,
    ClaimError,
    ClaimRules,
    Facts,
    Finding,
    Material,
    MaterialError,
    audit,
    open_evidence,
    sign_claim,
    sign_finding,
    vector_id,
)
from neurogrid.training.checks.evidence import Kind
from neurogrid.training.members.member_blobs import MemberBlobs
from neurogrid.training.members.witnessed.audited_rounds import AuditedRound, AuditedRounds
from neurogrid.training.members.witnessed.measuring import (
    Losses,
    Measuring,
    Wanted,
    read_vector,
)
from neurogrid.training.members.witnessed.neighbours import Neighbours
from neurogrid.training.members.witnessed.own_weights import OwnWeights, TakenBack
from neurogrid.training.optimizers.distro import Coefficients
from neurogrid.training.runs.run_file import ChecksSection
from neurogrid.training.trainer import TrainerDiedError
from neurogrid.training.wire.runs import (
    Epoch,
    EpochSeat,
    RoundCommitment,
    RoundEvidence,
    RoundFinding,
    RoundMeasure,
    RunMessage,
)
from neurogrid.training.witnessed import ResultPlan

__all__ = ["Auditing", "BrokenChainError"]

logger = logging.getLogger(__name__)

_RETRY: Final = 0.5
# Times that the leader is told a finding.
_MAX_TELLS: Final = 60
# Claims that are computed for others at once, or wait for it: of a round one or two, and what is judged.
_MAX_JOBS: Final = 16
# Rounds within which momenta come, where these take less than the seconds of one.
_PATIENCE: Final = 5
_NAMES: Final = ("before", "kept", "sent")


class BrokenChainError(NeuroGridError):
    """This member's momentum is not the one that its claims say: it is to begin anew."""


@dataclass(eq=False)
class _Job:
    """A claim that this member computes again.

    Attributes:
        seat: that claimed.
        peers: that have its momenta, who claimed first.
        until: the time by which these are to be here.
        last_step: rounds that are in the weights when they are waited for no more.
        waiting: is cancelled then.
    """

    round: AuditedRound
    seat: int
    claim: Claim
    signed: bytes
    peers: tuple[str, ...]
    until: float
    last_step: int
    vectors: dict[str, Tensor]
    gradient: Tensor | None = None
    waiting: trio.CancelScope | None = None


class Auditing:
    """Claims and audits of one member. Keep `run` running.

    Args:
        rules: what all know of claims.
        section: of the run file.
        leader: its peer id.
        weights: of this member.
        plan: of results.
        timeout: seconds in which a member gives its momenta.
        directory: for vectors.
        gather: has the samples of a seat's work in a round on the disk, however long that takes.
        wake: is called when there is something to compute.
    """

    def __init__(
        self,
        rules: ClaimRules,
        section: ChecksSection,
        leader: str,
        identity: Identity,
        exchange: Exchange,
        blobs: MemberBlobs,
        neighbours: Neighbours,
        weights: OwnWeights,
        plan: ResultPlan,
        timeout: float,
        directory: Path,
        gather: Callable[[Epoch, int], Awaitable[None]],
        wake: Callable[[], None],
    ) -> None:
        self._rules, self._leader, self._identity = rules, leader, identity
        self._exchange, self._blobs, self._neighbours = exchange, blobs, neighbours
        self._weights, self._plan, self._timeout = weights, plan, timeout
        self._directory, self._gather_samples, self._wake = directory, gather, wake
        self._rounds = AuditedRounds(section.audit, section.auditors, section.worth)
        self._own: tuple[int, int] | None = None
        self._number = self._step = 0
        self._made: tuple[bytes, bytes, bytes] | None = None
        self._momenta: tuple[Tensor, Tensor, Tensor] | None = None
        self._jobs: list[_Job] = []
        self._ready: list[_Job] = []
        self._measuring = Measuring(rules, self._tell_measure)
        self._nursery: trio.Nursery | None = None

    # What the leader says

    def hear(self, told: Epoch, incarnation: int) -> None:
        """The leader says where the run is."""
        peer = self._identity.peer_id
        own = next((each for each in told.members if each.peer == peer), None)
        if own is None or own.incarnation != incarnation or own.health != "healthy":
            return
        if self._own != (own.seat, incarnation):
            self._own, self._number = (own.seat, incarnation), 0
            self._jobs, self._ready = [], []
            self._measuring.forget()
            self._rounds.begin(own.seat)
        self._step = told.step
        for job in self._jobs:
            if job.waiting is not None and told.step >= job.last_step:
                job.waiting.cancel()
        drawn = self._rounds.hear(told)
        self._remove_files()
        if drawn is None or self._nursery is None:
            return
        assert drawn.audits is not None
        if any(each.seat == own.seat for each in drawn.audits):
            self._nursery.start_soon(self._offer_momenta, drawn)
        else:
            drawn.momenta = None  # nobody will ask for them
        for each in drawn.audits:
            if each.auditor == own.seat and each.seat in drawn.claims:
                self._begin(drawn, each.seat, *drawn.claims[each.seat], ())
            elif each.auditor == own.seat:
                logger.warning("the claim of seat %d, to be looked at, is not here", each.seat)
        for wanted in self._measuring.take(drawn, own.seat):
            self._nursery.start_soon(self._gather_measured, wanted)

    def judge(self, said: RoundEvidence) -> None:
        """The leader wants a claim judged, that an auditor says is false, or for which it was given nothing.

        Raises:
            RemoteProtocolError: it is not about what happened in this run.
        """
        round_ = self._rounds.of(said.epoch, said.round)
        if self._own is None or round_ is None or self._own[0] in (said.about, said.auditor):
            return
        if said.about in round_.findings:
            self._tell_finding(round_, said.about)
            return
        accused, accuser = round_.member(said.about), round_.member(said.auditor)
        is_drawn = round_.audits is None or any(
            (each.seat, each.auditor) == (said.about, said.auditor) for each in round_.audits
        )
        if accused is None or accuser is None or not is_drawn:
            raise _none(f"seat {said.auditor} was not drawn to look at the claim of {said.about}")
        known = round_.claims.get(said.about)
        if said.evidence:
            evidence = open_evidence(said.evidence)
            names = evidence.kind, evidence.accused, evidence.accuser
            if names != (Kind.RESULT, accused.peer, accuser.peer):
                raise _none("evidence names others than those who sit on the seats")
            if known is None or known[0] != evidence.claim:
                raise _none("evidence is about a claim that does not count here")
        if known is not None:
            self._begin(round_, said.about, *known, (accuser.peer,))

    # Claims

    def is_at(self, told: Epoch) -> bool:
        """Whether this member has the weights that a round begins with, and so can see whether claims are of it."""
        return self._weights.step == told.step and bool(self._weights.digest)

    def take_claim(self, told: Epoch, member: EpochSeat, said: RoundCommitment) -> None:
        """A member says what it computed.

        Raises:
            RemoteProtocolError: it says nothing, or its claim does not count.
        """
        round_ = self._rounds.at(told.step)
        if round_ is None or round_.key != (told.epoch, told.round):
            return
        try:
            if not said.claim:
                raise ClaimError(f"seat {said.seat} commits to a result without a claim")
            facts = self._facts(told, member.seat, member.incarnation)
            claim = self._rounds.claims.take(said.claim, member.peer, facts, said.result)
        except ClaimConflictError as exc:
            self._tell_conflict(told, said.seat, exc.evidence)
            raise _refused(exc) from exc
        except ClaimError as exc:
            logger.warning("a result is refused: %s", exc)
            raise _refused(exc) from exc
        round_.claims[said.seat] = claim, said.claim

    async def prepare(self) -> None:
        """See what the step under way is, for the claim of it.

        Raises:
            BrokenChainError: others take this member to have another momentum.
        """
        assert self._own is not None
        momenta = self._weights.momenta()
        self._made = await trio.to_thread.run_sync(_ids_of, momenta)
        self._momenta = momenta
        begins = self._rounds.claims.in_force(self._own, self._rules.start, self._number + 1)
        if begins != self._made[0]:
            raise BrokenChainError("the momentum is not the one that the last claim has left")

    def begin_chain(self) -> None:
        """A member that has claimed nothing yet begins with no momentum."""
        if self._number == 0:
            self._weights.forget_momentum()

    def sign(self, told: Epoch, result: bytes) -> bytes:
        """The signed claim of the step under way, which has this blob as its result."""
        assert self._own is not None
        assert self._made is not None
        facts = self._facts(told, *self._own)
        self._number += 1
        claim = self._claim(facts, self._made, result)
        signed = sign_claim(claim, self._identity)
        self._rounds.claims.take(signed, self._identity.peer_id, facts, result)
        round_ = self._rounds.at(told.step)
        if round_ is not None and round_.key == (told.epoch, told.round):
            round_.claims[facts.seat] = claim, signed
            round_.momenta = self._momenta
        self._made = self._momenta = None
        return signed

    def _claim(self, facts: Facts, made: tuple[bytes, bytes, bytes], result: bytes) -> Claim:
        return Claim(
            facts.run,
            facts.seat,
            facts.incarnation,
            self._number,
            facts.round,
            facts.weights,
            facts.settings,
            facts.samples,
            *made,
            result,
        )

    def _facts(self, told: Epoch, seat: int, incarnation: int) -> Facts:
        work = next((each for each in told.works if each.seat == seat), None)
        if work is None:
            raise ClaimError(f"seat {seat} has nothing to claim in round {told.round}")
        return self._rules.facts(
            (seat, incarnation),
            told.epoch,
            told.round,
            told.step,
            ((each.slice, each.start, each.stop) for each in work.ranges),
            self._weights.digest,
        )

    # Rounds

    async def before_apply(self, results: dict[int, Coefficients]) -> None:
        """Keep the agreed results that are about to be applied, by seat, and the weights before them, for audits."""
        assert self._weights.step is not None
        round_ = self._rounds.at(self._weights.step)
        if round_ is not None and round_.agreed is not None:
            path = self._directory / f"{round_.told.epoch}-{round_.told.round}.weights"
            await trio.to_thread.run_sync(_write, path, self._weights.distro.theta)
            round_.coefficients, round_.weights = results, path
            round_.files.append(path)

    def take_back(self, pairs: Sequence[tuple[int, int]]) -> list[TakenBack]:
        """Take out results of these seats, each from a round on, that leave the weights with the round applied next.

        Raises:
            KeyError: a round of these is not here any more.
        """
        assert self._weights.step is not None
        found = self._rounds.take_back(pairs, self._weights.step + 1)
        return [(applied, left, self._rules.rate(step)) for applied, left, step in found]

    @property
    def has_work(self) -> bool:
        """Whether there is something to compute for which all is here."""
        is_ready = any(self._can_start(job.round) for job in self._ready)
        return is_ready or self._measuring.has_work(self._can_start)

    def _can_start(self, round_: AuditedRound) -> bool:
        # Else the round is yet to be applied; or it never was here, which is found out at the start.
        return round_.weights is not None or round_.told.step != self._weights.step

    def _is_kept(self, round_: AuditedRound) -> bool:
        return round_.weights is not None and self._rounds.of(*round_.key) is round_

    async def work(
        self, gradient: Callable[[Epoch, int, Tensor], Awaitable[Tensor]], losses: Losses
    ) -> None:
        """Compute what is to be computed again, and measure what is to be measured.

        A claim that cannot be computed, as a slice is not to be had, is left out.

        Args:
            gradient: that of a seat's work in a round, at these weights.
            losses: on the works of these seats in a round, at these weights.

        Raises:
            TrainerDiedError: the trainer has ended.
        """
        while (job := next((j for j in self._ready if self._can_start(j.round)), None)) is not None:
            self._ready.remove(job)
            try:
                await self._compute(job, gradient)
            except MaterialError as exc:
                wanted = [name for name in _NAMES if getattr(job.claim, name) in exc.wanted]
                missing = [name for name in wanted if name not in job.vectors]
                if missing and self._nursery is not None:
                    # Whoever trains and computes for long asks late: that is no fault of who is asked.
                    job.until = trio.current_time() + self._timeout
                    job.last_step = self._step + _PATIENCE
                    self._nursery.start_soon(self._gather, job, missing)
                    continue
                logger.warning("the claim of seat %d cannot be computed: %s", job.seat, exc)
                self._end(job)
            except TrainerDiedError:
                raise
            except (NeuroGridError, ValueError, OSError) as exc:
                logger.warning("the claim of seat %d cannot be computed: %s", job.seat, exc)
                self._end(job)
        if self._own is not None:
            await self._measuring.work(self._own[0], self._can_start, self._is_kept, losses)

    async def _compute(
        self, job: _Job, gradient: Callable[[Epoch, int, Tensor], Awaitable[Tensor]]
    ) -> None:
        round_ = job.round
        if round_.weights is None or job.seat not in round_.coefficients:
            logger.warning(
                "the claim of seat %d cannot be computed: the weights before round %d are not here",
                job.seat,
                round_.told.round,
            )
            self._end(job)
            return
        if job.gradient is None:
            weights = await trio.to_thread.run_sync(read_vector, round_.weights)
            job.gradient = await gradient(round_.told, job.seat, weights)
        found = await trio.to_thread.run_sync(
            partial(
                audit,
                job.claim,
                round_.coefficients[job.seat],
                Material(job.vectors["before"], job.vectors.get("kept"), job.vectors.get("sent")),
                job.gradient,
                self._rules.rate(round_.told.step),
                self._rules.settings,
                Band(),
                is_agreed=job.seat not in round_.tried,
                pack=self._pack,
            )
        )
        self._note(job, self.said_of(found.finding))

    def said_of(self, finding: Finding) -> Finding:
        """Finding that this member reports: the one that it has made."""
        return finding

    def _note(self, job: _Job, finding: Finding) -> None:
        if job not in self._jobs:
            return  # this member has another seat by now
        level = logging.WARNING if finding.accuses else logging.INFO
        logger.log(
            level,
            "the claim of seat %d of round %d is %.3g bands off",
            job.seat,
            job.round.told.round,
            finding.excess,
        )
        job.round.findings[job.seat] = job.signed, sign_finding(finding, self._identity)
        self._tell_finding(job.round, job.seat)
        self._end(job)

    def _end(self, job: _Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)

    def _pack(self, coefficients: Coefficients) -> bytes:
        return self._plan.encode(coefficients.positions.numpy(), coefficients.values.numpy())

    # Tasks

    async def run(self) -> None:
        """Give momenta, fetch those of others, and tell the leader."""
        async with trio.open_nursery() as self._nursery:
            await trio.sleep_forever()

    def _begin(
        self, round_: AuditedRound, seat: int, claim: Claim, signed: bytes, more: Sequence[str]
    ) -> None:
        """Compute a claim again, once."""
        member = round_.member(seat)
        if seat in round_.judging or member is None or self._nursery is None:
            return
        if len(self._jobs) >= _MAX_JOBS:
            logger.warning("too much is to be computed again: the claim of seat %d is not", seat)
            return
        round_.judging.add(seat)
        until = trio.current_time() + self._timeout
        peers, last = (member.peer, *more), self._step + _PATIENCE
        job = _Job(round_, seat, claim, signed, peers, until, last, {})
        self._jobs.append(job)
        self._nursery.start_soon(self._gather, job, ["before"])

    async def _gather(self, job: _Job, names: Sequence[str]) -> None:
        """Fetch momenta; where they are not to be had in time, tell so."""
        reason = f"they did not come within {self._timeout:g} s or {_PATIENCE} rounds"
        with trio.move_on_at(job.until) as job.waiting:
            try:
                for name in names:
                    job.vectors[name] = await self._fetch(job, name)
            except NeuroGridError as exc:
                reason = str(exc)
        job.waiting = None
        if not job.vectors.keys() >= set(names):
            if job not in self._jobs:
                return
            logger.warning("the momenta of seat %d are not to be had: %s", job.seat, reason)
            job.round.findings[job.seat] = job.signed, b""
            self._tell_finding(job.round, job.seat)
            self._end(job)
            return
        if job.gradient is None:
            try:
                # Not where the gradient is computed: for what others keep back this member would miss its own rounds.
                await self._gather_samples(job.round.told, job.seat)
            except NeuroGridError as exc:
                logger.warning("the claim of seat %d cannot be computed: %s", job.seat, exc)
                self._end(job)
                return
        if job in self._jobs:
            self._ready.append(job)
            self._wake()

    async def _gather_measured(self, wanted: Wanted) -> None:
        try:
            for seat in wanted.seats:
                await self._gather_samples(wanted.round.told, seat)
        except NeuroGridError as exc:
            logger.warning("what the result of seat %d is worth is not known: %s", wanted.seat, exc)
            self._measuring.drop(wanted)
            return
        wanted.is_here = True
        self._wake()

    async def _fetch(self, job: _Job, name: str) -> Tensor:
        blob_id, num_bytes = getattr(job.claim, name), 4 * self._rules.settings.num_elements
        if blob_id == self._rules.start:
            return torch.zeros(self._rules.settings.num_elements)
        # A folder for each: two members may have the same momentum.
        folder = self._directory / f"{job.round.told.epoch}-{job.round.told.round}-{job.seat}"
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            peers = [each for each in job.peers if each in self._neighbours.peers]
            try:
                if not peers:
                    raise TransportError("it is not connected")
                fetched = await self._blobs.transfers.fetch_blob(
                    peers, blob_id, store=DirectoryStore(path.parent), max_bytes=num_bytes
                )
                break
            except NeuroGridError as exc:
                logger.debug("the momentum of seat %d is asked for again: %s", job.seat, exc)
            await trio.sleep(_RETRY)
        blob = fetched.blob
        if blob.path is None:
            await trio.to_thread.run_sync(path.write_bytes, blob.data)
        else:
            blob.path.replace(path)
        if path.stat().st_size != num_bytes:
            path.unlink()
            raise RemoteProtocolError(f"it has not {num_bytes} B, as a momentum has")
        await self._offer(job.round, path)
        return await trio.to_thread.run_sync(read_vector, path)

    async def _offer_momenta(self, round_: AuditedRound) -> None:
        """Let others compute this member's claim, which was drawn."""
        momenta, round_.momenta = round_.momenta, None
        if momenta is None:
            logger.warning("the claim of round %d is not this process's", round_.told.round)
            return
        for name, vector in zip(_NAMES, momenta, strict=True):
            path = self._directory / f"{round_.told.epoch}-{round_.told.round}-own.{name}"
            await trio.to_thread.run_sync(_write, path, vector)
            await self._offer(round_, path)

    async def _offer(self, round_: AuditedRound, path: Path) -> None:
        await self._blobs.offered.offer(path)
        if round_ in self._rounds.dropped or self._rounds.of(*round_.key) is not round_:
            self._blobs.offered.withdraw(path)
            return
        round_.files.append(path)

    def _remove_files(self) -> None:
        for round_ in self._rounds.dropped:
            for path in round_.files:
                self._blobs.offered.withdraw(path)
                path.unlink(missing_ok=True)
        self._rounds.dropped.clear()

    def _tell_finding(self, round_: AuditedRound, seat: int) -> None:
        signed, finding = round_.findings[seat]
        own = self._own
        if own is None or self._nursery is None:
            return
        said = RoundFinding(self._rules.run, own[0], *round_.key, seat, signed, finding)
        self._nursery.start_soon(self._tell, TensorMessage(RunMessage.FINDING, data=said.encode()))

    def _tell_measure(self, said: RoundMeasure) -> None:
        if self._nursery is not None:
            message = TensorMessage(RunMessage.MEASURE, data=said.encode())
            self._nursery.start_soon(self._tell, message)

    def _tell_conflict(self, told: Epoch, seat: int, evidence: bytes) -> None:
        own = self._own
        if own is None or self._nursery is None:
            return
        said = RoundEvidence(self._rules.run, told.epoch, told.round, seat, own[0], evidence)
        self._nursery.start_soon(self._tell, TensorMessage(RunMessage.EVIDENCE, data=said.encode()))

    async def _tell(self, message: TensorMessage) -> None:
        for _ in range(_MAX_TELLS):
            try:
                await self._exchange.send(self._leader, message)
                return
            except TransportError as exc:
                logger.debug("the leader cannot be told: %s", exc)
            await trio.sleep(_RETRY)


def _ids_of(momenta: tuple[Tensor, Tensor, Tensor]) -> tuple[bytes, bytes, bytes]:
    before, kept, sent = momenta
    return vector_id(before), vector_id(kept), vector_id(sent)


def _write(path: Path, vector: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(vector.contiguous().numpy().tobytes())


def _none(text: str) -> RemoteProtocolError:
    return RemoteProtocolError(text, code=ErrorCode.PROTOCOL_VIOLATION)


def _refused(error: ClaimError) -> RemoteProtocolError:
    return RemoteProtocolError(str(error), code=ErrorCode.PROTOCOL_VIOLATION)
