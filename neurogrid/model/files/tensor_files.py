"""Interface of the files with a checkpoint's tensors, whatever their format."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from neurogrid.model.files.blob import LayerContents

__all__ = ["TensorFiles"]


class TensorFiles(Protocol):
    """The tensors of a model, layer by layer, under the names that transformers gives them in a checkpoint."""

    @property
    def files(self) -> frozenset[Path]:
        """The files that the tensors which are here lie in."""

    @property
    def present_layers(self) -> frozenset[int]:
        """The layers all of whose tensors are here."""

    @property
    def quantised_as(self) -> str | None:
        """Format of the quantised matrices in the layers, for people; None if there are none."""

    @property
    def has_codes(self) -> bool:
        """Whether matrices of the layers are served as the codes that they are."""

    def layer(self, layer_id: int) -> LayerContents:
        """Tensors of a layer.

        Raises:
            CheckpointError, UnsupportedModelError: a matrix is not what its format says.
        """

    def let_go(self, layer_id: int) -> None:
        """Let the pages of a layer's files go, as far as they are mapped: they are read again when they are needed."""

    def layer_files(self, layer_id: int) -> frozenset[Path]:
        """The files of one layer."""

    def end_tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All tensors outside the layers (embedding, final norm, head), on the CPU.

        Args:
            dtype: of matrices that are made of codes.

        Raises:
            CheckpointError: the file of one of them is not here, or it is not what its format says.
        """
