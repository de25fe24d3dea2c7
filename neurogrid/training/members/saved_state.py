"""State that a member saves for a checkpoint, in one file: optimiser, and weights where these are not the common ones.

Weights that are synced in parts differ between members in the parts that had no turn since.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from neurogrid.errors import CheckpointError
from neurogrid.training.trainer.errors import TrainerError

__all__ = ["add_weights", "take_weights"]

_NAME: Final = "neurogrid.own_weights"


def add_weights(optimizer: Path, weights: Tensor) -> None:
    """Put a member's weights, float32 [n], beside its optimiser.

    Raises:
        TrainerError: the disk is full, or the like; as where the optimiser is written.
    """
    with safe_open(optimizer, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
        metadata = opened.metadata()
    _write({**tensors, _NAME: weights.clone()}, optimizer, metadata)


def take_weights(optimizer: Path, num_elements: int) -> Tensor | None:
    """Take them out again; None where there are none.

    Raises:
        CheckpointError: it is damaged, or the weights are those of another model.
        TrainerError: the disk is full, or the like.
    """
    try:
        with safe_open(optimizer, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            metadata = opened.metadata()
    except SafetensorError as exc:
        raise CheckpointError(f"{optimizer}: cannot be read: {exc}") from exc
    weights: Tensor | None = tensors.pop(_NAME, None)
    if weights is None:
        return None
    if weights.dtype != torch.float32 or weights.shape != (num_elements,):
        raise CheckpointError(f"{optimizer}: its weights are those of another model")
    _write(tensors, optimizer, metadata)
    return weights


def _write(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    try:
        save_file(tensors, path, metadata)
    except (OSError, SafetensorError) as exc:
        raise TrainerError(f"{path}: cannot be written: {exc}; make room there") from exc
