"""The weights that stages begin with, as blobs: a layer each, and one for what stands outside the layers.

They lie in the checkpoint's files, and are read as they are sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from neurogrid.model.files.blob import LayerBlob
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import build_config
from neurogrid.model.files.quantization import Quantization
from neurogrid.model.files.safetensors_header import TensorEntry
from neurogrid.model.files.tensors import dtype_name, tensor_to_bytes
from neurogrid.model.stages.skeleton import Skeleton
from neurogrid.p2p.transfer import BlobSource

__all__ = ["ENDS", "ChainWeights", "codes_of", "weights_name"]

ENDS: Final = "weights.ends"
"""The piece with all that stands outside the layers."""


def weights_name(layer_id: int) -> str:
    """The piece with the weights of a layer."""
    return f"weights.{layer_id}"


def codes_of(checkpoint: Checkpoint, quantize: str) -> Quantization | None:
    """Quantization of the layers: which matrices are codes, and of which form; None for no codes. No weight is read.

    Args:
        quantize: "int8" or "int4", what matrices become; "none" for what they are.

    Raises:
        ConfigurationError: something is to be made of what is quantised already.
        CheckpointError, UnsupportedModelError: a matrix cannot be codes, or the model is not known.
    """
    method = None if quantize == "none" else quantize
    if method is None and not checkpoint.has_codes:
        return None
    skeleton = Skeleton(
        build_config(checkpoint.config), dtype=torch.float32, device=torch.device("cpu")
    )
    return checkpoint.quantization(method, skeleton.loader)


class ChainWeights:
    """A checkpoint, for members that are stages. Making one reads all of it, for the blobs' ids.

    Args:
        path: its directory.
        quantize: "int8" or "int4", what its matrices become; "none" for what they are.

    Raises:
        ConfigurationError: something is to be made of what is quantised already.
        CheckpointError, UnsupportedModelError: the checkpoint is damaged, or of a model that is not known.

    Attributes:
        quantization: JSON of which matrices of the layers are codes; empty for none.
        num_layers: of the model.
        blobs: ids by the names of pieces.
        num_elements: of all weights.
    """

    def __init__(self, path: Path, quantize: str = "none") -> None:
        self._checkpoint = Checkpoint.open(path)
        self._form = codes_of(self._checkpoint, quantize)
        self.quantization = "" if self._form is None else json.dumps(self._form.record())
        self.num_layers = len(self._checkpoint.present_layers)
        self._sources: dict[bytes, BlobSource] = {}
        self._asked: dict[str, set[bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        for layer_id in range(self.num_layers):
            blob = self._checkpoint.layer_blob(layer_id, self._form)
            self.blobs[weights_name(layer_id)] = blob_id = blob.blob_id()
            self._sources[blob_id] = blob
        ends = self._checkpoint.end_tensors(torch.float32)
        blob = LayerBlob(
            {name: (_entry(each), tensor_to_bytes(each)) for name, each in ends.items()}
        )
        self.blobs[ENDS] = blob_id = blob.blob_id()
        self._sources[blob_id] = blob
        self.num_elements = sum(each.numel() for each in ends.values()) + sum(
            self._checkpoint.layer_blob(layer_id, self._form).num_elements
            for layer_id in range(self.num_layers)
        )

    def pieces(self, bounds: Sequence[int], index: int) -> dict[str, bytes]:
        """Blob ids of the weights that the stage of this index begins with, by the names of the pieces."""
        start, stop = bounds[index], bounds[index + 1]
        wanted = [weights_name(layer_id) for layer_id in range(start, stop)]
        if start == 0 or stop == self.num_layers:
            wanted.append(ENDS)
        return {name: self.blobs[name] for name in wanted}

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        """See `TransferPolicy.provide`."""
        source = self._sources.get(blob_id)
        if source is not None and peer_id in self._asked:
            self._asked[peer_id].add(blob_id)
        return source

    def count_asked(self, peers: Iterable[str]) -> None:
        """Count from now on which pieces these ask for."""
        self._asked |= {peer_id: set() for peer_id in peers}

    def num_asked(self, peers: Iterable[str]) -> dict[str, int]:
        """Pieces that each of these has asked for since it is counted."""
        return {peer_id: len(self._asked.get(peer_id, ())) for peer_id in peers}


def _entry(tensor: Tensor) -> TensorEntry:
    return TensorEntry(dtype_name(tensor.dtype), tuple(tensor.shape), 0, tensor.nbytes)
