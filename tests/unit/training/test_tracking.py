"""Trackers that a run file names: told each line, left out when they fail, refused when they are not installed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from neurogrid.errors import ConfigurationError
from neurogrid.training.leading.tracking import Tracking, make_trackers, open_tracking
from neurogrid.training.runs.run_file import parse_run_file

TEXT = '[model]\nconfig = "embedded"\n[data]\npath = "data/"\n[stop]\nrounds = 10\n'
LINES = [{"step": 4.0, "loss": 3.0}, {"step": 8.0, "loss": float("nan"), "round": 2.0}]


@dataclass
class Tracker:
    """Keeps what it is told; fails from some line on."""

    fails_at: int = 10**9
    told: list[tuple[dict[str, float], int]] = field(default_factory=list)
    is_finished: bool = False

    def log(self, values: dict[str, float], step: int) -> None:
        if len(self.told) >= self.fails_at:
            raise OSError("nobody answers")
        self.told.append((values, step))

    def finish(self) -> None:
        self.is_finished = True


def track(trackers: dict[str, Any], lines: list[dict[str, float]]) -> list[str]:
    """What was warned of while these lines were told."""
    warnings: list[str] = []

    async def main() -> None:
        tracking = Tracking(trackers, warnings.append)
        for line in lines:
            tracking.metrics(line)
        tracking.close()
        with trio.fail_after(10):
            await tracking.run()

    trio.run(main)
    return warnings


def test_each_tracker_gets_each_line_and_is_finished() -> None:
    trackers = {"a": Tracker(), "b": Tracker()}
    assert track(trackers, LINES) == []
    for tracker in trackers.values():
        assert tracker.told == [({"step": 4.0, "loss": 3.0}, 4), ({"step": 8.0, "round": 2.0}, 8)]
        assert tracker.is_finished


def test_one_that_fails_is_left_out_and_the_other_goes_on() -> None:
    trackers = {"a": Tracker(fails_at=1), "b": Tracker()}
    [warning] = track(trackers, LINES)
    assert warning.startswith("a gets no more figures, it failed: nobody answers")
    assert (len(trackers["a"].told), trackers["a"].is_finished) == (1, False)
    assert (len(trackers["b"].told), trackers["b"].is_finished) == (2, True)


def test_one_that_does_not_keep_up_holds_up_nobody() -> None:
    [warning] = track({"a": Tracker()}, [{"step": float(step)} for step in range(1000)])
    assert warning.startswith("trackers do not keep up")


def test_a_run_that_names_none_needs_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_tracking(parse_run_file(TEXT), tmp_path / "track", print) as tracking:
            tracking.metrics(LINES[0])

    trio.run(main)
    assert not (tmp_path / "track").exists()


def test_one_that_is_not_installed_is_named(tmp_path: Path) -> None:
    missing = [name for name in ("aim", "mlflow", "wandb") if not importlib.util.find_spec(name)]
    if not missing:
        pytest.skip("all of them are installed")
    pytest.importorskip("accelerate")
    run = parse_run_file(f'{TEXT}[track]\nto = ["{missing[0]}"]\n')
    with pytest.raises(ConfigurationError, match=f"pip install {missing[0]}"):
        make_trackers(run, tmp_path)


def test_tensorboard_gets_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = parse_run_file(f'{TEXT}[track]\nto = ["tensorboard"]\n')

    async def main() -> None:
        async with open_tracking(run, tmp_path, print) as tracking:
            for line in LINES:
                tracking.metrics(line)

    trio.run(main)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / run.name))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(4, 3.0)]
