"""Values of a run file that are changed while the run goes on: which may be, when they hold, how they are wanted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import ConfigurationError
from neurogrid.training.leading.chains.rates import StepRates
from neurogrid.training.leading.changes import WantedChanges
from neurogrid.training.leading.progress import QuietProgress
from neurogrid.training.runs.changes import (
    Changes,
    changed_run,
    changes_text,
    differing,
    run_at,
    told,
    values_of,
    words_of,
)
from neurogrid.training.runs.entries import ChangedEntry, ResumedEntry, RoundEntry, entry_of
from neurogrid.training.runs.inner_optimizer import rates_of
from neurogrid.training.runs.machine import Outcome, Rules, RunMachine
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.run_file import RunFile, parse_run_file
from neurogrid.training.runs.state import Occupant, Phase, RunState

TEXT = '[model]\nconfig = "embedded"\n[data]\npath = "data/"\n[stop]\nsteps = 16\n'
WHOLE = parse_run_file(TEXT)
STAGES = parse_run_file(f"{TEXT}[layout]\nstages = 2\n[inner]\nbatch_tokens = 512\n")
REPLICAS = parse_run_file(
    TEXT.replace("steps = 16", "rounds = 6")
    + '[layout]\nstages = 2\nreplicas = 2\n[outer]\nmethod = "diloco"\nevery = 5\n'
)
SAMPLE_TOKENS = STAGES.data.sequence_length


# Which may be changed


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("inner.lr=1e-4", 1e-4),
        ("inner.clip=0", 0.0),
        ("inner.batch_tokens=8_192", 8192),
        ("stop.hours=2.5", 2.5),
        ("stop.tokens=9000000", 9_000_000),
        ("eval.every=0", 0),
        ("outer.grace = 20", 20.0),
        ("layout.micro_batches=8", 8),
        ("layout.state_every=5", 5),
        ("checkpoints.every=7", 7),
    ],
)
def test_a_value_is_changed_and_nothing_else(word: str, value: float) -> None:
    values = values_of([word])
    changed = changed_run(STAGES, values)
    ((key, text),) = differing(STAGES, changed)
    title, _, name = key.partition(".")
    section = getattr(STAGES, title)
    assert getattr(getattr(changed, title), name) == value
    assert changed == replace(STAGES, **{title: replace(section, **{name: value})})
    assert changed_run(STAGES, {key: text}) == changed
    assert parse_run_file(changed.text(), name="run.toml") == changed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["inner.lr"], "is no KEY=VALUE"),
        (["lr=1"], '"lr" is no key of a section'),
        (["iner.lr=1"], 'there is no section "iner": there are model, layout'),
        (["inner.rl=1"], '[inner] has no key "rl": there are lr'),
        (["inner.lr=0"], "[inner] lr is a number above 0 and at most 1000, not 0"),
        (["inner.lr=fast"], '[inner] lr is a number above 0 and at most 1000, not "fast"'),
        (["inner.lr=1\n[x]\ny=2"], "[inner] lr is a number above 0"),
        (["inner.batch_tokens=100"], "[inner] batch_tokens is at least [data] sequence_length"),
        (["stop.steps=0"], "[stop] steps is a whole number from 1"),
        (["stop.steps=1e3"], "[stop] steps is a whole number from 1"),
        (["seed.x=1"], "there is no section"),
        (["model.config=other"], "[model] config stays while a run goes on"),
        (
            ["layout.stages=3"],
            "[layout] stages stays while a run goes on: it is what members agree",
        ),
        (["inner.optimizer=sgd"], "changed may be inner.lr, inner.clip, inner.batch_tokens, stop."),
    ],
)
def test_what_may_not_be_changed_is_refused_in_one_line(words: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        changed_run(STAGES, values_of(words))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_of_whole_models_only_what_is_the_leaders_own_is_changed() -> None:
    changed = changed_run(WHOLE, values_of(["stop.steps=9", "eval.samples=3"]))
    assert (changed.stop.steps, changed.eval.samples) == (9, 3)
    for word in ("inner.lr=1", "checkpoints.every=3", "outer.grace=3", "layout.micro_batches=2"):
        with pytest.raises(
            ConfigurationError, match=r"while a run of whole models goes on, .* stays"
        ):
            changed_run(WHOLE, values_of([word]))


def test_of_replicas_what_a_round_was_begun_with_stays() -> None:
    changed = changed_run(REPLICAS, values_of(["stop.rounds=9", "inner.lr=0.5", "outer.grace=7"]))
    assert (changed.stop.rounds, changed.inner.lr, changed.outer.grace) == (9, 0.5, 7)
    assert told(ChangedEntry(4, (("inner.lr", "0.5"),)), REPLICAS).startswith("from round 4 on")
    for word in ("inner.batch_tokens=4096", "layout.micro_batches=2"):
        with pytest.raises(
            ConfigurationError, match="stays while a run of several replicas goes on; changed may"
        ):
            changed_run(REPLICAS, values_of([word]))


def test_of_replicas_rates_hold_for_the_steps_of_a_round() -> None:
    state = RunState((50, 50), seed=1, num_epochs=None)

    def rules_of(run: RunFile) -> Rules:
        assert run.stop.rounds is not None
        return Rules(*(2, 2, 1, 5), projected=False, max_rounds=run.stop.rounds)

    rates = StepRates(REPLICAS, state, rules_of)
    first = rates_of(REPLICAS.inner, 6 * 5)
    assert [rates.rate(step) for step in range(30)] == [first(step) for step in range(30)]
    assert rates.changed(29) == (None, None)
    state.changes.take(ChangedEntry(3, (("inner.lr", "0.5"), ("inner.clip", "2"))))
    state.changes.take(ChangedEntry(4, (("stop.rounds", "12"),)))
    second = rates_of(replace(REPLICAS.inner, lr=0.5), 6 * 5)
    third = rates_of(replace(REPLICAS.inner, lr=0.5), 12 * 5)
    assert rates.changed(9) == (None, None)
    assert [rates.changed(step) for step in (10, 14)] == [(second(10), 2.0), (second(14), 2.0)]
    assert rates.changed(15) == (third(15), 2.0)


def test_what_is_wanted_is_written_and_read_again() -> None:
    values = values_of(["stop.steps=9", "inner.lr=1e-5", "inner.clip=2"])
    text = changes_text(changed_run(STAGES, values), values)
    assert text == "[inner]\nclip = 2.0\nlr = 1e-05\n\n[stop]\nsteps = 9\n"
    assert changed_run(STAGES, words_of(text)) == changed_run(STAGES, values)
    assert words_of("") == {}
    for wrong in ("[inner", "lr = 1", "[inner]\nlr = 1\nlr = 2"):
        with pytest.raises(ConfigurationError):
            words_of(wrong)


# When they hold


@given(st.data())
def test_what_holds_follows_from_the_journal(data: st.DataObject) -> None:
    """Changes come in their rounds, and rounds are taken back: what holds in a round is what was said last of it."""
    changes, said, round_ = Changes(), dict[tuple[int, str], str](), 0
    for number in range(data.draw(st.integers(0, 30))):
        while (due := changes.next_due(round_ + 1)) is not None:
            assert due.round == round_ + 1
            changes.take(due)
        event = data.draw(st.sampled_from(("round", "round", "change", "resume")))
        if event == "round":
            round_ += 1
        elif event == "change":
            keys = data.draw(st.sets(st.sampled_from("abc"), min_size=1))
            changes.take(
                ChangedEntry(round_ + 1, tuple((key, str(number)) for key in sorted(keys)))
            )
            # What was to come later of the same keys does not.
            said = {at: v for at, v in said.items() if at[1] not in keys or at[0] <= round_}
            said |= {(round_ + 1, key): str(number) for key in keys}
        else:
            round_ = data.draw(st.integers(0, round_))
            changes.take_back(round_)
        for at in range(round_ + 1):
            expected = {key: value for (r, key), value in sorted(said.items()) if r <= at}
            assert changes.at(at) == expected
        assert changes.last == {key: value for (_, key), value in sorted(said.items())}


class Led:
    """A chain as its machine has it: one member, whose rounds are decided one by one."""

    def __init__(self, run: RunFile = STAGES, *, max_samples: int | None = None) -> None:
        self.run, self.max_samples = run, max_samples
        self.state = RunState((50, 50), seed=1, num_epochs=None)
        self.journal: list[object] = []
        self._open()

    def _open(self) -> None:
        self.machine = RunMachine(self.rules_of(self.run), self.state, self._rules_at)
        self.rates = StepRates(self.run, self.state, self.rules_of)

    def _rules_at(self, values: Mapping[str, str]) -> Rules:
        return self.rules_of(changed_run(self.run, values))

    def rules_of(self, run: RunFile) -> Rules:
        samples = self.max_samples
        return Rules(
            *(1, 1, run.inner.batch_tokens // SAMPLE_TOKENS, 1),
            projected=False,
            max_samples=samples,
            max_rounds=run.stop.steps if samples is None else None,
        )

    def sit(self) -> None:
        self.machine.joined(self.machine.reserve("leader"), Occupant("leader", 1), "")

    def step(self) -> None:
        (seat,) = self.state.occupied()
        work = seat.works[0]
        self.machine.decided(
            Outcome(
                *(self.state.index + 1, self.state.round + 1, bytes(32)),
                {"leader": work.share},
                frozenset({Occupant("leader", 1)}),
            )
        )

    def note(self) -> list[object]:
        entries = self.machine.drain()
        self.journal += entries
        return list(entries)

    def restart(self) -> None:
        """The leader is killed, and reads its journal."""
        self.note()
        self.state = RunState((50, 50), seed=1, num_epochs=None)
        for entry in self.journal:
            again = entry_of(json.loads(json.dumps(entry.json())))  # type: ignore[attr-defined]
            assert again == entry
            self.state.apply(again)
        self._open()

    def sizes(self) -> list[int]:
        """Samples of the rounds that count."""
        sizes: dict[int, int] = {}
        for entry in self.journal:
            if isinstance(entry, RoundEntry):
                sizes[entry.round] = sum(each.num_samples for each in entry.ranges)
            elif isinstance(entry, ResumedEntry):
                sizes = {r: size for r, size in sizes.items() if r <= entry.round}
        return [sizes[r] for r in sorted(sizes)]


def test_what_was_dealt_stays_and_the_run_ends_where_it_says_now() -> None:
    led = Led()
    led.sit()
    for _ in range(3):
        led.step()
    entry = led.machine.change([("stop.steps", "8"), ("inner.batch_tokens", "1024")])
    assert told(entry, STAGES) == "from step 4 on: inner.batch_tokens = 1024, stop.steps = 8"
    while led.state.phase is not Phase.ENDED:
        led.step()
    led.note()
    assert led.state.round == 8
    assert led.sizes() == [2, 2, 2, 2, 2, 4, 4, 4]


@pytest.mark.parametrize("back_to", [0, 2, 3, 4, 6])
def test_a_leader_that_comes_back_does_what_it_did(back_to: int) -> None:
    wanted = Led()
    led = Led()
    for each in (wanted, led):
        each.sit()
        for _ in range(3):
            each.step()
        each.machine.change([("inner.batch_tokens", "1024"), ("inner.lr", "0.5")])
        for _ in range(3):
            each.step()
    led.restart()
    assert led.machine.rules.batch_samples == 4
    led.machine.resume(back_to)
    led.sit()
    while led.state.phase is not Phase.ENDED:
        led.machine.change_due()
        led.step()
    while wanted.state.phase is not Phase.ENDED:
        wanted.step()
    led.note()
    wanted.note()
    assert led.sizes() == wanted.sizes()
    rates = [[each.rates.rate(step) for step in range(16)] for each in (led, wanted)]
    assert rates[0] == rates[1]
    assert rates[0][2] == rates_of(STAGES.inner, 16)(2)
    assert rates[0][3] == rates_of(replace(STAGES.inner, lr=0.5), 16)(3)


def test_an_end_that_is_behind_the_run_comes_after_the_next_round() -> None:
    led = Led()
    led.sit()
    for _ in range(5):
        led.step()
    led.machine.change([("stop.steps", "3")])
    assert led.state.phase is Phase.TRAINING
    led.step()
    assert (led.state.phase, led.state.round) == (Phase.ENDED, 6)


def test_an_end_that_is_further_away_is_come_to() -> None:
    led = Led()
    led.sit()
    for _ in range(15):
        led.step()
    led.machine.change([("stop.steps", "20")])
    while led.state.phase is not Phase.ENDED:
        led.step()
    assert led.state.round == 20


# Rates


def test_a_stage_is_told_what_its_run_file_does_not_say() -> None:
    led = Led()
    led.sit()
    led.step()
    assert led.rates.changed(1) == (None, None)
    led.machine.change([("eval.every", "3"), ("layout.micro_batches", "2")])
    assert led.rates.changed(1) == (None, None)
    led.machine.change([("inner.clip", "0.0")])
    assert led.rates.changed(1) == (None, 0.0)
    led.step()
    led.machine.change([("stop.steps", "40")])
    assert led.rates.changed(1) == (None, 0.0)
    assert led.rates.changed(2) == (rates_of(STAGES.inner, 40)(2), 0.0)
    led.step()
    # All as it was.
    led.machine.change([("stop.steps", "16"), ("inner.clip", str(STAGES.inner.clip))])
    assert led.rates.changed(3) == (None, None)
    assert led.rates.changed(2) == (rates_of(STAGES.inner, 40)(2), 0.0)


@pytest.mark.parametrize(("tokens", "steps"), [("1024", 6 + 22), ("256", 6 + 88)])
def test_a_schedule_by_samples_ends_with_them_whatever_batches_there_were(
    tokens: str, steps: int
) -> None:
    led = Led(max_samples=100)
    led.sit()
    for _ in range(4):
        led.step()
    led.machine.change([("inner.batch_tokens", tokens)])
    for _ in range(2):  # were dealt before
        led.step()
    led.machine.change([("inner.lr", "0.5")])
    inner = replace(STAGES.inner, lr=0.5)
    rate = led.rates.rate(6)
    while led.state.phase is not Phase.ENDED:
        led.step()
    assert led.state.round == steps
    assert rate == rates_of(inner, steps)(6) > 0
    assert led.rates.rate(steps - 1) == rates_of(inner, steps)(steps - 1) > 0


# The file


class Lines(QuietProgress):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)


def test_a_leader_takes_in_what_the_file_says_once(tmp_path: Path) -> None:
    led, lines, directory = Led(), Lines(), RunDirectory(tmp_path)
    led.sit()
    led.step()
    led.note()
    wanted = WantedChanges(directory.changes, STAGES, led.machine, lines)
    assert not wanted.take()
    directory.write_changes("[inner]\nlr = 0.5\n[stop]\nsteps = 16\n")
    assert wanted.take()
    assert not wanted.take()
    assert led.note() == [ChangedEntry(2, (("inner.lr", "0.5"),))]
    assert lines.said == ["from step 2 on: inner.lr = 0.5"]
    led.step()
    directory.write_changes("[inner]\nlr = 0.5\n[stop]\nsteps = 9\n")
    assert wanted.take()
    assert lines.said[1:] == ["from step 3 on: stop.steps = 9"]
    assert run_at(STAGES, led.state.changes, 3).stop.steps == 9
    # Another leader finds nothing new.
    led.restart()
    assert not WantedChanges(directory.changes, STAGES, led.machine, lines).take()
    led.machine.resume(0)
    led.sit()
    again = WantedChanges(directory.changes, STAGES, led.machine, lines)
    assert not again.take()
    led.step()
    assert again.take()
    assert lines.said[2:] == ["from step 2 on: inner.lr = 0.5"]
    assert lines.warned == []


def test_works_that_are_cut_from_now_on_are_told_of_as_at_the_start(tmp_path: Path) -> None:
    """Once, when that is changed; not of changes that a run has none of."""
    led, lines, directory = Led(), Lines(), RunDirectory(tmp_path)
    led.sit()
    led.step()

    def cut(num_samples: int) -> str:
        return f"not {num_samples}" if num_samples > 512 // SAMPLE_TOKENS else ""

    wanted = WantedChanges(directory.changes, STAGES, led.machine, lines, cut)
    directory.write_changes("[inner]\nlr = 0.5\n")
    assert wanted.take()
    assert lines.warned == []
    directory.write_changes("[inner]\nlr = 0.5\nbatch_tokens = 1024\n")
    assert wanted.take()
    assert not wanted.take()
    assert lines.warned == [f"not {1024 // SAMPLE_TOKENS}"]


def test_a_wrong_file_is_told_of_once_and_changes_nothing(tmp_path: Path) -> None:
    led, lines, directory = Led(), Lines(), RunDirectory(tmp_path)
    led.sit()
    wanted = WantedChanges(directory.changes, STAGES, led.machine, lines)
    for number, (text, says) in enumerate(
        [
            ("[inner]\nlr = 0\n", "[inner] lr is a number above 0"),
            ("[inner\n", "this is no TOML"),
            ("[layout]\nstages = 7\n", "stays while a run goes on"),
            ("#" * 20_000, "is no file of changes"),
        ],
        1,
    ):
        directory.write_changes(text)
        assert not wanted.take()
        assert not wanted.take()
        assert len(lines.warned) == number
        assert says in lines.warned[-1]
    assert led.state.changes.made == []
    assert not list(tmp_path.glob("*partial"))


def test_at_its_end_nothing_is_changed_any_more(tmp_path: Path) -> None:
    led, lines, directory = Led(), Lines(), RunDirectory(tmp_path)
    led.sit()
    led.machine.stop("2 hours are over")
    directory.write_changes("[stop]\nsteps = 99\n")
    assert not WantedChanges(directory.changes, STAGES, led.machine, lines).take()
    assert "the run is at its end" in lines.warned[0]


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        RunDirectory(tmp_path / "gone").write_changes("")
