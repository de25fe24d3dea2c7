"""Adapters by what somebody names: their own directory, or that of the run that trained them."""

from __future__ import annotations

from pathlib import Path

import pytest

from neurogrid.assembly.adapter_places import adapter_directory, adapter_name
from neurogrid.errors import ConfigurationError


def run_of(folder: Path, *steps: int, file: str = "adapter_config.json") -> Path:
    """The directory of a run, with a checkpoint after each of these steps; the last one is the newest."""
    run = folder / "my-run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "journal").touch()
    for step in steps:
        checkpoint = run / "checkpoints" / f"step-{step}"
        checkpoint.mkdir()
        (checkpoint / file).write_text("{}")
        link = run / "checkpoints" / "new"
        link.symlink_to(checkpoint.name)
        link.replace(run / "checkpoints" / "latest")
    return run


def test_the_newest_checkpoint_of_a_run_is_its_adapter(tmp_path: Path) -> None:
    run = run_of(tmp_path, 4, 12)
    found = adapter_directory(run)
    assert found.resolve() == (run / "checkpoints" / "step-12").resolve()
    assert adapter_name(run) == "my-run"
    # One checkpoint is an adapter by itself.
    older = run / "checkpoints" / "step-4"
    assert adapter_directory(older) == older


def test_runs_that_have_no_adapter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no such directory"):
        adapter_directory(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match="has written no checkpoint yet"):
        adapter_directory(run_of(tmp_path / "new"))
    with pytest.raises(ConfigurationError, match="trains a whole model, and no adapter"):
        adapter_directory(run_of(tmp_path / "whole", 4, file="config.json"))
