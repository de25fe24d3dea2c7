"""A model as placing sees it, which brings its layers to workers: its config and its files, and nothing in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from neurogrid.model.files.blob import LayerBlob
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import PreTrainedConfig
from neurogrid.model.files.quantization import Quantization, model_fingerprint

__all__ = ["ModelSource"]


@dataclass(frozen=True)
class ModelSource:
    """Source of a model's layers, and the settings that a worker is told with them.

    Attributes:
        name: what the model is called.
        checkpoint: its files.
        config: transformers' own, built from the checkpoint's.
        dtype: what it is computed in.
        max_seq_len: tokens of the longest session.
        quantization: what of the layers is codes; None for nothing.
        has_coded_caches: whether the keys and values of sessions are codes, too.
    """

    name: str
    checkpoint: Checkpoint
    config: PreTrainedConfig
    dtype: torch.dtype
    max_seq_len: int
    quantization: Quantization | None
    has_coded_caches: bool = field(default=False, kw_only=True)

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of the checkpoint's config, and of what is quantised: 32 bytes."""
        return model_fingerprint(self.checkpoint.config, self.quantization)

    def layer_blob(self, layer_id: int) -> LayerBlob:
        """The bytes of a layer as they travel."""
        return self.checkpoint.layer_blob(layer_id, self.quantization)
