"""Optimisers of members, for gradients and for what a group agreed on: tensors in, tensors out.

Nothing here knows a socket, a clock or a peer. What is added up over members comes from the caller.

    adamw       torch's AdamW in pieces, which takes no memory beside it
    vectors     flat vectors, and spans of them
    rounding    a sum with a factor that has the same bits on every machine
    outer       DiLoCo's outer step, and plain averaging of weights
    streaming   the same in fragments, while the members go on computing
    distro      DisTrO: the few greatest frequencies of the momentum, and a signed step
    power_sgd   PowerSGD: gradients of matrices at a low rank, in two sums
    gradients   loss by label tokens, and clipping over stages
    schedules   learning rates over a run
"""

from neurogrid.training.optimizers.adamw import PiecewiseAdamW
from neurogrid.training.optimizers.distro import ChunkedDct, Coefficients, Distro
from neurogrid.training.optimizers.gradients import (
    clipping_factor,
    square_of_norm,
    token_weighted_loss,
)
from neurogrid.training.optimizers.outer import OuterOptimizer
from neurogrid.training.optimizers.power_sgd import PowerSgd
from neurogrid.training.optimizers.rounding import add_scaled_
from neurogrid.training.optimizers.schedules import SCHEDULES, schedule_of
from neurogrid.training.optimizers.streaming import (
    Flight,
    StreamingOuter,
    StreamingSchedule,
)
from neurogrid.training.optimizers.vectors import Spans

__all__ = [
    "ChunkedDct",
    "Coefficients",
    "Distro",
    "Flight",
    "OuterOptimizer",
    "PiecewiseAdamW",
    "PowerSgd",
    "SCHEDULES",
    "Spans",
    "StreamingOuter",
    "StreamingSchedule",
    "add_scaled_",
    "clipping_factor",
    "schedule_of",
    "square_of_norm",
    "token_weighted_loss",
]
