"""Settings of a run's trainers, batches of a work and its seed: the same for a member that computes it again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.trainer_settings import FileRange, TrainerSettings

__all__ = ["cut_batches", "trainer_settings", "work_seed"]


def trainer_settings(
    run: RunFile,
    config: str,
    *,
    total_steps: int,
    device: str = "cpu",
    threads: int = 0,
    memory_limit: int = 0,
) -> TrainerSettings:
    """The settings of the trainers of a run.

    Args:
        config: of the model, as JSON.
        total_steps: of the schedule.
    """
    return TrainerSettings(
        kind=run.model.kind,
        config=config,
        seed=run.seed,
        inner=run.inner,
        total_steps=max(total_steps, 1),
        device=device,
        threads=threads,
        memory_limit=memory_limit,
    )


def cut_batches(ranges: Sequence[FileRange], batch_samples: int) -> list[list[FileRange]]:
    """Ranges as batches of so many samples; the last may have fewer."""
    batches: list[list[FileRange]] = [[]]
    room = batch_samples
    for each in ranges:
        start = each.start
        while start < each.stop:
            if not room:
                batches.append([])
                room = batch_samples
            stop = min(each.stop, start + room)
            batches[-1].append(FileRange(each.path, start, stop))
            room -= stop - start
            start = stop
    return batches


def work_seed(run: int, seat: int, number: int) -> int:
    """The seed of what is random in a work of a seat, by that of the run."""
    digest = hashlib.sha256(f"neurogrid work {run} {seat} {number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
