"""The panel of a run, and of a worker that trains, as somebody sees them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace

import pytest
from rich.console import Console

from neurogrid.cli.terminal.panel.training import training_view
from neurogrid.cli.terminal.panel.view import View, draw
from neurogrid.cli.terminal.panel.worker import worker_view
from neurogrid.training.leading.board import RunBoard
from neurogrid.training.members.status import PartStatus
from tests.unit.test_panel import worker
from tests.unit.training.test_run_board import RUN, ChainRun, Run

PART = PartStatus(
    run="pilot",
    leader="12D3KooWleader",
    seat=2,
    state="training",
    reason="",
    round=5,
    batches_done=7,
    batches=20,
    tokens_per_second=5120.0,
    loss=2.5,
    num_samples=160,
    memory_bytes=450_000_000,
    micro_batch=8,
    held_slices=3,
    sent_bytes=1_000_000,
    received_bytes=2_000_000,
)


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    with run.board.watching(run.look):
        run.join("desk", "laptop")
        for loss in (4.0, 3.6, 3.2):
            run.decide("desk", "laptop", loss=loss)
        run.decide("desk", seconds=7.5)
        run.report("desk", batches_done=3, batch_seconds=0.5, done=4, round=4, cosine=0.62)
        run.report("laptop", state="averaging", done=4, round=4)
        run.now += 20
        yield run


def drawn(view: View, *, width: int = 150, height: int = 40, encoding: str = "utf-8") -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, height=height, force_terminal=False)
    console.print(draw(view, width=width, height=height, encoding=encoding))
    return stream.getvalue()


def test_the_panel_says_who_does_what(run: Run) -> None:
    text = drawn(training_view(run.board.status(), url="http://127.0.0.1:8090"))
    assert "round 5 waits for desk" in text
    assert "[########..] 3 of 4" in text
    assert "128" in text  # tokens a second
    assert "loss 3.2000" in text
    assert "round 4 took 7.5 s · 1 of 2 took part · late: laptop" in text
    assert "http://127.0.0.1:8090" in text
    assert "training begins with 2 members" in text


def test_the_panel_of_a_chain_says_who_has_which_layers() -> None:
    run = ChainRun()
    with run.board.watching(run.look):
        run.arrange("laptop", "desk")
        for loss in (4.0, 3.5):
            run.step(loss)
        far = {"micro_batches": 16, "done": 4, "under_way": 2}
        run.tell(0, "working", waited=0.25, memory_bytes=2_000_000_000, **far)
        run.tell(1, "loading")
        status = run.board.status()
        lines = [line.strip("│ ") for line in drawn(training_view(status)).splitlines()]
        (head,) = [line for line in lines if "layers" in line]
        assert head.split() == [
            "stage",
            "member",
            "layers",
            "state",
            *("under", "way"),
            "step",
            "waits",
            "memory",
            "lease",
        ]
        (first,) = [line for line in lines if "laptop" in line]
        assert first.split() == [
            *("1", "laptop", "0", "to", "11", "[##........]", "4", "of", "16"),
            *("2", "2", "25%", "2.0", "GB", "8", "s"),
        ]
        (second,) = [line for line in lines if "desk" in line]
        assert second.split()[:6] == ["2", "desk", "12", "to", "27", "starting"]
        (spare,) = [line for line in lines if "shelf" in line]
        assert spare.split()[:4] == ["-", "shelf", "stands", "by"]
        text = "\n".join(lines)
        assert "step 2 · " in text
        assert "2 stages · they waited 12% of the time · 6% by the order alone" in text
        assert "round" not in text
        for width in (40, 80):
            told = drawn(training_view(status), width=width, height=12).splitlines()
            assert max(map(len, told)) <= width
            assert any("desk" in line for line in told)
        run.widen("tower")
        lines = [line.strip("│ ") for line in drawn(training_view(run.board.status())).splitlines()]
        (at,) = [number for number, line in enumerate(lines) if "laptop" in line]
        assert lines[at].split()[:2] == ["1", "laptop"]
        assert lines[at + 1].split()[:2] == ["tower", "ready"]
        assert lines[at + 2].split()[:2] == ["2", "desk"]


def test_the_panel_before_anything_is_there() -> None:
    text = drawn(training_view(RunBoard(RUN).status()))
    assert "the model and the data are opened" in text


def test_the_panel_of_a_run_that_is_over(run: Run) -> None:
    for _ in range(6):
        run.decide("desk", "laptop", loss=2.0)
    text = drawn(training_view(run.board.status()))
    assert "ended: 10 rounds were made" in text


def test_an_alarm_stands_in_the_panel(run: Run) -> None:
    run.report("desk", gradient_norm=0.0)
    text = drawn(training_view(run.board.status()))
    assert "! desk learns nothing: its gradient is zero" in text


@pytest.mark.parametrize(("width", "height"), [(150, 40), (80, 24), (40, 12)])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_it_fits_every_terminal(run: Run, width: int, height: int, encoding: str) -> None:
    view = training_view(run.board.status(), encoding=encoding)
    lines = drawn(view, width=width, height=height, encoding=encoding).splitlines()
    assert max(map(len, lines)) <= width
    assert "".join(lines).isascii() or encoding == "utf-8"
    assert any("desk" in line for line in lines)


def test_a_worker_shows_that_it_trains() -> None:
    idle = replace(worker(), tenants=())
    text = drawn(worker_view(idle, PART, trains=True))
    assert "trains pilot" in text
    assert "[####......] 7 of 20 batches" in text
    assert "5,120 tokens/s" in text
    assert "loss 2.5000" in text
    failed = replace(PART, state="failed", reason="the model does not fit")
    assert "the model does not fit" in drawn(worker_view(idle, failed, trains=True))


@pytest.mark.parametrize(
    ("trains", "serves", "text"),
    [
        (True, True, "waits for a coordinator or a training run"),
        (True, False, "waits for a training run"),
        (False, True, "waits for a coordinator"),
    ],
)
def test_an_idle_worker_says_what_it_waits_for(trains: bool, serves: bool, text: str) -> None:
    idle = replace(worker(), tenants=())
    assert text in drawn(worker_view(idle, trains=trains, serves=serves))
