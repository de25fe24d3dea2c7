"""A member of a group as a pure machine: no clock, no socket, no torch.

It is told what comes and what time it is, and says what is to be done (`actions`). Its group decides one thing after
another, a change of members or the outcome of a round, and each decision is the same for all members, whichever of them
die, stop or cannot hear each other meanwhile:

- A leader proposes, under a ballot of its own; acceptors compute, and tell the digest of what came out. When all
  acceptors of a proposal have told the same, and they are enough (`quorums`), it is decided.
- When the leader is lost, another member asks for promises under a greater term. Those that promise tell what they have
  accepted; what may have been decided is proposed again, as it is, before anything else.
- Every message says all that its sender knows, and comes again each heartbeat.

More than 600 lines, since it is one machine: following, leading and taking over change the same state, and the
specification's tables are easier to hold against one file.

Source: protocol_spec/training/groups.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.limits import MAX_ERROR_CHARS
from neurogrid.training.averaging.plan import ReductionPlan
from neurogrid.training.averaging.rounds.actions import (
    Action,
    Decided,
    Fetch,
    Reduce,
    Removed,
    Send,
    Stop,
)
from neurogrid.training.averaging.rounds.leader import Leader, Progress, Proposed
from neurogrid.training.averaging.rounds.plans import (
    MIN_CHUNK_ELEMENTS,
    Shape,
    read_plan,
    write_plan,
)
from neurogrid.training.averaging.rounds.quorums import num_to_lead
from neurogrid.training.wire import (
    MAX_TOLD_DECISIONS,
    Ballot,
    Candidate,
    Decision,
    DecisionPayload,
    GroupSettings,
    Lead,
    Leave,
    Member,
    Plan,
    Promise,
    Proposal,
    Status,
    peers_at,
    place_peers,
    table_of,
)

__all__ = ["GroupMachine", "Message", "read_decisions"]

Message = Lead | Status | Candidate | Promise | Leave

_NOTHING: Final = Ballot(0, 0)
_MAX_REASON_CHARS: Final = 256
# A group has one a second at most: no member can use up all numbers.
_MAX_TERMS_AHEAD: Final = 2**32
# Members that stand again one after the other; of more, some do at once.
_PLACES: Final = 8
# How often the time between two of them doubles, where one term after another has had no leader.
_MAX_DOUBLINGS: Final = 2
_MAX_TOLD_BYTES: Final = 512 * 1024
# A leader of more members does not look at all of them for each message of one: looking takes it so many seconds for
# each, and is done again when ten times as long has passed, or with the next tick.
_FEW: Final = 256
_SECONDS_TO_LOOK: Final = 2e-6
# For people: who would read more?
_MAX_WAITED_FOR: Final = 32


@dataclass(slots=True)
class _Work:
    """A proposal that this member computes, or fetches the aggregate of."""

    ballot: Ballot
    token: int
    decision: Decision


@dataclass(slots=True)
class _Candidacy:
    """This member would lead: since when, and what it was promised."""

    term: int
    since: float
    promises: dict[str, Promise]


class GroupMachine:
    """One member. Call its methods as things happen, and do what `drain` gives after each.

    Args:
        me: this member.
        settings: of the group.
        shape: of the vector.
        history: the last decisions, in order; by the last of them this member is one.
        before: the members before the first of them.
        term: the term of its leader.
        leader: the peer id of the leader; this member's own where it founds the group.
        now: seconds, on any clock that does not go backwards.
        draw: a random u64, above zero.
        bandwidth: bytes a second; 0 where nobody can dial this member, `UNMEASURED` where it is not known.
        observes: it contributes nothing for now.

    Attributes:
        me, settings, shape: as given.
        index: of the last decision.
        round: rounds decided.
        members: since that decision.
        term: the greatest that it has promised.
        leader: peer id of whom it follows; None while it knows none.
        waits_for: peer ids that the group waits for, as its leader says.
        removed: why it is no member any more; None while it is one.
    """

    def __init__(
        self,
        me: Member,
        settings: GroupSettings,
        shape: Shape,
        history: Sequence[Decision],
        *,
        term: int,
        leader: str,
        now: float,
        draw: Callable[[], int],
        bandwidth: float = 0.0,
        observes: bool = False,
        before: Sequence[Member] = (),
    ) -> None:
        self.me, self.settings, self.shape = me, settings, shape
        last = history[-1]
        self.index, self.round, self.members = last.index, last.round, last.members
        self.term = term
        self.leader: str | None = leader
        self.waits_for: tuple[str, ...] = ()
        self.removed: str | None = None
        self._draw, self._bandwidth, self._observes = draw, bandwidth, observes
        self._history, self._before = deque(history), tuple(before)
        self._accepted: tuple[Ballot, Decision] | None = None
        self._work: _Work | None = None
        self._seen = _NOTHING  # the latest proposal that was looked at
        self._held: set[bytes] = (
            set()
        )  # digests of aggregates that were computed or fetched since the last decision
        self._failed: tuple[int, Mapping[str, str]] | None = None
        self._weight: float | None = None
        self._greatest_term = term
        self._followed = term, leader  # the last that was heard to lead, or this member itself
        self._gone: set[str] = set()
        self._heard_at = now
        self._silent_since: float | None = None
        self._candidacy: _Candidacy | None = None
        self._led_until: tuple[str | None, float] = (
            None,
            now,
        )  # whom it followed before it stood, and heard last
        self._asked: tuple[str, Candidate, float] | None = None  # for a promise, and too early
        self._lead: Leader | None = None
        self._is_leaving, self._leaving_for = False, ""
        self._expected: frozenset[str] = frozenset()
        self._due: Mapping[str, float] = {}
        self._is_gone = False  # a leader that is no member any more, and has yet to be heard
        self._gone_at: float | None = None
        self._beat_at = now
        self._told: Proposed | None = None
        self._stepped_at = now
        self._written: tuple[Proposed, Proposal, bytes] | None = None
        self._encoded: dict[int, bytes] = {}  # decisions of the history, by index
        self._known: tuple[object, Mapping[str, int]] = None, {}
        self._actions: list[Action] = []
        if leader == me.peer:
            self._lead = Leader(me, term, settings, shape, draw)

    # What others look at

    @property
    def is_leading(self) -> bool:
        """Whether this member leads."""
        return self._lead is not None

    @property
    def observes(self) -> bool:
        """Whether this member contributes nothing for now."""
        return self._observes

    @property
    def last(self) -> Decision:
        """The last decision."""
        return self._history[-1]

    @property
    def history(self) -> tuple[Decision, ...]:
        """The last decisions, in order."""
        return tuple(self._history)

    def told_to_joiner(self) -> tuple[tuple[Member, ...], tuple[bytes, ...]]:
        """Decisions for a peer that knows none: the members before the first of them, and the last ones, encoded.

        They are as many as one message holds, the last of all among them.
        """
        told, room = [self._encode(self.last)], _MAX_TOLD_BYTES
        for decision in [*self._history][-2::-1]:
            room -= len(told[0])
            if room < len(encoded := self._encode(decision)):
                break
            told.insert(0, encoded)
        return self._members_before(self.index + 1 - len(told)), tuple(told)

    def drain(self) -> list[Action]:
        """Take the actions that are to be done, in order; each is given once."""
        actions, self._actions = self._actions, []
        return actions

    # What this member does

    def contribute(self, weight: float, now: float) -> None:
        """Announce a vector of this weight for the round after the last that was decided, and stop observing."""
        self._weight = weight
        self._observes = False
        self._tell(now)

    def withdraw(self, now: float) -> None:
        """The vector is not to be used; a round that has it already may be decided all the same."""
        self._weight = None
        self._tell(now)

    def observe(self, is_observer: bool, now: float) -> None:
        """Rounds need not wait for this member, or have to again."""
        self._observes = is_observer
        self._tell(now)

    def expect(self, peers: frozenset[str], now: float) -> None:
        """Make rounds that this member leads wait for these even if they have said that they contribute nothing.

        They are going to contribute.
        """
        self._expected = peers
        if self._lead is not None:
            self._lead.expected = peers
            self._step(now)

    def foresee(self, due: Mapping[str, float], now: float) -> None:
        """Let rounds that this member leads go on without members that cannot have their vectors in time.

        Args:
            due: by peer id, when they have their next vectors at the earliest, in seconds of the clock of `now`.
        """
        self._due = due
        if self._lead is not None:
            self._lead.due = due
            self._step(now)

    def measure(self, bandwidth: float) -> None:
        """This member sends and receives so many bytes a second, or `UNMEASURED`; it is told with what is told next."""
        self._bandwidth = bandwidth

    def leave(self, now: float, reason: str = "") -> None:
        """Go, without the others having to find out. A leader goes when the group has decided to be without it."""
        if self.removed is not None or self._is_leaving:
            return
        # Longer than a message may say it, it would not be told at all.
        self._weight, self._is_leaving, self._leaving_for = None, True, reason[:MAX_ERROR_CHARS]
        self._leave_on(now)

    def _leave_on(self, now: float) -> None:
        """Go on with leaving, whoever leads by now."""
        if self._lead is not None and self._lead.has_company(self.members, now):
            if not self._lead.is_leaving:
                self._lead.is_leaving = True
                self._step(now)
            return
        for member in self.members:
            if member != self.me:
                self._send(member.peer, Leave(self.me.incarnation, self._leaving_for))
        self._remove(self._leaving_for or "it has left")

    def end(self, now: float, reason: str = "") -> None:
        """End the group: a leader's to do."""
        for member in self.members:
            if member != self.me:
                leave = Leave(self.me.incarnation, reason[:MAX_ERROR_CHARS], ends_group=True)
                self._send(member.peer, leave)
        self._remove(reason or "its leader has ended the group")

    def admit(self, member: Member, now: float, addresses: Sequence[str] = ()) -> bool:
        """A peer that can be dialled at these addresses asks its leader, this one, to be a member.

        Returns:
            Whether it will be; False where others are to join before, or this member does not lead.
        """
        if self._lead is None or member in self.members or member.peer == self.me.peer:
            return False
        is_admitted = self._lead.admits(member, addresses)
        for before in self.members:
            if before.peer == member.peer and is_admitted:  # that process is over
                self._lead.dismisses(before)
                self._lead.loses(before.peer, now)
        self._step(now)
        return is_admitted

    def is_asked_by(self, member: Member, now: float) -> None:
        """A peer asks this member, which does not lead, where to join: a member of its name is over."""
        if any(m.peer == member.peer and m != member for m in self.members):
            self.peer_lost(member.peer, now)

    # What came of what was to be done

    def reduced(self, token: int, digest: bytes, now: float) -> None:
        """A reduction or a fetch is done."""
        work = self._work
        if work is None or work.token != token:
            return
        self._held.add(digest)
        if work.decision.digest not in (b"", digest):
            self._fail({self.me.peer: "what was fetched is not what was asked for"}, now)
            return
        self._accept(work.ballot, replace(work.decision, digest=digest), now)

    def failed(self, token: int, lost: Mapping[str, str], now: float) -> None:
        """A reduction or a fetch failed, with the reason for each peer that is to blame."""
        if self._work is not None and self._work.token == token:
            self._fail(lost, now)

    def peer_lost(self, peer: str, now: float) -> None:
        """No stream leads to a peer any more."""
        self._gone.add(peer)
        if self._lead is not None:
            self._lead.loses(peer, now)
            self._step(now)
        elif peer == self.leader and self._asked is not None:
            # Another has noticed it before.
            sender, candidate, asked_at = self._asked
            if now - asked_at < self.settings.heartbeat and self.removed is None:
                self._consider_candidate(sender, candidate, now)
        self.tick(now)

    def ended(self, member: Member, now: float) -> None:
        """The process of a member has ended: a leader goes on without waiting whether it comes back."""
        if self._lead is not None and member in self.members and member != self.me:
            self._lead.dismisses(member)
            self._step(now)

    # Time

    def tick(self, now: float) -> None:
        """Time has passed: to be called a few times each heartbeat."""
        if self.removed is not None:
            return
        if self._is_gone:
            self._gone_at = self._gone_at or now
            if now - self._gone_at >= 2 * self.settings.grace:
                self._remove("it has left, and nobody has confirmed it")
        elif self._is_leaving and self._candidacy is None:
            self._leave_on(now)
            self._step(now)
        elif self._lead is not None:
            self._step(now)
        else:
            self._look_after_leader(now)
        if now >= self._beat_at and self.removed is None:
            self._beat(now)

    def _beat(self, now: float) -> None:
        """Say again how things stand: any message before may have been lost."""
        self._beat_at = now + self.settings.heartbeat
        if self._lead is not None:
            self._tell_members()
        elif self._candidacy is not None:
            self._ask_for_promises(self._candidacy)
        elif self.leader is not None:
            self._send(self.leader, self.status())

    # Messages

    def receive(self, sender: str, message: Message, now: float) -> None:
        """A message of a peer of the group.

        Raises:
            RemoteProtocolError: what is in it is malformed, or cannot be.
        """
        if self.removed is not None or sender == self.me.peer:
            return
        if not isinstance(message, Leave):
            ahead = message.term - self._greatest_term
            if ahead > _MAX_TERMS_AHEAD:
                raise violation(f"term {message.term} is {ahead} above all that were heard of")
        self._gone.discard(sender)
        if isinstance(message, Lead):
            if self._is_introduced(sender, message.decisions):
                self._follow(sender, message, now)
            elif message.index <= self.index:
                self._send(sender, self.status())  # it leaves when it knows that others know
        elif isinstance(message, Status):
            self._hear_status(sender, message, now)
        elif isinstance(message, Candidate):
            self._consider_candidate(sender, message, now)
        elif isinstance(message, Promise):
            self._count_promise(sender, message, now)
        elif isinstance(message, Leave):
            self._hear_leave(sender, message, now)

    def status(self) -> Status:
        """Status of this member, for a leader."""
        ballot, accepted = self._accepted or (_NOTHING, None)
        failed_attempt, lost = self._failed or (0, {})
        is_ready = self._weight is not None and not self._is_leaving
        return Status(
            incarnation=self.me.incarnation,
            term=self.term,
            index=self.index,
            ready_round=self.round + 1 if is_ready else 0,
            weight=self._weight or 0.0 if is_ready else 0.0,
            accepted_term=ballot.term,
            accepted_attempt=ballot.attempt,
            accepted=accepted.digest if accepted is not None else b"",
            seen_attempt=self._seen.attempt if self._seen.term == self.term else 0,
            failed_attempt=failed_attempt,
            lost=tuple(lost),
            reasons=tuple(reason[:_MAX_REASON_CHARS] for reason in lost.values()),
            bandwidth=self._bandwidth,
            observes=self._observes,
        )

    def _tell(self, now: float) -> None:
        """Act on a change of what this member knows: as the leader take a step, else send the leader its status."""
        if self.removed is not None:
            return
        if self._lead is not None:
            self._step(now)
        elif self.leader is not None and self._candidacy is None:
            self._send(self.leader, self.status())

    def _send(self, to: str, message: Message) -> None:
        self._actions.append(Send(to, message))

    # Following

    def _follow(self, sender: str, message: Lead, now: float) -> None:
        before = self.index
        if message.term < self.term:
            # What was decided is, whoever tells it: that this is no member any more, perhaps.
            if self._learn_all(message.decisions) and not self._is_beyond_help(message):
                if self.index > before and self._lead is not None:
                    self._step_down(now)
                self._send(sender, self.status())  # by which it learns of the greater term
            return
        if message.term > self.term:
            self._stop()
            self._lead = None
            self.term, self._failed = message.term, None
        elif self.leader not in (None, sender):
            return  # what this member has promised in a term it has promised to one
        self._greatest_term = max(self._greatest_term, message.term)
        self.leader, self._candidacy, self._silent_since = sender, None, None
        self._heard_at = now
        self.waits_for = message.waits_for
        if not self._learn_all(message.decisions):
            return
        # After a round it has nothing to say until it has its next vector; after a change of members it may have one.
        is_changed = self.index > before and not self.last.is_round
        if is_changed or self._followed != (message.term, sender):
            self._followed = message.term, sender
            self._send(sender, self.status())
        if message.index > self.index:
            if not self._is_beyond_help(message):
                # There are more of them, or its leader thinks that it has them.
                self._send(sender, self.status())
            return
        if message.proposal and message.index == self.index:
            self._look_at(Proposal.decode(message.proposal), now)

    def _is_beyond_help(self, message: Lead | Promise) -> bool:
        """Whether decisions are missing that nobody tells any more: this is no member then."""
        told, missing = message.decisions, message.index - self.index
        if not told or DecisionPayload.decode(told[0]).index <= self.index + 1:
            return False
        self._remove(f"{missing} decisions were made without this member")
        return True

    def _is_introduced(self, sender: str, decisions: tuple[bytes, ...]) -> bool:
        """Whether a peer is a member, as far as this one knows or by what it tells that comes next."""
        if sender in self._incarnations():
            return True
        news = read_decisions(decisions, self.members, after=self.index)
        return bool(news) and sender in news[-1].peers

    def _learn_all(self, decisions: tuple[bytes, ...]) -> bool:
        """Take over decisions; False when this member is none after them."""
        for decision in read_decisions(decisions, self.members, after=self.index):
            self._check_decision(decision, is_decided=True)
            self._learn(decision)
        return self.removed is None

    def _learn(self, decision: Decision) -> None:
        self._stop()
        self.index, self.round, self.members = decision.index, decision.round, decision.members
        self._history.append(decision)
        if len(self._history) > MAX_TOLD_DECISIONS:
            self._before = self._history.popleft().members
        self._accepted, self._failed, self._seen = None, None, _NOTHING
        self._held.clear()
        has_contributed = self.me.peer in decision.contributors
        if decision.is_round:
            self._weight = None
        self._actions.append(Decided(decision, has_contributed))
        if self.me in self.members:
            if self.leader not in decision.peers:
                self.leader = None  # it has left
            return
        if self._lead is not None and self._is_leaving:
            self._is_gone = (
                True  # when another knows: else they could not tell whether it was decided
            )
        else:
            self._remove("it has left" if self._is_leaving else "the group goes on without it")

    def _check_decision(self, decision: Decision, *, is_decided: bool) -> None:
        """Whether a decision can be the next.

        Raises:
            RemoteProtocolError: it cannot; says why.
        """
        if decision.index != self.index + 1 or decision.round != self.round + decision.is_round:
            raise violation(
                f"decision {decision.index} of round {decision.round} is no next one after "
                f"{self.index} of round {self.round}"
            )
        if not decision.is_round:
            return
        if is_decided and not decision.digest:
            raise violation("a round was decided without an aggregate")
        if not {*decision.contributors} <= {member.peer for member in self.members}:
            raise violation("a contributor is no member")
        self._check_vector(decision.num_elements, decision.chunk_elements)
        if decision.codec != self.settings.result_codec:
            raise violation(f"the aggregate is {decision.codec} in another group")

    def _check_vector(self, num_elements: int, chunk_elements: int) -> None:
        if num_elements != self.shape.num_elements:
            raise violation(
                f"a round is of {num_elements} elements, and the group's vector has "
                f"{self.shape.num_elements}"
            )
        smallest = min(num_elements, MIN_CHUNK_ELEMENTS, self.settings.chunk_elements)
        if chunk_elements < smallest or chunk_elements % self.shape.block:
            raise violation(f"chunks of {chunk_elements} elements are not as agreed")

    def _check_plan(self, plan: ReductionPlan) -> None:
        """Whether a plan is one of this group.

        Raises:
            RemoteProtocolError: it is not.
        """
        agreed = (self.settings.codec, self.settings.result_codec, self.settings.aggregator)
        if (plan.codec, plan.result_codec, plan.aggregator) != agreed:
            raise violation("a plan is not as agreed")

    def _remove(self, reason: str) -> None:
        self._stop()
        self.removed, self._lead, self._candidacy = reason, None, None
        self._actions.append(Removed(reason))

    def _look_at(self, proposal: Proposal, now: float) -> None:
        ballot = Ballot(self.term, proposal.attempt)
        if ballot <= self._seen:
            return
        decision = DecisionPayload.decode(proposal.decision).after(self.members)
        self._check_decision(decision, is_decided=not proposal.plan)
        table = table_of(decision, self.members)
        acceptors = peers_at(proposal.acceptors, table)
        plan = None
        if proposal.plan:
            plan = read_plan(Plan.decode(proposal.plan), decision, table)
            self._check_plan(plan)
        self._stop()
        self._seen, self._failed = ballot, None
        if self.me.peer not in acceptors:
            return
        if plan is not None:
            self._begin_round(ballot, decision, plan, now)
        elif not decision.digest or decision.digest in self._held:
            self._accept(ballot, decision, now)
        else:
            self._work = _Work(ballot, self._draw(), decision)
            self._actions.append(Fetch(self._work.token, decision, decision.holders))

    def _begin_round(
        self, ballot: Ballot, decision: Decision, plan: ReductionPlan, now: float
    ) -> None:
        self._work = _Work(ballot, plan.reduction, decision)
        if self.me.peer in plan.members and self._weight is None:
            self._fail({self.me.peer: "it has no vector for this round"}, now)
        else:
            self._actions.append(Reduce(plan))

    def _accept(self, ballot: Ballot, decision: Decision, now: float) -> None:
        self._work = None
        self._accepted = ballot, decision
        self._tell(now)

    def _fail(self, lost: Mapping[str, str], now: float) -> None:
        assert self._work is not None
        self._failed = self._work.ballot.attempt, lost
        self._work = None
        self._tell(now)

    def _stop(self) -> None:
        if self._work is not None:
            self._actions.append(Stop(self._work.token))
            self._work = None

    def _incarnations(self) -> Mapping[str, int]:
        """The members' incarnations by their peer ids."""
        if self._known[0] is not self.members:
            self._known = self.members, dict(self.members)
        return self._known[1]

    # Leading

    def _hear_status(self, sender: str, status: Status, now: float) -> None:
        incarnations = self._incarnations()
        if sender not in incarnations:
            if self._lead is not None and not self._is_gone:
                self._tell_stranger(sender, status)
            return
        self._greatest_term = max(self._greatest_term, status.term)
        if self._lead is None:
            return
        if self._is_gone and status.index >= self.index:
            self._remove("it has left")
            return
        if status.term > self.term:
            # Most have promised another to follow it; it will be heard.
            self._step_down(now)
            return
        if incarnations[sender] == status.incarnation:
            is_news = status != self._lead.status_of(sender)
            self._lead.hears(sender, status, now)
            if status.index < self.index:
                self._tell_member(sender)
            pause = 10 * _SECONDS_TO_LOOK * len(self.members) if len(self.members) > _FEW else 0.0
            if is_news and now - self._stepped_at >= pause:  # the clock brings the rest
                self._step(now)
        else:
            self._tell_stranger(sender, status)

    def _step_down(self, now: float) -> None:
        self._stop()
        self._lead, self.leader = None, None
        self._heard_at = now

    def _step(self, now: float) -> None:
        """Lead on, until there is nothing more to decide or to propose."""
        self._stepped_at = now
        while self._lead is not None and not self._is_gone:
            has_adopted = self._lead.to_adopt is not None
            decided = self._lead.step(
                Progress(self.index, self.round, self.members), self.status(), now
            )
            if self._lead.cannot_adopt:
                # Nobody that is left may hold the aggregate: those that promise now say whether it was accepted.
                self._lead = None
                self._stand(now)
                continue
            if decided is not None:
                before = self.members
                self._learn(decided)
                self._tell_all({*before, *self.members} - {self.me})
                if has_adopted and self.members != before and not self._is_gone:
                    # An earlier leader may have gone on with these members, and none of them has promised this one
                    # anything.
                    self._lead = None
                    self._stand(now)
                continue
            proposed = self._lead.proposed
            self.waits_for = self._lead.waits_for
            if proposed == self._told:
                return
            self._told = proposed
            self._tell_members()
            if proposed is not None:
                self._look_at(self._write(proposed)[0], now)

    def _tell_members(self) -> None:
        self._tell_all({*self.members} - {self.me})

    def _tell_all(self, members: set[Member]) -> None:
        for member in sorted(members):
            self._tell_member(member.peer)

    def _tell_member(self, peer: str) -> None:
        status = self._lead.status_of(peer) if self._lead is not None else None
        proposed = self._lead.proposed if self._lead is not None else None
        known = status.index if status is not None else 0
        if (
            proposed is not None
            and status is not None
            and (
                (status.index, status.term, status.seen_attempt)
                == (self.index, self.term, proposed.attempt)
            )
        ):
            proposed = None  # it is the longest of all that is told
        self._send(
            peer,
            Lead(
                term=self.term,
                index=self.index,
                decisions=self._decisions_after(known),
                proposal=self._write(proposed)[1] if proposed is not None else b"",
                waits_for=self.waits_for[:_MAX_WAITED_FOR],
            ),
        )

    def _write(self, proposed: Proposed) -> tuple[Proposal, bytes]:
        """A proposal as it is told, and encoded: once, not for each member."""
        if self._written is None or self._written[0] is not proposed:
            proposal = _written(proposed, self.members)
            self._written = proposed, proposal, proposal.encode()
        return self._written[1:]

    def _encode(self, decision: Decision) -> bytes:
        """A decision of the history, encoded once."""
        if decision.index not in self._encoded:
            oldest = self._history[0].index
            self._encoded = {i: said for i, said in self._encoded.items() if i >= oldest}
            self._encoded[decision.index] = decision.encode(self._members_before(decision.index))
        return self._encoded[decision.index]

    def _members_before(self, index: int) -> tuple[Member, ...]:
        """The members before a decision of the history."""
        place = index - self._history[0].index
        return self._history[place - 1].members if place else self._before

    def _tell_stranger(self, peer: str, status: Status) -> None:
        """A member that is none any more may not know it yet."""
        self._send(
            peer,
            Lead(self.term, self.index, self._decisions_after(status.index)),
        )

    def _decisions_after(self, index: int) -> tuple[bytes, ...]:
        """Encoded decisions, the first of those that are kept and as many as one message holds."""
        told: list[bytes] = []
        room = _MAX_TOLD_BYTES
        for decision in self._history:
            if decision.index > index:
                told.append(self._encode(decision))
                room -= len(told[-1])
                if room < 0 and len(told) > 1:
                    return tuple(told[:-1])
        return tuple(told)

    def _hear_leave(self, sender: str, message: Leave, now: float) -> None:
        member = Member(sender, message.incarnation)
        if member not in self.members:
            return
        if message.ends_group:
            if sender == self.leader:
                self._remove(message.reason or "its leader has ended the group")
        elif self._lead is not None:
            self._lead.dismisses(member)
            self._lead.loses(sender, now)
            self._step(now)
        else:
            self._gone.add(sender)
            self.tick(now)

    # Taking over

    def _look_after_leader(self, now: float) -> None:
        if self._candidacy is not None:
            if now - self._candidacy.since >= self._patience():
                self._stand(now)
            return
        is_lost = self.leader is None or self.leader in self._gone
        silence = self.settings.grace
        if self._followed != (self.term, self.leader):
            # A candidate that was promised has to be heard by others before it is heard as a leader.
            silence = max(silence, self._patience())
        if not is_lost and now - self._heard_at < silence:
            return
        if self._silent_since is None:
            self._silent_since = now
        # One after the other, so that two do not ask at once.
        waits = [m.peer for m in self.members if m.peer not in self._gone and m.peer != self.leader]
        rank = waits.index(self.me.peer) if self.me.peer in waits else 0
        if now - self._silent_since >= rank * self.settings.heartbeat:
            self._stand(now)

    def _patience(self) -> float:
        """Seconds until a candidacy, this member's or the one that it has promised, has come to nothing.

        So far apart that the first is heard before the second stands again, also where messages take long: the longer,
        the more terms have come to nothing. By the term, and by the place among all members, on which those agree that
        do not know of the same losses.
        """
        place = self.members.index(self.me) % _PLACES if self.me in self.members else 0
        num_terms = max(self._greatest_term, self.term) - self._followed[0]
        apart = self.settings.grace / 2 * (1 << min(max(num_terms - 1, 0), _MAX_DOUBLINGS))
        return self.settings.heartbeat + (1 + place) * apart

    def _stand(self, now: float) -> None:
        """Ask to lead, under a term greater than all that were heard of."""
        self._stop()
        if self.leader not in (None, self.me.peer):
            self._led_until = self.leader, self._heard_at
        self.term = self._greatest_term = max(self._greatest_term, self.term) + 1
        self.leader, self._failed = None, None
        self._candidacy = _Candidacy(self.term, now, {})
        self._ask_for_promises(self._candidacy)
        self._beat_at = now + self.settings.heartbeat
        self._may_lead(now)

    def _ask_for_promises(self, candidacy: _Candidacy) -> None:
        asked = Candidate(self.me.incarnation, candidacy.term, self.index, self._decisions_after(0))
        for member in self.members:
            promise = candidacy.promises.get(member.peer)
            has_promised = promise is not None and promise.incarnation == member.incarnation
            if member != self.me and not has_promised:
                self._send(member.peer, asked)

    def _consider_candidate(self, sender: str, message: Candidate, now: float) -> None:
        if self._is_introduced(sender, message.decisions):
            self._greatest_term = max(self._greatest_term, message.term)
            before = self.index
            if not self._learn_all(message.decisions):
                return
            if self.index > before and self._lead is not None:
                self._step_down(now)  # another has led since, and decided
        hears_leader = (
            self.leader not in (None, sender)
            and self.leader not in self._gone
            and now - self._heard_at < self.settings.grace / 2
        )
        is_member = Member(sender, message.incarnation) in self.members
        promised_before = message.term == self.term and self.leader == sender
        can_promise = not (self._lead is not None or hears_leader or not is_member)
        if not promised_before and not (can_promise and message.term > self.term):
            if hears_leader and is_member:
                self._asked = sender, message, now
            if message.index < self.index:
                # It may be a member no more.
                decisions = self._decisions_after(message.index)
                news = Promise(
                    self.me.incarnation, message.term, self.index, decisions, refuses=True
                )
                self._send(sender, news)
            return
        if not promised_before:
            self._stop()
            self.term, self.leader, self._failed = message.term, sender, None
            self._candidacy, self._silent_since, self._heard_at = None, None, now
            self._seen = _NOTHING
        ballot, accepted = self._accepted or (_NOTHING, None)
        self._send(
            sender,
            Promise(
                incarnation=self.me.incarnation,
                term=self.term,
                index=self.index,
                decisions=self._decisions_after(message.index),
                accepted_term=ballot.term,
                accepted_attempt=ballot.attempt,
                accepted=accepted.encode(self.members) if accepted is not None else b"",
            ),
        )

    def _count_promise(self, sender: str, message: Promise, now: float) -> None:
        candidacy = self._candidacy
        if candidacy is None or message.term != candidacy.term:
            return
        if not self._is_introduced(sender, message.decisions):
            return
        if not self._learn_all(message.decisions):
            return
        if message.refuses:
            self._is_beyond_help(message)
            return
        # It may have become a member, or the next of its name, by what it has told.
        if Member(sender, message.incarnation) not in self.members:
            return
        candidacy.promises[sender] = message
        self._may_lead(now)

    def _may_lead(self, now: float) -> None:
        """Lead, if as many have promised as it takes, and none of them knows of more decisions than this member."""
        candidacy = self._candidacy
        assert candidacy is not None
        # By a decision that came with a promise, a peer may be another incarnation, which has promised nothing.
        promises = {
            peer: said
            for peer, said in candidacy.promises.items()
            if Member(peer, said.incarnation) in self.members
        }
        if 1 + len(promises) < num_to_lead(len(self.members)):
            return
        if any(promise.index > self.index for promise in promises.values()):
            return
        accepted: list[tuple[Ballot, Decision]] = [
            (promise.ballot, DecisionPayload.decode(promise.accepted).after(self.members))
            for promise in promises.values()
            if promise.accepted and promise.index == self.index
        ]
        if self._accepted is not None:
            accepted.append(self._accepted)
        self._candidacy = None
        self.leader, self._silent_since = self.me.peer, None
        self._followed = self.term, self.me.peer
        self._lead = Leader(
            self.me,
            self.term,
            self.settings,
            self.shape,
            self._draw,
            to_adopt=_to_adopt(accepted),
            is_leaving=self._is_leaving,
        )
        self._lead.expected, self._lead.due = self._expected, self._due
        self._told = None
        self._seen = _NOTHING
        before, heard_at = self._led_until
        if before is not None:
            self._lead.heard_before(before, heard_at)  # no round is to wait for it once more
        for peer in self._gone:
            self._lead.loses(peer, now)
        for peer in promises:
            self._lead.hears(peer, None, now)
        self._tell_members()
        self._step(now)


