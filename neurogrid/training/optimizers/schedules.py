"""Learning rates over a run: by name, from transformers, as factors of the learning rate.

A factor depends on the number of the step alone, so members that know the step have the same. For an optimiser of
torch: `LambdaLR(optimizer, schedule_of("cosine", ...))`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["SCHEDULES", "schedule_of"]

# Our names, and transformers' for them.
SCHEDULES = {
    "constant": "constant_with_warmup",
    "linear": "linear",
    "cosine": "cosine_with_min_lr",
    "warmup_stable_decay": "warmup_stable_decay",
}


def schedule_of(
    name: str,
    *,
    num_steps: int,
    num_warmup_steps: int = 0,
    num_decay_steps: int = 0,
    least: float = 0.0,
) -> Callable[[int], float]:
    """The factor of the learning rate for each step, counted from 0.

    Args:
        name: "constant", "linear" to 0, "cosine", or "warmup_stable_decay" (linear up, constant, cosine down).
        num_steps: of the run, warm-up and decay among them.
        num_warmup_steps: from 0 up to the whole rate, linearly.
        num_decay_steps: at the end, for "warmup_stable_decay" alone.
        least: factor at the end of "cosine" and "warmup_stable_decay".

    Raises:
        ValueError: an unknown name, numbers that do not fit into the run, or one that the schedule has no use for.
    """
    if name not in SCHEDULES:
        raise ValueError(f"no schedule {name!r}; there are {', '.join(SCHEDULES)}")
    has_decay, has_least = name == "warmup_stable_decay", name in ("cosine", "warmup_stable_decay")
    if num_steps < 1 or num_warmup_steps < 0 or num_warmup_steps + num_decay_steps > num_steps:
        raise ValueError(
            f"{num_warmup_steps} steps of warm-up and {num_decay_steps} of decay do not fit into "
            f"{num_steps} steps"
        )
    if has_decay != (num_decay_steps > 0):
        raise ValueError(f"num_decay_steps is {num_decay_steps}, for {name!r}")
    if not 0 <= least <= 1 or (least and not has_least):
        raise ValueError(f"the least factor is {least}, for {name!r}")
    specific: dict[str, float] = {}
    if name == "cosine":
        specific = {"min_lr_rate": least}
    elif has_decay:
        specific = {"num_decay_steps": num_decay_steps, "min_lr_ratio": least}
    # An optimiser of nothing: transformers hands out its factors by way of one.
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    # Here, not above: it brings PEFT, and most who import this make no schedule.
    from transformers.optimization import get_scheduler

    scheduler = get_scheduler(
        SCHEDULES[name],
        optimizer,
        num_warmup_steps=num_warmup_steps,
        num_training_steps=num_steps,
        scheduler_specific_kwargs=specific,
    )
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor
