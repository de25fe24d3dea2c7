"""Members of a witnessed run: who lies, who comes and goes, and how many there may be."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from neurogrid.training.witnessed import (
    BloomFilter,
    Committed,
    Eject,
    EpochEnd,
    EpochPhase,
    EpochState,
    Gone,
    Health,
    Joined,
    Left,
    Pause,
    Resume,
    Unhealthy,
    Witnessed,
    filter_salt,
    seat_item,
    tick,
)
from neurogrid.training.witnessed.machine import MAX_EVENTS
from neurogrid.training.witnessed.phases import MAX_BARRED, MAX_PENDING
from tests.unit.training.simulated_witnessed import RULES, WitnessedRun

WARMUP = EpochPhase.WARMUP
TRAIN = EpochPhase.ROUND_TRAIN
DRAW = bytes(32)


# Lies


def test_two_commitments_of_one_seat_eject_it() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c")
    run.commit()
    run.witness([0], having=[0, 1, 2])
    run.go(Committed(run.commitment(0, "another")))
    assert run.health[0] is Health.EJECTED
    assert run.state.proofs == ()
    run.witness([1, 2], having=[0, 1, 2])
    # None of both counts, whatever filters say.
    assert (run.agreed_seats, run.state.round) == ({1, 2}, 2)
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


def test_a_proof_of_more_results_than_there_can_be_does_not_count() -> None:
    run = WitnessedRun(replace(RULES, batches=2))
    run.train(*"abcdef")
    run.commit()
    salt = filter_salt(run.state.seed, 0)
    found = [bytes([number]) * 32 for number in range(3)]
    many = replace(run.proof(0, range(6)), results=bytes(BloomFilter.of(salt, found)))
    assert many.results_filter(run.state.seed).num_set > 16
    run.go(Witnessed(many))
    assert run.state.proofs == ()


def test_who_has_no_batches_has_no_result_to_agree_on() -> None:
    run = WitnessedRun(replace(RULES, batches=1))
    run.train("a", "b", "c")
    run.commit()
    (trainer,) = run.parts.works
    digest = run.commitment((trainer + 1) % 3).digest()
    for seat in (0, 1, 2):
        results = BloomFilter.of(filter_salt(run.state.seed, seat), [digest])
        run.go(Witnessed(replace(run.proof(seat, [0, 1, 2]), results=bytes(results))))
    assert len(run.state.proofs) == 3
    run.wait(20)
    assert (run.state.ended, run.state.agreed) == (EpochEnd.NOTHING_AGREED, ())


def test_witnesses_that_claim_what_nobody_has_do_not_come_to_a_quorum() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c", "d", "e", "f")
    run.commit([0, 1, 2, 3, 4])
    run.witness([0, 1, 2], having=[0, 1, 2, 3, 4, 5])
    run.witness([3, 4], having=[0, 1, 2, 3, 4])
    run.commit([5])
    run.wait(20)
    run.wait(5)
    assert run.agreed_seats == {0, 1, 2, 3, 4}
    assert 5 not in run.state.seats


def test_who_tells_the_leader_of_another_result_is_dropped() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c", "d")
    run.commit([0, 1, 2])
    run.go(Committed(run.commitment(3, "another")))
    run.witness()
    run.wait(20)
    assert (run.agreed_seats, run.state.seats) == ({0, 1, 2}, (0, 1, 2))
    # And who tells it of none.
    run.commit([0, 1])
    run.witness()
    run.wait(20)
    assert (run.agreed_seats, run.state.seats) == ({0, 1}, (0, 1))


def test_an_ejected_member_takes_nothing_back_that_was_agreed() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c")
    run.round()
    run.commit()
    run.go(Eject(1, b"it computed something else"))
    assert (run.health[1], run.agreed_seats) == (Health.EJECTED, {0, 1, 2})
    run.witness()
    assert run.agreed_seats == {0, 2}


def test_a_peer_is_ejected_after_it_has_left() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c")
    run.go(Left(2, Health.WITHDRAWN))
    before = run.state
    run.go(Eject(2, b"", "d"), Eject(99))
    assert run.state is before
    run.go(Eject(2))
    assert run.health[2] is Health.EJECTED
    # And where its seat is forgotten.
    run.join("d")
    run.go(Eject(99, b"", "d"), Eject(99, b"", "d"))
    assert (run.state.barred, run.state.pending) == (("c", "d"), ())


def test_a_peer_is_ejected_for_what_it_did_on_a_seat_before() -> None:
    run = WitnessedRun(replace(RULES, rounds=1))
    run.train("a", "b", "c", "d")
    run.go(Joined("a", 2))
    run.round()
    run.checkpoint()
    assert (run.seat_of("a"), run.state.member(0)) == (4, None)
    run.warm()
    run.commit()
    run.go(Eject(0, b"", "a"))
    assert (run.health[4], run.state.barred) == (Health.EJECTED, ("a",))
    run.witness()
    assert run.agreed_seats == {1, 2, 3}


# Members


def test_another_process_of_a_member_waits_and_the_old_one_is_dropped() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c")
    run.go(Joined("a", 1), Joined("a", 5), Joined("a", 5), Joined("a", 6))
    assert (run.health[0], run.state.pending) == (Health.DROPPED, (("a", 6),))
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
    assert run.health[3] is Health.HEALTHY
    run.go(Unhealthy(2, (3,), 0, 2), Unhealthy(2, (3,), 1, 1), Unhealthy(7, (3,), 0, 1))
    assert run.health[3] is Health.HEALTHY
    run.go(Unhealthy(2, (3,), 0, 1))
    assert run.health[3] is Health.DROPPED
    # Of three, one cannot drop another; a round later all is forgotten.
    run.go(Unhealthy(0, (1,), 0, 1))
    run.round()
    assert (run.state.complaints, run.state.healthy) == ((), (0, 1, 2))


def test_complaints_of_those_that_left_do_not_count() -> None:
    run = WitnessedRun()
    run.train("a", "b", "c", "d", "e")
    run.go(Unhealthy(0, (4,), 0, 1), Left(0))
    run.go(Unhealthy(1, (4,), 0, 1), Unhealthy(2, (4,), 0, 1))
    assert run.state.healthy == (1, 2, 3, 4)
    run.go(Unhealthy(3, (4,), 0, 1))
    assert run.state.healthy == (1, 2, 3)


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
    assert run.agreed_seats == set(parts.works)
    assert set(run.state.seats) == set(range(6)) - {silent}


def test_without_batches_it_is_enough_that_witnesses_heard_of_a_member() -> None:
    run = WitnessedRun(replace(RULES, batches=1, witnesses=1))
    run.train("a", "b", "c")
    (trainer,), (witness,) = run.parts.works, run.parts.witnesses
    idle = next(iter({0, 1, 2} - {trainer, witness}))
    run.commit([trainer])
    # Its commitment to nothing has come to the witness, and not to the leader.
    run.go(Witnessed(run.proof(witness, [trainer, idle])))
    assert (run.state.round, run.state.healthy) == (2, (0, 1, 2))


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
