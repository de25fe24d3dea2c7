"""The leader of a witnessed run: it hears its members, has the machine go on, and keeps what an epoch has come to.

    what members say -> events -> machine -> journal -> an Epoch, which all are told

It computes nothing of a round itself. When an epoch is over, it takes the weights over from members of which more than
half have the same, in pieces, and makes a checkpoint of them; with these the next epoch begins. Weights that nobody has
any more are lost: the run goes on from the last checkpoint then. More than 600 lines, since members, weights and audits
are one conversation about the same state.

Source: protocol_spec/training/witnessed.md.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import trio

from neurogrid.errors import NeuroGridError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.node.roles import Table, authorise
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.transfer import Transfers
from neurogrid.p2p.trust import COORDINATOR, RUN_ROLES
from neurogrid.p2p.wire import MessageType, TensorMessage
from neurogrid.training.checks import ClaimRules
from neurogrid.training.leading.chains.members import ChainMembers
from neurogrid.training.leading.changes import WantedChanges
from neurogrid.training.leading.facts import RunFacts
from neurogrid.training.leading.hiring import HEARTBEAT
from neurogrid.training.leading.keeper import Keeper
from neurogrid.training.leading.look import LeaderLook
from neurogrid.training.leading.settings import LeaderProgress
from neurogrid.training.leading.sources import Sources
from neurogrid.training.leading.waiting import watch_members
from neurogrid.training.leading.witnessed.agreement import (
    WeightAgreement,
    providers_of,
    tells_of_weights,
)
from neurogrid.training.leading.witnessed.audits import RoundAudits
from neurogrid.training.leading.witnessed.common_weights import CommonWeights
from neurogrid.training.leading.witnessed.epoch_messages import epoch_message
from neurogrid.training.leading.witnessed.round_events import RoundEvents
from neurogrid.training.leading.witnessed.trials import Trials
from neurogrid.training.runs.changes import run_at
from neurogrid.training.runs.entries import Entry
from neurogrid.training.runs.state import Occupant, Phase, Seat
from neurogrid.training.runs.weight_pieces import cut_pieces
from neurogrid.training.runs.witnessed_machine import WitnessedMachine
from neurogrid.training.wire.runs import (
    Epoch,
    EpochReport,
    RoundEvidence,
    RoundFinding,
    RoundMeasure,
    RunMessage,
)
from neurogrid.training.witnessed import (
    Checkpointed,
    EpochPhase,
    Gone,
    Health,
    Joined,
    Left,
    Pause,
    Resume,
    Stop,
    Warm,
    due,
)

__all__ = ["WITNESSED_LEADER_TAKES", "EpochLostError", "WitnessedLeader"]

logger = logging.getLogger(__name__)

WITNESSED_LEADER_TAKES: Final[Table] = {
    RunMessage.REPORT: RUN_ROLES,
    RunMessage.EPOCH_REPORT: RUN_ROLES,
    RunMessage.COMMITMENT: RUN_ROLES,
    RunMessage.WITNESS: RUN_ROLES,
    RunMessage.HEALTH: RUN_ROLES,
    RunMessage.FINDING: RUN_ROLES,
    RunMessage.EVIDENCE: RUN_ROLES,
    RunMessage.MEASURE: RUN_ROLES,
    RunMessage.HOLD: RUN_ROLES,
    RunMessage.FOLLOW: frozenset({COORDINATOR}),
    MessageType.TRANSFER_REQUEST: RUN_ROLES,
    MessageType.TRANSFER_OFFER: RUN_ROLES,
    MessageType.WEIGHTS: RUN_ROLES,
}
"""The roles that the leader of a witnessed run takes each message from."""

_DRAW_BYTES: Final = 32
_HOURS_LOOK: Final = 10.0
# Seconds for which the weights of an epoch are waited for at its end, at least, whatever the run file says.
_LEAST_COOLDOWN: Final = 10.0
_GOODBYE: Final = 5.0
# Seconds between two Epochs, where something changes all the time.
_SMALLEST_PAUSE: Final = 0.02
# Times in which witnesses have nothing of a member, before it is not asked again.
_MAX_DROPPED: Final = 3


class EpochLostError(NeuroGridError):
    """Nobody has the weights of an epoch any more: the run goes on from its last checkpoint."""


class WitnessedLeader:
    """Leads a witnessed run with the members of a host's cluster. Keep `run` running; it returns when it is over.

    Args:
        host: this peer's.
        exchange: of runs, on it.
        transfers: of that.
        facts: what members are told.
        machine: what decides.
        weights: at the beginning of the epoch.
        keeper: what is kept on disk.
        sources: nodes that have the data.
        changes: that somebody wants.
        progress: is told what people may want to see.
        pause: a file: while it is there, the run is paused.
        total_steps: of the schedule that members go by.
        wait: seconds that members are waited for.
        rules: what all know of claims, in a run with audits.
        entries: of the journal so far.

    Attributes:
        kept_round: the round whose weights are a checkpoint, or are becoming one.
    """

    def __init__(
        self,
        host: Host,
        exchange: Exchange,
        transfers: Transfers,
        facts: RunFacts,
        machine: WitnessedMachine,
        weights: CommonWeights,
        keeper: Keeper,
        sources: Sources,
        changes: WantedChanges,
        progress: LeaderProgress,
        pause: Path,
        *,
        total_steps: int,
        wait: float,
        clock: Callable[[], float],
        rules: ClaimRules | None = None,
        entries: Sequence[Entry] = (),
    ) -> None:
        self._host, self._exchange, self._transfers = host, exchange, transfers
        self._facts, self._machine, self._weights = facts, machine, weights
        self._keeper, self._sources, self._changes = keeper, sources, changes
        self._progress, self._pause, self._wait, self._clock = progress, pause, wait, clock
        self._members = ChainMembers(
            host,
            exchange,
            facts,
            progress,
            total_steps=total_steps,
            most=None,  # those beyond [members] max wait until there is a place in an epoch
            on_no_memory=lambda worker: False,
        )
        self._reports: dict[str, EpochReport] = {}
        self._events = RoundEvents(facts.run_id, exchange, machine, self._members, progress)
        self._agreement = WeightAgreement()
        self._is_fetching = self._awaits_audits = False
        self._num_messages = 0
        self._num_dropped: dict[str, int] = {}
        self._audits: RoundAudits | None = None
        if rules is not None:
            run = facts.run_file
            self._audits = RoundAudits(
                rules,
                run.checks,
                machine,
                run.epochs.train,
                self._digest_after,
                self._members.called,
                progress.warn,
            )
            self._events.on_claim = self._audits.take_claim
        self._trials: Trials | None = None
        if self._audits is not None and facts.run_file.members.open:
            self._trials = Trials(
                facts.run_id,
                host.peer_id,
                facts.run_file.members.max,
                entries,
                machine,
                self._audits,
                self._members.called,
                progress.say,
                progress.warn,
                self._refuse,
                self._is_here,
            )
        # Peers that are refused for a while, with the time at which they may try again.
        self._refused: dict[str, float] = {}
        self._goodbyes: list[tuple[str, str]] = []
        # Seats that are left by what is seen here, not by what witnesses say.
        self._left: set[int] = set()
        authorise(exchange, WITNESSED_LEADER_TAKES)
        exchange.on_message(RunMessage.EPOCH_REPORT, self._on_report)
        exchange.on_peer_lost(self._on_lost)
        exchange.on_message(RunMessage.FINDING, self._on_finding)
        exchange.on_message(RunMessage.EVIDENCE, self._on_evidence)
        exchange.on_message(RunMessage.MEASURE, self._on_measure)

    def look(self) -> LeaderLook:
        """State of the run, its workers and its audits at this moment, for display."""
        return LeaderLook(
            peer_id=self._host.peer_id,
            state=self._machine.state,
            rules=self._machine.rules,
            peers=self._members.looks(),
            seconds=self._keeper.seconds,
            num_parameters=self._facts.num_parameters,
            applied=self._weights.round,
            digest=self._weights.digest,
            waits=self._waits(),
            checks=self._audits.look_at() if self._audits is not None else None,
        )

    def _waits(self) -> str:
        """Reason why no rounds are made at the moment; empty where they are."""
        state = self._machine.epoch
        if state.phase is EpochPhase.PAUSED:
            return "the run is paused: neurogrid train change DIR go-on goes on with it"
        is_warmup = state.phase is EpochPhase.WARMUP
        if not is_warmup and state.phase is not EpochPhase.COOLDOWN:
            return ""
        missing = [
            member.peer
            for member in state.members
            if member.health is Health.HEALTHY
            and member.seat not in (state.ready if is_warmup else state.checkpointed)
        ]
        names = ", ".join(map(self._members.called, missing))
        if is_warmup:
            return f"waits until members have the weights: {names}"
        return f"waits for the weights after round {state.made}: {names}"

    # The run

    async def run(self) -> None:
        """Lead the run to its end.

        Raises:
            EpochLostError: nobody has the weights any more: begin again from the last checkpoint.
            NeuroGridError: it cannot go on; says why.
        """
        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                await self._sources.wait(self._wait)
                await self._weights.offer()
                nursery.start_soon(self._members.run)
                nursery.start_soon(self._tell_epochs)
                nursery.start_soon(self._tell_evidence)
                nursery.start_soon(self._watch_hours)
                nursery.start_soon(
                    partial(
                        watch_members,
                        self._machine,
                        self._progress,
                        self._members.refusals,
                        wait=self._wait,
                        num_here=self._num_here,
                    )
                )
                while not self._is_over:
                    await self._step(nursery)
                self._sources.end()
                await self._say_goodbye()
                nursery.cancel_scope.cancel()

    def _num_here(self) -> int:
        """Members of the epoch; between two of them, peers that wait for the next one and count."""
        epoch = self._machine.epoch
        waiting = [peer for peer, _ in epoch.pending if peer not in epoch.trials]
        return len(self._machine.state.occupied()) or len(waiting)

    @property
    def _is_over(self) -> bool:
        epoch = self._machine.epoch
        return epoch.phase is EpochPhase.FINISHED and self._weights.round == epoch.made

    async def _step(self, nursery: trio.Nursery) -> None:
        """Take in what has happened, and wait for more."""
        changed = self._members.changed.next
        if self._changes.take():
            self._keeper.write(self._machine.drain())
        self._look_after_members()
        self._look_at_pause()
        if self._audits is not None:
            self._audits.suspicion.look(self._counted())
            for event in self._audits.look(self._clock()):
                self._events.add(event)
        if self._trials is not None:
            self._look_at_trials(self._trials, nursery)
        if not self._is_fetching:
            self._check_weights()
            while self._tick(nursery, self._clock()):
                pass
        elif self._awaits_audits:
            # The cooldown lasts; but who is gone, or ejected, is so.
            while self._tick(nursery, self._machine.epoch.began):
                pass
        now, until = self._clock(), due(self._machine.epoch_rules, self._machine.epoch)
        pause = HEARTBEAT
        if until is not None and not self._is_fetching:
            pause = min(max(until - now, 0.02), HEARTBEAT)
        with trio.move_on_after(pause):
            await changed.wait()

    def _tick(self, nursery: trio.Nursery, now: float) -> bool:
        """Have the machine go on, at this time; whether something has changed."""
        before, events = self._machine.epoch, self._events.take()
        self._hear_losses()
        rounds, seats = self._machine.state.round, dict(self._machine.state.seats)
        draw = secrets.token_bytes(_DRAW_BYTES)
        if not self._machine.tick(now, events, draw, self._name_of):
            return False
        if self._audits is not None:
            self._audits.ticked(before)
        if self._machine.state.round > rounds:
            self._keeper.figures.decided(self._machine.state)
        self._keeper.write(self._machine.drain())
        after = self._machine.epoch
        for number in seats.keys() - self._machine.state.seats.keys():
            self._note_lost(seats[number], in_round=before.has_round)
        if after.going is EpochPhase.COOLDOWN and before.going is not EpochPhase.COOLDOWN:
            self._say_end()
            self._is_fetching = True
            nursery.start_soon(self._keep_epoch)
        elif after.made > before.made:
            self._keeper.noted(after.made, self._agreement.take(), self._checks())
        if after.going is EpochPhase.WARMUP and before.going is not EpochPhase.WARMUP:
            self._progress.say(
                f"epoch {after.epoch + 1} begins with {len(after.healthy)} members, after round {after.made}"
            )
        self._members.changed.set()
        return True

    def _checks(self) -> dict[str, float]:
        return self._audits.take_counts() if self._audits is not None else {}

    def _name_of(self, peer: str) -> str:
        return self._members.get(peer).name

    def _say_end(self) -> None:
        epoch = self._machine.epoch
        why = {
            "members": "there are too few members",
            "quorum": "too few witnesses have said what they have",
            "nothing_agreed": "witnesses have agreed on nothing",
        }.get(str(epoch.ended), "")
        if why:
            self._progress.warn(f"the epoch ends after round {epoch.made}: {why}")

    def _note_lost(self, held: Seat, *, in_round: bool) -> None:
        """Somebody has no seat any more: say so, and ask it no more where witnesses never have anything of it."""
        seat, peer = held.number, held.peer
        called = held.name or f"member {seat}"
        self._progress.warn(f"{called} is out of the epoch: the others go on")
        epoch = self._machine.epoch
        member = next((each for each in epoch.members if each.seat == seat), None)
        if member is not None and member.health is Health.EJECTED:
            reasons = self._audits.reasons if self._audits is not None else {}
            self._members.give_up(peer, reasons.get(peer, "it has said two things of one round"))
        elif in_round and seat not in self._left and self._is_here(peer):
            self._num_dropped[peer] = self._num_dropped.get(peer, 0) + 1
            if self._num_dropped[peer] >= _MAX_DROPPED:
                why = f"witnesses had nothing of it in {_MAX_DROPPED} epochs"
                self._members.give_up(peer, why)
                self._progress.warn(f"{self._members.called(peer)} takes part no more: {why}")

    def _check_weights(self) -> None:
        """Raises EpochLostError where the weights of the last epoch are nobody's any more."""
        epoch = self._machine.epoch
        is_between = epoch.going in (EpochPhase.WAITING_FOR_MEMBERS, EpochPhase.FINISHED)
        if is_between and self._weights.round != epoch.made:
            raise EpochLostError(
                f"nobody has the weights after round {epoch.made}: the run goes on from round {self._weights.round}"
            )

    # Members

    def _is_here(self, peer: str) -> bool:
        """Whether a member is there. One whose lease has ended takes part all the same."""
        return self._host.is_connected(peer) and not self._members.is_silent(
            self._members.get(peer)
        )

    def _look_after_members(self) -> None:
        """Make events of who has come, and who is gone."""
        epoch = self._machine.epoch
        pending = dict(epoch.pending)
        for member in epoch.members:
            if member.health is not Health.HEALTHY:
                continue
            report = self._reports.get(member.peer)
            is_other = report is not None and report.incarnation != member.incarnation
            if is_other or not self._is_here(member.peer):
                self._leave(member.seat)
            elif report is not None:
                self._hear_report(member.seat, report)
        for peer, incarnation in epoch.pending:
            report = self._reports.get(peer)
            is_other = report is None or report.incarnation != incarnation
            if is_other or not self._is_here(peer):
                self._events.add(Gone(peer, incarnation))
        healthy = {m.peer: m.incarnation for m in epoch.members if m.health is Health.HEALTHY}
        for peer, report in self._reports.items():
            is_known = report.incarnation in (healthy.get(peer), pending.get(peer))
            if is_known or report.state != "waiting" or peer in epoch.barred:
                continue
            # One that is no member any more says that it waits before it can be one again.
            if self._is_here(peer) and self._members.get(peer).is_started:
                if self._trials is None:
                    self._events.add(Joined(peer, report.incarnation))
                elif peer not in self._refused:
                    for event in self._trials.takes(peer, report.incarnation, report.invitation):
                        self._events.add(event)
        others = [m.peer for m in epoch.members if m.health is Health.HEALTHY]
        for step, peer in self._agreement.apart(self._counted(), others):
            self._progress.warn(
                f"{self._members.called(peer)} has other weights than most members after round {step}: are its "
                "versions and its machine the same?"
            )
            for member in epoch.members:
                if member.peer == peer and member.health is Health.HEALTHY:
                    self._leave(member.seat)

    def _look_at_trials(self, trials: Trials, nursery: trio.Nursery) -> None:
        """Take what has come of trials, and have those that are refused end."""
        for event in trials.look():
            self._events.add(event)
        self._keeper.write(self._machine.drain())  # bans, and uses of invitations
        goodbyes, self._goodbyes = self._goodbyes, []
        for peer, reason in goodbyes:
            # One that takes nothing is not waited for: rounds go on.
            nursery.start_soon(self._members.dismiss, peer, reason)
        now = time.time()
        for peer, until in list(self._refused.items()):
            if now >= until:
                del self._refused[peer]
                self._members.take_again(peer)

    def _refuse(self, peer: str, reason: str, seconds: float | None) -> None:
        """Have a peer take no part for so many seconds, or for good; it is told why."""
        self._refused[peer] = math.inf if seconds is None else time.time() + seconds
        self._members.give_up(peer, reason)
        self._goodbyes.append((peer, reason))

    def _leave(self, seat: int) -> None:
        self._left.add(seat)
        self._events.add(Left(seat, Health.DROPPED))

    def _hear_report(self, seat: int, report: EpochReport) -> None:
        """A member of the epoch tells how it stands."""
        epoch = self._machine.epoch
        has_these = (report.step, report.digest) == (self._weights.round, self._weights.digest)
        if not has_these:
            return
        if epoch.going is EpochPhase.WARMUP and report.state == "warm":
            if report.has_weights and seat not in epoch.ready:
                self._events.add(Warm(seat, epoch.epoch))
            return
        is_kept = report.state == "kept" and report.step == epoch.made
        if epoch.going is EpochPhase.COOLDOWN and is_kept and seat not in epoch.checkpointed:
            self._events.add(Checkpointed(seat, epoch.epoch))

    def _hear_losses(self) -> None:
        figures = self._keeper.figures
        occupants = set()
        for seat in self._machine.state.occupied():
            assert seat.occupant is not None
            report = self._members.get(seat.occupant.peer).report
            occupants.add(seat.occupant)
            if report is not None and report.incarnation == seat.occupant.incarnation:
                figures.heard(
                    Occupant(seat.occupant.peer, report.incarnation),
                    report.loss_sum,
                    report.num_tokens,
                )
        figures.keep(occupants)

    # What members say

    def _on_lost(self, peer: str, reason: NeuroGridError) -> None:
        # It may come back as another process: what this one said is of no use then.
        self._reports.pop(peer, None)

    def _on_report(self, message: TensorMessage) -> None:
        report, peer = EpochReport.decode(message.data), sender_of(message)
        if report.run != self._facts.run_id:
            return
        before = self._reports.get(peer)
        if before is not None and report.incarnation < before.incarnation:
            return
        self._reports[peer] = report
        if tells_of_weights(report, peer, self._machine.epoch):
            self._agreement.told(peer, report.step, report.digest)
            if self._audits is not None:
                cosines = dict(zip(report.seats, report.cosines, strict=True))
                self._audits.suspicion.told(peer, report.step, cosines)
        self._members.heard(message)
        self._members.changed.set()

    def _on_finding(self, message: TensorMessage) -> None:
        said, peer = RoundFinding.decode(message.data), sender_of(message)
        self._members.heard(message)
        if self._audits is not None and said.run == self._facts.run_id:
            try:
                self._audits.take_finding(said, peer, self._clock())
            finally:
                self._members.changed.set()

    def _on_evidence(self, message: TensorMessage) -> None:
        said, peer = RoundEvidence.decode(message.data), sender_of(message)
        self._members.heard(message)
        if self._audits is not None and said.run == self._facts.run_id:
            self._audits.take_conflict(said, peer)
            self._members.changed.set()

    def _on_measure(self, message: TensorMessage) -> None:
        said, peer = RoundMeasure.decode(message.data), sender_of(message)
        self._members.heard(message)
        if self._audits is not None and said.run == self._facts.run_id:
            self._audits.take_measure(said, peer)

    def _digest_after(self, step: int) -> bytes:
        return self._agreement.digest(step, self._counted())

    def _counted(self) -> list[str]:
        """Healthy members that are not on trial."""
        epoch = self._machine.epoch
        return [each.peer for each in epoch.members if each.seat in epoch.counted]

    # Weights

    async def _keep_epoch(self) -> None:
        """Take the weights of an epoch over, and make a checkpoint of them."""
        try:
            await self._finish_audits()
            epoch = self._machine.epoch
            if self._weights.round == epoch.made:
                return
            attempts = itertools.count()
            with trio.move_on_after(self._cooldown):
                while not await self._fetch_weights(epoch.made, next(attempts)):
                    changed = self._members.changed.next
                    with trio.move_on_after(HEARTBEAT):
                        await changed.wait()
            if self._weights.round == epoch.made:
                await self._keeper.wait_room()
                told, checks = self._agreement.take(), self._checks()
                self._keeper.applied(self._weights, self._machine.state, (), told, checks)
        finally:
            self._is_fetching = False
            self._members.changed.set()

    async def _finish_audits(self) -> None:
        """Have the claims of the epoch's last round looked at, before its weights are kept."""
        audits, self._awaits_audits = self._audits, True
        try:
            since, train = trio.current_time(), self._facts.run_file.epochs.train
            while audits is not None:
                changed = self._members.changed.next
                missing, num_open = audits.unfinished(self._is_here)
                is_late = trio.current_time() - since > train
                if not num_open and (is_late or not missing):
                    break
                with trio.move_on_after(HEARTBEAT):
                    await changed.wait()
            if audits is not None:
                self._progress.say(audits.line())
            if audits is not None and missing:
                self._progress.warn(
                    f"of the epoch's last round {len(missing)} results were not computed again within {train:g} s"
                )
        finally:
            self._awaits_audits = False

    @property
    def _cooldown(self) -> float:
        return max(self._machine.epoch_rules.cooldown, _LEAST_COOLDOWN)

    async def _fetch_weights(self, step: int, attempt: int) -> bool:
        """Fetch the weights that most members have after a round; whether they are here."""
        members = self._counted()
        here = [peer for peer in members if self._is_here(peer)]
        digest = self._agreement.digest(step, members) or self._agreement.digest(step, here)
        if not digest:
            return False
        reports = {peer: self._reports[peer] for peer in here if peer in self._reports}
        names = cut_pieces(self._weights.common.numel())
        blobs, providers = providers_of(reports, step, digest, names, attempt)
        if not providers:
            return False
        try:
            await self._weights.fetch(
                self._transfers,
                names,
                blobs,
                providers,
                round_number=step,
                digest=digest,
                timeout=self._cooldown,
            )
        except NeuroGridError as exc:
            self._progress.warn(f"the weights after round {step} did not come: {exc}; asking again")
            await trio.sleep(HEARTBEAT)
            return False
        return True

    # What members are told

    async def _tell_epochs(self) -> None:
        last, told_at = None, -math.inf
        newest: dict[str, bytes] = {}
        async with trio.open_nursery() as nursery:
            while True:
                changed = self._members.changed.next
                told = self._message()
                # Also to those that have come since: that is all that a heartbeat is for.
                what = replace(told, number=1, left=0.0), frozenset(self._reports)
                if what != last or trio.current_time() - told_at >= HEARTBEAT:
                    last, told_at = what, trio.current_time()
                    data = told.encode()
                    for peer in filter(self._is_here, self._reports):
                        if peer not in newest:
                            nursery.start_soon(self._tell_epoch, peer, newest)
                        newest[peer] = data
                await trio.sleep(_SMALLEST_PAUSE)
                with trio.move_on_after(HEARTBEAT):
                    await changed.wait()

    async def _tell_epoch(self, peer: str, newest: dict[str, bytes]) -> None:
        """Tell a peer the newest Epoch, and once more where there is a newer one by then: one that takes nothing is
        waited for by nobody else."""
        data = None
        while data is not newest[peer]:
            data = newest[peer]
            await self._members.tell(peer, RunMessage.EPOCH, data)
        del newest[peer]

    async def _tell_evidence(self) -> None:
        """Have claims judged, by those that have yet to."""
        busy: set[str] = set()
        async with trio.open_nursery() as nursery:
            while self._audits is not None:
                changed = self._members.changed.next
                due: dict[str, list[bytes]] = {}
                for peer, said in self._audits.to_judge():
                    if peer not in busy and self._is_here(peer):
                        due.setdefault(peer, []).append(said.encode())
                for peer, told in due.items():
                    busy.add(peer)
                    nursery.start_soon(self._tell_all_evidence, peer, told, busy)
                await trio.sleep(HEARTBEAT / 2)
                with trio.move_on_after(HEARTBEAT):
                    await changed.wait()

    async def _tell_all_evidence(self, peer: str, told: list[bytes], busy: set[str]) -> None:
        for data in told:
            await self._members.tell(peer, RunMessage.EVIDENCE, data)
        busy.remove(peer)

    def _message(self) -> Epoch:
        # It rises also after a restart.
        self._num_messages = max(self._num_messages + 1, time.time_ns() // 1000)
        until = due(self._machine.epoch_rules, self._machine.epoch)
        return epoch_message(
            self._facts.run_id,
            self._num_messages,
            self._machine,
            self._weights,
            self._addresses_of,
            self._offers,
            self._sources.addresses,
            0.0 if until is None else until - self._clock(),
            self._audits.watched if self._audits is not None else (),
        )

    def _addresses_of(self, peer: str) -> Sequence[str]:
        report = self._members.get(peer).report
        return report.group_addresses if report is not None else ()

    def _offers(self, peer: str) -> bool:
        report, weights = self._reports.get(peer), self._weights
        return (
            report is not None
            and (report.step, report.digest) == (weights.round, weights.digest)
            and report.names == weights.names
        )

    async def _say_goodbye(self) -> None:
        with trio.move_on_after(_GOODBYE):
            data = self._message().encode()
            # While one is told, others may go.
            for peer in list(self._reports):
                if self._is_here(peer):
                    await self._members.tell(peer, RunMessage.EPOCH, data)
        await self._members.dismiss_all(self._machine.state.reason or "the run is over")

    # What people want

    def _look_at_pause(self) -> None:
        is_wanted, epoch = self._pause.exists(), self._machine.epoch
        is_paused = epoch.phase is EpochPhase.PAUSED
        if is_wanted and not is_paused and not epoch.reason and not self._is_fetching:
            self._progress.say("the run is paused")
            self._events.add(Pause())
        elif is_paused and not is_wanted:
            self._progress.say("the run goes on")
            self._events.add(Resume())

    async def _watch_hours(self) -> None:
        while True:
            state = self._machine.state
            hours = run_at(self._facts.run_file, state.changes, state.round + 1).stop.hours
            left = math.inf if hours is None else 3600 * hours - self._keeper.seconds
            if left <= 0 and state.phase in (Phase.WAITING, Phase.TRAINING):
                self._events.add(Stop(f"{hours:g} hours are over"))
                self._members.changed.set()
                return
            await trio.sleep(min(max(left, 1.0), _HOURS_LOOK))
