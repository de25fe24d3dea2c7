"""What a board knows of a run: from the journal, from figures, and from a look at its leader."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from neurogrid.training.leading.board import MAX_FIGURES, RunBoard
from neurogrid.training.leading.look import LeaderLook, PeerLook, StageLook
from neurogrid.training.leading.status import StageStatus
from neurogrid.training.runs.alarms import NUM_FLAT, AlarmKind
from neurogrid.training.runs.entries import CheckpointEntry, Entry, JoinedEntry, RunEntry
from neurogrid.training.runs.journal import Recorded
from neurogrid.training.runs.machine import Outcome, Rules, RunMachine
from neurogrid.training.runs.run_file import RunFile, parse_run_file
from neurogrid.training.runs.run_file.stage_sections import LayoutSection
from neurogrid.training.runs.state import Occupant, Phase, RunState
from neurogrid.training.wire.runs import Report, StageReport

RUN_ID = bytes(range(16))
RUN = parse_run_file('[model]\nconfig = "embedded"\n[data]\npath = "data/"\n[stop]\nrounds = 10\n')
RULES = Rules(
    min_members=2, max_members=8, batch_samples=2, steps=4, max_rounds=10, projected=False
)
TOKENS = 32


CHAIN = replace(RUN, layout=LayoutSection(stages=2))


class Run:
    """A run without network: a real machine, whose entries the board is told as the journal would."""

    def __init__(self, run_file: RunFile = RUN, rules: Rules = RULES) -> None:
        self.now = 1000.0
        self.rules = rules
        self.board = RunBoard(run_file, clock=lambda: self.now)
        self.board.tokens_per_sample = TOKENS
        self.machine = RunMachine(rules, RunState((64, 64), seed=0))
        self.reports: dict[str, Report] = {}
        self.recorded: list[Recorded] = []
        self.differing: dict[str, int] = {}
        self.index = 0
        self.told(RunEntry(RUN_ID, "leader", bytes(32), bytes(32), (64, 64), 0))

    def told(self, *entries: Entry) -> None:
        for entry in entries:
            each = Recorded(len(self.recorded) + 1, self.now, entry)
            self.recorded.append(each)
            self.board.record(each)

    def join(self, *names: str) -> None:
        for name in names:
            self.machine.joined(self.machine.reserve(name), Occupant(name, 1), name)
            self.reports[name] = Report(run=RUN_ID, seat=0, state="ready", incarnation=1)
        self.told(*self.machine.drain())

    def report(self, name: str, **changes: Any) -> None:
        known = {"run": RUN_ID, "seat": 0, "state": "training", "incarnation": 1}
        self.reports[name] = Report(**{**known, **changes})

    def decide(
        self, *names: str, seconds: float = 5.0, loss: float | None = None, **more: float
    ) -> None:
        """A round that those took part in with one work each, with these figures beside the loss."""
        self.now += seconds
        self.index += 1
        state = self.machine.state
        weights = {
            name: float(seat.works[0].weight)
            for name in names
            if (seat := state.seat_of(name)) is not None
        }
        members = frozenset(seat.occupant for seat in state.occupied() if seat.occupant)
        wrong = self.machine.decided(
            Outcome(self.index, state.round + 1, bytes([state.round] * 32), weights, members)
        )
        assert not wrong
        self.told(*self.machine.drain())
        if loss is not None:
            tokens = float(state.num_used * TOKENS)
            figures = {"round": state.round, "step": 4 * state.round, "tokens": tokens}
            self.board.metrics({**figures, "seconds": self.now - 1000, "loss": loss, **more})

    def look(self) -> LeaderLook:
        return LeaderLook(
            peer_id="leader",
            state=self.machine.state,
            rules=self.rules,
            peers=[
                PeerLook(
                    name,
                    name,
                    None,
                    True,
                    report,
                    {"torch": "2.10"},
                    lease_seconds=7.5,
                )
                for name, report in self.reports.items()
            ],
            seconds=self.now - 1000,
            differing=self.differing,
        )


class ChainRun(Run):
    """A run in two stages, of members of these names in order; a third one stands by."""

    def __init__(self) -> None:
        super().__init__(CHAIN, replace(RULES, min_members=1, steps=1))
        self.waits = "waits for members: 0 of 2 are here"
        self.stages: list[StageLook] = []
        self.join("leader")
        del self.reports["leader"]

    def widen(self, name: str) -> None:
        """The first stage has this member, too."""
        self.report(name, state="ready")
        self.stages.insert(1, replace(self.stages[0], peer_id=name, report=None, waited=None))

    def arrange(self, *names: str, spare: str = "shelf") -> None:
        for name in (*names, spare):
            self.report(name, state="ready")
        self.waits = ""
        bounds = (0, 12, 28)
        self.stages = [
            StageLook(name, index + 1, *bounds[index : index + 2])
            for index, name in enumerate(names)
        ]

    def tell(self, index: int, state: str, *, waited: float | None = None, **more: Any) -> None:
        """What a stage reports, and how long it has waited."""
        report = StageReport(RUN_ID, 7, state, self.machine.state.round, **more)
        self.stages[index] = replace(self.stages[index], report=report, waited=waited)

    def step(self, loss: float, *, waited: float = 0.125) -> None:
        self.decide("leader", seconds=1.5)
        state = self.machine.state
        figures = {"round": state.round, "step": state.round, "seconds": self.now - 1000}
        told = {"loss": loss, "stages": 2, "waited": waited, "bubble": 0.0588}
        self.board.metrics({**figures, "tokens": float(state.num_used * TOKENS), **told})

    def look(self) -> LeaderLook:
        return replace(super().look(), stages=self.stages, waits=self.waits)


@pytest.fixture
def run() -> Run:
    run = Run()
    with run.board.watching(run.look):
        yield run


def test_a_board_answers_before_there_is_a_leader() -> None:
    status = RunBoard(RUN).status()
    assert status.phase is Phase.WAITING
    assert status.waits == "the model and the data are opened"
    assert (status.members, status.rounds, status.loss) == ((), (), None)


def test_it_says_how_many_members_are_waited_for(run: Run) -> None:
    assert run.board.status().waits == "waits for members: 0 of 2 are there"
    run.join("a")
    assert run.board.status().waits == "waits for members: 1 of 2 are there"
    run.join("b")
    status = run.board.status()
    assert (status.phase, status.waits) == (Phase.TRAINING, "")
    assert status.run_id == RUN_ID.hex()
    assert [event.text for event in status.events] == [
        "training begins with 2 members, 160 samples in all"
    ]


def test_a_round_says_who_took_part_and_who_was_late(run: Run) -> None:
    run.join("a", "b")
    run.decide("a", "b", seconds=5, loss=4.0)
    run.decide("a", seconds=7)
    first, second = run.board.status().rounds
    assert (first.round, first.seats, first.late, first.seconds) == (1, (0, 1), (), 5.0)
    assert (first.samples, first.figures["loss"]) == (16, 4.0)
    assert (second.round, second.seats, second.late, second.seconds) == (2, (0,), (1,), 7.0)
    assert second.names == {0: "a", 1: "b"}
    assert second.figures == {}
    a, b = run.board.status().members
    assert (a.num_rounds, a.num_late) == (2, 0)
    assert (b.num_rounds, b.num_late) == (1, 1)


def test_a_member_without_work_is_not_late(run: Run) -> None:
    run.join("a", "b")
    run.decide("a", "b")
    run.told(JoinedEntry(seat=2, peer="c", incarnation=1, name="c"))  # and nothing was dealt to it
    run.decide("a", "b")
    assert run.board.status().rounds[-1].late == ()


def test_a_member_is_seen_at_work(run: Run) -> None:
    run.join("a", "b")
    run.report("a", batches_done=3, batch_seconds=0.5, loss_sum=300.0, num_tokens=100, cosine=0.5)
    run.report("b", state="averaging", done=1)
    a, b = run.board.status().members
    assert (a.seat, a.name, a.state, a.batches_done, a.batches) == (0, "a", "training", 3, 4)
    assert a.tokens_per_second == 2 * TOKENS / 0.5
    assert (a.loss, a.cosine, a.lease_seconds) == (3.0, 0.5, 7.5)
    assert (b.state, b.batches_done) == ("averaging", 0)
    assert run.board.status().waits == "", "no longer than usual"
    run.now += 60
    assert run.board.status().waits == "round 1 waits for a"


def test_a_members_loss_is_that_of_what_it_told_since(run: Run) -> None:
    run.join("a", "b")
    run.report("a", loss_sum=300.0, num_tokens=100)
    assert run.board.status().members[0].loss == 3.0
    run.report("a", loss_sum=500.0, num_tokens=200)
    assert run.board.status().members[0].loss == 2.0
    assert run.board.status().members[0].loss == 2.0
    run.report("a", loss_sum=40.0, num_tokens=10)  # it began anew
    assert run.board.status().members[0].loss == 4.0


def test_what_those_had_told_that_are_gone_is_forgotten(run: Run) -> None:
    """Workers come and go for as long as the run lasts."""
    for number in range(30):
        run.reports = {}
        run.report(f"worker {number}", loss_sum=300.0, num_tokens=100)
        assert run.board.status().members[0].loss == 3.0
    assert len(run.board._losses) == 1


def test_a_lost_members_samples_are_told(run: Run) -> None:
    run.join("a", "b", "c")
    run.machine.left(2, "its machine is off")
    run.told(*run.machine.drain())
    text = run.board.status().events[-1].text
    assert text.startswith("c is out: its machine is off; ")
    assert text.endswith("samples that it had are dealt to others")
    assert [member.name for member in run.board.status().members if member.seat is not None] == [
        "a",
        "b",
    ]


def test_what_is_done_of_the_run_and_what_is_left(run: Run) -> None:
    run.join("a", "b")
    assert run.board.status().part == 0
    for _ in range(4):
        run.decide("a", "b", seconds=10, loss=3.0)
    status = run.board.status()
    assert status.part == pytest.approx(0.4)
    assert status.remaining_seconds == pytest.approx(60)
    assert status.tokens_per_second == pytest.approx(16 * TOKENS / 10)
    assert status.samples is not None
    assert (status.samples.used, status.samples.available + status.samples.assigned) == (64, 64)


def test_a_board_takes_over_what_an_earlier_leader_wrote(run: Run) -> None:
    run.join("a", "b")
    run.decide("a", "b", loss=4.0)
    run.decide("a", loss=3.5)
    run.told(CheckpointEntry(step=8, round=2))
    again = RunBoard(RUN, clock=lambda: run.now)
    again.replay(run.recorded, run.board.figures)
    status = again.status()
    assert [(each.round, each.late) for each in status.rounds] == [(1, ()), (2, (1,))]
    assert [each.step for each in status.checkpoints] == [8]
    assert (status.loss, status.events) == (3.5, ())


def test_what_is_replayed_twice_is_there_once(run: Run) -> None:
    run.join("a", "b")
    run.decide("a", "b", loss=4.0)
    before = run.board.status()
    run.board.replay(run.recorded, list(run.board.figures))
    after = run.board.status()
    assert (after.rounds, after.checkpoints, after.loss) == (
        before.rounds,
        before.checkpoints,
        before.loss,
    )
    assert len(run.board.journal) == len(run.recorded)


def test_rounds_after_the_checkpoint_are_taken_back(run: Run) -> None:
    run.join("a", "b")
    for loss in (4.0, 3.5, 3.0):
        run.decide("a", "b", loss=loss)
    run.machine.resume(2)
    run.told(*run.machine.drain())
    status = run.board.status()
    assert [each.round for each in status.rounds] == [1, 2]
    assert status.loss == 3.5
    assert status.waits == "waits for those who had a seat: a, b"


def test_a_member_is_apart_when_it_was_for_three_rounds(run: Run) -> None:
    run.join("a", "b", "c")
    for round in (1, 1, 2, 3):
        for name, cosine in (("a", 0.7), ("b", 0.1), ("c", 0.6)):
            run.report(name, round=round, cosine=cosine, gradient_norm=1.0)
        assert run.board.status().alarms == ()
        run.decide("a", "b", "c", loss=3.0 - round / 10)
    [alarm] = run.board.status().alarms
    assert (alarm.kind, alarm.seat) == (AlarmKind.MEMBER_APART, 1)
    run.report("b", round=4, cosine=0.6, gradient_norm=1.0)
    run.decide("a", "b", "c", loss=2.5)
    run.report("b", round=5, cosine=0.1, gradient_norm=1.0)
    run.decide("a", "b", "c", loss=2.4)
    assert run.board.status().alarms == ()


def test_an_alarm_is_said_once_and_stays_in_the_status(run: Run) -> None:
    run.join("a", "b")
    run.report("a", gradient_norm=0.0)
    run.decide("a", "b", loss=3.0)
    run.decide("a", "b", loss=2.9)
    said = [event for event in run.board.events.last if event.kind == "alarm"]
    assert len(said) == 1
    assert [alarm.kind for alarm in run.board.status().alarms] == [AlarmKind.ZERO_GRADIENTS]
    run.report("a", gradient_norm=1.0)
    assert run.board.status().alarms == ()


def test_an_alarm_that_comes_and_goes_is_said_again_after_a_while_alone(run: Run) -> None:
    run.join("a", "b")

    said: list[str] = []
    run.board.on_alarm = said.append

    def tell(*norms: float) -> None:
        for norm in norms:
            run.report("a", gradient_norm=norm)
            run.board.metrics({"loss": 3.0 - len(run.board.figures) / 10})

    tell(0.0, 1.0, 0.0, 1.0, 1.0, 0.0)
    assert len(said) == 1
    tell(*(1.0,) * NUM_FLAT, 0.0)
    assert len(said) == 2


def test_a_loss_that_is_not_a_number_is_an_alarm_and_no_figure(run: Run) -> None:
    run.join("a", "b")
    run.decide("a", "b", loss=3.0)
    run.decide("a", "b", loss=float("nan"))
    status = run.board.status()
    assert [alarm.kind for alarm in status.alarms] == [AlarmKind.DIVERGING_LOSS]
    assert status.loss == 3.0


def test_whether_it_learns_counts_members_with_other_weights(run: Run) -> None:
    run.join("a", "b")
    for loss in (4.0, 3.6, 3.2, 2.9, 2.5):
        run.decide("a", "b", loss=loss)
    for name in "ab":
        run.report(name, round=5, digest=bytes(32))
    learning = run.board.learning()
    assert (learning.training_verified, learning.hash_agreement_rate) == (True, 1.0)
    run.report("b", round=5, digest=bytes([1] * 32))
    learning = run.board.learning()
    assert (learning.training_verified, learning.hash_agreement_rate) == (False, 0.5)


def test_figures_are_bounded_and_keep_both_ends() -> None:
    board = RunBoard(RUN)
    for number in range(3 * MAX_FIGURES):
        board.metrics({"round": number, "loss": 1.0})
    assert len(board.figures) <= MAX_FIGURES
    assert board.figures[0]["round"] == 0
    assert board.figures[-1]["round"] == 3 * MAX_FIGURES - 1
    rounds = [line["round"] for line in board.figures]
    assert rounds == sorted(set(rounds))


def test_a_chain_in_stages() -> None:
    """The stages come first, in order, as they report themselves; whoever stands by comes behind them."""
    run = ChainRun()
    with run.board.watching(run.look):
        assert run.board.status().waits == "waits for members: 0 of 2 are here"
        assert [event.text for event in run.board.status().events] == [
            "training begins in 2 stages, 20 samples in all"
        ]
        run.arrange("laptop", "desk")
        far = {"micro_batches": 16, "done": 5, "under_way": 2}
        run.tell(0, "working", waited=0.25, memory_bytes=900, **far)
        run.tell(1, "loading")
        run.step(4.0)
        status = run.board.status()
        assert status.is_chain
        assert status.waits == ""
        assert [member.name for member in status.members] == ["laptop", "desk", "shelf"]
        first, second, spare = status.members
        assert first.stage == StageStatus(1, 0, 12, step=0, waited=0.25, **far)
        assert (first.state, first.memory_bytes, first.seat) == ("training", 900, None)
        assert second.stage == StageStatus(2, 12, 28)
        assert (second.state, spare.state, spare.stage) == ("starting", "ready", None)
        run.tell(1, "failed", reason="no memory left")
        failed = run.board.status().members[1]
        assert (failed.state, failed.reason) == ("failed", "no memory left")
    assert not RunBoard(RUN).status().is_chain
