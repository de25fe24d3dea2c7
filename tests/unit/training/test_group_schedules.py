"""Schedules in which a group once went wrong, message by message; and what no schedule may bring it to do."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import pytest

from neurogrid.errors import RemoteProtocolError
from neurogrid.training.averaging.rounds import (
    Decided,
    Fetch,
    GroupMachine,
    Message,
    Reduce,
    Send,
    read_decisions,
)
from neurogrid.training.wire import (
    Candidate,
    Decision,
    GroupSettings,
    Lead,
    Member,
    Plan,
    Promise,
    Proposal,
    Status,
)
from tests.unit.training.simulated_group import SHAPE, Faults, SimulatedGroup

SETTINGS = GroupSettings(min_members=1, grace=10.0)


class Members:
    """Machines whose messages arrive when, and if, a test says so."""

    def __init__(self, names: str, settings: GroupSettings = SETTINGS) -> None:
        self.now, self.settings = 0.0, settings
        self.machines: dict[str, GroupMachine] = {}
        self.sent: list[tuple[str, Send]] = []
        self.fetches: dict[str, Fetch] = {}
        self.reductions: dict[str, tuple[str, ...]] = {}  # their members, by who carries them out
        self.decided: dict[int, set[tuple[Member, ...]]] = {}
        self._numbers = itertools.count(1)
        first = Decision(1, 0, tuple(names), (1,) * len(names))
        for name in names:
            self.start(Member(name, 1), [first], term=1, leader=names[0])

    def start(
        self,
        me: Member,
        history: list[Decision],
        *,
        term: int,
        leader: str,
        before: tuple[Member, ...] = (),
    ) -> None:
        self.machines[me.peer] = GroupMachine(
            me,
            self.settings,
            SHAPE,
            history,
            term=term,
            leader=leader,
            before=before,
            now=self.now,
            draw=lambda: next(self._numbers),
        )

    def start_joiner(self, me: Member, leader: str) -> None:
        """One that was admitted by the last decision of a leader, and has its answer."""
        before, told = self.machines[leader].told_to_joiner()
        history, term = read_decisions(told, before), self.machines[leader].term
        self.start(me, history, term=term, leader=leader, before=before)

    def collect(self) -> None:
        for name, machine in self.machines.items():
            for action in machine.drain():
                if isinstance(action, Send):
                    self.sent.append((name, action))
                elif isinstance(action, Fetch):
                    self.fetches[name] = action
                elif isinstance(action, Reduce):
                    self.reductions[name] = action.plan.members
                elif isinstance(action, Decided):
                    told = self.decided.setdefault(action.decision.index, set())
                    told.add(action.decision.members)

    def tick(self, *names: str, after: float = 0.0) -> None:
        self.now += after
        for name in names:
            self.machines[name].tick(self.now)
        self.collect()

    def tell(self, sender: str, to: str, kind: type[Message] = Lead) -> None:
        """Deliver the last message of a kind from one to the other."""
        self.collect()
        found = [
            send.message
            for name, send in self.sent
            if name == sender and send.to == to and isinstance(send.message, kind)
        ]
        self.machines[to].receive(sender, found[-1], self.now)
        self.collect()

    def has_sent(self, sender: str, to: str, kind: type[Message]) -> bool:
        return any(
            (name, send.to) == (sender, to) and isinstance(send.message, kind)
            for name, send in self.sent
        )

    def report(self, leader: str, *names: str) -> None:
        """Each tells how it stands."""
        for name in names:
            self.machines[leader].receive(name, self.machines[name].status(), self.now)
        self.collect()


def test_a_promise_of_an_earlier_process_is_none_of_the_next() -> None:
    """C was promised by P, which was started again, and follows A, and decides with it and B."""
    group = Members("ABXPC")
    group.tick("C", after=10.0)
    group.tick("C", after=5.0)  # C stands
    group.tell("C", "P", Candidate)
    # P is started again, and joins where A leads. A knows B and X only.
    group.report("A", "B", "X")
    group.machines["A"].admit(Member("P", 2), group.now)
    group.tell("A", "B")
    group.tell("A", "X")
    group.report("A", "B", "X")
    second = group.machines["A"].last
    assert (second.index, Member("P", 2) in second.members) == (2, True)
    group.tell("A", "X")
    group.tell("A", "B")
    promise = next(
        send.message
        for name, send in reversed(group.sent)
        if (name, send.to) == ("P", "C") and isinstance(send.message, Promise)
    )
    group.start_joiner(Member("P", 2), "A")
    # C has the promises of the old P and of X, which tells what was decided.
    candidate = group.machines["C"]
    candidate.receive("P", promise, group.now)
    group.now += 6.0
    group.tick("C")
    group.machines["X"].receive("C", Candidate(1, candidate.term, candidate.index), group.now)
    group.collect()
    group.tell("X", "C", Promise)
    assert candidate.index == 2
    # A goes on with B and the new P.
    group.tick("A")
    group.report("A", "B", "P")
    group.machines["A"].admit(Member("J", 1), group.now)
    group.tell("A", "B")
    group.tell("A", "P")
    group.report("A", "B", "P")
    assert group.machines["A"].index == 3
    # So C cannot: it has one promise of four.
    assert not candidate.is_leading
    assert all(len(told) == 1 for told in group.decided.values())


def test_a_promise_may_bring_the_decision_that_its_sender_is_a_member_by() -> None:
    """Of five three are left: X has not heard what it accepted, and the new P is all that knows it, to C a stranger."""
    group = Members("ABXPC")
    leader, candidate = group.machines["A"], group.machines["C"]
    group.report("A", "B", "X")
    leader.admit(Member("P", 2), group.now)
    for name in "BX":
        group.tell("A", name)
    group.report("A", "B", "X")
    assert leader.index == 2
    group.start_joiner(Member("P", 2), "A")
    group.tick("C", after=10.0)
    group.tick("C", after=5.0)
    for name in "PX":
        group.tell("C", name, Candidate)
        group.tell(name, "C", Promise)
    assert candidate.index == 2
    assert candidate.is_leading


def test_one_that_joins_again_is_not_taken_for_the_silent_one_that_it_was() -> None:
    group = Members("ABC")
    leader = group.machines["A"]
    group.report("A", "B", "C")
    for _ in range(3):
        group.tick("A", after=8.0)
        group.report("A", "B")
    group.tell("A", "B")
    group.report("A", "B")
    assert [m.peer for m in leader.members] == ["A", "B"]
    # As C was heard last two graces ago, and is a member again from now on.
    leader.admit(Member("C", 2), group.now)
    group.tell("A", "B")
    group.report("A", "B")
    leader.admit(Member("J", 1), group.now)
    group.tell("A", "B")
    group.start_joiner(Member("C", 2), "A")
    group.report("A", "B", "C")
    group.tell("A", "B")
    group.report("A", "B", "C")
    assert leader.members == (("A", 1), ("B", 1), ("C", 2), ("J", 1))


def test_nobody_waits_for_a_member_whose_next_process_asks_to_join() -> None:
    """It has the place of the one before, and the round that waited for that one goes on."""
    group = Members("ACB")
    leader = group.machines["A"]
    for name in "AB":
        group.machines[name].contribute(1.0, group.now)
    group.report("A", "B", "C")
    assert leader.waits_for == ("C",)
    leader.admit(Member("C", 2), group.now)
    assert leader.waits_for == ()
    group.tell("A", "B")
    assert group.reductions == {"A": ("A", "B"), "B": ("A", "B")}


def test_a_leader_whose_next_process_asks_to_join_is_lost() -> None:
    group = Members("ABC")
    group.machines["B"].is_asked_by(Member("A", 1), group.now)  # the same, late
    assert group.machines["B"].leader == "A"
    group.machines["B"].is_asked_by(Member("A", 2), group.now)
    group.machines["C"].is_asked_by(Member("A", 2), group.now)
    group.tell("B", "C", Candidate)
    group.tell("C", "B", Promise)
    assert group.machines["B"].is_leading


def test_a_leader_that_cannot_adopt_asks_again() -> None:
    """X told C of a round, and is lost before anybody could fetch it: C, Y and Z go on without it."""
    group = Members("AXYZC")
    round_ = Decision(
        2, 1, tuple("AXYZC"), (1,) * 5, ("A", "X", "Y"), (1.0,) * 3, bytes(32), 10_000, 4096, "f32"
    )
    held = replace(round_, holders=("A", "X", "Y"))
    group.tick("C", after=10.0)
    group.tick("C", after=5.0)
    candidate = group.machines["C"]
    term = candidate.term
    candidate.receive("X", Promise(1, term, 1, (), 1, 1, held.encode(candidate.members)), group.now)
    for name in "YZ":
        group.tell("C", name, Candidate)
    group.tell("Y", "C", Promise)
    assert candidate.is_leading
    candidate.peer_lost("X", group.now)
    candidate.peer_lost("A", group.now)
    group.report("C", "Y", "Z")
    for name in "YZ":
        group.tell("C", name)
    for name in "YCZ":
        assert name in group.fetches, "it has accepted what it does not hold"
        fetch = group.fetches[name]
        lost = dict.fromkeys(fetch.holders, "it is gone")
        group.machines[name].failed(fetch.token, lost, group.now)
    group.report("C", "Y", "Z")
    assert not candidate.is_leading
    assert candidate.term > term
    for name in "YZ":
        group.tell("C", name, Candidate)
        group.tell(name, "C", Promise)
    assert candidate.is_leading
    group.report("C", "Y", "Z")
    candidate.admit(Member("J", 1), group.now)
    for name in "YZ":
        group.tell("C", name)
    group.report("C", "Y", "Z")
    assert Member("J", 1) in candidate.members


def test_a_leader_that_adopted_other_members_asks_them() -> None:
    """A has decided on new members, and goes on with them; C hears of them from B, and not what they have accepted."""
    group = Members("ABCX")
    leader, candidate = group.machines["A"], group.machines["C"]
    for name in "JK":
        leader.admit(Member(name, 1), 0.0)
    group.tick("A")
    group.report("A", "B")
    group.tell("A", "B")
    group.report("A", "B")
    assert leader.index == 2
    for name in "JK":
        group.start_joiner(Member(name, 1), "A")
    group.report("A", "J", "K")
    leader.admit(Member("L", 1), group.now)
    for name in "JK":
        group.tell("A", name)
    group.report("A", "J", "K")
    assert leader.index == 3
    # C hears no more of A than B had accepted.
    group.tick("C", after=10.0)
    group.tick("C", after=5.0)
    for name in "BX":
        group.tell("C", name, Candidate)
        group.tell(name, "C", Promise)
    assert candidate.is_leading
    group.report("C", "B", "X")
    for name in "BX":
        group.tell("C", name)
    group.report("C", "B", "X")
    assert candidate.index == 2
    # With the members that it knew before it cannot decide on anything else.
    candidate.admit(Member("Z", 1), group.now)
    for name in "BX":
        group.tell("C", name)
    group.report("C", "B", "X")
    for name in "BX":
        group.tell("C", name)
    group.report("C", "B", "X")
    assert all(len(told) == 1 for told in group.decided.values())
    assert not candidate.is_leading
    assert candidate.index == 2


def test_no_two_lead_in_one_term() -> None:
    """C promised L, which leads, and then stands itself; what it decides is not taken for what L proposed."""
    group = Members("ALCXY")
    machines = group.machines
    group.tick("L", after=10.0)
    group.tick("L")
    for name in "CY":
        group.tell("L", name, Candidate)
        group.tell(name, "L", Promise)
    assert machines["L"].is_leading
    machines["L"].admit(Member("J", 1), group.now)
    group.report("L", "C", "Y")
    group.tell("L", "Y")  # which accepts
    group.report("A", "Y")  # which leads no more
    assert not machines["A"].is_leading
    group.tick("C", after=16.0)  # L has told C of no leading
    group.tick("C", after=5.0)
    for name in "AX":
        group.tell("C", name, Candidate)
        group.tell(name, "C", Promise)
    assert machines["C"].is_leading
    machines["C"].admit(Member("K", 1), group.now)
    group.report("C", "A", "X")
    for name in "AX":
        group.tell("C", name)
    group.report("C", "A", "X")
    assert machines["C"].index == 2
    # C is lost before anybody has heard of it.
    for _ in range(4):
        group.tick("Y", after=20.0)
        group.tick("Y", after=5.0)
        for name in "AX":
            group.tell("Y", name, Candidate)
            if group.has_sent(name, "Y", Promise):
                group.tell(name, "Y", Promise)
    assert machines["Y"].is_leading
    machines["Y"].admit(Member("Q", 1), group.now)
    for _ in range(2):
        group.report("Y", "A", "X")
        for name in "AX":
            group.tell("Y", name)
    group.report("Y", "A", "X")
    assert machines["Y"].index > 1
    assert all(len(told) == 1 for told in group.decided.values())


def test_a_leader_adopts_what_was_accepted_last() -> None:
    group = Members("ABCXY")
    candidate = group.machines["C"]
    first, last = (Decision(2, 0, (*"ABCXY", name), (1,) * 6) for name in ("one", "two"))
    group.tick("C", after=10.0)
    group.tick("C", after=5.0)
    for peer, attempt, told in (("B", 2, last), ("X", 1, first)):
        accepted = told.encode(candidate.members)
        promise = Promise(1, candidate.term, 1, (), 1, attempt, accepted)
        candidate.receive(peer, promise, group.now)
    assert candidate.is_leading
    group.report("C", "B", "X")
    for _ in range(2):
        for name in "BX":
            group.machines["C"].tick(group.now)
            group.tell("C", name)
        group.report("C", "B", "X")
    assert candidate.last.members == last.members


def test_a_member_takes_over_the_next_decision_alone() -> None:
    machine = Members("AB").machines["B"]
    third = Decision(3, 0, ("A", "B"), (1, 1))
    machine.receive("A", Lead(1, 3, (third.encode(machine.members),)), 0.0)
    assert machine.index == 1


def test_candidates_stand_the_further_apart_the_more_terms_come_to_nothing() -> None:
    """Where messages take long, the first is to be heard before the second stands; and nobody waits for ever longer."""
    group = Members("ABC")
    stood: dict[str, list[float]] = {"B": [], "C": []}
    for _ in range(4 * 250):
        for name, times in stood.items():
            term = group.machines[name].term
            group.tick(name)
            if group.machines[name].term > term:
                times.append(group.now)
        group.now += 0.25
    for place, times in ((1, stood["B"]), (2, stood["C"])):
        pauses = [later - before for before, later in itertools.pairwise(times)]
        # A heartbeat, and for each place half a grace, doubled twice.
        assert pauses[:3] == [1 + (1 + place) * 5.0 * factor for factor in (1, 2, 4)]
        assert {*pauses[3:]} == {1 + (1 + place) * 20.0}


def test_a_member_gives_whom_it_promised_the_time_to_be_heard_by_others() -> None:
    """A candidate needs C's promise, too, which takes longer than the grace to come."""
    group = Members("ABC")
    group.tick("B", after=10.0)
    group.tick("B", after=1.0)
    group.tell("B", "C", Candidate)
    promised_at, term = group.now, group.machines["C"].term
    patience = 1.0 + 3 * 5.0
    while group.now < promised_at + patience:
        group.tick("C")
        assert group.machines["C"].term == term, f"stood after {group.now - promised_at:g} s"
        group.now += 0.5
    group.tick("C")
    group.tick("C", after=1.0)  # for A is before it
    assert group.machines["C"].term > term


