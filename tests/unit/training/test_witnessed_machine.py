"""Phases of a witnessed run, one thing at a time: what Psyche's acceptance tests have, ends and pauses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neurogrid.training.witnessed import (
    Checkpointed,
    Committed,
    Eject,
    EpochEnd,
    EpochPhase,
    Gone,
    Health,
    Joined,
    Left,
    Pause,
    Resume,
    Stop,
    Warm,
    Witnessed,
    due,
    seat_item,
)
from tests.unit.training.simulated_witnessed import RULES, WitnessedRun

WAITING = EpochPhase.WAITING_FOR_MEMBERS
WARMUP = EpochPhase.WARMUP
TRAIN = EpochPhase.ROUND_TRAIN
WITNESS = EpochPhase.ROUND_WITNESS
COOLDOWN = EpochPhase.COOLDOWN
FINISHED = EpochPhase.FINISHED
PAUSED = EpochPhase.PAUSED


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
    assert (alone.state.round, alone.agreed_seats) == (2, {0})


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
    assert run.health == {0: Health.HEALTHY, 1: Health.HEALTHY}


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


def test_who_comes_when_the_warmup_is_over_waits_for_the_next_epoch() -> None:
    run = WitnessedRun()
    run.join("a", "b", "c")
    run.warm([0, 1])
    run.now += 30
    run.join("d")
    assert (run.state.phase, run.state.seats, run.state.pending) == (TRAIN, (0, 1), (("d", 1),))


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
    assert (early.state.phase, early.state.round, early.agreed_seats) == (TRAIN, 2, {0, 1, 2})


def test_proofs_of_less_than_all_do_not_end_the_training() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c")
    run.commit()
    run.witness(having=[0])
    assert (run.state.phase, run.state.round, len(run.state.proofs)) == (TRAIN, 1, 3)
    # One that has all is not the quorum, whatever others have sent.
    mixed = WitnessedRun()
    mixed.train("a", "b", "c")
    mixed.commit()
    mixed.witness([0], having=[0, 1, 2])
    mixed.witness([1], having=[0, 1])
    mixed.witness([2], having=[0, 2])
    assert (mixed.state.phase, mixed.state.round, len(mixed.state.proofs)) == (TRAIN, 1, 3)
    other = WitnessedRun()
    other.train("a", "b", "c")
    other.commit()
    # A root that is not that of what the filter has.
    forged = [replace(other.proof(seat, [0, 1, 2]), root=bytes(32)) for seat in (0, 1, 2)]
    other.go(*map(Witnessed, forged))
    assert (other.state.phase, other.state.round, len(other.state.proofs)) == (TRAIN, 1, 3)


def test_a_proof_that_comes_before_the_commitments_counts_when_they_are_there() -> None:
    run = WitnessedRun()
    run.train("a", "b")
    run.witness()
    assert run.state.phase is TRAIN
    run.commit([0])
    assert run.state.phase is TRAIN
    run.commit([1])
    assert (run.state.round, run.agreed_seats) == (2, {0, 1})


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
    assert (run.state.round, run.agreed_seats) == (2, {0, 1, 2, 3, 4})
    assert set(run.health.values()) == {Health.HEALTHY}


def test_replace_node_and_complete_round() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c")
    run.go(Gone("c", 1), Joined("d", 1))
    assert (run.health[2], run.state.pending) == (Health.DROPPED, (("d", 1),))
    # The round needs nothing of who is lost, and takes nobody in.
    run.round()
    assert (run.state.round, run.agreed_seats, run.state.seats) == (2, {0, 1}, (0, 1))
    run.round()
    run.round()
    assert (run.state.phase, run.state.ended) == (COOLDOWN, EpochEnd.ROUNDS)
    run.checkpoint()
    assert (run.state.phase, run.state.healthy) == (WARMUP, (0, 1, 3))
    assert run.state.member(3).peer == "d"  # type: ignore[union-attr]
    run.warm()
    run.round()
    assert run.agreed_seats == {0, 1, 3}


def test_finish_epoch() -> None:
    run = WitnessedRun()
    run.train("a", "b")
    for number in (1, 2, 3):
        assert (run.state.phase, run.state.round) == (TRAIN, number)
        run.round()
    assert (run.state.phase, run.state.ended) == (COOLDOWN, EpochEnd.ROUNDS)
    # What the last round agreed on is to be applied before the weights are kept.
    assert run.agreed_seats == {0, 1}
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


def test_a_cooldown_ends_when_most_of_those_that_are_left_have_kept_the_weights() -> None:
    run = WitnessedRun(replace(RULES, rounds=1))
    run.train("a", "b", "c", "d")
    run.round()
    run.go(Checkpointed(0, 0), Checkpointed(1, 1), Checkpointed(9, 0), Left(0))
    run.go(Checkpointed(1, 0), Checkpointed(1, 0))
    assert (run.state.phase, run.state.checkpointed) == (COOLDOWN, {0, 1})
    run.go(Checkpointed(3, 0))
    assert (run.state.phase, run.state.healthy) == (WARMUP, (1, 2, 3))


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
    assert run.agreed_seats == {0, 1, 2}


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
    assert (run.state.phase, run.state.round, run.agreed_seats) == (TRAIN, 2, {0, 1})
    assert (run.health[2], run.state.seats) == (Health.DROPPED, (0, 1))
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
    assert (run.state.phase, run.agreed_seats) == (COOLDOWN, {0, 1, 2})


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
    assert run.agreed_seats == {0, 1, 2, 3}
    assert run.health[1] is Health.WITHDRAWN
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
    assert run.health == {0: Health.HEALTHY, 1: Health.HEALTHY, 2: Health.DROPPED}
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
    assert (run.agreed_seats, run.state.seats) == ({0, 1, 2}, (0, 1, 2))


def test_a_run_ends_after_its_rounds() -> None:
    run = WitnessedRun(replace(RULES, max_rounds=2))
    run.train("a", "b")
    run.round()
    run.round()
    assert (run.state.phase, run.state.reason) == (COOLDOWN, "2 rounds were made")
    assert run.state.ended is EpochEnd.STOPPED
    assert run.agreed_seats == {0, 1}
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
    assert (run.state.phase, run.state.ended, run.agreed_seats) == (
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
