"""The leader's part of a member's machine: what to propose next, and when something is decided.

Pure. A proposal is decided when each of its acceptors has told the same digest for it; they must be as many as
`num_to_decide`. A leader never decides a proposal that it has gone on from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from neurogrid.training.averaging.plan import ReductionPlan, Way
from neurogrid.training.averaging.rounds.plans import Shape, make_plan
from neurogrid.training.averaging.rounds.quorums import num_to_decide
from neurogrid.training.wire import (
    MAX_GROUP_MEMBERS,
    MAX_NEW_ADDRESSES,
    Ballot,
    Decision,
    GroupSettings,
    Member,
    Status,
)

__all__ = ["MAX_JOINERS", "Leader", "Progress", "Proposed"]

MAX_JOINERS: Final = 64
"""Peers that are added by one decision, and that may wait for it."""

_ADDRESSES_OF_A_JOINER: Final = MAX_NEW_ADDRESSES // MAX_JOINERS

# A member that is blamed while it is there may have been unlucky: it is tried once more.
_MAX_STRIKES: Final = 2
# Of the grace: a member that was silent for so long is no member any more.
_GRACES_UNTIL_REMOVED: Final = 2
# Of the grace: so long others aggregate for two members that could not hear each other.
_GRACES_APART: Final = 30
# A member that cannot make it by the grace is waited for that long at most, in the last of so many rounds.
_MAX_GRACES: Final = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a group, as its leader knows it.

    Attributes:
        index: of the last decision.
        round: rounds decided.
        members: since that decision.
    """

    index: int
    round: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Proposed:
    """A proposal: a decision as it is, or a round that is to be computed (`plan`)."""

    attempt: int
    decision: Decision
    acceptors: tuple[str, ...]
    plan: ReductionPlan | None = None


@dataclass(slots=True)
class _Heard:
    """Record of a member: its last status, and when it was heard.

    Attributes:
        at: when it was heard last.
        status: what it said; None for nothing yet.
        gone_at: since when no stream leads to it; None while one does.
    """

    at: float
    status: Status | None = None
    gone_at: float | None = None


