"""The part of an adapter in one layer: as a blob, and as what is added to the linear layers there.

Source: protocol_spec/sessions.md, "Adapters".

Shape legend: r rank, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch

from neurogrid.errors import CheckpointError
from neurogrid.model.files.blob import MAX_BLOB_HEADER_BYTES, LayerBlob, parse_blob
from neurogrid.model.files.safetensors_header import TensorEntry
from neurogrid.model.files.tensor_names import numbers_hidden
from neurogrid.model.files.tensors import dtype_name, is_finite, tensor_to_bytes
from neurogrid.model.kernels.low_rank import LowRank
from neurogrid.p2p.wire.limits import MAX_ADAPTER_RANK

__all__ = ["Adapter", "LayerAdapter", "Matrices", "layer_adapter_blob", "max_part_bytes"]

_A: Final = ".lora_A"
_B: Final = ".lora_B"
_SCALING: Final = ".scaling"
_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of an adapter beside one linear layer, as they travel.

    Attributes:
        a: [r, I], float32, float16 or bfloat16.
        b: [O, r], in the same dtype.
        scaling: a factor of what they give.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


class LayerAdapter:
    """The part of an adapter in one layer.

    Attributes:
        beside: what is added to the result of each linear layer, by its path in the layer.
        num_bytes: of memory.
        mixes: whether its rows may be computed with those of other adapters: not beside the linear layers of numbered
            modules, which may be experts that get some of the rows in an order of their own.
    """

    def __init__(self, beside: Mapping[str, LowRank]) -> None:
        self.beside = dict(beside)
        self.num_bytes = sum(each.num_bytes for each in self.beside.values())
        self.mixes = all("#" not in numbers_hidden(path) for path in self.beside)

    @classmethod
    def read(
        cls,
        blob: memoryview,
        linears: Mapping[str, tuple[int, int]],
        *,
        device: torch.device,
    ) -> LayerAdapter:
        """Read a part from its blob; keeps nothing of it.

        Args:
            blob: as it came.
            linears: [O, I] of the linear layers of the layer, by path.
            device: where they compute.

        Raises:
            CheckpointError: it is not what the specification says, or of another model.
        """
        tensors = parse_blob(blob)
        paths = {name.removesuffix(_A) for name in tensors if name.endswith(_A)}
        wanted = {path + suffix for path in paths for suffix in (_A, _B, _SCALING)}
        if odd := sorted(wanted ^ tensors.keys()):
            raise CheckpointError(
                f"an adapter has {_A}, {_B} and {_SCALING} of each linear layer, and of {odd[0][:120]!r} not all"
            )
        return cls({path: _read(path, tensors, linears, device) for path in sorted(paths)})


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter of sessions on one stage.

    Attributes:
        layers: its parts, by layer; layers without one are not there.
    """

    layers: Mapping[int, LayerAdapter]

    @cached_property
    def mixes(self) -> bool:
        """Whether its rows may be computed with those of other adapters."""
        return all(part.mixes for part in self.layers.values())


def layer_adapter_blob(beside: Mapping[str, Matrices]) -> LayerBlob:
    """The blob of the part of an adapter in one layer, from its matrices by path."""
    tensors: dict[str, torch.Tensor] = {}
    for path, its in beside.items():
        tensors[path + _A], tensors[path + _B] = its.a, its.b
        tensors[path + _SCALING] = torch.tensor(its.scaling, dtype=torch.float32)
    entries = {
        name: TensorEntry(dtype_name(tensor.dtype), tuple(tensor.shape), 0, tensor.nbytes)
        for name, tensor in tensors.items()
    }
    return LayerBlob(
        {name: (entries[name], tensor_to_bytes(tensor)) for name, tensor in tensors.items()}
    )


def max_part_bytes(linears: Mapping[str, tuple[int, int]]) -> int:
    """Bytes that the blob of a part may have at most, beside linear layers of these [O, I]."""
    numbers = sum(MAX_ADAPTER_RANK * (outputs + inputs) + 1 for outputs, inputs in linears.values())
    return 4 * numbers + MAX_BLOB_HEADER_BYTES


def _read(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    linears: Mapping[str, tuple[int, int]],
    device: torch.device,
) -> LowRank:
    a, b, scaling = (tensors[path + suffix] for suffix in (_A, _B, _SCALING))
    shape = linears.get(path)
    if shape is None:
        raise CheckpointError(f"an adapter is for {path[:120]!r}, which is no linear layer there")
    if a.dtype not in _FLOATS or b.dtype != a.dtype:
        raise CheckpointError(f"{path}: an adapter of {a.dtype} and {b.dtype} is not read")
    if a.dim() != 2 or b.dim() != 2 or (b.shape[0], a.shape[1]) != shape:
        raise CheckpointError(
            f"{path}: an adapter of {list(a.shape)} and {list(b.shape)} is for another model: the linear layer has "
            f"{shape[0]} outputs and {shape[1]} inputs"
        )
    if scaling.dtype != torch.float32 or scaling.dim() or not math.isfinite(scaling.item()):
        raise CheckpointError(f"{path}: the scaling of an adapter is one finite number in float32")
    if not is_finite(a) or not is_finite(b):
        raise CheckpointError(f"{path}: an adapter has NaN or infinity")
    try:
        return LowRank(a, b, scaling.item(), device=device)
    except ValueError as exc:
        raise CheckpointError(f"{path}: {exc}") from exc
