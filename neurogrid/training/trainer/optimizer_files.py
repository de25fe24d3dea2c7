"""An inner optimiser in a file: safetensors, with the size of micro-batches and the model's buffers.

Names: `state/KEY/PARAMETER` and `buffer/NAME`. All that is read is checked against the model before any is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from neurogrid.errors import CheckpointError

__all__ = ["StoredOptimizer", "read_optimizer", "write_optimizer"]

_FORMAT: Final = "neurogrid inner optimizer 1"
_MAX_MICRO_BATCH: Final = 2**20
# What each kind keeps of a parameter; a number of steps is a tensor of no dimensions.
_KEYS: Final = {"adamw": ("exp_avg", "exp_avg_sq", "step"), "sgd": ("momentum_buffer",)}


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """Contents of the file of an optimiser.

    Attributes:
        states: by parameter and key.
        buffers: of the model, by name.
        micro_batch: samples at once; 0 for not known yet.
    """

    states: dict[str, dict[str, Tensor]]
    buffers: dict[str, Tensor]
    micro_batch: int


def write_optimizer(
    path: Path,
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *,
    kind: str,
    micro_batch: int,
) -> None:
    """Write the file.

    Args:
        kind: "adamw" or "sgd".
    """
    tensors = {
        f"buffer/{name}": buffer.cpu().contiguous().clone() for name, buffer in buffers.items()
    }
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value is not None:  # momentum of SGD before its first step
                tensors[f"state/{key}/{name}"] = value.cpu().contiguous()
    metadata = {"format": _FORMAT, "optimizer": kind, "micro_batch": str(micro_batch)}
    save_file(tensors, path, metadata)


def read_optimizer(
    path: Path, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], kind: str
) -> StoredOptimizer:
    """Read and check the file, onto the CPU.

    Raises:
        CheckpointError: it is damaged, or of another model or optimiser.
    """
    states: dict[str, dict[str, Tensor]] = defaultdict(dict)
    found: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            micro_batch = _micro_batch(path, metadata, kind)
            for full_name in opened.keys():  # noqa: SIM118 - it is no mapping
                value = opened.get_tensor(full_name)
                group, _, rest = full_name.partition("/")
                key, _, name = rest.partition("/")
                if group == "buffer" and rest in buffers:
                    _check(path, full_name, value, buffers[rest].shape, buffers[rest].dtype)
                    found[rest] = value
                elif group == "state" and key in _KEYS[kind] and name in parameters:
                    shape = torch.Size() if key == "step" else parameters[name].shape
                    _check(path, full_name, value, shape, torch.float32)
                    states[name][key] = value
                else:
                    raise CheckpointError(
                        f"{path}: {full_name[:80]!r} belongs to another model or optimiser"
                    )
    except (OSError, SafetensorError) as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc}") from exc
    lacking = set(buffers) - set(found)
    partly = [name for name, state in states.items() if set(state) != set(_KEYS[kind])]
    # Of a parameter that no loss depends on there is nothing.
    if lost := sorted([*lacking, *partly]):
        raise CheckpointError(
            f"{path}: lacks what belongs to {lost[0][:80]}: the file is of another model"
        )
    return StoredOptimizer(dict(states), found, micro_batch)


def _micro_batch(path: Path, metadata: Mapping[str, str], kind: str) -> int:
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{path}: is no inner optimiser of a trainer")
    if metadata.get("optimizer") != kind:
        raise CheckpointError(
            f"{path}: is of {metadata.get('optimizer', '')[:40]!r}, and the run has {kind!r}"
        )
    text = metadata.get("micro_batch", "")
    if not (
        text.isascii() and text.isdecimal() and int(text[:8]) <= _MAX_MICRO_BATCH and len(text) < 9
    ):
        raise CheckpointError(f"{path}: its size of micro-batches is {text[:40]!r}")
    return int(text)


def _check(path: Path, name: str, value: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if value.shape != shape or value.dtype != dtype:
        raise CheckpointError(
            f"{path}: {name[:80]!r} is {value.dtype} {list(value.shape)}, and the model has {dtype} {list(shape)}"
        )
