"""A worker that takes minutes for each batch after its first.

Run as a program with the options of `neurogrid-worker`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import trio

from neurogrid.cli.commands.worker import main
from neurogrid.training.trainer import BatchDone, Trainer

BATCH_SECONDS = 120.0
_train = Trainer.train


async def train(trainer: Trainer, batches: Sequence[Any], **told: Any) -> Any:
    """The first batch, and then for so long nothing that everybody else is done before."""
    on_batch = told.pop("on_batch")

    def first(done: BatchDone) -> None:
        on_batch(replace(done, seconds=BATCH_SECONDS))

    trained = await _train(trainer, batches[:1], on_batch=first, **told)
    await trio.sleep(BATCH_SECONDS * (len(batches) - 1))
    return trained


if __name__ == "__main__":
    Trainer.train = train  # type: ignore[method-assign]
    sys.exit(main())
