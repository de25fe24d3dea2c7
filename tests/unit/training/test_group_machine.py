"""Whatever happens on the network, no two members of a group are told different things."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.training.averaging.rounds import machine
from neurogrid.training.averaging.rounds.quorums import num_to_decide, num_to_lead
from neurogrid.training.wire import Decision, Lead
from tests.unit.training.simulated_group import Faults, SimulatedGroup

FAULTS = st.builds(
    Faults,
    seconds=st.just(8.0),
    loss=st.sampled_from([0.0, 0.05, 0.3]),
    doubling=st.sampled_from([0.0, 0.2]),
    delay=st.sampled_from([0.01, 0.1, 0.6]),
    kills=st.integers(0, 2),
    stops=st.integers(0, 3),
    cuts=st.integers(0, 4),
    joins=st.integers(0, 2),
    leaves=st.integers(0, 1),
    wrong_bits=st.sampled_from([0.0, 0.0, 0.2]),
    restarts=st.integers(0, 2),
    untold=st.sampled_from([0.0, 0.0, 0.1]),
)


def can_go_on(group: SimulatedGroup) -> bool:
    """Whether enough are left of the members that the survivors know of, to decide and to lead."""
    survivors = [node for node in group.nodes.values() if node.counts]
    if not survivors:
        return False
    best = max(survivors, key=lambda node: node.machine.index).machine
    left = sum(
        (node := group.nodes.get(member.peer)) is not None and node.counts
        for member in best.members
    )
    need = max(num_to_decide(len(best.members)), num_to_lead(len(best.members)))
    return left >= max(need, group.settings.min_members if best.round == 0 else 0)


def check(num_members: int, faults: Faults, seed: int) -> None:
    """No two members are told different things, and when all is well again, those that are left go on."""
    group = SimulatedGroup(num_members, Random(seed), faults)
    group.run(faults.seconds)  # which asserts it at each decision
    group.heal()
    # As long as it may take to find out who is lost, and to find a leader, with two that stand in turn.
    group.run(faults.seconds + 10)
    if can_go_on(group):
        before = group.last.round
        group.run(faults.seconds + 16)
        assert group.last.round > before, (
            f"stuck after round {before} with {num_members}, {faults}, seed {seed}"
        )


@settings(max_examples=60)
@given(num_members=st.integers(1, 6), faults=FAULTS, seed=st.integers(0, 2**32))
def test_no_two_members_are_told_different_things(
    num_members: int, faults: Faults, seed: int
) -> None:
    check(num_members, faults, seed)


@pytest.mark.parametrize("is_far_behind", [False, True])
def test_who_is_none_any_more_learns_it_from_a_leader_of_a_lesser_term(is_far_behind: bool) -> None:
    """The two told each other the same for ever: it has promised a later term, and the leader knows it no more."""
    group = SimulatedGroup(3, Random(5), Faults())
    group.run(3)
    leader, *_, last = (node.machine for node in group.nodes.values())
    index, members = leader.index, leader.members
    last.term = last._greatest_term = leader.term + 2
    gone = Decision(
        index + 1,
        leader.round,
        tuple(m.peer for m in members if m != last.me),
        tuple(m.incarnation for m in members if m != last.me),
    )
    later = replace(gone, index=index + 9)
    if is_far_behind:
        last.receive(
            leader.me.peer, Lead(leader.term, index + 9, (later.encode(members),)), group.now
        )
        assert last.removed == "9 decisions were made without this member"
    else:
        told = gone.encode(members), later.encode(gone.members)
        last.receive(leader.me.peer, Lead(leader.term, index + 9, told), group.now)
        assert last.removed == "the group goes on without it"


@pytest.mark.parametrize("seed", [759, 862])
def test_candidates_agree_where_messages_take_more_than_half_of_the_grace(seed: int) -> None:
    check(6, Faults(delay=0.6, kills=2), seed)


@pytest.mark.parametrize("seed", range(20))
def test_a_leader_that_looks_at_its_members_now_and_then_decides_as_others(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of hundreds does: here of two and more, no more than ten times in a second."""
    monkeypatch.setattr(machine, "_FEW", 1)
    monkeypatch.setattr(machine, "_SECONDS_TO_LOOK", 0.002)
    check(5, Faults(loss=0.05, kills=1, stops=1, joins=1), seed)


@pytest.mark.long
@settings(max_examples=20_000)
@given(num_members=st.integers(1, 6), faults=FAULTS, seed=st.integers(0, 2**32))
def test_no_two_members_are_told_different_things_for_long(
    num_members: int, faults: Faults, seed: int
) -> None:
    check(num_members, faults, seed)


def test_a_quorum_that_decides_meets_one_that_leads() -> None:
    for number in range(1, 200):
        assert num_to_decide(number) + num_to_lead(number) == number + 1
        # Two leaders of one term would have a promise of one member in common.
        assert 2 * num_to_lead(number) > number


@pytest.mark.parametrize("num_members", [1, 2, 4, 7])
def test_where_nothing_goes_wrong_all_contribute_to_each_round(num_members: int) -> None:
    group = SimulatedGroup(num_members, Random(1), Faults())
    group.run(10)
    rounds = [decision for decision in group.by_index.values() if decision.is_round]
    assert len(rounds) > 8
    assert all(len(decision.contributors) == num_members for decision in rounds)
