"""Checkpoints of a chain: one that cannot be written is said, the one before stays, and the run goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import build_config
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.training.checkpoints import latest_checkpoint
from neurogrid.training.data.blob_files import OfferedFiles
from neurogrid.training.leading.chains import model_files
from neurogrid.training.leading.chains.keeper import ChainKeeper
from neurogrid.training.leading.chains.state import ChainState
from neurogrid.training.leading.round_figures import RoundFigures
from neurogrid.training.runs.entries import CheckpointEntry, RunEntry
from neurogrid.training.runs.journal import Journal
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.run_file import parse_run_file
from neurogrid.training.runs.state import RunState
from tests.unit.full_disk import full_disk
from tests.unit.training.scripted_chain import FakeProgress

RUN = parse_run_file(
    """
[model]
config = "model.json"
[data]
path = "text.txt"
[layout]
stages = 2
[checkpoints]
keep = 1
[stop]
steps = 8
"""
)
CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=16,
)


@dataclass
class Kept:
    """A keeper, and what it has said and written."""

    keeper: ChainKeeper
    progress: FakeProgress
    journal: Journal
    path: Path

    async def writes(self, step: int, **changes: torch.Tensor) -> Path | None:
        """A checkpoint of a state with such weights; the latest one."""
        self.save(step, self.learned(step) | changes)
        return await self.write()

    def learned(self, value: float) -> dict[str, torch.Tensor]:
        """All that the stages have learned."""
        model: Any = AutoModelForCausalLM.from_pretrained(self.path / "model")
        return {name: torch.full_like(each, value) for name, each in model.named_parameters()}

    def save(self, step: int, learned: dict[str, torch.Tensor]) -> Path:
        file = self.path / "stages" / f"step-{step}" / "first.safetensors"
        file.parent.mkdir(parents=True)
        save_file(learned, file)
        return file

    async def write(self) -> Path | None:
        state = await ChainState.open(self.path / "stages", OfferedFiles())
        await self.keeper.write_checkpoint(state, RunState((100,), seed=1))
        return latest_checkpoint(self.path / "checkpoints")

    @property
    def steps(self) -> list[int]:
        """Of the checkpoints that the journal has."""
        entries = [line.entry for line in self.journal.entries]
        return [each.step for each in entries if isinstance(each, CheckpointEntry)]


@asynccontextmanager
async def kept_run(path: Path) -> AsyncIterator[Kept]:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).save_pretrained(path / "model")
    progress = FakeProgress()
    identity = Identity.generate()
    with Journal.open(path / "journal", identity) as journal:
        journal.append(RunEntry(bytes(16), identity.peer_id, bytes(32), bytes(32), (100,), 1))
        keeper = ChainKeeper(
            RunDirectory(path),
            RUN,
            journal,
            path / "model",
            path / "data",
            progress,  # type: ignore[arg-type]
            RoundFigures(RUN, 32),
        )
        yield Kept(keeper, progress, journal, path)


async def test_what_stages_have_learned_becomes_a_model(tmp_path: Path) -> None:
    async with kept_run(tmp_path) as run:
        path = await run.writes(4)
        assert path == tmp_path / "checkpoints" / "step-4"
        assert load_file(path / "model.safetensors")["model.norm.weight"].eq(4).all()
        assert (run.steps, run.progress.warned) == ([4], [])


async def test_a_full_disk_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And there is one when there is room again."""
    async with kept_run(tmp_path) as run:
        before = await run.writes(4)
        run.save(8, run.learned(8))
        # To read its config takes a file, which the limit would stop.
        opened = Checkpoint.open(tmp_path / "model")
        config = build_config(opened.config)
        monkeypatch.setattr(Checkpoint, "open", lambda path: opened)
        monkeypatch.setattr(model_files, "build_config", lambda table: config)
        with full_disk():
            assert await run.write() == before
        (warning,) = run.progress.warned
        assert "no checkpoint after step 8: " in warning
        assert "cannot be written" in warning
        assert [each.name for each in (tmp_path / "checkpoints").glob("step-*")] == ["step-4"]
        assert await run.write() == tmp_path / "checkpoints" / "step-8"
        assert run.steps == [4, 8]


async def test_a_piece_of_another_model_is_said(tmp_path: Path) -> None:
    async with kept_run(tmp_path) as run:
        before = await run.writes(4)
        assert await run.writes(8, **{"model.norm.weight": torch.ones(17)}) == before
        assert await run.writes(12, other=torch.ones(1)) == before
        half = run.learned(16)
        del half["model.norm.weight"]
        run.save(16, half)
        assert await run.write() == before
        shape, name, lacking = run.progress.warned
        assert "have learned model.norm.weight of shape [17], torch.float32" in shape
        assert "the model has it of [16], torch.float32" in shape
        assert "have learned 'other', which the model has not" in name
        assert "have told nothing of model.norm.weight, which the model has" in lacking


async def test_a_model_that_is_gone_is_said(tmp_path: Path) -> None:
    async with kept_run(tmp_path) as run:
        run.save(4, run.learned(4))
        (tmp_path / "model" / "model.safetensors").unlink()
        assert await run.write() is None
        assert f"{tmp_path / 'model'}: " in run.progress.warned[0]


async def test_older_checkpoints_that_stay_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with kept_run(tmp_path) as run:
        await run.writes(4)
        rename = Path.rename

        def refuse(path: Path, target: Path) -> Path:
            if target.name.endswith("-removed"):
                raise OSError(30, "Read-only file system")
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", refuse)
        assert await run.writes(8) == tmp_path / "checkpoints" / "step-8"
        assert run.steps == [4, 8]
        (warning,) = run.progress.warned
        assert "older checkpoints cannot be removed: Read-only file system" in warning
