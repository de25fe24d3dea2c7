"""Checkpoints of a run that are served: they stay while somebody has them, whatever the run removes."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from neurogrid.assembly import coordinator as assembly
from neurogrid.assembly import planned_fleet
from neurogrid.cli.commands import coordinator
from neurogrid.cli.commands.follow import ServedRun
from neurogrid.cli.options.trust import Trust
from neurogrid.cli.terminal.screen import Screen


def test_each_of_several_models_has_its_checkpoint_until_it_lets_go(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    for step in (8, 16):
        (checkpoints / f"step-{step}").mkdir(parents=True)
        (checkpoints / f"step-{step}" / "config.json").write_text(str(step))
    (tmp_path / "journal").touch()
    latest = checkpoints / "latest"
    runs = [ServedRun.of(tmp_path, follows=False) for _ in range(2)]
    first, second = [run for run in runs if run is not None]
    latest.symlink_to("step-8")
    with first.take() as one:
        latest.unlink()
        latest.symlink_to("step-16")
        with second.take() as other:
            shutil.rmtree(checkpoints / "step-8")
            assert [(each / "config.json").read_text() for each in (one, other)] == ["8", "16"]
            assert (one.name, other.name) == ("step-8", "step-16")
        assert (one / "config.json").exists()
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-16"]


async def test_traces_are_sent_of_all_checkpoints_that_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OpenTelemetry keeps the first provider that a process sets: when that has ended, no other takes its place."""
    happened: list[str] = []

    @contextmanager
    def exporting(*_: Any) -> Iterator[None]:
        happened.append("exporting")
        yield
        happened.append("ended")

    @asynccontextmanager
    async def opened(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(adapters=())

    async def served(*_: Any) -> None:
        happened.append("served")
        if happened.count("served") == 3:
            raise trio.EndOfChannel

    async def nothing(*_: Any) -> None:
        pass

    async def shown(*_: Any) -> tuple[Any, Any]:
        return server, SimpleNamespace()

    server = SimpleNamespace(
        board=None, url="", restore=nothing, serve=served, finish=nothing, metrics=None
    )
    monkeypatch.setattr(coordinator, "exporting_traces", exporting)
    monkeypatch.setattr(coordinator, "_settings", lambda *_: None)
    monkeypatch.setattr(coordinator, "_listening", lambda *_: None)
    monkeypatch.setattr(coordinator, "existing_trust", lambda *_: Trust())
    monkeypatch.setattr(coordinator, "find_model", nothing)
    monkeypatch.setattr(coordinator, "_open_shown", shown)
    monkeypatch.setattr(coordinator, "import_libraries", lambda *_: None)
    monkeypatch.setattr(planned_fleet, "load_model", nothing)
    monkeypatch.setattr(assembly, "open_coordinator", opened)
    options = coordinator.build_parser().parse_args(["--http-port", "0"])
    with pytest.raises(trio.EndOfChannel):
        await coordinator._serve(options, Screen(), [])
    assert happened == ["exporting", *["served"] * 3]
