"""A model as placing sees it, which brings its layers to workers: its config and its files, and nothing in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import PreTrainedConfig

__all__ = ["ModelSource"]


@dataclass(frozen=True)
class ModelSource:
    """Where the layers of a model come from, and what a worker is told of it.

    Attributes:
        name: what the model is called.
        checkpoint: its files.
        config: transformers' own, built from the checkpoint's.
        dtype: what it is computed in.
        max_seq_len: tokens of the longest session.
    """

    name: str
    checkpoint: Checkpoint
    config: PreTrainedConfig
    dtype: torch.dtype
    max_seq_len: int