def _to_adopt(accepted: list[tuple[Ballot, Decision]]) -> Decision | None:
    """The decision that may have been made: what was accepted under the latest ballot, if it is one thing; else None.

    Acceptors of one ballot that have told different things have decided nothing by it, nor was anything decided before:
    that would have been proposed to them as it is.
    """
    if not accepted:
        return None
    latest = max(ballot for ballot, _ in accepted)
    decisions = [decision for ballot, decision in accepted if ballot == latest]
    first = decisions[0]
    if all(replace(d, holders=()) == replace(first, holders=()) for d in decisions):
        return first
    return None


def read_decisions(
    told: Sequence[bytes], members: Sequence[Member], *, after: int | None = None
) -> list[Decision]:
    """Decisions that follow on one another, of those that are told, as far as there is no gap.

    Args:
        told: encoded, in order.
        members: before the first of them that is not known yet.
        after: the index of the last that is known; None for nothing.

    Raises:
        RemoteProtocolError: one is malformed, or names who is not there.
    """
    found: list[Decision] = []
    for payload in map(DecisionPayload.decode, told):
        if after is None or payload.index == after + 1:
            found.append(payload.after(members))
            after, members = payload.index, found[-1].members
    return found


def _written(proposed: Proposed, members: Sequence[Member]) -> Proposal:
    table = table_of(proposed.decision, members)
    plan = proposed.plan
    return Proposal(
        attempt=proposed.attempt,
        decision=proposed.decision.encode(members),
        acceptors=place_peers(proposed.acceptors, table),
        plan=write_plan(plan, table).encode() if plan is not None else b"",
    )
