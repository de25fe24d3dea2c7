"""What the leader of a run keeps: checkpoints of rounds, also of bad weights, and why something is not in one."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

from neurogrid.errors import CheckpointError, ConfigurationError
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.averaging.parts import Layout
from neurogrid.training.checkpoints import read_checkpoint
from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.leading.keeper import Keeper
from neurogrid.training.leading.progress import QuietProgress
from neurogrid.training.leading.round_figures import RoundFigures
from neurogrid.training.runs.entries import RunEntry
from neurogrid.training.runs.journal import Journal
from neurogrid.training.runs.outer_state import OuterState
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.run_file import RunFile, parse_run_file
from neurogrid.training.runs.state import Phase, RunState
from neurogrid.training.trainer import Evaluation

LAYOUT = Layout(("a",), ((40,),))
MANIFEST = Manifest(
    "text",
    (SliceInfo(bytes(32), 8, 264),),
    (SliceInfo(b"\x01" * 32, 8, 264),),
    sequence_length=8,
    vocab_size=500,
)
RUN = parse_run_file(
    '[model]\nconfig = "embedded"\n[data]\npath = "data/"\n[stop]\nrounds = 9\n[outer]\nmethod = "diloco"\n'
    "[eval]\nevery = 1\n[checkpoints]\nevery = 2\n"
)


class Progress(QuietProgress):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


class Trainer:
    """In the place of one: writes a file, and finds the loss that it is given."""

    pid, layout = 1, LAYOUT

    def __init__(self, loss: float) -> None:
        self.weights, self._loss = torch.zeros(LAYOUT.num_elements), loss

    async def evaluate(self, ranges: Any) -> Evaluation:
        return Evaluation(self._loss, 7, 7, None)

    async def save(self, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(bytes(8))


class Slices:
    async def fetch(self, info: SliceInfo, timeout: float) -> Path:
        return Path("slice")


class World:
    """A keeper, and a run that it is told of.

    Attributes:
        fetch: in the place of `fetch_state`.
    """

    def __init__(self, path: Path, journal: Journal, run: RunFile, loss: float) -> None:
        self.directory = RunDirectory(path)
        self.journal, self.progress = journal, Progress()
        self.state = RunState((8,), seed=0)
        self.outer = OuterState(LAYOUT, torch.zeros(LAYOUT.num_elements), lr=1.0, momentum=0.0)
        self.figures = RoundFigures(run, 8)
        self.seconds: list[float] = []
        self.fetch: Callable[[int], str] = lambda seat: "it is lost"
        self._made = run, loss

    def keeper(self) -> Keeper:
        run, loss = self._made

        async def fetch_state(round_number: int, seat: int, path: Path, timeout: float) -> str:
            self.seconds.append(timeout)
            if seat:
                await trio.sleep_forever()
            return self.fetch(seat)

        return Keeper(
            self.directory,
            bytes(16),
            run,
            lambda round_number: run,
            self.journal,
            Trainer(loss),  # type: ignore[arg-type]
            MANIFEST,
            self.directory.path / "data",
            Slices(),  # type: ignore[arg-type]
            fetch_state,
            self.progress,
            self.figures,
        )

    def decide(self, round_number: int, phase: Phase = Phase.TRAINING) -> None:
        self.state.round = self.outer.round = self.state.num_trained = round_number
        self.state.phase = phase
        self.figures.decided(self.state)


Make = Callable[..., World]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    identity = Identity.generate()
    with Journal.open(tmp_path / "journal.jsonl", identity) as journal:
        journal.append(RunEntry(bytes(16), identity.peer_id, bytes(32), bytes(32), (8,), 0))
        yield lambda loss=2.5, run=RUN: World(tmp_path, journal, run, loss)


async def test_the_last_round_has_a_checkpoint_though_it_was_no_last_one_then(make: Make) -> None:
    told = make()
    keeper = told.keeper()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        told.decide(2)
        keeper.applied(told.outer, told.state, ())
        told.decide(3, Phase.FINISHING)
        keeper.applied(told.outer, told.state, ())
        told.state.phase = Phase.ENDED
        keeper.applied(told.outer, told.state, ())
        path = await keeper.finish()
        nursery.cancel_scope.cancel()
    assert read_checkpoint(path).state["round"] == 3
    assert [line["round"] for line in told.directory.figures()] == [2, 3]


@pytest.mark.parametrize("every", [2, 3])
async def test_the_last_round_is_evaluated_once_though_it_was_no_last_one_then(
    make: Make, every: int
) -> None:
    told = make(run=replace(RUN, eval=replace(RUN.eval, every=every)))
    keeper = told.keeper()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        told.decide(3, Phase.FINISHING)
        keeper.applied(told.outer, told.state, ())
        told.state.phase = Phase.ENDED
        keeper.applied(told.outer, told.state, ())
        path = await keeper.finish()
        nursery.cancel_scope.cancel()
    state = read_checkpoint(path).state
    assert (state["round"], state["eval_loss"]) == (3, 2.5)
    first, *later = told.directory.figures()
    # What was told of the round already is not told twice.
    assert ("eval_loss" in first, len(later)) == (every == 3, every != 3)
    for line in later:
        assert sorted(line) == ["eval_loss", "round", "seconds", "step", "tokens"]


async def test_a_run_that_ends_before_its_first_round_has_no_checkpoint(make: Make) -> None:
    told = make()
    keeper = told.keeper()
    told.state.phase = Phase.ENDED
    keeper.applied(told.outer, told.state, ())
    with pytest.raises(CheckpointError, match="before its first round"), trio.fail_after(30):
        await keeper.finish()


@pytest.mark.parametrize("loss", [math.nan, math.inf])
async def test_weights_whose_loss_is_no_number_are_kept_all_the_same(
    make: Make, loss: float
) -> None:
    told = make(loss)
    keeper = told.keeper()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        told.decide(2)
        keeper.applied(told.outer, told.state, ())
        path = await keeper.finish()
        nursery.cancel_scope.cancel()
    assert "eval_loss" not in read_checkpoint(path).state
    lines = told.directory.metrics.read_text().splitlines()
    assert [sorted({"eval_loss", "round"} & json.loads(line).keys()) for line in lines] == [
        ["round"]
    ]
    assert told.progress.warnings == [f"the weights after round 2 are bad: eval_loss is {loss}"]


async def test_why_an_optimiser_is_in_no_checkpoint(make: Make, autojump_clock: MockClock) -> None:
    """All of them have time as large ones need, and who waits in vain is told why."""
    large = Layout(("a",), ((2**30,),))
    told = make(run=replace(RUN, eval=replace(RUN.eval, every=0)))
    keeper = told.keeper()
    keeper._trainer.layout = large
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        told.decide(2)
        keeper.applied(told.outer, told.state, {0, 1})
        await keeper.finish()
        nursery.cancel_scope.cancel()
    # Two of 2^30 parameters, with two values of each in float32: 16 GiB, at 8 MiB/s.
    assert told.seconds == [30 + 2048] * 2
    first, second = told.progress.warnings
    assert first.startswith("the optimiser of member 0 is not in the checkpoint of round 2, ")
    assert first.endswith(": it is lost")
    assert second.endswith(": it was not here within 2078 s")


async def test_a_journal_that_cannot_be_written_is_no_checkpoint_that_is_missing(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = make()
    keeper = told.keeper()

    def full(entry: object) -> None:
        raise ConfigurationError("cannot write the journal: No space left on device")

    monkeypatch.setattr(told.journal, "append", full)
    told.decide(2)
    keeper.applied(told.outer, told.state, ())
    with (
        pytest.RaisesGroup(pytest.RaisesExc(ConfigurationError, match="cannot write the journal")),
        trio.fail_after(30),
    ):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(keeper.run)
            await keeper.finish()
            nursery.cancel_scope.cancel()
    assert told.progress.warnings == []


async def test_an_older_checkpoint_is_not_given_for_the_last_one(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = make()
    keeper = told.keeper()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keeper.run)
        told.decide(2)
        keeper.applied(told.outer, told.state, ())
        await keeper.finish()

        async def full(directory: Path) -> None:
            raise CheckpointError("No space left on device")

        monkeypatch.setattr(keeper._trainer, "save", full)
        told.decide(3, Phase.ENDED)
        keeper.applied(told.outer, told.state, ())
        with pytest.raises(CheckpointError, match=r"its last round, 3, .* after round 2$"):
            await keeper.finish()
        nursery.cancel_scope.cancel()
    assert told.progress.warnings == [
        "no checkpoint after round 3: No space left on device. The one before is whole"
    ]
