"""What a member keeps for a checkpoint, in one file: its optimiser, and its weights where they are not the common ones.

Weights that are synced in parts differ between members in the parts that had no turn since.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["add_weights", "take_weights"]

_NAME: Final = "neurogrid.own_weights"


def add_weights(optimizer: Path, weights: Tensor) -> None:
    """Put a member's weights, float32 [n], beside its optimiser."""
    with safe_open(optimizer, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        metadata = opened.metadata()
    save_file({**tensors, _NAME: weights.clone()}, optimizer, metadata)


def take_weights(optimizer: Path) -> Tensor | None:
    """Take them out again; None where there are none."""
    with safe_open(optimizer, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        metadata = opened.metadata()
    weights: Tensor | None = tensors.pop(_NAME, None)
    if weights is not None:
        save_file(tensors, optimizer, metadata)
    return weights
