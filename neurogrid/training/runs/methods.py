"""Common weights by the method of a run file: with differences and an outer step, or gradients and a common one."""

from __future__ import annotations

from torch import Tensor

from neurogrid.training.averaging.parts import Layout
from neurogrid.training.runs.common_steps import CommonSteps
from neurogrid.training.runs.outer_state import OuterState, RunWeights
from neurogrid.training.runs.run_file import RunFile
from neurogrid.training.runs.trainer_settings import TrainerSettings

__all__ = ["weights_by"]


def weights_by(
    run: RunFile, layout: Layout, weights: Tensor, settings: TrainerSettings
) -> RunWeights:
    """The common weights of a run by its method.

    Args:
        layout: of the model's trained parameters.
        weights: float32 [num_elements], a member's own.
        settings: of the run's trainers.
    """
    if run.outer.method == "data_parallel":
        return CommonSteps(
            layout,
            weights,
            settings.inner,
            total_steps=settings.total_steps,
            freshness=run.outer.freshness,
        )
    return OuterState(
        layout,
        weights,
        lr=run.outer.lr,
        momentum=run.outer.momentum,
        num_parts=run.outer.fragments,
        overlaps=run.outer.overlap,
        freshness=run.outer.freshness,
    )