@dataclass(slots=True)
class Leader:
    """A leader in one term.

    Args:
        me: this member.
        term: its term.
        settings: of the group.
        shape: the vector that the group averages.
        draw: a random u64, above zero.
        to_adopt: a decision that may have been decided in an earlier term: it is proposed before anything else.

    Attributes:
        proposed: what is proposed; None for nothing.
        waits_for: peer ids of the members that a round waits for.
        is_leaving: this member would go, once the group has decided to be without it.
        cannot_adopt: a member failed at what is to be adopted; whether it has to be is to be asked again.
        expected: peer ids of members that rounds wait for even if they have said that they contribute nothing.
        due: by peer id, when members have their next vectors at the earliest, in seconds of the clock of `now`; none
            for those of which nothing is known.
    """

    me: Member
    term: int
    settings: GroupSettings
    shape: Shape
    draw: Callable[[], int]
    to_adopt: Decision | None = None
    proposed: Proposed | None = None
    waits_for: tuple[str, ...] = ()
    is_leaving: bool = False
    cannot_adopt: bool = False
    expected: frozenset[str] = frozenset()
    due: Mapping[str, float] = field(default_factory=dict)
    _attempt: int = 0
    _members: tuple[Member, ...] = ()
    _heard: dict[str, _Heard] = field(default_factory=dict)
    _joiners: dict[str, tuple[Member, tuple[str, ...]]] = field(default_factory=dict)
    _leavers: set[Member] = field(default_factory=set)
    _strikes: Counter[str] = field(default_factory=Counter)
    _apart: dict[frozenset[str], float] = field(default_factory=dict)
    _struck_at: float = 0.0
    _quorum_since: float | None = None
    # By peer id, rounds in a row that it was a member in and not a contributor.
    _passed_over: Counter[str] = field(default_factory=Counter)
    _bandwidths: dict[str, float] = field(default_factory=dict)

    # What is heard

    def hears(self, peer: str, status: Status | None, now: float) -> None:
        """A member has said something."""
        heard = self._heard.setdefault(peer, _Heard(now))
        heard.at, heard.gone_at = now, None
        if status is not None:
            heard.status = status
            self._bandwidths[peer] = status.bandwidth

    def loses(self, peer: str, now: float) -> None:
        """No stream leads to a peer any more."""
        heard = self._heard.setdefault(peer, _Heard(now))
        if heard.gone_at is None:
            heard.gone_at = now

    def heard_before(self, peer: str, at: float) -> None:
        """A member was heard then, before this one led."""
        self._heard[peer] = _Heard(at)

    def admits(self, member: Member, addresses: Sequence[str]) -> bool:
        """A peer would join, and can be dialled at these addresses; False where too many would."""
        if len(self._joiners) >= MAX_JOINERS and member.peer not in self._joiners:
            return False
        self._joiners[member.peer] = member, tuple(addresses[:_ADDRESSES_OF_A_JOINER])
        return True

    def dismisses(self, member: Member) -> None:
        """A member has said that it goes."""
        if member.peer in self._joiners and self._joiners[member.peer][0] == member:
            del self._joiners[member.peer]
        self._leavers.add(member)

    def has_company(self, members: Iterable[Member], now: float) -> bool:
        """Whether another member is there that could lead after this one."""
        return any(m != self.me and self._is_there(m.peer, now) for m in members)

    def status_of(self, peer: str) -> Status | None:
        """The last status that a member has sent; None for nothing yet."""
        heard = self._heard.get(peer)
        return heard.status if heard is not None else None

    # What is decided

    def step(self, progress: Progress, own: Status, now: float) -> Decision | None:
        """Go as far as what was heard allows.

        Args:
            progress: where the group is.
            own: what this member would tell a leader.
            now: seconds.

        Returns:
            What is decided now, if anything is. `proposed` may be another one after the call.
        """
        self._note_members(progress.members, now)
        self.hears(self.me.peer, own, now)
        if self.proposed is not None:
            decided = self._outcome(self.proposed, progress, now)
            if decided is not None:
                if decided.is_round:
                    self._note_round(decided)
                self._forget_index()
                return decided
        if self.proposed is None:
            self.proposed = self._next(progress, now)
        return None

    def _note_members(self, members: tuple[Member, ...], now: float) -> None:
        """A member counts from when it is one: what was heard of another process of its name says nothing of it."""
        before, self._members = self._members, members
        if members != before:
            known = {*before, *members}
            restarted = {m.peer for m in before} & {m.peer for m in members if m not in before}
            gone = {m.peer for m in known} - {m.peer for m in members}
            for peer in restarted | gone:
                self._heard.pop(peer, None)
        for member in members:
            self._heard.setdefault(member.peer, _Heard(now))

    def _forget_index(self) -> None:
        self.proposed = self.to_adopt = self._quorum_since = None
        self._strikes.clear()

    def _outcome(self, proposed: Proposed, progress: Progress, now: float) -> Decision | None:
        """The decision that a proposal has become; None while it is none, is given up, or makes room for another."""
        told: dict[str, bytes] = {}
        blamed: list[tuple[str, str]] = []
        failed = 0
        for peer in proposed.acceptors:
            status = self.status_of(peer)
            if status is None or status.index != progress.index:
                continue
            if status.ballot == Ballot(self.term, proposed.attempt):
                told[peer] = status.accepted
                if proposed.plan is None and status.accepted != proposed.decision.digest:
                    # Nobody who keeps to the rules accepts anything but what was proposed as it is.
                    self._strike([peer] * _MAX_STRIKES, now)
                    self.proposed = None
                    return None
            elif status.term == self.term and status.failed_attempt == proposed.attempt:
                failed += 1
                blamed += [(peer, other) for other in status.lost]
        if len(told) == len(proposed.acceptors):
            if len(set(told.values())) == 1:
                (digest,) = set(told.values())
                decision = replace(proposed.decision, digest=digest)
                if len(told) >= num_to_decide(len(progress.members)):
                    return decision
                self._propose_to_more(decision, proposed, progress, now)
                return None
            self._propose_the_likeliest(proposed, told)
            return None
        lost = [peer for peer in proposed.acceptors if not self._is_there(peer, now)]
        if not lost and blamed:
            lost = [self._most_blamed(blamed, proposed)]
            self._apart.update(dict.fromkeys(map(frozenset, blamed), now))
            self.cannot_adopt = self.to_adopt is not None
        if lost or len(told) + failed == len(proposed.acceptors):
            self._strike(lost, now)
            self.proposed = None
        return None

    def _propose_to_more(
        self, decision: Decision, proposed: Proposed, progress: Progress, now: float
    ) -> None:
        """Too few have computed an aggregate to decide on it: others, that are late or observe, are to fetch it."""
        able = [m.peer for m in self._there(progress, now) if self._is_able(m.peer)]
        others = [peer for peer in self._at(progress, able) if peer not in proposed.acceptors]
        staying = [peer for peer in others if peer in decision.peers]
        acceptors, enough = (*proposed.acceptors, *staying), num_to_decide(len(progress.members))
        if len(acceptors) >= enough:
            self.proposed = self._proposed(replace(decision, holders=proposed.acceptors), acceptors)
        elif len(proposed.acceptors) + len(others) >= enough:
            # Members that it would be without are there again: the next one keeps them.
            self.proposed = None

    def _propose_the_likeliest(self, proposed: Proposed, told: dict[str, bytes]) -> None:
        """Some have another aggregate: what most have is proposed as it is, and the others are to fetch it."""
        counts, own = Counter(told.values()), told.get(self.me.peer)
        digest = max(counts, key=lambda said: (counts[said], said == own))
        holders = tuple(peer for peer, said in told.items() if said == digest)
        self.proposed = self._proposed(
            replace(proposed.decision, digest=digest, holders=holders), proposed.acceptors
        )

    def _most_blamed(self, blamed: list[tuple[str, str]], proposed: Proposed) -> str:
        """Choose the member to go on without, of pairs of one that blames and one that is blamed.

        Either of the two may be at fault, so it is the one that is in most pairs, whoever is heard first; and of as
        many, the one that is blamed, and that comes last.
        """
        pairs: Counter[str] = Counter()
        named: Counter[str] = Counter()
        for peer, other in blamed:
            named[other] += 1
            if proposed.plan is None or peer == other:
                pairs[other] += 1
            elif _meet(peer, other, proposed.plan):
                pairs.update((peer, other))
            else:
                pairs[peer] += 2  # it says what it cannot know
        order = {peer: number for number, peer in enumerate(proposed.acceptors)}
        return max(
            pairs,
            key=lambda peer: (pairs[peer], named[peer], peer != self.me.peer, order.get(peer, -1)),
        )

    def _strike(self, peers: Iterable[str], now: float) -> None:
        self._struck_at = now
        self._strikes.update(peers)

    def _is_there(self, peer: str, now: float) -> bool:
        heard = self._heard.get(peer)
        if peer == self.me.peer:
            return True
        return heard is not None and heard.gone_at is None and now - heard.at < self.settings.grace

    def _there(self, progress: Progress, now: float) -> list[Member]:
        """The members that can be asked for anything: none that has said that it goes, whatever comes of it later."""
        return [
            m for m in progress.members if self._is_there(m.peer, now) and m not in self._leavers
        ]

    def _is_able(self, peer: str) -> bool:
        return self._strikes[peer] < _MAX_STRIKES

    def _at(self, progress: Progress, peers: Iterable[str]) -> tuple[str, ...]:
        """The peers among these that are as far as this member: they know the same last decision."""
        return tuple(
            peer
            for peer in peers
            if (status := self.status_of(peer)) is not None and status.index == progress.index
        )

    def _next(self, progress: Progress, now: float) -> Proposed | None:
        """Make the next proposal: a decision to adopt, a round, or a change of members; None if none can be made."""
        if self._strikes and now - self._struck_at >= self.settings.grace:
            self._strikes.clear()  # whatever was wrong may have passed
        there = self._there(progress, now)
        able = [m.peer for m in there if self._is_able(m.peer)]
        if self.to_adopt is not None:
            return self._adoption(self.to_adopt, progress, able)
        proposal = self._round(progress, there, able, now)
        members = self._next_members(progress, now)
        if proposal is None and members != progress.members:
            newcomers, addresses = self._introductions(progress, members)
            decision = Decision(
                progress.index + 1,
                progress.round,
                *_split(members),
                newcomers=newcomers,
                addresses=addresses,
            )
            proposal = self._accepted_by(decision, progress, able)
        return proposal

    def _adoption(self, decision: Decision, progress: Progress, able: list[str]) -> Proposed | None:
        holders = [
            peer
            for peer in able
            if (status := self.status_of(peer)) is not None
            and status.index == progress.index
            and status.accepted == decision.digest
        ]
        held = replace(decision, holders=tuple(holders) or decision.holders)
        return self._accepted_by(held, progress, able)

    def _accepted_by(
        self, decision: Decision, progress: Progress, able: list[str]
    ) -> Proposed | None:
        """A decision as it is, to be accepted by all that are there and as far as this member."""
        acceptors = self._at(progress, able)
        if len(acceptors) < num_to_decide(len(progress.members)):
            return None
        if self.me not in decision.members and acceptors == (self.me.peer,):
            return None  # nobody would know that this member has gone
        return self._proposed(decision, acceptors)

    def _round(
        self, progress: Progress, there: list[Member], able: list[str], now: float
    ) -> Proposed | None:
        """A round, if it is time for one."""
        weights: dict[str, float] = {}
        late: list[str] = []
        for member in there:
            status = self.status_of(member.peer)
            if status is not None and (status.index, status.ready_round) == (
                progress.index,
                progress.round + 1,
            ):
                if member.peer in able:
                    weights[member.peer] = status.weight
            elif status is None or not status.observes or member.peer in self.expected:
                late.append(member.peer)
        self.waits_for = tuple(late) if weights else ()
        enough = num_to_decide(len(progress.members))
        quorum = max(self.settings.quorum, 1)
        if len(weights) < quorum or not any(weights.values()) or self.is_leaving:
            self._quorum_since = None
            return None
        if progress.round == 0 and len(progress.members) < self.settings.min_members:
            return None
        if self._quorum_since is None:
            self._quorum_since = now
        if any(self._is_waited_for(peer, self._quorum_since, now) for peer in late):
            return None
        plan = make_plan(
            self.settings,
            self.shape,
            leader=self.me.peer,
            # By their ids: the same members give the same bits, whoever of them came first.
            weights=dict(sorted(weights.items())),
            bandwidths=self._bandwidths_of_reducers(weights, now),
            reduction=self.draw(),
        )
        acceptors = tuple(dict.fromkeys((*plan.members, *plan.reducers)))
        if len({*acceptors, *self._at(progress, able)}) < enough:
            return None
        members = self._next_members(progress, now)
        newcomers, addresses = self._introductions(progress, members)
        decision = Decision(
            progress.index + 1,
            progress.round + 1,
            *_split(members),
            contributors=plan.members,
            weights=plan.weights,
            num_elements=plan.num_elements,
            chunk_elements=plan.chunk_elements,
            codec=plan.result_codec,
            holders=acceptors,
            newcomers=newcomers,
            addresses=addresses,
        )
        return self._proposed(decision, acceptors, plan)

    def _is_waited_for(self, peer: str, since: float, now: float) -> bool:
        """Whether a round that has had its quorum since then waits for a member that is late."""
        due, grace = self.due.get(peer), self.settings.grace
        if due is None:
            return now - since < grace
        # Graces that rounds before did not wait for it: it would be too far behind before all of them are over.
        until = since + grace * min(1 + self._passed_over[peer], _MAX_GRACES)
        return max(now, due) < until

    def _note_round(self, decision: Decision) -> None:
        for peer in decision.peers:
            if peer in decision.contributors:
                self._passed_over.pop(peer, None)
            else:
                self._passed_over[peer] += 1

    def _bandwidths_of_reducers(self, peers: Collection[str], now: float) -> dict[str, float]:
        """Bandwidths, 0 for those that could not hear each other lately: others aggregate for both."""
        patience = _GRACES_APART * self.settings.grace
        self._apart = {pair: at for pair, at in self._apart.items() if now - at < patience}
        away = {peer for pair in self._apart if len(pair & set(peers)) == 2 for peer in pair}
        bandwidths = {peer: self._bandwidths.get(peer, 0.0) for peer in peers}
        kept = {peer: 0.0 if peer in away else value for peer, value in bandwidths.items()}
        return kept if any(kept.values()) else bandwidths

    def _next_members(self, progress: Progress, now: float) -> tuple[Member, ...]:
        """The members from the next decision on: without those that are lost or leave, with those that would join."""
        patience = _GRACES_UNTIL_REMOVED * self.settings.grace
        kept: dict[str, Member] = {}
        again: dict[str, Member] = {}  # the next processes of their names
        for member in progress.members:
            if member.peer in self._joiners and self._joiners[member.peer][0] != member:
                again[member.peer] = self._joiners[member.peer][0]
                continue
            heard = self._heard[member.peer]
            is_lost = heard.gone_at is not None and now - heard.gone_at >= self.settings.grace
            is_silent = now - heard.at >= patience and member != self.me
            if not (is_lost or is_silent or member in self._leavers):
                kept[member.peer] = member
        if self.is_leaving and len(progress.members) > 1:
            kept.pop(self.me.peer, None)
        kept.update(again)
        for peer, (member, _) in list(self._joiners.items()):
            if member in progress.members:
                del self._joiners[peer]
            elif peer in kept or len(kept) < MAX_GROUP_MEMBERS:  # else it waits for a place
                kept[peer] = member
        return tuple(kept.values()) or progress.members

    def _introductions(
        self, progress: Progress, members: tuple[Member, ...]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Addresses of newcomers, as `Decision.newcomers` and `Decision.addresses`."""
        places = [
            (member.peer, address)
            for member in members
            if member not in progress.members
            for address in self._joiners[member.peer][1]
        ]
        return tuple(peer for peer, _ in places), tuple(address for _, address in places)

    def _proposed(
        self, decision: Decision, acceptors: tuple[str, ...], plan: ReductionPlan | None = None
    ) -> Proposed:
        self._attempt += 1
        return Proposed(self._attempt, decision, acceptors, plan)


def _meet(one: str, other: str, plan: ReductionPlan) -> bool:
    """Whether two have to do with each other in a reduction."""
    reducers = (one in plan.reducers) + (other in plan.reducers)
    if plan.way is Way.GRID:  # within a row, and reducers of several
        return reducers == 2 or (reducers == 1 and plan.row_of(one) == plan.row_of(other))
    return plan.way is Way.EVERYBODY or reducers > 0


def _split(members: tuple[Member, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return tuple(m.peer for m in members), tuple(m.incarnation for m in members)
