"""Each rule of a group is needed: a machine without it is found out by simulated schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from neurogrid.errors import RemoteProtocolError
from neurogrid.training.averaging.rounds import Decided, GroupMachine, leader, machine
from neurogrid.training.averaging.rounds.leader import Leader
from neurogrid.training.wire import Ballot, Decision, DecisionPayload, Member
from tests.unit.training import test_group_schedules as schedules
from tests.unit.training.simulated_group import Faults, SimulatedGroup

Patch = pytest.MonkeyPatch


def some_faults(random: Random) -> Faults:
    """Bad, and not so bad that a group ends before anything can go wrong."""
    return Faults(
        seconds=10.0,
        loss=random.choice((0.0, 0.05, 0.2)),
        doubling=random.choice((0.0, 0.2)),
        delay=random.choice((0.05, 0.2, 0.8)),
        kills=random.choice((0, 0, 1)),
        stops=random.randrange(5),
        cuts=random.choice((0, 3, 8)),
        joins=random.randrange(4),
        leaves=random.choice((0, 0, 1)),
        wrong_bits=random.choice((0.0, 0.3)),
        restarts=random.choice((0, 0, 1)),
        untold=random.choice((0.0, 0.05, 0.15)),
    )


def survives(seed: int) -> bool:
    """Whether a schedule ends without two members that were told different things."""
    random = Random(seed)
    faults = some_faults(random)
    group = SimulatedGroup(random.randint(3, 7), random, faults)
    try:
        group.run(faults.seconds)
        group.heal()
        group.run(faults.seconds + 5)
    except (AssertionError, RemoteProtocolError, RecursionError):
        return False  # or one has told what cannot be, or decides the same for ever
    return True


def decides_without_all(patch: Patch) -> None:
    """Enough have told the same: those that have not are not waited for."""
    outcome = Leader._outcome

    def mutant(self: Leader, proposed: Any, progress: Any, now: float) -> Decision | None:
        ballot = Ballot(self.term, proposed.attempt)
        told = Counter(
            status.accepted
            for peer in proposed.acceptors
            if (status := self.status_of(peer)) is not None
            and (status.index, status.ballot) == (progress.index, ballot)
        )
        for digest, number in told.items():
            if number >= leader.num_to_decide(len(progress.members)):
                return replace(proposed.decision, digest=digest)
        return outcome(self, proposed, progress, now)

    patch.setattr(Leader, "_outcome", mutant)


def decides_with_fewer(patch: Patch) -> None:
    patch.setattr(leader, "num_to_decide", lambda number: max(1, (number + 1) // 2 - 1))


def leads_with_fewer(patch: Patch) -> None:
    patch.setattr(machine, "num_to_lead", lambda number: max(1, number // 2))


def adopts_nothing(patch: Patch) -> None:
    patch.setattr(machine, "_to_adopt", lambda accepted: None)


def adopts_the_earliest(patch: Patch) -> None:
    patch.setattr(
        machine,
        "_to_adopt",
        lambda accepted: min(accepted, key=lambda pair: pair[0])[1] if accepted else None,
    )


def leads_on_after_a_change(patch: Patch) -> None:
    """What was adopted has changed the members, and they are not asked."""
    step, stand = GroupMachine._step, GroupMachine._stand

    def mutant_step(self: Any, now: float) -> None:
        leading, index = self._lead, self.index
        self._stays = lambda: leading if self.index > index else None
        try:
            step(self, now)
        finally:
            self._stays = lambda: None

    def mutant_stand(self: Any, now: float) -> None:
        kept = self._stays() if hasattr(self, "_stays") else None
        if kept is not None:
            self._lead = kept
        else:
            stand(self, now)

    patch.setattr(GroupMachine, "_step", mutant_step)
    patch.setattr(GroupMachine, "_stand", mutant_stand)


def follows_a_lesser_term(patch: Patch) -> None:
    follow = GroupMachine._follow

    def mutant(self: Any, sender: str, message: Any, now: float) -> None:
        if message.term < self.term and self._lead is None:
            self.term, self.leader = message.term, sender
        follow(self, sender, message, now)

    patch.setattr(GroupMachine, "_follow", mutant)


def promises_a_lesser_term(patch: Patch) -> None:
    consider = GroupMachine._consider_candidate

    def mutant(self: Any, sender: str, message: Any, now: float) -> None:
        if message.term <= self.term and self._lead is None and self._candidacy is None:
            self.term, self.leader = message.term - 1, None
        consider(self, sender, message, now)

    patch.setattr(GroupMachine, "_consider_candidate", mutant)


def forgets_at_a_promise(patch: Patch) -> None:
    consider = GroupMachine._consider_candidate

    def mutant(self: Any, sender: str, message: Any, now: float) -> None:
        if message.term > self.term:
            self._accepted = None
        consider(self, sender, message, now)

    patch.setattr(GroupMachine, "_consider_candidate", mutant)


def forgets_when_it_stands(patch: Patch) -> None:
    stand = GroupMachine._stand

    def mutant(self: Any, now: float) -> None:
        self._accepted = None
        stand(self, now)

    patch.setattr(GroupMachine, "_stand", mutant)


def applies_what_it_accepts(patch: Patch) -> None:
    accept = GroupMachine._accept

    def mutant(self: Any, ballot: Ballot, decision: Decision, now: float) -> None:
        accept(self, ballot, decision, now)
        if self._accepted is not None:
            has_contributed = self.me.peer in decision.contributors
            self._actions.append(Decided(decision, has_contributed))

    patch.setattr(GroupMachine, "_accept", mutant)


def reports_what_it_had_before(patch: Patch) -> None:
    """What was accepted is told under the ballot that was looked at last."""
    status = GroupMachine.status

    def mutant(self: Any) -> Any:
        said = status(self)
        seen = self._seen
        if self._accepted is None or seen < self._accepted[0]:
            return said
        return replace(said, accepted_term=seen.term, accepted_attempt=seen.attempt)

    patch.setattr(GroupMachine, "status", mutant)


def decides_what_was_given_up(patch: Patch) -> None:
    """A report counts for whichever attempt of the term."""
    outcome = Leader._outcome

    def mutant(self: Leader, proposed: Any, progress: Any, now: float) -> Decision | None:
        for peer in proposed.acceptors:
            heard = self._heard.get(peer)
            if heard is not None and heard.status and heard.status.accepted_term == self.term:
                heard.status = replace(heard.status, accepted_attempt=proposed.attempt)
        return outcome(self, proposed, progress, now)

    patch.setattr(Leader, "_outcome", mutant)


def decides_on_differing_digests(patch: Patch) -> None:
    def mutant(self: Any, proposed: Any, told: dict[str, bytes]) -> None:
        digest = Counter(told.values()).most_common(1)[0][0]
        for peer in told:
            heard = self._heard[peer]
            heard.status = replace(heard.status, accepted=digest)

    patch.setattr(Leader, "_propose_the_likeliest", mutant)


def skips_decisions(patch: Patch) -> None:
    def mutant(self: Any, decisions: tuple[bytes, ...]) -> bool:
        for encoded in decisions:
            payload = DecisionPayload.decode(encoded)
            if payload.index > self.index:
                self._learn(payload.after(self.members))
        return self.removed is None

    patch.setattr(GroupMachine, "_learn_all", mutant)


def counts_promises_of_earlier_members(patch: Patch) -> None:
    """A candidate that has learned of other members counts what those before had promised."""
    may_lead = GroupMachine._may_lead

    def mutant(self: Any, now: float) -> None:
        candidacy = self._candidacy
        strangers = [m.peer for m in self.members if m.peer not in candidacy.promises]
        gone = [
            peer
            for peer, said in candidacy.promises.items()
            if Member(peer, said.incarnation) not in self.members
        ]
        for old, new in zip(gone, strangers, strict=False):
            incarnation = next(m.incarnation for m in self.members if m.peer == new)
            candidacy.promises[new] = replace(candidacy.promises[old], incarnation=incarnation)
        may_lead(self, now)

    patch.setattr(GroupMachine, "_may_lead", mutant)


def promises_a_term_twice(patch: Patch) -> None:
    consider = GroupMachine._consider_candidate

    def mutant(self: Any, sender: str, message: Any, now: float) -> None:
        if message.term == self.term and self._lead is None and self._candidacy is None:
            self.leader = sender
        consider(self, sender, message, now)

    patch.setattr(GroupMachine, "_consider_candidate", mutant)


def stands_in_a_term_that_it_promised(patch: Patch) -> None:
    """One of the members does, C."""
    stand = GroupMachine._stand

    def mutant(self: Any, now: float) -> None:
        if self.me.peer == "C" and self.term > 1:
            self._greatest_term = self.term = self.term - 1
        stand(self, now)

    patch.setattr(GroupMachine, "_stand", mutant)


def takes_what_it_cannot_hold(patch: Patch) -> None:
    """An aggregate is accepted before it has been fetched."""
    look = GroupMachine._look_at

    def mutant(self: Any, proposal: Any, now: float) -> None:
        self._held.add(DecisionPayload.decode(proposal.decision).digest)
        look(self, proposal, now)

    patch.setattr(GroupMachine, "_look_at", mutant)


def looks_at_a_ballot_again(patch: Patch) -> None:
    """A proposal that comes late is carried out after a later one, and reported as the later one."""
    look = GroupMachine._look_at

    def mutant(self: Any, proposal: Any, now: float) -> None:
        seen = self._seen
        if Ballot(self.term, proposal.attempt) < seen:
            self._seen = Ballot(0, 0)
            proposal = replace(proposal, attempt=seen.attempt)
        look(self, proposal, now)

    patch.setattr(GroupMachine, "_look_at", mutant)


def goes_on_without_an_acceptor(patch: Patch) -> None:
    """What is proposed ends the membership of one that is to accept it."""
    members = Leader._next_members

    def mutant(self: Leader, progress: Any, now: float) -> tuple[Member, ...]:
        kept = members(self, progress, now)
        if kept != progress.members and len(kept) > 2:
            kept = tuple(m for m in kept if m == self.me or m != kept[-1])
        return kept

    patch.setattr(Leader, "_next_members", mutant)


Mutant = Callable[[Patch], None]

MUTANTS: list[Mutant] = [
    decides_without_all,
    decides_with_fewer,
    leads_with_fewer,
    adopts_nothing,
    adopts_the_earliest,
    leads_on_after_a_change,
    follows_a_lesser_term,
    promises_a_lesser_term,
    forgets_at_a_promise,
    forgets_when_it_stands,
    applies_what_it_accepts,
    reports_what_it_had_before,
    decides_what_was_given_up,
    decides_on_differing_digests,
    skips_decisions,
    counts_promises_of_earlier_members,
    promises_a_term_twice,
    stands_in_a_term_that_it_promised,
    takes_what_it_cannot_hold,
    looks_at_a_ballot_again,
    goes_on_without_an_acceptor,
]


# The first of up to 40 schedules of which one finds it out.
FOUND_FROM: dict[Mutant, int] = {
    decides_without_all: 30,
    decides_with_fewer: 0,
    leads_with_fewer: 0,
    adopts_nothing: 0,
    forgets_at_a_promise: 40,
    forgets_when_it_stands: 170,
    applies_what_it_accepts: 0,
    reports_what_it_had_before: 0,
    decides_what_was_given_up: 0,
    decides_on_differing_digests: 30,
    goes_on_without_an_acceptor: 0,
}
# Those that take more coincidences than chance brings about, and a schedule that was written for them.
FOUND_BY: dict[Mutant, Callable[[], None]] = {
    leads_on_after_a_change: schedules.test_a_leader_that_adopted_other_members_asks_them,
    counts_promises_of_earlier_members: schedules.test_a_promise_of_an_earlier_process_is_none_of_the_next,
    adopts_the_earliest: schedules.test_a_leader_adopts_what_was_accepted_last,
    stands_in_a_term_that_it_promised: schedules.test_no_two_lead_in_one_term,
    follows_a_lesser_term: schedules.test_a_member_accepts_nothing_under_a_lesser_term,
    promises_a_lesser_term: schedules.test_a_member_promises_no_lesser_term,
    promises_a_term_twice: schedules.test_a_member_promises_a_term_to_one_alone,
    looks_at_a_ballot_again: schedules.test_a_member_looks_at_no_proposal_before_the_last_that_it_looked_at,
    skips_decisions: schedules.test_a_member_takes_over_the_next_decision_alone,
    takes_what_it_cannot_hold: schedules.test_a_leader_that_cannot_adopt_asks_again,
}


def name_of(mutant: Mutant) -> str:
    return mutant.__name__


@pytest.mark.parametrize("mutant", FOUND_FROM, ids=name_of)
def test_a_group_without_the_rule_is_found_out(mutant: Mutant, monkeypatch: Patch) -> None:
    first = FOUND_FROM[mutant]
    mutant(monkeypatch)
    assert not all(survives(seed) for seed in range(first, first + 40))


@pytest.mark.parametrize("mutant", FOUND_BY, ids=name_of)
def test_a_group_without_the_rule_fails_in_its_schedule(mutant: Mutant, monkeypatch: Patch) -> None:
    FOUND_BY[mutant]()
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        FOUND_BY[mutant]()


def test_a_group_with_all_rules_survives() -> None:
    assert all(survives(seed) for seed in range(40))


@pytest.mark.parametrize("seed", [243, 313, 475, 614, 676])
def test_a_member_that_is_back_is_not_asked_to_end_its_membership(seed: int) -> None:
    # It was lost when the round was proposed, and is there when more are to accept the aggregate.
    assert survives(seed)


@pytest.mark.long
def test_a_group_with_all_rules_survives_for_long() -> None:
    assert all(survives(seed) for seed in range(20_000))


def test_each_mutant_is_tried() -> None:
    assert {*FOUND_FROM, *FOUND_BY} == set(MUTANTS)