def promised() -> Members:
    """C has promised B the third term."""
    group = Members("ABC")
    group.now = 10.0
    group.machines["C"].receive("B", Candidate(1, 3, 1), group.now)
    assert (group.machines["C"].term, group.machines["C"].leader) == (3, "B")
    return group


def test_a_member_accepts_nothing_under_a_lesser_term() -> None:
    group = promised()
    decision = Decision(2, 0, ("A", "B", "C", "J"), (1,) * 4)
    proposal = Proposal(1, decision.encode(group.machines["C"].members), (0, 2)).encode()
    group.machines["C"].receive("A", Lead(1, 1, (), proposal), group.now)
    assert group.machines["C"].status().accepted_attempt == 0


def test_a_member_promises_no_lesser_term() -> None:
    group = promised()
    group.machines["C"].receive("A", Candidate(1, 2, 1), group.now + 20.0)
    group.collect()
    assert group.machines["C"].term == 3
    assert not group.has_sent("C", "A", Promise)


def test_a_member_promises_a_term_to_one_alone() -> None:
    group = promised()
    group.machines["C"].receive("A", Candidate(1, 3, 1), group.now + 20.0)
    group.collect()
    assert group.machines["C"].leader == "B"
    assert not group.has_sent("C", "A", Promise)


def test_a_member_looks_at_no_proposal_before_the_last_that_it_looked_at() -> None:
    """One that is late changes nothing of what the member has accepted under the ballot of the later one."""
    group = Members("ABC")
    late, last = (Decision(2, 0, (*"ABC", name), (1,) * 4) for name in "JK")
    for attempt, decision in ((2, last), (1, late)):
        encoded = decision.encode(group.machines["C"].members)
        proposal = Proposal(attempt, encoded, (0, 1, 2)).encode()
        group.machines["C"].receive("A", Lead(1, 1, (), proposal), group.now)
    group.machines["C"].receive("B", Candidate(1, 2, 1), group.now + 20.0)
    group.collect()
    (promise,) = [send.message for name, send in group.sent if isinstance(send.message, Promise)]
    assert (promise.accepted_term, promise.accepted_attempt) == (1, 2)
    assert promise.accepted == last.encode(group.machines["C"].members)


