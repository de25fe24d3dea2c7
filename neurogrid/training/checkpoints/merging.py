"""Merging of an adapter into the model that it is for: W + alpha / r * B A, matrix by matrix.

Names of an adapter are paths of modules, and a checkpoint may have others. Where a family does, transformers says
which; where it makes several tensors of one, or one of several, nothing is merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import build_config
from neurogrid.model.files.gguf.model_files import gguf_files
from neurogrid.model.files.model_code import quiet_transformers
from neurogrid.model.files.tensor_names import layer_of
from neurogrid.model.stages.skeleton import build_on_meta
from neurogrid.training.stages.lora import read_adapter

__all__ = ["Merging"]

_PREFIX: Final = "base_model.model."
_A: Final = ".lora_A.weight"
_B: Final = ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class _Pair:
    """The matrices beside one linear layer: A [r, in], B [out, r]."""

    a: Tensor
    b: Tensor


class Merging:
    """An adapter and the model that it is for. Made by `open`.

    Attributes:
        base: the directory of the model.
        files: of its weights.
    """

    def __init__(
        self, base: Path, files: tuple[Path, ...], pairs: dict[str, _Pair], scale: float
    ) -> None:
        self.base, self.files = base, files
        self._pairs, self._scale = pairs, scale

    @classmethod
    def open(cls, adapter: Path, base: Path | None) -> Merging:
        """Read an adapter, and find the tensor of its model for each of its matrices.

        Args:
            adapter: its directory.
            base: the directory of the model; None for that which the adapter names.

        Raises:
            ConfigurationError: the model is not there.
            CheckpointError: the adapter or the model is damaged, or they do not belong together.
            UnsupportedModelError: the adapter is for weights in codes, or for what a checkpoint has in another form.
        """
        stored = read_adapter(adapter)
        base = _base_of(adapter, stored.base, base)
        if gguf_files(base):
            raise UnsupportedModelError(f"{base}: a model in GGUF, into which no adapter is merged")
        checkpoint = Checkpoint.open(base)
        if checkpoint.has_codes:
            raise UnsupportedModelError(
                f"{base}: its weights are quantised, and no adapter is merged into codes: name the float16, bfloat16 "
                "or float32 checkpoint with --base"
            )
        names = _pair_names(stored.tensors)
        found: dict[str, _Pair] = {}
        for path, name in _names_in_checkpoint(checkpoint, names, base).items():
            a, b = stored.tensors[_PREFIX + path + _A], stored.tensors[_PREFIX + path + _B]
            if a.ndim != 2 or b.ndim != 2 or not a.shape[0] == b.shape[1] == stored.section.r:
                raise CheckpointError(
                    f"{adapter}: {path} has matrices {list(a.shape)} and {list(b.shape)}, which are not of rank "
                    f"{stored.section.r}"
                )
            found[name] = _Pair(a, b)
        merging = cls(
            base, tuple(sorted(checkpoint.files)), found, stored.section.alpha / stored.section.r
        )
        merging._check_shapes(
            {
                name: shape
                for layer_id in range(checkpoint.num_layers)
                for name, shape in checkpoint.layer_shapes(layer_id).items()
            }
        )
        return merging

    def merged(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of the model with what the adapter adds to it: float32, or as it is where that is nothing."""
        pair = self._pairs.get(name)
        if pair is None:
            return tensor
        return tensor.float() + (pair.b @ pair.a) * self._scale

    def _check_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        for name, pair in self._pairs.items():
            wanted = (pair.b.shape[0], pair.a.shape[1])
            if (shape := shapes.get(name)) is None:
                raise CheckpointError(
                    f"{self.base}: has no {name}, which the adapter is for: its names are others than those of the "
                    "model in transformers. Open both with peft, and save what merge_and_unload gives"
                )
            if shape != wanted:
                raise CheckpointError(
                    f"{self.base}: {name} has shape {list(shape)}, and the adapter is for {list(wanted)}: it belongs "
                    "to another model"
                )


def _base_of(adapter: Path, told: str, base: Path | None) -> Path:
    """The directory of the model that an adapter is for.

    Args:
        told: by the adapter.
        base: by whoever exports.
    """
    if base is not None:
        if not base.is_dir():
            raise ConfigurationError(f"--base {base}: there is no such directory")
        return base
    if not told:
        raise ConfigurationError(
            f"{adapter}: does not say which model it is for: name its directory with --base"
        )
    if not (found := Path(told)).is_dir():
        raise ConfigurationError(
            f"{adapter}: is an adapter for the model in {told[:200]}, and there is no such directory here: say with "
            "--base where it is"
        )
    return found


def _pair_names(tensors: dict[str, Tensor]) -> list[str]:
    """The paths of the linear layers that an adapter has matrices for, both of them."""
    paths = sorted(
        {name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B) for name in tensors}
    )
    for path in paths:
        for part in (_A, _B):
            if _PREFIX + path + part not in tensors:
                raise CheckpointError(f"the adapter lacks {_PREFIX}{path}{part}")
    return paths


def _names_in_checkpoint(checkpoint: Checkpoint, paths: list[str], base: Path) -> dict[str, str]:
    """Names of the weights of linear layers in a checkpoint, by the paths of their modules."""
    model = build_on_meta(build_config(checkpoint.config), torch.float32)
    modules = dict(model.named_modules())
    found: dict[str, str] = {}
    for path in paths:
        module = modules.get(path)
        if not isinstance(module, nn.Linear):
            raise CheckpointError(
                f"{base}: the model has no linear layer {path[:120]}, which the adapter is for"
            )
        name = f"{path}.weight"
        if layer_of(name, checkpoint.num_layers) is None:
            # What is tied is more than one thing.
            raise UnsupportedModelError(
                f"the adapter is for {path[:120]}, which is in no layer; open both with peft, and save what "
                "merge_and_unload gives"
            )
        weight = module.weight
        with quiet_transformers():
            written = revert_weight_conversion(model, {name: weight})
        ((written_name, tensor),) = written.items() if len(written) == 1 else (("", None),)
        if tensor is not weight:
            raise UnsupportedModelError(
                f"{base}: its files have {name[:120]} in another form than the model in transformers; open both with "
                "peft, and save what merge_and_unload gives"
            )
        found[path] = written_name
    return found
