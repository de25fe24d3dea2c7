"""Writes checkpoints of a trainer to a directory that has room for one, and tells what came of it, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import trio
from safetensors.torch import load_file

from neurogrid.errors import CheckpointError
from neurogrid.training.checkpoints import latest_checkpoint, new_checkpoint, read_checkpoint
from neurogrid.training.trainer import TrainerError, open_trainer
from tests.e2e.training.trainer_models import settings_of, text_config


async def main(folder: Path) -> None:
    told = {}
    async with open_trainer(settings_of(text_config())) as trainer:
        room = torch.zeros(trainer.layout.num_elements // 4)

        async def write(step: int, *, with_model: bool) -> None:
            async with new_checkpoint(folder, step) as draft:
                if with_model:
                    await trainer.save(draft.path)
                draft.add_training({"step": step}, outer={"momentum": room}, members={})

        await write(1, with_model=True)
        try:
            await write(2, with_model=True)
        except TrainerError as exc:
            told["of the trainer"] = str(exc)
        left = folder / "other"
        left.write_bytes(bytes(2 * room.nbytes))
        try:
            await write(2, with_model=False)
        except CheckpointError as exc:
            told["of the checkpoint"] = str(exc)
        left.unlink()
        told["names"] = sorted(each.name for each in folder.iterdir())
        latest = latest_checkpoint(folder)
        assert latest is not None
        found = read_checkpoint(latest)
        told["step"] = found.state["step"]
        stored = load_file(latest / "model.safetensors")
        views = trainer.layout.views(trainer.weights)
        told["is whole"] = all(torch.equal(stored[name], view) for name, view in views.items())
    print(json.dumps(told))


trio.run(main, Path(sys.argv[1]))
