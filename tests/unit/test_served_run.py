"""Checkpoints of a run that are served: they stay while somebody has them, whatever the run removes."""

from __future__ import annotations

import shutil
from pathlib import Path

from neurogrid.cli.commands.follow import ServedRun


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
