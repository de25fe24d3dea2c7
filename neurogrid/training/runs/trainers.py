"""What a run file says to a trainer."""

from __future__ import annotations

from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.trainer import InnerSettings, TrainerSettings

__all__ = ["trainer_settings"]


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
    inner = run.inner
    steps = max(total_steps, 1)
    return TrainerSettings(
        kind=run.model.kind,
        config=config,
        seed=run.seed,
        inner=InnerSettings(
            optimizer=inner.optimizer,
            lr=inner.lr,
            betas=inner.betas,
            eps=inner.eps,
            weight_decay=inner.weight_decay,
            momentum=inner.momentum,
            schedule=inner.schedule,
            warmup=inner.warmup_steps(steps),
            decay=inner.decay_steps(steps),
            batch_tokens=inner.batch_tokens,
            batch_samples=inner.batch_samples,
            precision=inner.precision,
            clip=inner.clip,
            micro_batch=inner.micro_batch,
        ),
        total_steps=steps,
        device=device,
        threads=threads,
        memory_limit=memory_limit,
    )
