"""An adapter as its coordinator has it: a blob for each layer, and the id of each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from neurogrid.errors import UnsupportedModelError
from neurogrid.model.adapters.layer_adapter import Matrices, layer_adapter_blob
from neurogrid.model.adapters.peft_files import PeftAdapter
from neurogrid.model.files.blob import LayerBlob
from neurogrid.model.files.tensor_names import layer_of
from neurogrid.model.files.tensors import is_finite
from neurogrid.p2p.wire.blob_id import BLOB_ID_BYTES

__all__ = ["AdapterSource", "cut_adapter"]

_NONE = bytes(BLOB_ID_BYTES)


@dataclass(frozen=True)
class AdapterSource:
    """The parts of an adapter, by layer. Made by `cut_adapter`.

    Attributes:
        blobs: of the layers that it has matrices in.
        layer_bytes: memory that a part takes at most where it is applied, by layer.
        key: 32 bytes that name all of it, by its content.
    """

    blobs: Mapping[int, LayerBlob]
    layer_bytes: Mapping[int, int]
    key: bytes = field(init=False)

    def __post_init__(self) -> None:
        hasher = hashlib.sha256()
        for layer_id, blob in sorted(self.blobs.items()):
            hasher.update(layer_id.to_bytes(4) + blob.blob_id())
        object.__setattr__(self, "key", hasher.digest())

    @property
    def num_bytes(self) -> int:
        """Bytes that all parts have as they travel."""
        return sum(blob.num_bytes for blob in self.blobs.values())

    def ids(self, start: int, stop: int) -> bytes:
        """Blob ids of layers [start, stop) for a SessionOpen, zeros for a layer without a part; empty if all are."""
        ids = [
            self.blobs[layer_id].blob_id() if layer_id in self.blobs else _NONE
            for layer_id in range(start, stop)
        ]
        return b"".join(ids) if any(each is not _NONE for each in ids) else b""


def cut_adapter(
    adapter: PeftAdapter,
    num_layers: int,
    layer_name: Callable[[int], str],
    linears: Callable[[int], Mapping[str, tuple[int, int]]],
    *,
    dtype: torch.dtype | None = None,
) -> AdapterSource:
    """Cut an adapter into its layers, and check that it is for this model. Blocks: hashes it.

    Args:
        layer_name: what the module of a layer is called in the whole model.
        linears: [O, I] of the linear layers of a layer, by path in it.
        dtype: of matrices that were saved in a wider one, unless a number is too large for it; None to leave all as
            they were saved.

    Raises:
        UnsupportedModelError: it is for another model, or for what is in no layer.
    """
    by_layer: dict[int, dict[str, Matrices]] = {}
    for path, its in adapter.matrices.items():
        layer_id = layer_of(f"{path}.", num_layers)
        prefix = None if layer_id is None else f"{layer_name(layer_id)}."
        if layer_id is None or prefix is None or not path.startswith(prefix):
            raise UnsupportedModelError(
                f"{adapter.directory}: the adapter is for {path[:120]!r}, which is in none of the {num_layers} layers "
                "of this model. Embedding and head take none here: train one that leaves them out"
            )
        inside = path.removeprefix(prefix)
        shape = linears(layer_id).get(inside)
        if shape is None:
            raise UnsupportedModelError(
                f"{adapter.directory}: the adapter is for {path[:120]!r}, which is no linear layer of this model"
            )
        if shape != (its.b.shape[0], its.a.shape[1]):
            raise UnsupportedModelError(
                f"{adapter.directory}: the adapter is for another model: {path[:120]} has {shape[0]} outputs and "
                f"{shape[1]} inputs here, and {its.b.shape[0]} and {its.a.shape[1]} there"
            )
        by_layer.setdefault(layer_id, {})[inside] = _narrowed(its, dtype)
    return AdapterSource(
        {layer_id: layer_adapter_blob(beside) for layer_id, beside in sorted(by_layer.items())},
        {
            layer_id: sum(4 * (each.a.numel() + each.b.numel()) for each in beside.values())
            for layer_id, beside in by_layer.items()
        },
    )


def _narrowed(its: Matrices, dtype: torch.dtype | None) -> Matrices:
    if dtype is None or its.a.itemsize <= dtype.itemsize:
        return its
    a, b = its.a.to(dtype), its.b.to(dtype)
    return replace(its, a=a, b=b) if is_finite(a) and is_finite(b) else its
