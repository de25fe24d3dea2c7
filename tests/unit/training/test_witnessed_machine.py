"""Phases of a witnessed run, one thing at a time: what Psyche's acceptance tests have, and what else may happen."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from neurogrid.training.witnessed import (
    BloomFilter,
    Checkpointed,
    Commitment,
    Committed,
    Eject,
    EpochEnd,
    EpochPhase,
    EpochRules,
    EpochState,
    Event,
    Gone,
    Health,
    Joined,
    Left,
    Pause,
    Resume,
    Stop,
    Unhealthy,
    Warm,
    Witnessed,
    WitnessProof,
    due,
    event_json,
    event_of,
    filter_salt,
    seat_item,
    tick,
)
from neurogrid.training.witnessed.machine import MAX_EVENTS
from neurogrid.training.witnessed.phases import MAX_BARRED, MAX_PENDING
from tests.unit.training.simulated_witnessed import RULES, WitnessedRun, fold

WAITING = EpochPhase.WAITING_FOR_MEMBERS
WARMUP, TRAIN = EpochPhase.WARMUP, EpochPhase.ROUND_TRAIN
WITNESS, COOLDOWN = EpochPhase.ROUND_WITNESS, EpochPhase.COOLDOWN
FINISHED, PAUSED = EpochPhase.FINISHED, EpochPhase.PAUSED
DRAW = bytes(32)


def health(run: WitnessedRun) -> dict[int, Health]:
    return {each.seat: each.health for each in run.state.members}


def agreed_seats(run: WitnessedRun) -> set[int]:
    return {each.seat for each in run.state.agreed}


# The acceptance list of Psyche


def test_connect_single_node() -> None:
    run = WitnessedRun()
    run.join("a")
    assert (run.state.phase, run.state.pending) == (WAITING, (("a", 1),))
    assert due(run.rules, run.state) is None
    run.wait(1e9)
    assert run.state.phase is WAITING
    alone = WitnessedRun(replace(RULES, min_members=1))
    alone.train("a")
    alone.round()
    assert (alone.state.round, agreed_seats(alone)) == (2, {0})


def test_connect_multiple_nodes() -> None:
    run = WitnessedRun(replace(RULES, min_members=5))
    run.join("a", "b", "c", "d")
    assert run.state.phase is WAITING
    run.join("e")
    assert run.state.phase is WARMUP
    assert [each.peer for each in run.state.members] == ["a", "b", "c", "d", "e"]
    assert run.state.healthy == (0, 1, 2, 3, 4)
    assert run.state.pending == ()


def test_state_change_waiting_for_members_to_warmup() -> None:
    run = WitnessedRun()
    run.join("a")
    run.now = 7.0
    run.join("b")
    assert (run.state.phase, run.state.began) == (WARMUP, 7.0)
    assert due(run.rules, run.state) == 37.0
    # Who comes in time is in the first round.
    run.join("c")
    assert run.state.healthy == (0, 1, 2)
    run.warm([0, 1])
    assert run.state.phase is WARMUP
    run.warm([2])
    assert (run.state.phase, run.state.seats) == (TRAIN, (0, 1, 2))


def test_shutdown_node_in_warmup() -> None:
    run = WitnessedRun()
    run.join("a", "b")
    run.warm([0])
    run.go(Left(1))
    assert (run.state.phase, run.state.healthy, run.state.epoch) == (WAITING, (0,), 0)
    # The one that is left waits, warm as it is, for another.
    run.join("c")
    assert (run.state.phase, run.state.healthy, run.state.ready) == (WARMUP, (0, 2), {0})
    run.warm([2])
    assert run.state.phase is TRAIN


def test_a_shutdown_in_warmup_that_leaves_enough_goes_on_without_it() -> None:
    run = WitnessedRun()
    run.join("a", "b", "c")
    run.warm([0, 1])
    run.go(Left(2))
    assert (run.state.phase, run.state.seats) == (TRAIN, (0, 1))
    assert health(run) == {0: Health.HEALTHY, 1: Health.HEALTHY}


def test_who_is_not_warm_in_time_is_dropped() -> None:
    run = WitnessedRun()
    run.join("a", "b", "c")
    run.warm([0, 2])
    run.wait(29.9)
    assert run.state.phase is WARMUP
    run.wait(0.1)
    assert (run.state.phase, run.state.seats) == (TRAIN, (0, 2))
    slow = WitnessedRun()
    slow.join("a", "b")
    slow.warm([0])
    slow.wait(30)
    assert (slow.state.phase, slow.state.healthy) == (WAITING, (0,))


def test_to_round_train() -> None:
    run = WitnessedRun()
    run.join("a", "b")
    run.now = 3.0
    run.warm()
    state = run.state
    assert (state.phase, state.began, state.round, state.round_of_epoch) == (TRAIN, 3.0, 1, 1)
    assert (state.first_batch, state.num_batches) == (0, 8)
    assert state.seed != bytes(32)
    assert sorted(run.parts.works) == [0, 1]
    assert sorted(run.parts.works.values()) == [(0, 4), (4, 4)]
    assert due(run.rules, state) == 23.0


def test_to_round_witness() -> None:
    run = WitnessedRun()
    run.train("a", "b")
    # By the time, whoever has sent what.
    run.wait(19.9)
    assert run.state.phase is TRAIN
    run.wait(0.1)
    assert run.state.phase is WITNESS
    # At once, when the quorum has all.
    early = WitnessedRun()
    early.train("a", "b", "c")
    early.commit()
    early.witness([0])
    assert early.state.phase is TRAIN
    early.witness([2])
    assert early.state.phase is WITNESS
    # The third may still say what it has.
    early.witness([1], having=[0, 1])
    assert (early.state.phase, early.state.round, agreed_seats(early)) == (TRAIN, 2, {0, 1, 2})


def test_proofs_of_less_than_all_do_not_end_the_training() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c")
    run.commit()
    run.witness(having=[0])
    assert (run.state.phase, len(run.state.proofs)) == (TRAIN, 3)
    other = WitnessedRun()
    other.train("a", "b", "c")
    other.commit()
    # A root that is not that of what the filter has.
    forged = [replace(other.proof(seat, [0, 1, 2]), root=bytes(32)) for seat in (0, 1, 2)]
    other.go(*map(Witnessed, forged))
    assert other.state.phase is TRAIN


def test_a_proof_that_comes_before_the_commitments_counts_when_they_are_there() -> None:
    run = WitnessedRun()
    run.train("a", "b")
    run.witness()
    assert run.state.phase is TRAIN
    run.commit([0])
    assert run.state.phase is TRAIN
    run.commit([1])
    assert (run.state.round, agreed_seats(run)) == (2, {0, 1})


def test_validate_all_clients_participate_in_witness_bloom() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c", "d", "e")
    run.commit()
    proofs = [run.proof(seat, run.state.healthy) for seat in run.state.healthy]
    for proof in proofs:
        heard = proof.participants_filter(run.state.seed)
        results = proof.results_filter(run.state.seed)
        assert all(seat_item(seat) in heard for seat in range(5))
        assert seat_item(5) not in heard
        assert all(run.commitment(seat).digest() in results for seat in range(5))
        assert run.commitment(0, "another").digest() not in results
    # Filters of two witnesses have different bits for the same.
    assert len({proof.participants for proof in proofs}) == 5
    run.go(*map(Witnessed, proofs))
    assert (run.state.round, agreed_seats(run)) == (2, {0, 1, 2, 3, 4})
    assert set(health(run).values()) == {Health.HEALTHY}


def test_replace_node_and_complete_round() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c")
    run.go(Gone("c", 1), Joined("d", 1))
    assert (health(run)[2], run.state.pending) == (Health.DROPPED, (("d", 1),))
    # The round needs nothing of who is lost, and takes nobody in.
    run.round()
    assert (run.state.round, agreed_seats(run), run.state.seats) == (2, {0, 1}, (0, 1))
    run.round()
    run.round()
    assert (run.state.phase, run.state.ended) == (COOLDOWN, EpochEnd.ROUNDS)
    run.checkpoint()
    assert (run.state.phase, run.state.healthy) == (WARMUP, (0, 1, 3))
    assert run.state.member(3).peer == "d"  # type: ignore[union-attr]
    run.warm()
    run.round()
    assert agreed_seats(run) == {0, 1, 3}


def test_finish_epoch() -> None:
    run = WitnessedRun()
    run.train("a", "b")
    for number in (1, 2, 3):
        assert (run.state.phase, run.state.round) == (TRAIN, number)
        run.round()
    assert (run.state.phase, run.state.ended) == (COOLDOWN, EpochEnd.ROUNDS)
    # What the last round agreed on is to be applied before the weights are kept.
    assert agreed_seats(run) == {0, 1}
    assert (run.state.round, run.state.made) == (3, 3)
    run.go(Checkpointed(0, 0))
    assert run.state.phase is COOLDOWN
    run.tick(Checkpointed(1, 0))
    state = run.state
    assert (state.phase, state.epoch, state.round, state.round_of_epoch) == (WAITING, 1, 3, 0)
    assert (state.agreed, state.next_batch, state.healthy) == ((), 24, (0, 1))
    run.go()
    assert run.state.phase is WARMUP
    # Who was warm in the epoch before is to say so again.
    run.go(Warm(0, 0), Warm(1, 0))
    assert run.state.phase is WARMUP
    run.warm()
    assert (run.state.round, run.state.first_batch) == (4, 24)


def test_a_cooldown_ends_by_its_time() -> None:
    run = WitnessedRun(replace(RULES, rounds=1))
    run.train("a", "b")
    run.round()
    run.wait(9.9)
    assert run.state.phase is COOLDOWN
    run.wait(0.1)
    assert (run.state.phase, run.state.epoch) == (WARMUP, 1)


def test_client_join_in_training() -> None:
    run = WitnessedRun(replace(RULES, max_members=3))
    run.train("a", "b")
    run.join("c", "d")
    assert run.state.healthy == (0, 1)
    for _ in range(3):
        run.round()
        assert run.state.pending == (("c", 1), ("d", 1))
    run.checkpoint()
    # There is room for one; the other waits on.
    assert (run.state.healthy, run.state.pending) == ((0, 1, 2), (("d", 1),))
    run.warm()
    run.round()
    assert agreed_seats(run) == {0, 1, 2}


def test_shutdown_node_in_training_and_complete_round() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c")
    # Nobody has noticed: it is silent.
    run.commit([0, 1])
    run.witness([0, 1], having=[0, 1])
    assert run.state.phase is TRAIN
    run.wait(20)
    assert run.state.phase is WITNESS
    run.wait(5)
    assert (run.state.phase, run.state.round, agreed_seats(run)) == (TRAIN, 2, {0, 1})
    assert (health(run)[2], run.state.seats) == (Health.DROPPED, (0, 1))
    # All batches go to those that are left, and none comes twice.
    assert sorted(run.parts.works.values()) == [(8, 4), (12, 4)]


def test_client_join_in_training_and_get_model_using_p2p() -> None:
    run = WitnessedRun(replace(RULES, rounds=1))
    run.train("a", "b")
    run.round()
    run.join("c")
    run.checkpoint()
    # It warms up with the weights of the others, which have them; all begin together.
    assert (run.state.phase, run.state.healthy) == (WARMUP, (0, 1, 2))
    run.warm([0, 1])
    run.wait(29)
    assert run.state.phase is WARMUP
    run.warm([2])
    run.round()
    assert (run.state.phase, agreed_seats(run)) == (COOLDOWN, {0, 1, 2})


# Ends of rounds, of epochs and of runs


def test_an_epoch_ends_when_members_are_too_few() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c", "d")
    run.commit()
    run.witness([0, 1, 2])
    run.go(Left(0), Left(1, Health.WITHDRAWN), Left(2))
    run.wait(5)
    # What they had done counts.
    assert (run.state.phase, run.state.ended) == (COOLDOWN, EpochEnd.MEMBERS)
    assert agreed_seats(run) == {0, 1, 2, 3}
    assert health(run)[1] is Health.WITHDRAWN
    run.wait(10)
    assert (run.state.phase, run.state.healthy, run.state.epoch) == (WAITING, (3,), 1)


def test_an_epoch_ends_where_proofs_are_fewer_than_the_quorum() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c")
    run.commit([0, 1])
    run.witness([0], having=[0, 1])
    run.wait(20)
    run.wait(5)
    assert (run.state.phase, run.state.ended) == (COOLDOWN, EpochEnd.QUORUM)
    assert (run.state.agreed, run.state.round, run.state.next_batch) == ((), 0, 0)
    # Without witnesses, who committed is known to be there.
    assert health(run) == {0: Health.HEALTHY, 1: Health.HEALTHY, 2: Health.DROPPED}
    stale = run.commitment(0)
    run.wait(10)
    run.warm()
    # The number and the batches come again; what was signed before does not count.
    assert (run.state.epoch, run.state.round, run.state.first_batch) == (1, 1, 0)
    before = run.state
    run.go(Committed(replace(stale, epoch=0, round=1, num_batches=4)))
    assert run.state is before


def test_an_epoch_ends_where_nothing_is_agreed() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c")
    run.witness(having=[])
    run.wait(20)
    run.wait(5)
    assert (run.state.phase, run.state.ended) == (COOLDOWN, EpochEnd.NOTHING_AGREED)
    assert run.state.round == 0


def test_who_withholds_its_result_is_dropped() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c", "d")
    run.commit()
    run.witness([0, 1, 2], having=[0, 1, 2])
    run.witness([3])
    run.wait(20)
    assert (agreed_seats(run), run.state.seats) == ({0, 1, 2}, (0, 1, 2))


def test_a_run_ends_after_its_rounds() -> None:
    run = WitnessedRun(replace(RULES, max_rounds=2))
    run.train("a", "b")
    run.round()
    run.round()
    assert (run.state.phase, run.state.reason) == (COOLDOWN, "2 rounds were made")
    assert run.state.ended is EpochEnd.STOPPED
    assert agreed_seats(run) == {0, 1}
    run.checkpoint()
    assert run.state.phase is FINISHED
    before = run.state
    run.go(Joined("c", 1), Left(0), Pause(), Stop("again"), Eject(0))
    run.wait(1e6)
    assert run.state is before
    assert due(run.rules, run.state) is None


def test_a_round_that_was_not_made_does_not_count() -> None:
    run = WitnessedRun(replace(RULES, max_rounds=1))
    run.train("a", "b")
    run.commit()
    run.wait(20)
    run.wait(5)
    assert (run.state.phase, run.state.reason) == (COOLDOWN, "")
    run.wait(10)
    run.warm()
    run.round()
    assert (run.state.phase, run.state.reason) == (COOLDOWN, "1 rounds were made")


def test_a_run_that_has_made_its_rounds_begins_no_other() -> None:
    run = WitnessedRun(replace(RULES, max_rounds=4))
    run.state = replace(run.state, round=4)
    run.go()
    assert run.state.phase is FINISHED


def test_a_stop_ends_with_the_round_under_way() -> None:
    run = WitnessedRun()
    run.train("a", "b")
    run.commit()
    run.go(Stop("enough"), Stop("another"))
    assert (run.state.phase, run.state.reason) == (TRAIN, "enough")
    run.join("c")
    assert run.state.pending == ()
    run.witness()
    assert (run.state.phase, run.state.ended, agreed_seats(run)) == (
        COOLDOWN,
        EpochEnd.STOPPED,
        {0, 1},
    )
    run.wait(10)
    assert run.state.phase is FINISHED


@pytest.mark.parametrize("peers", [(), ("a",), ("a", "b")])
def test_a_stop_without_a_round_ends_at_once(peers: tuple[str, ...]) -> None:
    run = WitnessedRun()
    run.join(*peers)
    run.go(Stop("no more"))
    assert run.state.phase is FINISHED


def test_a_stop_in_the_cooldown_lets_it_be() -> None:
    run = WitnessedRun(replace(RULES, rounds=1))
    run.train("a", "b")
    run.round()
    run.go(Stop("no more"))
    assert run.state.phase is COOLDOWN
    run.checkpoint()
    assert run.state.phase is FINISHED


# Pauses


def test_a_pause_gives_the_rest_of_the_phase_back() -> None:
    run = WitnessedRun()
    run.train("a", "b")
    run.wait(15)
    run.go(Pause(), Pause())
    assert (run.state.phase, run.state.paused, run.state.elapsed) == (PAUSED, TRAIN, 15.0)
    assert due(run.rules, run.state) is None
    run.wait(1000)
    assert run.state.phase is PAUSED
    run.go(Resume(), Resume())
    assert (run.state.phase, run.state.paused) == (TRAIN, None)
    assert due(run.rules, run.state) == run.now + 5
    run.wait(4.9)
    assert run.state.phase is TRAIN
    run.wait(0.2)
    assert run.state.phase is WITNESS


def test_what_members_had_under_way_counts_in_a_pause() -> None:
    run = WitnessedRun()
    run.train("a", "b")
    run.go(Pause())
    run.round()
    run.join("c")
    assert (run.state.phase, len(run.state.proofs), run.state.pending) == (PAUSED, 2, (("c", 1),))
    run.go(Resume())
    assert (run.state.phase, run.state.round) == (TRAIN, 2)


@pytest.mark.parametrize("num_peers", [0, 1, 2])
def test_each_phase_can_be_paused(num_peers: int) -> None:
    run = WitnessedRun()
    run.join(*"ab"[:num_peers])
    before = run.state
    run.go(Pause())
    run.go(Joined("c", 1))
    run.go(Left(0))
    run.wait(1e4)
    assert (run.state.phase, run.state.paused) == (PAUSED, before.phase)
    run.go(Resume())
    assert run.state.phase is (WAITING if num_peers == 0 else WARMUP)


def test_a_stop_takes_a_pause_back() -> None:
    run = WitnessedRun()
    run.train("a", "b")
    run.go(Pause())
    run.go(Stop("no more"))
    assert run.state.phase is TRAIN
    run.go(Pause())
    assert run.state.phase is TRAIN
    run.round()
    run.checkpoint()
    assert run.state.phase is FINISHED


# Lies


def test_two_commitments_of_one_seat_eject_it() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c")
    run.commit()
    run.witness([0], having=[0, 1, 2])
    run.go(Committed(run.commitment(0, "another")))
    assert health(run)[0] is Health.EJECTED
    assert run.state.proofs == ()
    run.witness([1, 2], having=[0, 1, 2])
    # None of both counts, whatever filters say.
    assert (agreed_seats(run), run.state.round) == ({1, 2}, 2)
    before = run.state
    run.go(Joined("a", 1), Joined("a", 2), Committed(run.commitment(0)))
    assert run.state is before
    assert run.state.barred == ("a",)


def test_a_commitment_counts_for_what_was_assigned_only() -> None:
    run = WitnessedRun()
    run.train("a", "b")
    before, right = run.state, run.commitment(0)
    wrong = [
        replace(right, first_batch=right.first_batch + 1),
        replace(right, num_batches=right.num_batches + 1),
        replace(right, first_batch=0, num_batches=0),
        replace(right, epoch=1),
        replace(right, round=2),
        replace(right, seat=7),
        replace(right, seat=1),
    ]
    run.go(*map(Committed, wrong))
    assert run.state is before
    run.go(Committed(right), Committed(right))
    assert run.state.commitments == (right,)


def test_a_proof_with_bits_that_nothing_explains_does_not_count() -> None:
    run = WitnessedRun(replace(RULES, witnesses=2))
    run.train("a", "b", "c", "d")
    run.commit()
    before = run.state
    witness, other = run.parts.witnesses
    idle = next(iter({0, 1, 2, 3} - {witness, other}))
    right = run.proof(witness, [0, 1, 2, 3])
    salt = filter_salt(run.state.seed, witness)
    elsewhere = bytes(BloomFilter.of(salt, [seat_item(each) for each in (witness, 9)]))
    wrong = [
        replace(right, participants=bytes([255] * 128)),
        replace(right, results=bytes([255] * 128)),
        replace(right, participants=bytes(128)),
        replace(right, participants=elsewhere),
        replace(right, participants=run.proof(other, [0, 1, 2, 3]).participants),
        replace(right, epoch=1),
        replace(right, round=2),
        replace(right, seat=other),
        run.proof(idle, [0, 1, 2, 3]),
        replace(run.proof(9, [0, 1, 2, 3]), seat=9),
    ]
    run.go(*map(Witnessed, wrong))
    assert run.state is before
    # The first one counts, whatever comes after it.
    run.go(Witnessed(right), Witnessed(right), Witnessed(run.proof(witness, [witness])))
    assert run.state.proofs == (right,)


def test_witnesses_that_claim_what_nobody_has_do_not_come_to_a_quorum() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c", "d", "e", "f")
    run.commit([0, 1, 2, 3, 4])
    run.witness([0, 1, 2], having=[0, 1, 2, 3, 4, 5])
    run.witness([3, 4], having=[0, 1, 2, 3, 4])
    run.commit([5])
    run.wait(20)
    run.wait(5)
    assert agreed_seats(run) == {0, 1, 2, 3, 4}
    assert 5 not in run.state.seats


def test_an_ejected_member_takes_nothing_back_that_was_agreed() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c")
    run.round()
    run.commit()
    run.go(Eject(1, b"it computed something else"))
    assert (health(run)[1], agreed_seats(run)) == (Health.EJECTED, {0, 1, 2})
    run.witness()
    assert agreed_seats(run) == {0, 2}


def test_a_peer_is_ejected_after_it_has_left() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c")
    run.go(Left(2, Health.WITHDRAWN))
    before = run.state
    run.go(Eject(2, b"", "d"), Eject(99))
    assert run.state is before
    run.go(Eject(2))
    assert health(run)[2] is Health.EJECTED
    # And where its seat is forgotten.
    run.join("d")
    run.go(Eject(99, b"", "d"), Eject(99, b"", "d"))
    assert (run.state.barred, run.state.pending) == (("c", "d"), ())


def test_a_peer_is_ejected_on_all_its_seats() -> None:
    run = WitnessedRun()
    run.join("a", "b", "c")
    run.go(Joined("a", 2))
    assert health(run)[3] is Health.HEALTHY
    run.go(Joined("b", 2), Eject(3))
    assert run.state.barred == ("a",)
    assert "a" not in {run.state.member(seat).peer for seat in run.state.healthy}  # type: ignore[union-attr]


# Members


def test_another_process_of_a_member_waits_and_the_old_one_is_dropped() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c")
    run.go(Joined("a", 1), Joined("a", 5), Joined("a", 5), Joined("a", 6))
    assert (health(run)[0], run.state.pending) == (Health.DROPPED, (("a", 6),))
    run.go(Gone("a", 5), Gone("x", 1))
    assert run.state.pending == (("a", 6),)
    run.go(Gone("a", 6))
    assert run.state.pending == ()


def test_who_was_dropped_comes_again_with_another_seat() -> None:
    run = WitnessedRun(replace(RULES, rounds=1))
    run.train("a", "b", "c")
    run.go(Left(0))
    run.join("a")
    run.round()
    run.checkpoint()
    assert (run.state.healthy, run.seat_of("a")) == ((1, 2, 3), 3)


def test_members_that_most_others_cannot_reach_are_dropped() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c", "d")
    run.go(Unhealthy(0, (3, 9), 0, 1), Unhealthy(0, (3,), 0, 1), Unhealthy(1, (3, 1), 0, 1))
    assert run.state.complaints == ((0, 3), (1, 3))
    assert health(run)[3] is Health.HEALTHY
    run.go(Unhealthy(2, (3,), 0, 2), Unhealthy(2, (3,), 1, 1), Unhealthy(7, (3,), 0, 1))
    assert health(run)[3] is Health.HEALTHY
    run.go(Unhealthy(2, (3,), 0, 1))
    assert health(run)[3] is Health.DROPPED
    # Of three, one cannot drop another; a round later all is forgotten.
    run.go(Unhealthy(0, (1,), 0, 1))
    run.round()
    assert (run.state.complaints, run.state.healthy) == ((), (0, 1, 2))


def test_one_of_two_cannot_drop_the_other_by_a_complaint() -> None:
    run = WitnessedRun()
    run.train("a", "b")
    run.go(Unhealthy(0, (1,), 0, 1))
    assert run.state.healthy == (0, 1)


def test_auditors_and_those_without_batches_are_healthy_when_they_show_themselves() -> None:
    run = WitnessedRun(replace(RULES, auditors=1, batches=2, witnesses=3))
    run.train("a", "b", "c", "d", "e", "f")
    parts = run.parts
    (auditor,) = parts.auditors
    idle = {*parts.trainers[2:], auditor}
    assert set(parts.works) == set(parts.trainers[:2])
    silent = next(iter(idle - set(parts.witnesses)), None)
    run.commit(set(range(6)) - {silent})
    run.witness(having=parts.works)
    assert run.state.round == 2
    assert agreed_seats(run) == set(parts.works)
    assert set(run.state.seats) == set(range(6)) - {silent}


def test_batches_may_be_one_for_each_trainer() -> None:
    run = WitnessedRun(replace(RULES, batches=0, auditors=1))
    run.train("a", "b", "c", "d")
    assert (run.state.num_batches, len(run.parts.works)) == (3, 3)
    run.round()
    assert (run.state.first_batch, run.state.num_batches) == (3, 3)


def test_there_is_always_a_trainer() -> None:
    run = WitnessedRun(replace(RULES, min_members=1, auditors=5, batches=0))
    run.join("a")
    run.warm()
    assert (run.parts.trainers, run.parts.auditors, run.state.num_batches) == ((0,), (), 1)


# Bounds


def test_those_that_wait_are_bounded() -> None:
    run = WitnessedRun(replace(RULES, min_members=8))
    run.tick(Pause())
    run.tick(*(Joined(f"p{number}", 1) for number in range(MAX_PENDING + 5)))
    assert len(run.state.pending) == MAX_PENDING
    run.tick(*(Eject(0, b"", f"q{number}") for number in range(MAX_BARRED + 5)))
    assert len(run.state.barred) == MAX_BARRED
    assert "q0" not in run.state.barred


def test_members_and_complaints_of_a_long_warmup_are_bounded() -> None:
    run = WitnessedRun(replace(RULES, max_members=4))
    run.join("a", "b")
    for number in range(200):
        run.join(f"p{number}")
        seat = run.seat_of(f"p{number}")
        run.go(Unhealthy(seat, (0, 1), 0, 0), Left(seat))
        assert len(run.state.members) <= 8
        assert len(run.state.complaints) <= 4
    assert run.state.phase is WARMUP


@pytest.mark.parametrize(
    "changes",
    [
        {"min_members": 0},
        {"max_members": 1},
        {"max_members": 129},
        {"rounds": 0},
        {"max_rounds": 0},
        {"batches": -1},
        {"batches": 65_537},
        {"witnesses": -1},
        {"auditors": -1},
        {"warmup": 0.0},
        {"train": -1.0},
        {"witness": inf},
        {"cooldown": nan},
    ],
)
def test_rules_out_of_range_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"."):
        replace(RULES, **changes)  # type: ignore[arg-type]


def test_a_tick_refuses_what_is_no_tick() -> None:
    state = EpochState()
    for now in (inf, nan):
        with pytest.raises(ValueError, match="time"):
            tick(RULES, state, now, [], draw=DRAW)
    with pytest.raises(ValueError, match="draw"):
        tick(RULES, state, 0.0, [], draw=b"")
    with pytest.raises(ValueError, match="at most"):
        tick(RULES, state, 0.0, [Pause()] * (MAX_EVENTS + 1), draw=DRAW)


def test_a_clock_that_goes_back_lets_no_time_pass() -> None:
    run = WitnessedRun()
    run.now = 100.0
    run.train("a", "b")
    run.now = 10.0
    run.go(Pause())
    assert run.state.elapsed == 0.0
    run.go(Resume())
    run.now = 29.9
    run.go()
    assert run.state.phase is TRAIN


def test_a_tick_without_anything_gives_the_same_object() -> None:
    run = WitnessedRun()
    for act in (lambda: run.join("a"), lambda: run.join("b"), run.warm, run.commit):
        act()
        assert tick(run.rules, run.state, run.now, [], draw=DRAW) is run.state


# Journals


SOME: list[Event] = [
    Joined("a", 2**64 - 1),
    Gone("ä", 0),
    Left(3),
    Left(3, Health.WITHDRAWN),
    Warm(1, 2),
    Committed(Commitment(1, 2, 3, 2**64 - 1, 5, bytes(range(32))), b"sig"),
    Witnessed(WitnessProof.of(1, DRAW, 2, 3, []), bytes(512)),
    Unhealthy(1, (2, 3), 4, 5),
    Checkpointed(1, 2),
    Pause(),
    Resume(),
    Eject(4, b"\0\1", "p"),
    Stop("why"),
]


@pytest.mark.parametrize("event", SOME, ids=lambda event: type(event).__name__)
def test_an_event_reads_as_it_was_written(event: Event) -> None:
    written = event_json(event)
    assert event_of(written) == event
    assert event_of(dict(written)) == event
    with pytest.raises(ValueError, match="not known"):
        event_of({**written, "more": 1})
    for key in written:
        with pytest.raises(ValueError, match=r"."):
            event_of({name: value for name, value in written.items() if name != key})
        for other in (None, [-1], {}, -1, "x" * 2000, 1.5, True, 2**64):
            with pytest.raises(ValueError, match=r"."):
                event_of({**written, key: other})


@pytest.mark.parametrize("value", [None, 3, "joined", [], {}, {"kind": "other"}, {"kind": 3}])
def test_what_is_no_event_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        event_of(value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Joined("", 1),
        lambda: Joined("p" * 129, 1),
        lambda: Joined("p", 2**64),
        lambda: Left(-1),
        lambda: Left(1, Health.EJECTED),
        lambda: Stop(""),
        lambda: Eject(1, bytes(65_537)),
        lambda: Unhealthy(1, tuple(range(129)), 0, 0),
        lambda: Committed(Commitment(0, 0, 0, 0, 0, bytes(32)), bytes(513)),
        lambda: Commitment(0, 0, 0, 0, 0, bytes(31)),
        lambda: Commitment(0, 0, 0, 2**64, 0, bytes(32)),
        lambda: Commitment(2**32, 0, 0, 0, 0, bytes(32)),
        lambda: WitnessProof(0, 0, 0, bytes(127), bytes(128), bytes(32)),
        lambda: WitnessProof(0, 0, 0, bytes(128), bytes(128), bytes(31)),
    ],
)
def test_events_out_of_bounds_are_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        make()  # type: ignore[operator]


def test_a_journal_folds_to_the_same_state_from_anywhere() -> None:
    run = WitnessedRun(replace(RULES, rounds=2, auditors=1))
    states = [(0, run.state)]

    def note() -> None:
        states.append((len(run.journal), run.state))

    run.train("a", "b", "c", "d")
    run.commit()
    note()
    run.go(Unhealthy(0, (1,), 0, 1), Pause())
    note()
    run.wait(3)
    run.go(Resume())
    run.join("e")
    run.witness()
    note()
    run.go(Committed(run.commitment(2)), Committed(run.commitment(2, "another")))
    note()
    run.wait(20)
    run.wait(5)
    note()
    run.wait(10)
    run.warm()
    note()
    run.go(Stop("ä reason"))
    for begin, state in states:
        again = EpochState.read(state.json())
        assert again == state
        assert again.digest() == state.digest()
        assert fold(run.rules, run.journal[begin:], again) == run.state
    assert len({state.digest() for _, state in states}) == len(states)


def test_a_state_that_is_none_is_refused() -> None:
    run = WitnessedRun()
    run.train("a", "b")
    run.round()
    written = run.state.json()
    for key in written:
        for other in (None, -1, {}, "?", [["?"]], [None], 2**64, "zz" * 32):
            if not (key == "reason" and isinstance(other, str)):
                with pytest.raises(ValueError, match=r"."):
                    EpochState.read({**written, key: other})
        with pytest.raises(ValueError, match=r"."):
            EpochState.read({name: each for name, each in written.items() if name != key})
    with pytest.raises(ValueError, match=r"."):
        EpochState.read({**written, "more": 0})
    with pytest.raises(ValueError, match="finite"):
        EpochState.read({**written, "began": "7ff0000000000000"})


def test_time_alone_brings_a_run_to_rest() -> None:
    for rules in (RULES, replace(RULES, witnesses=1), replace(RULES, min_members=1)):
        run = WitnessedRun(rules)
        run.train("a", "b", "c")
        run.commit([0])
        run.join("d")
        for _ in range(20):
            if (then := due(run.rules, run.state)) is None:
                break
            run.now = max(run.now, then)
            run.go()
        assert (run.state.phase, due(run.rules, run.state)) == (WAITING, None)


def test_rules_are_the_same_for_all_uses_of_them() -> None:
    assert isinstance(RULES, EpochRules)
    assert RULES.limit(WAITING) is None
    assert RULES.limit(WARMUP) == 30.0