def test_a_round_is_decided_while_most_members_observe() -> None:
    group = SimulatedGroup(5, Random(1), Faults())
    group.run(3)
    before = group.last.round
    contributing = list(group.nodes)[:2]
    for node in group.nodes.values():
        if node.machine.me.peer not in contributing:
            node.observes = True
            node.machine.withdraw(group.now)
            node.machine.observe(True, group.now)
    group.run(10)
    rounds = [d for d in group.by_index.values() if d.round > before + 2 and d.is_round]
    assert len(rounds) > 3
    assert all(set(d.contributors) <= set(contributing) for d in rounds)
    assert all(node.machine.round >= group.last.round - 1 for node in group.nodes.values())


ROUND = Decision(2, 1, ("A", "B"), (1, 1), ("A",), (1.0,), b"", 10_000, 4096, "f32")
PLAN = Plan(7, (0,), (0, 3), "f32", "mean", "butterfly")


@pytest.mark.parametrize(
    ("decision", "plan"),
    [
        (ROUND, None),
        (replace(ROUND, digest=bytes(32)), PLAN),
        (replace(ROUND, weights=(0.0,)), PLAN),
        (replace(ROUND, codec="f16"), PLAN),
        (replace(ROUND, index=3), PLAN),
        (ROUND, replace(PLAN, cuts=(0, 2))),
        (ROUND, replace(PLAN, reducers=(2,))),
        (ROUND, replace(PLAN, codec="f16")),
        (ROUND, replace(PLAN, aggregator="median")),
        (Decision(2, 0, ("A", "B"), (1, 1)), PLAN),
    ],
)
def test_a_round_is_proposed_with_its_own_plan(decision: Decision, plan: Plan | None) -> None:
    machine = Members("AB").machines["B"]
    encoded = plan.encode() if plan is not None else b""
    proposal = Proposal(1, decision.encode(machine.members), (0, 1), encoded)
    with pytest.raises(RemoteProtocolError):
        machine.receive("A", Lead(1, 1, (), proposal.encode()), 0.0)
    assert machine.status().accepted_attempt == 0


@pytest.mark.parametrize(
    "message", [Candidate(1, 2**32 + 2, 1), Lead(2**64 - 1, 1), Status(1, 2**40, 1)]
)
def test_one_member_cannot_use_up_all_terms(message: Message) -> None:
    machine = Members("AB").machines["B"]
    with pytest.raises(RemoteProtocolError, match="above all"):
        machine.receive("A", message, 0.0)
    assert machine.term == 1
