"""The machine of witnessed runs: what the phases make of seats, works and rounds, and that the journal says it all."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from neurogrid.errors import ConfigurationError
from neurogrid.training.checks.claims import Samples
from neurogrid.training.leading.witnessed.epoch_messages import round_works
from neurogrid.training.runs.audit import audit
from neurogrid.training.runs.entries import (
    DealtEntry,
    EndEntry,
    Entry,
    EpochEntry,
    LeftEntry,
    ReturnedEntry,
    RoundEntry,
    RunEntry,
    entry_of,
)
from neurogrid.training.runs.machine import Rules
from neurogrid.training.runs.state import Phase, RunState
from neurogrid.training.runs.witnessed_machine import (
    WitnessedMachine,
    begun_epochs,
    fold_epochs,
)
from neurogrid.training.wire.runs import MAX_RANGES, RoundWork
from neurogrid.training.witnessed import (
    Checkpointed,
    Commitment,
    Committed,
    EpochPhase,
    EpochRules,
    Event,
    Health,
    Joined,
    Left,
    Pause,
    Resume,
    Stop,
    Trial,
    Warm,
    Witnessed,
    WitnessProof,
    parts_of,
)

SIZES = (40, 40, 40)
BATCH = 4
RUN = RunEntry(bytes(16), "leader", bytes(32), bytes(32), SIZES, 7)
RULES = EpochRules(
    min_members=2, max_members=8, rounds=3, batches=0, warmup=9, train=9, witness=9, cooldown=9
)


class Run:
    """A run whose members do what they should, but for those that are told otherwise."""

    def __init__(
        self,
        *,
        max_samples: int | None = None,
        max_rounds: int | None = None,
        batches: int = 0,
        sizes: tuple[int, ...] = SIZES,
        batch: int = BATCH,
    ) -> None:
        self.rules = Rules(2, 8, batch, 1, 1, False, max_samples, max_rounds)
        self.epochs = replace(RULES, batches=batches)
        self.entries: list[Entry] = [replace(RUN, slices=sizes)]
        self.now, self.num_draws = 100.0, 0
        self.machine = WitnessedMachine(
            self.rules, self.epochs, RunState(sizes, seed=7), begun_epochs()
        )

    def tick(self, *events: Event, seconds: float = 0.0) -> bool:
        self.now += seconds
        self.num_draws += 1
        draw = hashlib.sha256(str(self.num_draws).encode()).digest()
        changed = self.machine.tick(self.now, events, draw, lambda peer: peer.upper())
        self.entries += self.machine.drain()
        return changed

    def begin(self, *peers: str) -> None:
        self.tick(*(Joined(peer, 1) for peer in peers))
        self.warm()

    def warm(self) -> None:
        state = self.machine.epoch
        self.tick(*(Warm(seat, state.epoch) for seat in state.healthy))
        self.tick()

    def make_round(self, *, silent: int | None = None) -> None:
        """One round: each member commits, and each bears witness; but for a silent one."""
        state = self.machine.epoch
        works = parts_of(self.epochs, state).works
        commitments = [
            Commitment(seat, state.epoch, state.round, *works.get(seat, (0, 0)), bytes([seat]) * 32)
            for seat in state.seats
            if seat != silent
        ]
        self.tick(*map(Committed, commitments))
        proofs = [
            WitnessProof.of(seat, state.seed, state.epoch, state.round, commitments)
            for seat in state.seats
            if seat != silent
        ]
        self.tick(*map(Witnessed, proofs))
        before = self.machine.epoch
        if before.going is EpochPhase.ROUND_TRAIN:
            self.tick(seconds=10)
        if self.machine.epoch.going is EpochPhase.ROUND_WITNESS:
            self.tick(seconds=10)

    def cool_down(self) -> None:
        state = self.machine.epoch
        assert state.phase is EpochPhase.COOLDOWN
        self.tick(*(Checkpointed(seat, state.epoch) for seat in state.healthy))
        while self.tick():
            pass

    def of(self, kind: type[Entry]) -> list[Entry]:
        return [entry for entry in self.entries if isinstance(entry, kind)]

    def check(self) -> None:
        """The journal is sound, reads as it was written, and comes to the same state."""
        assert audit(self.entries).problems == ()
        assert [entry_of(entry.json()) for entry in self.entries] == self.entries
        assert fold_epochs(self.epochs, self.entries) == self.machine.epoch


def test_a_run_to_its_end() -> None:
    run = Run(max_rounds=5)
    run.begin("a", "b", "c")
    for _ in range(3):
        run.make_round()
    run.cool_down()
    run.warm()
    for _ in range(2):
        run.make_round()
    assert run.machine.epoch.phase is EpochPhase.COOLDOWN
    run.cool_down()
    assert run.machine.epoch.phase is EpochPhase.FINISHED
    assert run.machine.state.phase is Phase.ENDED
    rounds = [entry.round for entry in run.of(RoundEntry) if isinstance(entry, RoundEntry)]
    assert rounds == [1, 2, 3, 4, 5]
    assert run.machine.state.num_used == 5 * 3 * BATCH
    assert len(run.of(EndEntry)) == 1
    run.check()


@pytest.mark.parametrize(("samples", "rounds"), [(24, 2), (26, 3), (25, 3), (37, 4)])
def test_the_last_round_has_what_is_left(samples: int, rounds: int) -> None:
    run = Run(max_samples=samples)
    run.begin("a", "b", "c")
    for number in range(rounds):
        if run.machine.epoch.phase is EpochPhase.COOLDOWN:
            run.cool_down()
            run.warm()
        run.make_round()
        assert (run.machine.state.num_used == samples) == (number == rounds - 1)
    assert run.machine.epoch.reason == f"{samples} samples were trained on"
    run.cool_down()
    assert run.machine.epoch.phase is EpochPhase.FINISHED
    run.check()


def test_a_seat_on_trial_has_a_work_also_where_no_samples_are_left() -> None:
    """Its batch is of no round: without samples it could commit to nothing, and all would wait for it in vain."""
    run = Run(max_samples=sum(SIZES), batch=sum(SIZES) // 3)
    run.tick(*(Joined(peer, 1) for peer in "abc"), Trial("d"), Joined("d", 1))
    run.warm()
    assert run.machine.epoch.trial_seats == (3,)
    works = {each.seat: each for each in round_works(run.machine)}
    assert works.keys() == parts_of(run.epochs, run.machine.epoch).works.keys() == {0, 1, 2, 3}
    run.make_round()
    assert run.machine.state.num_used == sum(SIZES)
    assert run.machine.epoch.reason == f"{sum(SIZES)} samples were trained on"
    run.cool_down()
    assert run.machine.epoch.phase is EpochPhase.FINISHED
    run.check()


def test_what_is_not_agreed_is_dealt_again() -> None:
    run = Run(max_rounds=9)
    run.begin("a", "b", "c")
    before = {seat: list(held.works) for seat, held in run.machine.state.seats.items()}
    run.make_round(silent=1)
    assert [type(each) for each in run.of(ReturnedEntry)] == [ReturnedEntry]
    assert run.machine.epoch.member(1) is not None
    assert 1 not in run.machine.state.seats
    (lost,) = before[1]
    again = [
        each
        for held in run.machine.state.seats.values()
        for work in held.works
        for each in work.ranges
    ]
    numbers = {(r.slice, n) for r in again for n in range(r.start, r.stop)}
    assert {(r.slice, n) for r in lost.ranges for n in range(r.start, r.stop)} <= numbers
    run.check()


def test_a_member_that_is_lost_after_it_committed_counts() -> None:
    run = Run(max_rounds=9)
    run.begin("a", "b", "c")
    state = run.machine.epoch
    works = parts_of(run.epochs, state).works
    commitments = [Commitment(s, 0, 1, *works[s], bytes([s]) * 32) for s in state.seats]
    run.tick(*map(Committed, commitments))
    run.tick(Left(1, Health.DROPPED))
    assert run.machine.state.seats[1].works
    run.tick(*(Witnessed(WitnessProof.of(s, state.seed, 0, 1, commitments)) for s in (0, 2)))
    while run.machine.epoch.round == 1 and run.tick(seconds=10):
        pass
    (entry,) = run.of(RoundEntry)
    assert isinstance(entry, RoundEntry)
    assert {seat for seat, _ in entry.contributions} == {0, 1, 2}
    assert [entry.seat for entry in run.of(LeftEntry) if isinstance(entry, LeftEntry)] == [1]
    run.check()


def test_too_few_witnesses_agree_on_nothing() -> None:
    run = Run(max_rounds=9)
    run.begin("a", "b")
    run.tick(seconds=10)
    run.tick(seconds=10)
    assert run.machine.epoch.phase is EpochPhase.COOLDOWN
    assert not run.of(RoundEntry)
    assert run.machine.state.seats == {}
    run.check()


def test_a_stop_ends_with_the_round() -> None:
    run = Run(max_samples=1000)
    run.begin("a", "b")
    run.tick(Stop("enough"))
    assert run.machine.state.phase is Phase.FINISHING
    run.make_round()
    run.cool_down()
    assert run.machine.epoch.phase is EpochPhase.FINISHED
    assert run.machine.state.num_used == 2 * BATCH
    run.check()


def test_a_pause_keeps_the_round() -> None:
    run = Run(max_rounds=1)
    run.begin("a", "b")
    run.tick(Pause())
    assert not run.tick(seconds=1000)
    run.tick(Resume())
    run.make_round()
    assert len(run.of(RoundEntry)) == 1
    run.check()


def test_a_run_that_is_resumed_gives_no_seat_again() -> None:
    run = Run(max_rounds=9)
    run.begin("a", "b")
    run.make_round()
    run.make_round()
    state = RunState(SIZES, seed=7, resumable={1})
    for entry in run.entries:
        state.apply(entry)
    again = WitnessedMachine(run.rules, run.epochs, state, fold_epochs(run.epochs, run.entries))
    again.resume(1)
    run.machine = again
    run.entries += again.drain()
    assert (again.epoch.made, again.epoch.epoch, again.epoch.next_seat) == (1, 1, 2)
    run.begin("a", "b")
    assert sorted(again.state.seats) == [2, 3]
    for _ in range(3):
        run.make_round()
    assert again.state.round == 4
    assert again.state.num_used == 4 * 2 * BATCH
    run.check()


def test_batches_of_a_round_are_dealt_by_the_committee() -> None:
    run = Run(max_rounds=2, batches=5)
    run.begin("a", "b")
    (dealt,) = run.of(DealtEntry)
    assert isinstance(dealt, DealtEntry)
    assert [work.num_samples for _, work in dealt.works] == [3 * BATCH, 2 * BATCH]
    order = list(parts_of(run.epochs, run.machine.epoch).works)
    assert [seat for seat, _ in dealt.works] == order
    run.make_round()
    run.check()


def test_an_altered_journal_is_found() -> None:
    run = Run(max_rounds=2)
    run.begin("a", "b")
    run.make_round()
    # The one by which the second round began.
    dealt = max(n for n, entry in enumerate(run.entries) if isinstance(entry, DealtEntry))
    at = max(n for n in range(dealt) if isinstance(run.entries[n], EpochEntry))
    entry = run.entries[at]
    assert isinstance(entry, EpochEntry)
    for wrong in (
        replace(entry, digest=bytes(32)),
        replace(entry, draw=bytes(32)),
        replace(entry, time=entry.time + 1.0),
        replace(entry, events=({"kind": "flown"},)),
    ):
        with pytest.raises(ConfigurationError, match=r"an entry of an epoch|another state"):
            fold_epochs(run.epochs, [*run.entries[:at], wrong, *run.entries[at + 1 :]])


def test_a_work_has_no_more_ranges_than_an_epoch_and_a_claim_can_say() -> None:
    """Of slices of one sample a work of two batches would have 6,000 ranges; the rest is dealt in later rounds."""
    run = Run(sizes=(1,) * 40_000, batch=3000, batches=4, max_samples=20_000)
    run.begin("a", "b")
    works = [work for seat in run.machine.state.seats.values() for work in seat.works]
    assert [len(work.ranges) for work in works] == [MAX_RANGES] * 2
    for told in round_works(run.machine):
        assert RoundWork.decode(told.encode()) == told
        assert len(Samples(told.ranges, 0, 0).digest()) == 32
    run.make_round()
    while run.machine.epoch.phase is not EpochPhase.FINISHED:
        if run.machine.epoch.phase is EpochPhase.COOLDOWN:
            run.cool_down()
        elif run.machine.epoch.has_round:
            run.make_round()
        else:
            run.warm()
    assert run.machine.state.num_used == 20_000
    run.check()
