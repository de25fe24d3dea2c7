"""A process that has a trainer, and trains until it is killed."""

from __future__ import annotations

import sys
from pathlib import Path

import trio

from neurogrid.training.trainer import open_trainer
from tests.e2e.training.trainer_models import batches_of, settings_of, text_config


async def main(path: Path) -> None:
    async with open_trainer(settings_of(text_config())) as trainer:
        print(trainer.pid, flush=True)
        batches = batches_of(path, 8) * 10_000
        await trainer.train(
            batches,
            step=0,
            seed=0,
            on_batch=lambda done: print("training", flush=True) if done.batches == 1 else None,
        )


trio.run(main, Path(sys.argv[1]))
