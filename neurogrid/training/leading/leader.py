"""The leader of a run: finds members, deals work, follows the group that averages, and keeps what comes of it.

What is decided is the matter of `runs.machine`; here it is told what happens, and what it says is written down, told to
members and done. More than 600 lines, since what members report, what the group decides and what the leader orders are
one conversation about the same state.

Source: protocol_spec/training/runs.md.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import trio

from neurogrid.errors import NeuroGridError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.node.roles import Table, authorise
from neurogrid.p2p.exchange.counters import Direction, TrafficCounters
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.hosts.host import Host, own_addresses
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.trust import COORDINATOR, RUN_ROLES
from neurogrid.p2p.trust.certificate import format_span
from neurogrid.p2p.wire import Hello, MessageType, TensorMessage
from neurogrid.renewed_event import RenewedEvent
from neurogrid.training.averaging.groups import (
    Group,
    GroupError,
    NotAMemberError,
    Outcome,
    RoundTimeout,
    State,
    fetch_state_left_over,
    open_group,
)
from neurogrid.training.leading.changes import WantedChanges
from neurogrid.training.leading.deputies import Copying
from neurogrid.training.leading.digests import WeightDigests
from neurogrid.training.leading.facts import RunFacts
from neurogrid.training.leading.group_watch import GroupWatch
from neurogrid.training.leading.hiring import HEARTBEAT, Hiring, LackingError, bid_of
from neurogrid.training.leading.keeper import Keeper
from neurogrid.training.leading.look import LeaderLook, PeerLook
from neurogrid.training.leading.settings import LeaderProgress
from neurogrid.training.leading.sources import Holder, Sources
from neurogrid.training.leading.waiting import watch_members
from neurogrid.training.runs.changes import run_at
from neurogrid.training.runs.machine import Outcome as Decision
from neurogrid.training.runs.machine import RunMachine
from neurogrid.training.runs.outer_state import RunWeights
from neurogrid.training.runs.projection import seconds_left
from neurogrid.training.runs.resources import (
    Need,
    choose_offers,
)
from neurogrid.training.runs.round_trace import Timeline, round_trace
from neurogrid.training.runs.state import Occupant, Phase, Seat
from neurogrid.training.wire import GroupSettings, Member
from neurogrid.training.wire.runs import (
    Offer,
    Order,
    Report,
    RunMessage,
    Start,
    Work,
)

__all__ = ["LEADER_TAKES", "GroupLostError", "Leader"]

logger = logging.getLogger(__name__)

_DEPUTIES: Final = frozenset({COORDINATOR})

LEADER_TAKES: Final[Table] = {
    RunMessage.REPORT: RUN_ROLES,
    RunMessage.HOLD: RUN_ROLES,
    RunMessage.FOLLOW: _DEPUTIES,
    RunMessage.LINES: _DEPUTIES,
    MessageType.TRANSFER_REQUEST: RUN_ROLES | _DEPUTIES,
    MessageType.TRANSFER_OFFER: RUN_ROLES,
    MessageType.WEIGHTS: RUN_ROLES,
}
"""The roles that a leader takes each message from."""

# Seconds for which offers are waited for that are compared, where there are more workers than room: each is kept for
# half a second.
_GATHERING: Final = 0.4
_JOIN_TIMEOUT: Final = 15.0
_RETRY: Final = 3.0
_MOMENT: Final = 2.0
_SEARCH: Final = 20.0  # for members that go on without the leader
_GOODBYE: Final = 5.0
# Members that the group cannot do without are waited for: so many times the grace, and so many seconds at least.
_GRACES_UNTIL_LOST: Final = 3
_UNTIL_LOST: Final = 30.0
# Seconds that the members of a group that was lost have to take their seats again.
_RETURN: Final = 30.0
# Seconds for the weights of members that are left of a group that was lost.
_LEFT_OVER_TIMEOUT: Final = 600.0
# Seconds between looks at how long the run may take.
_HOURS_LOOK: Final = 10.0
_OTHER_GROUP: Final = "the run goes on with another group"
# Times that a member may fail before it is not asked again.
_MAX_FAILURES: Final = 3


class GroupLostError(NeuroGridError):
    """The group of a run is lost, and the run goes on with another one: from what its leader has."""


@dataclass
class _Peer:
    """A worker, as the leader has it.

    Attributes:
        seat: that is reserved for it, or that it has.
        is_started: whether it was told to begin.
        has_parted: it was told to leave the group of before.
        num_failures: so often it could not.
        refusal: why it takes no part, for people; empty where nothing is known.
        dismissed: its incarnation that was told last that it is banned.
        due: when it has its next vector at the earliest, in trio's time; None where nothing is known.
    """

    seat: int | None = None
    name: str = ""
    is_started: bool = False
    has_parted: bool = False
    report: Report | None = None
    num_orders: int = 0
    num_failures: int = 0
    refusal: str = ""
    dismissed: int = 0
    due: float | None = None
    versions: dict[str, str] = field(default_factory=dict)


class Leader:
    """Leads a run with the members of a host's cluster. Keep `run` running; it returns when the run is over.

    Args:
        host: this peer's.
        exchange: of runs, on it.
        facts: what members are told.
        machine: what decides.
        state: the common weights.
        keeper: what is kept on disk: journal, metrics, checkpoints.
        sources: nodes that have the data.
        changes: that somebody wants.
        copying: keeps a deputy.
        progress: is told what people may want to see.
        total_steps: of the schedule that members go by.
        wait: seconds that vacant seats are waited for; fewer with a group that follows one that was lost.
        resume_at: the round of the newest checkpoint; 0 where there is none; None where nothing of it was read, and the
            run goes on with members that do, or not at all.
        saved: optimisers that members fetch here, by seat.
        is_anew: whether members that are in a group of before are to leave it.
    """

    def __init__(
        self,
        host: Host,
        exchange: Exchange,
        facts: RunFacts,
        machine: RunMachine,
        state: RunWeights,
        keeper: Keeper,
        sources: Sources,
        changes: WantedChanges,
        copying: Copying,
        progress: LeaderProgress,
        *,
        total_steps: int,
        wait: float,
        resume_at: int | None = 0,
        saved: Mapping[int, bytes] | None = None,
        is_anew: bool = False,
    ) -> None:
        self._host, self._exchange, self._facts = host, exchange, facts
        self._machine, self._state, self._keeper = machine, state, keeper
        self._sources, self._changes, self._total_steps = sources, changes, total_steps
        sources.holders, sources.addresses_of = self._holders, self._addresses_of
        self._copying, self._progress, self._wait = copying, progress, wait
        copying.tell_all(self._started_peers)
        self._resume_at, self._saved = resume_at, dict(saved or {})
        # Whether there may be a group of before, which members are to leave.
        self._is_anew = is_anew
        # Peers that were started: they have nothing of a group of before.
        self._begun: set[str] = set()
        # Seconds that vacant seats are kept: with the group their optimisers are lost, if they are in no checkpoint.
        self._return = wait
        if is_anew:
            self._return = min(wait, _RETURN) if self._saved else 0.0
        self._peers: dict[str, _Peer] = {}
        # Peers that are being asked, or started.
        self._asked: set[str] = set()
        self._hiring = Hiring(exchange, facts.run_id)
        self._group: Group | None = None
        # After the last decision that was looked at.
        self._members: frozenset[Occupant] = frozenset()
        # Members that cannot come back: their processes have ended, or begun anew.
        self._ended: set[Occupant] = set()
        self._changed = RenewedEvent()
        self._applied = RenewedEvent()
        self._nursery: trio.Nursery | None = None
        # Of the weights after this round: those of the next one may be in place, and their digest not known yet.
        self._digest, self._digest_round = b"", 0
        self._timeline = Timeline({"neurogrid.run": facts.run_file.name})
        self._digests = WeightDigests()
        # The last round that the keeper was told of, and whether it was told that it is the run's last.
        self._kept: tuple[int, bool] | None = None
        authorise(exchange, LEADER_TAKES)
        exchange.on_message(RunMessage.REPORT, self._on_report)
        exchange.on_peer_opened(self._on_opened)
        exchange.on_peer_lost(self._on_lost)
        # Of a deputy some are here already, and those that obeyed another leader say nothing to this one.
        for peer_id, hello in exchange.opened_peers().items():
            self._on_opened(peer_id, hello)

    @property
    def peers(self) -> dict[str, _Peer]:
        """Workers that are or were here, by peer id."""
        return self._peers

    @property
    def machine(self) -> RunMachine:
        """State machine of the run, which decides what its members do."""
        return self._machine

    @property
    def state(self) -> RunWeights:
        """The common weights."""
        return self._state

    def hear(self, reports: Iterable[TensorMessage]) -> None:
        """Take what members have reported before this leader was there."""
        for message in reports:
            self._on_report(message)

    def look(self) -> LeaderLook:
        """State of the run and its peers at this moment, for display."""
        now = trio.current_time()
        group = self._group
        counters = group.counters if group is not None else TrafficCounters()
        return LeaderLook(
            peer_id=self._host.peer_id,
            state=self._machine.state,
            rules=self._machine.rules,
            peers=[
                PeerLook(
                    peer_id=peer_id,
                    name=peer.name,
                    seat=peer.seat,
                    is_connected=self._host.is_connected(peer_id),
                    report=peer.report,
                    versions=peer.versions,
                    lease_seconds=self._hiring.book.left(peer_id, now),
                )
                for peer_id, peer in self._peers.items()
            ],
            seconds=self._keeper.seconds,
            num_parameters=self._facts.num_parameters,
            applied=self._digest_round,
            digest=self._digest,
            sent_bytes=counters.total(Direction.SENT).num_bytes,
            differing={member.peer: since for member, since in self._digests.differing.items()},
        )

    # The run

    async def run(self) -> None:
        """Lead the run to its end.

        Raises:
            GroupLostError: so many are lost that the rest cannot go on by itself: `keep_state`, and begin again.
            NeuroGridError: it cannot go on; says why.
        """
        try:
            with unwrap_errors():
                async with trio.open_nursery() as self._nursery:
                    await self._run(self._nursery)
                    self._nursery.cancel_scope.cancel()
        finally:
            self._nursery = None  # what is reported from now on is nobody's to answer

    async def _run(self, nursery: trio.Nursery) -> None:
        state = self._machine.state
        nursery.start_soon(self._copying.run)
        await self._copying.settle()
        join: Sequence[str] = ()
        if state.occupied() and not self._is_anew:
            join = await self._find_group(state.occupied())
        self._is_anew = not join
        if state.num_seats and not join:
            if self._resume_at is None:
                raise GroupLostError("no member is found that goes on")
            self._machine.resume(self._resume_at)
            self._keeper.figures.resumed(self._resume_at)
            self._write()
        while not self._is_over:
            try:
                async with self._open_group(join) as group:
                    self._group = group
                    await self._lead(group)
            except NotAMemberError as exc:
                logger.warning("the leader joins its group anew: %s", exc)
                join, self._group = self._group_addresses(), None
            except GroupError as exc:
                await self._take_state_left_over()
                raise GroupLostError(
                    f"the members that are left cannot go on by themselves: {exc}"
                ) from exc
        await self._say_goodbye()

    async def keep_state(self) -> None:
        """Make the common weights as they are here the last checkpoint, where they are newer: the run goes on from it.

        What members that are lost may have decided without the leader is in no journal.
        """
        if self._state.round > (self._resume_at or 0):
            await self._keeper.keep_state(self._state, self._machine.state)

    def _open_group(self, join: Sequence[str]) -> AbstractAsyncContextManager[Group]:
        outer = self._facts.run_file.outer
        settings = GroupSettings(
            # The leader is one, and contributes nothing.
            min_members=1 + self._facts.run_file.members.min,
            quorum=outer.quorum,
            grace=outer.grace,
            attempt_timeout=outer.attempt_timeout,
            codec=outer.codec,
            result_codec=outer.result_codec,
            aggregator=outer.aggregator,
            way=outer.way,
            purpose=f"run {self._facts.run_id.hex()}",
        )
        return open_group(
            self._host,
            self._state.group_layout,
            join=join,
            settings=None if join else settings,
            observes=True,
            after_round=self._state.round,
            timeout=_JOIN_TIMEOUT + 3 * outer.grace,
        )

    async def _find_group(self, occupied: Sequence[Seat]) -> Sequence[str]:
        """Addresses of members that go on without the leader; empty where there are none."""
        self._progress.say("looking for the members that were there")
        peers = [seat.occupant.peer for seat in occupied if seat.occupant is not None]
        with trio.move_on_after(min(self._wait, _SEARCH)):
            while not self._group_addresses():
                if all(map(self._host.is_connected, peers)):
                    with trio.move_on_after(_MOMENT):  # one that takes part says so at once
                        while not self._group_addresses():
                            await trio.sleep(_MOMENT / 20)
                    break
                await trio.sleep(_MOMENT / 10)
        return self._group_addresses()

    async def _take_state_left_over(self) -> None:
        """Have the common weights of members that cannot go on by themselves, where these are those of the last round
        of the journal, and all of them agree on what they are."""
        round_number = self._machine.state.round
        told = {
            peer_id: peer.report.digest
            for peer_id, peer in self._peers.items()
            if peer.report is not None
            and peer.report.incarnation
            and peer.report.round == round_number
            and self._host.is_connected(peer_id)
        }
        if self._state.round == round_number or len(digests := {*told.values()}) != 1:
            return
        state = await fetch_state_left_over(
            self._host,
            list(told),
            self._state.sizes,
            round_number=round_number,
            timeout=_LEFT_OVER_TIMEOUT,
        )
        if state is None:
            return
        before = State(self._state.round, tuple(v.clone() for v in self._state.state().vectors))
        await trio.to_thread.run_sync(self._state.load, state)
        if await trio.to_thread.run_sync(self._state.digest) in digests:
            names = ", ".join(_called(self._peers[peer_id], peer_id) for peer_id in told)
            self._progress.say(f"the weights after round {round_number} are those that {names} had")
        else:  # it reported another one
            await trio.to_thread.run_sync(self._state.load, before)

    def _group_addresses(self) -> tuple[str, ...]:
        return tuple(
            address
            for peer in self._peers.values()
            if peer.report is not None and peer.report.incarnation
            for address in peer.report.group_addresses
        )

    async def _lead(self, group: Group) -> None:
        fetched = await group.fetch_state(self._state.sizes, timeout=600)
        if fetched is not None:
            await trio.to_thread.run_sync(self._state.load, fetched)
        group.show_state(self._state.state())
        await self._digest_weights()
        self._expect(group)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow_decisions, group)
            nursery.start_soon(self._follow_outcomes, group)
            nursery.start_soon(self._watch_group, group)
            nursery.start_soon(self._sources.wait, self._wait)
            nursery.start_soon(self._enlist_all)
            nursery.start_soon(self._hiring.renew, self._lease_lost)
            nursery.start_soon(self._tell_orders)
            nursery.start_soon(self._give_up_vacant)
            nursery.start_soon(self._watch_hours)
            nursery.start_soon(self._watch_changes)
            nursery.start_soon(
                partial(
                    watch_members,
                    self._machine,
                    self._progress,
                    self._refusals,
                    wait=self._wait,
                )
            )
            while not self._is_over:
                await self._applied.wait()
            nursery.cancel_scope.cancel()
        await self._note_applied()  # it may have ended without the leader

    @property
    def _is_over(self) -> bool:
        """Whether the run has ended, and all that was decided is in the weights."""
        state = self._machine.state
        return state.phase is Phase.ENDED and self._state.round >= state.round

    def _write(self) -> None:
        """Write down what the machine says, before anybody acts on it."""
        entries = self._machine.drain()
        if entries:
            self._keeper.write(entries)
            if self._group is not None:
                self._expect(self._group)
            self._changed.set()
            self._applied.set()

    def _expect(self, group: Group) -> None:
        """Have rounds wait for those that were given work: they may have it before the group hears of it."""
        group.expect(self._those_with_works())

    def _those_with_works(self) -> tuple[str, ...]:
        return tuple(
            seat.occupant.peer
            for seat in self._machine.state.occupied()
            if seat.occupant is not None and self._machine.works(seat.number)
        )

    def _started_peers(self) -> list[str]:
        return [peer_id for peer_id, peer in self._peers.items() if peer.is_started]

    # The group

    async def _follow_decisions(self, group: Group) -> None:
        while True:
            decision = await group.decision_after(self._machine.state.index)
            if self._machine.state.phase is Phase.ENDED:
                return  # of a round that members have made after the last one of the run
            after = self._machine.state.round
            if decision.round > after + decision.is_round:
                raise GroupLostError(
                    f"what round {after + 1} used is not known: the group tells of it no more"
                )
            await self._keeper.wait_room()
            await self._copying.wait_heard()
            self._decided(
                Decision(
                    decision.index,
                    decision.round if decision.is_round else 0,
                    decision.digest,
                    dict(zip(decision.contributors, decision.weights, strict=True)),
                    frozenset(Occupant(m.peer, m.incarnation) for m in decision.members),
                )
            )

    def _decided(self, decision: Decision) -> None:
        self._members = decision.members
        self._ended &= decision.members
        self._digests.keep(decision.members)
        self._keeper.figures.keep(decision.members)
        seats = self._machine.state.occupied()
        lost = [seat for seat in seats if seat.occupant not in decision.members]
        wrong = self._machine.decided(decision)
        for peer_id in wrong:
            logger.error("%s has contributed with a weight that is not its own", peer_id)
            self._ban(peer_id, "its contribution was not of the work that it was given")
        for seat in lost:
            self._progress.warn(f"{seat.name or f'member {seat.number}'} is lost: the others go on")
        if decision.round:
            # At the end of the run those have left already whose work comes too late.
            num_members = len(seats) - len(lost)
            self._keeper.figures.decided(self._machine.state, num_members=num_members)
        self._write()
        state = self._machine.state
        if decision.round > state.round and state.phase is not Phase.ENDED:
            raise GroupLostError(
                f"round {decision.round} is of no work that was dealt, and members have it in their weights"
            )

    async def _watch_group(self, group: Group) -> None:
        """Give the group up when so many of it are lost at once that it decides nothing any more."""
        watch = GroupWatch(max(_UNTIL_LOST, _GRACES_UNTIL_LOST * group.settings.grace))
        while True:
            members = group.history[-1].members
            ended = [m for m in members if Occupant(m.peer, m.incarnation) in self._ended]
            lost = [m for m in members if not self._is_connected(m)]
            now = trio.current_time()
            if why := watch.look(members, leader=group.leader, lost=lost, ended=ended, now=now):
                raise GroupLostError(f"the members that are left cannot go on by themselves: {why}")
            await trio.sleep(HEARTBEAT)

    def _is_connected(self, member: Member) -> bool:
        return member.peer == self._host.peer_id or self._host.is_connected(member.peer)

    async def _follow_outcomes(self, group: Group) -> None:
        await self._note_applied()  # what was fetched: rounds that were decided without the leader
        while True:
            try:
                outcome = await group.next_outcome(timeout=3600)
            except RoundTimeout:
                continue
            state = self._machine.state
            if state.phase is Phase.ENDED and outcome.round > state.round:
                return  # a round that members have made after the last one of the run
            with trio.CancelScope(shield=True):
                await self._apply(group, outcome)
            # Not shielded: where another one leads, the decision is noted here no more.
            await self._note_round(outcome)

    async def _apply(self, group: Group, outcome: Outcome) -> None:
        with self._timeline.during("training.apply"):
            group.take_state_back()
            await trio.to_thread.run_sync(partial(self._state.apply, outcome))
            group.show_state(self._state.state())
            await self._digest_weights()

    async def _note_round(self, outcome: Outcome) -> None:
        await self._note_applied()
        told = {
            "neurogrid.round": outcome.round,
            "neurogrid.members": len(self._machine.state.occupied()),
        }
        ids = round_trace(self._facts.run_id, outcome.round)
        self._timeline.end(ids, "training.round", told, is_root=True)

    async def _note_applied(self) -> None:
        """Have kept what is in the common weights."""
        await self._wait_decided()
        if (last := self._machine.state.round) < self._state.round:
            raise GroupLostError(
                f"round {last} was the run's last, and the members have the weights of a later one only"
            )
        # What was the last round may be known later than what it is: members with works have left since.
        kept = self._state.round, self._is_over
        if self._kept == kept:
            return
        self._kept = kept
        seats = [seat.number for seat in self._machine.state.occupied()]
        self._keeper.applied(
            self._state,
            self._machine.state,
            seats,
            self._digests.take(),
            step_norm=self._state.step_norm,
        )
        self._applied.set()

    async def _wait_decided(self) -> None:
        """Wait until what is in the common weights is decided here, too, or the run has ended before it."""
        state = self._machine.state
        # The decision is older than its outcome.
        while state.round < self._state.round and state.phase is not Phase.ENDED:
            await self._changed.wait()

    async def _digest_weights(self) -> None:
        digest = await trio.to_thread.run_sync(self._state.digest)
        self._digest, self._digest_round = digest, self._state.round
        for member in self._digests.own(self._state.round, self._digest):
            self._warn_of_digest(member.peer, self._state.round)

    def _warn_of_digest(self, peer_id: str, round_number: int) -> None:
        called = _called(self._peers.get(peer_id, _Peer()), peer_id)
        self._progress.warn(
            f"{called} has other weights than the leader after round {round_number}: are its versions and its machine "
            "the same?"
        )

    async def wait_saved(self, round_number: int, seat: int) -> tuple[str, bytes] | None:
        """Wait for the optimiser that a seat saves after a round: the peer id and blob id; None if it will not come."""
        while True:
            held = self._machine.state.seats.get(seat)
            peer = self._peers.get(held.occupant.peer) if held and held.occupant else None
            if held is None or held.occupant is None or peer is None:
                return None
            if not self._host.is_connected(held.occupant.peer):
                return None
            report = peer.report
            if report is not None and report.saved_round == round_number:
                return held.occupant.peer, report.saved
            # It saves before the next round: what it trained for this one came too late for it.
            if report is not None and max(report.saved_round, report.round) > round_number:
                return None
            with trio.move_on_after(HEARTBEAT):
                await self._changed.wait()

    # Members

    def _on_opened(self, peer_id: str, hello: Hello) -> None:
        if hello.role == "worker":
            peer = self._peers.setdefault(peer_id, _Peer(name=hello.name))
            # It may be another process; one that takes part goes on with it.
            peer.is_started = False
            self._changed.set()

    def _on_lost(self, peer_id: str, reason: NeuroGridError) -> None:
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        logger.debug("lost %s: %s", peer_id, reason)
        # Whether it is lost to the others is the group's to decide; one that has not begun is asked again.
        self._hiring.book.drop(peer_id)
        if self._machine.state.seat_of(peer_id) is None:
            self._machine.release(peer_id)
            del self._peers[peer_id]
        else:
            peer.is_started = False
        self._changed.set()

    async def _enlist_all(self) -> None:
        """Ask workers that are here and have nothing to do: they may be who has the data."""
        members = self._facts.run_file.members
        memory = self._facts.member_memory
        need = Need(memory, members.storage, members.cores, members.gpu, members.price)
        async with trio.open_nursery() as nursery:
            while True:
                free = [
                    peer_id
                    for peer_id, peer in self._peers.items()
                    if not peer.is_started
                    and peer_id not in self._asked
                    and peer.num_failures < _MAX_FAILURES
                    and not self._is_banned(peer_id)
                    and self._host.is_connected(peer_id)
                ]
                if free and self._machine.wants_members:
                    await self._enlist(nursery, free, need)
                is_any_free = any(not peer.is_started for peer in self._peers.values())
                with trio.move_on_after(_RETRY if is_any_free else 60.0):
                    await self._changed.wait()
                    await trio.sleep(0.05)

    async def _enlist(self, nursery: trio.Nursery, peers: Sequence[str], need: Need) -> None:
        """Ask workers, and start those that fit as they answer. Where there are more than there is room for, the best
        of those that answer soon come first, and then whoever answers while there is room."""
        offers: dict[str, tuple[Offer, float]] = {}
        silent, all_answered, chosen = set(peers), trio.Event(), trio.Event()

        async def ask_and_start(peer_id: str) -> None:
            try:
                offered = await self._ask(peer_id, need)
                silent.discard(peer_id)
                if not silent:
                    all_answered.set()
                if offered is not None:
                    offers[peer_id] = offered
                    await chosen.wait()
                    if self._machine.has_room(peer_id):
                        await self._start(peer_id, *offered)
            finally:
                self._asked.discard(peer_id)

        if self._machine.num_free >= len(peers):
            chosen.set()
        for peer_id in peers:
            self._asked.add(peer_id)
            nursery.start_soon(ask_and_start, peer_id)
        if chosen.is_set():
            return
        with trio.move_on_after(_GATHERING):
            await all_answered.wait()
        for peer_id in choose_offers(
            {peer: bid_of(offer) for peer, (offer, _) in offers.items()}, need
        ):
            if peer_id in self._peers and self._machine.has_room(peer_id):
                self._keep_seat(peer_id)
        chosen.set()

    def _keep_seat(self, peer_id: str) -> int:
        """The seat that a peer has, or is to take."""
        held = self._machine.state.seat_of(peer_id)
        return held.number if held is not None else self._machine.reserve(peer_id)

    def _may_be_of_before(self, peer_id: str) -> bool:
        """Whether what a peer has of this run may be in a group of before: this leader has begun nothing with it."""
        if not self._is_anew or peer_id in self._begun:
            return False
        return all(member.peer != peer_id for member in self._members)

    async def _ask(self, peer_id: str, need: Need) -> tuple[Offer, float] | None:
        """Ask a worker for an offer: the offer, and when it was asked; None for no answer, or one that will not do."""
        if self._may_be_of_before(peer_id):
            # A Start changes nothing of a part that it has, if it has not left that.
            if (peer := self._peers.get(peer_id)) is not None:
                peer.has_parted = True
            await self._hiring.dismiss(peer_id, _OTHER_GROUP)
        try:
            return await self._hiring.ask(peer_id, need)
        except LackingError as exc:
            self._note_refusal(peer_id, str(exc))
            # A seat that was kept for it is another's: it trains for somebody else by now.
            self._machine.release(peer_id)
        except NeuroGridError as exc:
            logger.info("%s was asked, and does not answer: %s", peer_id, exc)
        return None

    def _note_refusal(self, peer_id: str, reason: str) -> None:
        peer = self._peers.get(peer_id)
        if peer is not None and peer.refusal != reason:
            peer.refusal = reason
            self._progress.warn(f"{_called(peer, peer_id)} takes no part yet: {reason}")
        logger.debug("%s takes no part: %s", peer_id, reason)

    async def _start(self, peer_id: str, offer: Offer, asked_at: float) -> None:
        peer = self._peers.get(peer_id)
        group = self._group
        if peer is None or group is None:
            return
        held, seat = self._machine.state.seat_of(peer_id), self._keep_seat(peer_id)
        facts = self._facts
        start = Start(
            run=facts.run_id,
            lease=offer.lease,
            seat=seat,
            run_file=facts.text,
            config=facts.config,
            kind=facts.run_file.model.kind,
            manifest=facts.manifest,
            num_parameters=facts.num_parameters,
            total_steps=self._total_steps,
            group=tuple(group.addresses[:16]),
            # Of a seat that nobody has taken since: none is given again that was left.
            state=self._saved.get(seat, b"") if held is None else b"",
        )
        self._begun.add(peer_id)
        try:
            await self._hiring.start(peer_id, start, asked_at=asked_at)
        except NeuroGridError as exc:
            if isinstance(exc, LackingError):
                # It will say so again, unless it is another process then.
                peer.num_failures = _MAX_FAILURES
                self._note_refusal(peer_id, str(exc))
            logger.info("%s was not started: %s", peer_id, exc)
            if held is None:
                self._machine.release(peer_id)
            return
        peer.seat, peer.is_started, peer.versions = seat, True, dict(offer.versions)
        peer.name = offer.name or peer.name

    def _lease_lost(self, peer_id: str) -> None:
        if (peer := self._peers.get(peer_id)) is not None:
            peer.is_started = False  # it is asked anew
            self._changed.set()

    def _on_report(self, message: TensorMessage) -> None:
        peer_id, report = sender_of(message), Report.decode(message.data)
        if report.run != self._facts.run_id:
            return
        try:
            self._take_report(peer_id, report)
        except NeuroGridError as exc:
            # What cannot be written down ends the run, and not the stream of whoever reports.
            if self._nursery is None:
                raise
            self._nursery.start_soon(_fail, exc)

    def _take_report(self, peer_id: str, report: Report) -> None:
        peer = self._peers.setdefault(peer_id, _Peer())
        occupant = Occupant(peer_id, report.incarnation)
        if report.incarnation and self._may_be_of_before(peer_id):
            if not peer.has_parted:
                peer.has_parted = True
                self._start_soon_dismissal(peer_id, _OTHER_GROUP)
            return
        if self._is_banned(peer_id):
            if report.incarnation not in (0, peer.dismissed):  # it may not know it yet
                peer.dismissed = report.incarnation
                self._start_soon_dismissal(peer_id, "banned from this run")
            return
        # Others dial what it tells.
        report = replace(report, group_addresses=own_addresses(report.group_addresses, peer_id))
        earlier, before = peer.report, peer.report.incarnation if peer.report is not None else 0
        if before not in (0, report.incarnation):
            self._ended.add(Occupant(peer_id, before))
        peer.report = report
        if report.state == "failed":
            self._note_failure(peer_id, peer, report.reason)
            return
        seat = self._machine.state.seat_of(peer_id)
        if occupant in self._members:
            if report.digest and self._digests.told(occupant, report.round, report.digest):
                self._warn_of_digest(peer_id, report.round)
            self._keeper.figures.heard(
                occupant, report.loss_sum, report.num_tokens, report.gradient_norm
            )
            is_new = seat is None or seat.occupant != occupant
            if report.held and is_new:
                self._sources.look()
            # Nobody is dealt what nobody has.
            if is_new and self._sources.is_complete():
                if peer.seat is None:
                    peer.seat = self._machine.reserve(peer_id)
                self._machine.joined(peer.seat, occupant, peer.name, report.held)
                seat = self._machine.state.seat_of(peer_id)
                self._progress.say(f"{_called(peer, peer_id)} takes part")
                peer.num_failures, peer.refusal = 0, ""
            if seat is not None:
                peer.seat = seat.number
                self._machine.measured(seat.number, report.batch_seconds)
        self._write()
        if earlier is None or _progress_of(earlier) != _progress_of(report):
            self._foresee(peer, report)
        self._changed.set()

    def _foresee(self, peer: _Peer, report: Report) -> None:
        """Tell the group when a member that trains has its vector at the earliest."""
        works = () if peer.seat is None else self._machine.works(peer.seat)
        work = next((work for work in works if work.number > report.done), None)
        peer.due = None
        if work is not None and report.state == "training" and report.batch_seconds:
            peer.due = trio.current_time() + seconds_left(
                work.num_samples,
                self._machine.rules.batch_samples,
                batches_done=report.batches_done,
                batch_seconds=report.batch_seconds,
            )
        if self._group is not None:
            due = {peer_id: each.due for peer_id, each in self._peers.items()}
            self._group.foresee({peer_id: at for peer_id, at in due.items() if at is not None})

    def _holders(self) -> dict[str, Holder]:
        """Members that are here and have slices themselves: as the journal says, or as they say before they sit."""
        found = {}
        for peer_id, peer in self._peers.items():
            report, seat = peer.report, self._machine.state.seat_of(peer_id)
            if report is None or not self._host.is_connected(peer_id):
                continue
            held = self._machine.state.holds.get(seat.number, ()) if seat is not None else ()
            if numbers := held or report.held:
                found[peer_id] = Holder(numbers, report.group_addresses)
        return found

    def _addresses_of(self, peer_id: str) -> Sequence[str]:
        """Multiaddrs at which a connected member can be dialled; empty for others."""
        peer = self._peers.get(peer_id)
        if peer is None or peer.report is None or not self._host.is_connected(peer_id):
            return ()
        return peer.report.group_addresses

    def _refusals(self) -> list[str]:
        """Reasons why connected workers take no part, for people: a line for each worker."""
        return [
            f"{_called(peer, peer_id)}: {peer.refusal}"
            for peer_id, peer in self._peers.items()
            if peer.refusal and self._host.is_connected(peer_id)
        ]

    def _note_failure(self, peer_id: str, peer: _Peer, reason: str) -> None:
        peer.num_failures += 1
        peer.is_started = False
        peer.report = None
        end = "; it is not asked again" if peer.num_failures >= _MAX_FAILURES else ""
        peer.refusal = reason
        self._progress.warn(f"{_called(peer, peer_id)} has failed: {reason}{end}")
        self._ended |= {member for member in self._members if member.peer == peer_id}
        seat = self._machine.state.seat_of(peer_id)
        # One that is in the group leaves it by a decision: what it contributed before comes first.
        if seat is not None and seat.occupant not in self._members:
            self._machine.left(seat.number, reason)
        self._machine.release(peer_id)
        self._hiring.book.drop(peer_id)
        self._write()
        self._changed.set()

    def _ban(self, peer_id: str, reason: str) -> None:
        """A peer did other than it was told: that is written down, and it takes no part for a while."""
        if self._is_banned(peer_id):  # it does not care
            self._start_soon_dismissal(peer_id, "banned from this run")
            return
        entry = self._machine.ban(peer_id, reason, now=time.time())
        if (seat := self._machine.state.seat_of(peer_id)) is not None:
            self._machine.left(seat.number, f"banned: {reason}")
        self._write()
        self._hiring.book.drop(peer_id)
        peer = self._peers.setdefault(peer_id, _Peer())
        peer.is_started = False
        lasts = f"for {format_span(entry.until - entry.at)}" if entry.until else "from this run"
        self._progress.warn(
            f"{_called(peer, peer_id)} is banned {lasts}: {reason}. Its membership it keeps: --revoke {peer_id} takes "
            "that away"
        )
        self._start_soon_dismissal(peer_id, f"banned {lasts}: {reason}")

    def _is_banned(self, peer_id: str) -> bool:
        return self._machine.state.ban_of(peer_id, time.time()) is not None

    def _start_soon_dismissal(self, peer_id: str, reason: str) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._hiring.dismiss, peer_id, reason)

    async def _give_up_vacant(self) -> None:
        """Wait for those who are to take the seats of a run that goes on, but not for ever."""
        if self._return:
            await trio.sleep(self._return)
        for seat in self._machine.state.vacant():
            if self._return:
                self._progress.warn(f"nobody took seat {seat.number}: the run goes on without it")
            self._machine.left(seat.number, f"nobody took it within {self._return:g} s")
        self._write()

    async def _watch_hours(self) -> None:
        while True:
            state = self._machine.state
            hours = run_at(self._facts.run_file, state.changes, state.round + 1).stop.hours
            left = math.inf if hours is None else 3600 * hours - self._keeper.seconds
            if left <= 0:
                break
            await trio.sleep(min(left, _HOURS_LOOK))
        self._machine.stop(f"{hours:g} hours are over")
        self._write()

    async def _watch_changes(self) -> None:
        # Rounds that were made without the leader are as they were dealt.
        await self._wait_decided()
        while True:
            if self._changes.take():
                self._write()
            self._sources.look()
            await trio.sleep(HEARTBEAT)

    # Orders

    async def _tell_orders(self) -> None:
        while True:
            # No order follows from what the deputy has not.
            await self._copying.wait_open()
            changed = self._changed.next
            async with trio.open_nursery() as nursery:
                for seat in self._machine.state.occupied():
                    assert seat.occupant is not None
                    peer = self._peers.get(seat.occupant.peer)
                    if peer is None or not self._host.is_connected(seat.occupant.peer):
                        continue
                    order = self._order(peer, seat.occupant, seat.number)
                    nursery.start_soon(
                        self._hiring.tell, seat.occupant.peer, RunMessage.ORDER, order.encode()
                    )
            with trio.move_on_after(HEARTBEAT):
                await changed.wait()

    def _order(self, peer: _Peer, occupant: Occupant, seat: int) -> Order:
        batch_samples = self._machine.rules.batch_samples
        works = tuple(
            Work(
                number=work.number,
                position=work.position,
                stride=work.stride,
                batch_samples=batch_samples,
                weight=work.weight,
                ranges=work.ranges,
            )
            for work in self._machine.works(seat)
        )
        peer.num_orders = max(peer.num_orders + 1, time.time_ns() // 1000)  # also after a restart
        slices = {each.slice for work in works for each in work.ranges}
        self._sources.takes(occupant.peer, slices)
        leads_group = self._group is not None and self._group.leader == occupant.peer
        return Order(
            run=self._facts.run_id,
            number=peer.num_orders,
            incarnation=occupant.incarnation,
            works=works[:4],
            sources=self._sources.addresses_for(occupant.peer, slices),
            # Not before the last outcome is here: members are who has it.
            ends=self._is_over,
            term=self._copying.term,
            seat=seat,
            expects=self._those_with_works() if leads_group else (),
        )

    async def _say_goodbye(self) -> None:
        self._sources.end()
        reason = self._machine.state.reason or "the run is over"
        with trio.move_on_after(_GOODBYE):
            await self._copying.wait_open()
            async with trio.open_nursery() as nursery:
                for peer_id, peer in self._peers.items():
                    if peer.is_started and self._host.is_connected(peer_id):
                        nursery.start_soon(self._hiring.dismiss, peer_id, reason)


async def _fail(error: NeuroGridError) -> None:
    raise error


def _progress_of(report: Report) -> tuple[object, ...]:
    """Fields of a report by which its member's progress with a work is known."""
    return report.incarnation, report.state, report.done, report.batches_done


def _called(peer: _Peer, peer_id: str) -> str:
    """A member, for people."""
    if peer.name:
        return peer.name
    return f"member {peer.seat}" if peer.seat is not None else peer_id
