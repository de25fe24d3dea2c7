"""The leader of a run as a pure machine: whatever happens to members, each sample of an epoch is used exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.audit import audit
from neurogrid.training.runs.entries import (
    DealtEntry,
    Entry,
    JoinedEntry,
    ResumedEntry,
    RoundEntry,
    RunEntry,
)
from neurogrid.training.runs.machine import RunMachine
from neurogrid.training.runs.state import Occupant, Phase, RunState, spans_of
from neurogrid.training.wire.runs import MAX_RANGES, Work
from tests.unit.training.simulated_run import RUN, SIZES, Cluster, drive, rules


def used(journal: list[Entry]) -> Counter[tuple[int, int]]:
    """How often each sample was used, as the journal says."""
    rounds: list[RoundEntry] = []
    for entry in journal:
        if isinstance(entry, ResumedEntry):
            rounds = [r for r in rounds if r.round <= entry.round]
        elif isinstance(entry, RoundEntry):
            rounds.append(entry)
    return Counter(
        (each.slice, number)
        for entry in rounds
        for each in entry.ranges
        for number in range(each.start, each.stop)
    )


def everything(times: int) -> Counter[tuple[int, int]]:
    return Counter(
        {(index, number): times for index, size in enumerate(SIZES) for number in range(size)}
    )


def test_one_member_trains_on_all_of_it_and_the_run_ends() -> None:
    cluster = Cluster(rules(), num_epochs=1)
    cluster.join()
    while cluster.state.phase is not Phase.ENDED:
        cluster.average()
    assert used(cluster.journal) == everything(1)
    assert cluster.state.num_used == sum(SIZES)


@pytest.mark.parametrize("projected", [True, False])
def test_each_member_has_the_work_at_hand_and_the_next(projected: bool) -> None:
    cluster = Cluster(rules(min_members=2, max_samples=None, projected=projected))
    cluster.join()
    assert cluster.machine.works(0) == ()
    cluster.join()
    for seat in (0, 1):
        # Nothing is ahead until the speed of both is known.
        assert [len(cluster.machine.works(each)) for each in (0, 1)] == [1 if projected else 2] * 2
        cluster.machine.measured(seat, 0.1)
    for seat in (0, 1):
        works = cluster.machine.works(seat)
        first = 2 if projected else 6  # a batch, to see how long it takes
        assert [work.num_samples for work in works] == [first, 6]
        assert [work.position for work in works] == [0.0, first / 2]
        assert works[1].stride == 1.0


def test_a_slow_member_gets_less_and_its_batches_count_for_more() -> None:
    cluster = Cluster(rules(min_members=3, max_samples=None, steps=10))
    cluster.machine.reserve("a")
    for seat, seconds in ((0, 0.1), (1, 0.1), (2, 0.5)):
        cluster.machine.measured(seat, seconds)
    for peer in ("a", "b", "c"):
        cluster.join(peer)
    fast, _, slow = (cluster.machine.works(seat)[0] for seat in range(3))
    assert fast.num_samples == 28
    # Two batches and a half of one.
    assert slow.num_samples == 5
    assert fast.stride == 10 / 14
    assert slow.stride == 10 / 3


def test_a_newcomer_has_one_batch_until_its_speed_is_known() -> None:
    cluster = Cluster(rules(min_members=2, max_samples=None))
    cluster.join()
    cluster.join()
    for seat in (0, 1):
        cluster.machine.measured(seat, 0.1)
    cluster.join()
    (first,) = cluster.machine.works(2)
    assert first.num_samples == 2
    cluster.average()
    (second,) = cluster.machine.works(2)
    assert second.num_samples == 2
    cluster.machine.measured(2, 0.1)
    assert [work.num_samples for work in cluster.machine.works(2)] == [2, 6]


def test_a_member_gets_first_what_it_has_itself() -> None:
    """And so does one that takes over from the journal; what it has is used up before others help with it."""
    cluster = Cluster(rules(min_members=2, projected=False), num_epochs=1)
    cluster.join(holds=(0, 3, 17))
    assert cluster.state.holds == {0: frozenset({0, 3})}
    cluster.join(holds=(2,))
    cluster.restarted()
    assert cluster.state.holds == {0: frozenset({0, 3}), 1: frozenset({2})}
    dealt: dict[int, list[int]] = {0: [], 1: []}
    for entry in cluster.journal:
        if isinstance(entry, DealtEntry):
            for seat, work in entry.works:
                dealt[seat] += [each.slice for each in work.ranges for _ in range(each.num_samples)]
    # Two works of six samples each: ten of its own, and two of what is left.
    assert sorted(dealt[0][:10]) == [0] * 7 + [3] * 3
    assert dealt[0][10:] == [1] * 2
    assert dealt[1] == [2] * 9 + [1] * 3
    cluster.lose("peer1")
    assert cluster.state.holds == {1: frozenset({2})}
    while cluster.state.phase is not Phase.ENDED:
        cluster.average()
        if len(cluster.members) < 2 and cluster.state.phase is Phase.TRAINING:
            cluster.join()
    assert used(cluster.journal) == everything(1)


def test_a_journal_names_no_slices_that_there_are_not() -> None:
    state = RunState(SIZES, seed=1)
    with pytest.raises(ConfigurationError, match="has slice 4 by the journal, and the data have 4"):
        state.apply(JoinedEntry(0, "peer", 1, "", ((1, 2), (3, 5))))


@pytest.mark.parametrize(
    ("numbers", "spans"),
    [
        ((), []),
        ((0,), [(0, 1)]),
        ((3,), [(3, 4)]),
        ((0, 1, 2, 5, 7, 8), [(0, 3), (5, 6), (7, 9)]),
        ((1, 9, 10, 11), [(1, 2), (9, 10)]),
    ],
)
def test_numbers_as_spans(numbers: tuple[int, ...], spans: list[tuple[int, int]]) -> None:
    assert list(spans_of(numbers, 10)) == spans


def test_parts_that_had_no_turn_are_synced_at_the_end() -> None:
    cluster = Cluster(rules(num_parts=3, max_rounds=4, max_samples=None))
    cluster.join()
    while cluster.state.phase is not Phase.ENDED:
        cluster.average()
    rounds = [entry for entry in cluster.journal if isinstance(entry, RoundEntry)]
    assert [bool(entry.ranges) for entry in rounds] == [True] * 4 + [False] * 2


def test_a_round_that_is_made_after_the_last_one_is_none_of_the_run() -> None:
    """A change has ended it sooner, and its members were at the work after that."""
    cluster = Cluster(rules(max_rounds=4, max_samples=None, projected=False))
    peer = cluster.join()
    _, second = cluster.machine.works(0)
    cluster.machine.rules = rules(max_rounds=1, max_samples=None, projected=False)
    cluster.average()
    assert cluster.state.phase is Phase.ENDED
    cluster.index, cluster.round = 2, 2
    assert cluster.decide({peer: float(second.share)}) == []
    assert (cluster.state.index, cluster.state.round) == (2, 1)
    assert audit([RUN, *cluster.journal]).problems == ()


def test_a_member_that_is_late_contributes_both_works_to_the_next_round() -> None:
    cluster = Cluster(rules(min_members=2, max_samples=None))
    late, other = cluster.join(), cluster.join()
    for seat in (0, 1):
        cluster.machine.measured(seat, 0.1)
    cluster.average(without=late)
    assert len(cluster.machine.works(0)) == 2
    cluster.train(late, 2)
    cluster.average()
    last = [entry for entry in cluster.journal if isinstance(entry, RoundEntry)][-1]
    assert dict(last.contributions) == {0: 2, 1: 1}
    assert cluster.state.seat_of(other) is not None


def test_a_contribution_of_another_weight_is_found() -> None:
    cluster = Cluster(rules(max_samples=None))
    peer = cluster.join()
    cluster.index = cluster.round = 1
    assert cluster.decide({peer: 7.0}) == [peer]
    assert sum(used(cluster.journal).values()) == 6


def test_a_contribution_of_less_than_a_work_is_of_none() -> None:
    """What else is in the round counts, and the journal is sound."""
    cluster = Cluster(rules(min_members=2, max_samples=None, projected=False))
    wrong, other = cluster.join(), cluster.join()
    cluster.index = cluster.round = 1
    assert cluster.decide({wrong: 0.5, other: 6.0}) == [wrong]
    assert sum(used(cluster.journal).values()) == 6
    assert len(cluster.machine.works(0)) == 2
    assert audit([RUN, *cluster.journal]).problems == ()


def test_a_round_of_no_works_is_no_round_of_the_run() -> None:
    cluster = Cluster(rules(min_members=2, max_samples=None, projected=False))
    wrong, _ = cluster.join(), cluster.join()
    cluster.average()
    cluster.index = cluster.round = 2
    assert cluster.decide({wrong: 0.5, "nobody": 6.0}) == [wrong, "nobody"]
    assert (cluster.state.index, cluster.state.round) == (2, 1)
    assert audit([RUN, *cluster.journal]).problems == ()
    cluster.machine.resume(1)
    cluster.note()
    assert audit([RUN, *cluster.journal]).problems == ()


def test_a_work_has_no_more_ranges_than_an_order_can_say() -> None:
    """Of slices of one sample, what a member trains on in a round would be 6,000; what came back, too."""
    sizes = (1,) * 20_000
    run = RunEntry(bytes(16), "leader", bytes(32), bytes(32), sizes, 1)
    some = rules(steps=500, batch_samples=12, max_samples=None, projected=False)
    machine = RunMachine(some, RunState(sizes, seed=1))
    for number, peer in enumerate("ab"):
        machine.joined(machine.reserve(peer), Occupant(peer, 1 + number), "")
    journal = machine.drain()
    machine.left(0, "lost")
    journal += machine.drain()
    works = [*machine.works(1)]
    for entry in journal:
        if isinstance(entry, DealtEntry):
            works += [work for _, work in entry.works]
    assert max(len(work.ranges) for work in works) == MAX_RANGES
    for work in works:
        told = Work(work.number, work.position, work.stride, 12, work.weight, work.ranges)
        assert Work.decode(told.encode()) == told
    assert audit([run, *journal]).problems == ()


def test_members_are_found_for_works_that_wait_for_somebody() -> None:
    """A run whose hours are over while it waits for its members goes on with them; others it does not need."""
    cluster = Cluster(rules(min_members=2, max_samples=None, projected=False))
    assert cluster.machine.wants_members
    cluster.join("a")
    cluster.join("b")
    cluster.average()
    cluster.restarted()
    cluster.machine.resume(1)
    cluster.machine.stop("hours are over")
    assert cluster.state.phase is Phase.FINISHING
    assert (cluster.machine.wants_members, cluster.machine.num_free) == (True, 2)
    cluster.join("a")
    assert cluster.machine.works(0) == ()
    assert (cluster.machine.wants_members, cluster.machine.num_free) == (True, 1)
    cluster.join("b")
    assert (cluster.machine.wants_members, cluster.machine.num_free) == (False, 0)
    cluster.index, cluster.round = 0, 1
    cluster.average()
    cluster.average()
    assert cluster.state.phase is Phase.ENDED
    assert (cluster.machine.wants_members, audit([RUN, *cluster.journal]).problems) == (False, ())


def test_vacant_seats_have_the_last_syncs_too() -> None:
    """A run that is to stop while it waits for its members: what they learn in their last works is of all parts."""
    cluster = Cluster(rules(min_members=2, max_samples=None, projected=False, num_parts=3))
    cluster.join("a")
    cluster.join("b")
    cluster.average()
    cluster.restarted()
    cluster.machine.resume(1)
    assert not cluster.state.occupied()
    cluster.machine.stop("hours are over")
    cluster.join("a")
    cluster.note()
    # Another leader, before the second one is back: nothing is dealt twice.
    cluster.restarted()
    cluster.machine.resume(1)
    cluster.machine.stop("hours are over")
    cluster.join("a")
    cluster.join("b")
    for seat in cluster.state.occupied():
        assert [bool(work.ranges) for work in seat.works[-3:]] == [True, False, False]
    cluster.index, cluster.round = 0, 1
    while cluster.state.phase is not Phase.ENDED:
        cluster.average()
    last = [entry for entry in cluster.journal if isinstance(entry, RoundEntry)][-3:]
    assert [bool(entry.ranges) for entry in last] == [True, False, False]
    assert audit([RUN, *cluster.journal]).problems == ()


def test_what_is_resumed_deals_what_was_dealt() -> None:
    cluster = Cluster(rules(min_members=2, max_samples=None))
    cluster.join("a")
    cluster.join("b")
    for _ in range(3):
        cluster.average()
    wanted = [cluster.machine.works(seat) for seat in (0, 1)]
    cluster.average()
    cluster.average()
    cluster.restarted()
    cluster.machine.resume(3)
    assert not any(cluster.state.occupied())
    cluster.join("c")
    assert cluster.machine.works(0) == ()
    cluster.join("d")
    assert [cluster.machine.works(seat) for seat in (0, 1)] == wanted


def test_a_leader_that_goes_on_can_go_back_as_far_as_it_has_kept() -> None:
    cluster = Cluster(rules(min_members=1, max_samples=None))
    # As one that has read its journal, and can be resumed where it was.
    cluster.state._resumable = {0}
    cluster.state.keep_all()
    cluster.join("a")
    works = []
    for _ in range(3):
        cluster.average()
        works.append(cluster.machine.works(0))
    cluster.state.forget_before(2)
    with pytest.raises(ConfigurationError, match="no round 1"):
        cluster.machine.resume(1)
    cluster.machine.resume(2)
    assert cluster.state.round == 2
    cluster.join("b")
    assert cluster.machine.works(0) == works[1]


def test_a_vacant_seat_that_nobody_takes_is_dealt_to_the_rest() -> None:
    cluster = Cluster(rules(min_members=1), num_epochs=1)
    cluster.join("a")
    cluster.join("b")
    cluster.average()
    cluster.restarted()
    cluster.machine.resume(1)
    cluster.join("a")
    (vacant,) = cluster.state.vacant()
    cluster.machine.left(vacant.number, "nobody came")
    cluster.note()
    cluster.index, cluster.round = 0, 1
    while cluster.state.phase is not Phase.ENDED:
        cluster.average()
    assert used(cluster.journal) == everything(1)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_each_sample_is_used_once_whatever_happens(data: st.DataObject) -> None:
    num_epochs = data.draw(st.integers(1, 2))
    cluster = Cluster(
        rules(
            max_samples=num_epochs * sum(SIZES),
            num_parts=data.draw(st.integers(1, 2)),
            projected=data.draw(st.booleans()),
            steps=data.draw(st.integers(1, 4)),
        ),
        num_epochs=num_epochs,
    )
    drive(cluster, data)
    assert cluster.state.phase is Phase.ENDED
    assert used(cluster.journal) == everything(num_epochs)


def test_an_altered_journal_is_noticed() -> None:
    cluster = Cluster(rules(max_samples=None, projected=False))
    cluster.join()
    joined, began, dealt, _ = cluster.journal
    state = RunState(SIZES, seed=2)
    state.apply(joined)
    state.apply(began)
    with pytest.raises(ConfigurationError, match="other samples"):
        state.apply(dealt)


def test_a_ban_is_longer_each_time_and_outlasts_what_is_taken_back() -> None:
    cluster, now = Cluster(rules(max_samples=None)), 1_800_000_000.5
    peer = cluster.join()
    cluster.join()
    cluster.average()
    assert cluster.state.ban_of(peer, now) is None
    lasts = []
    for _ in range(5):
        entry = cluster.machine.ban(peer, "it took what was not its own", now=now)
        lasts.append(entry.until and entry.until - entry.at)
        assert cluster.state.ban_of(peer, now) == entry
    assert lasts == [3600, 36_000, 360_000, 0, 0]
    other = cluster.machine.ban("other", "", now=now)
    assert other.number == 6
    assert cluster.state.ban_of("other", other.until - 1) == other
    assert cluster.state.ban_of("other", other.until) is None
    cluster.note()
    cluster.machine.resume(0)
    cluster.note()
    for _ in range(2):
        assert cluster.state.ban_of(peer, now + 10**9) is not None
        cluster.restarted()


def test_a_seat_of_who_is_banned_is_left_and_its_samples_are_dealt_to_others() -> None:
    cluster = Cluster(rules(), num_epochs=1)
    cheat = cluster.join()
    cluster.join()
    cluster.ban(cheat)
    assert cluster.state.seat_of(cheat) is None
    while cluster.state.phase is not Phase.ENDED:
        cluster.average()
    assert used(cluster.journal) == everything(1)
    assert audit(
        [RunEntry(bytes(16), "leader", bytes(32), bytes(32), tuple(SIZES), 1), *cluster.journal]
    ).is_sound
