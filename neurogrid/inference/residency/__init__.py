"""Residency of several models: pure decisions on which are open, from what is asked of each.

No clock, no socket, no torch: times are given.
"""

from neurogrid.inference.residency.moving_count import MovingCount
from neurogrid.inference.residency.residency import (
    MAX_MODELS,
    Close,
    ModelState,
    Open,
    Residency,
    ResidencyLimits,
)

__all__ = [
    "MAX_MODELS",
    "Close",
    "ModelState",
    "MovingCount",
    "Open",
    "Residency",
    "ResidencyLimits",
]
