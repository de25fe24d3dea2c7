"""The model of a state in a checkpoint of its own, as transformers opens it: read and written a layer at a time.

    config.json, generation_config.json, model-00001-of-00009.safetensors, ..., model.safetensors.index.json

The leader of a chain has no more memory than others, and the model may fit into none of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from neurogrid.errors import CheckpointError
from neurogrid.model.files.blob import parse_blob
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.checkpoint_files import INDEX_FILE
from neurogrid.model.files.config import build_config
from neurogrid.model.files.model_code import quiet_transformers
from neurogrid.model.stages.skeleton import Skeleton
from neurogrid.training.stages.weight_files import WeightFiles

__all__ = ["write_model"]

# A file takes no more tensors once it has so many bytes: they are in memory until it is written.
_FILE_BYTES: Final = 256 * 1024 * 1024
_GENERATION_CONFIG: Final = "generation_config.json"


def write_model(folder: Path, base: Path, pieces: Mapping[str, Path]) -> None:
    """Write config and weights, in float32.

    Args:
        folder: that they go to; there, and without weights.
        base: the checkpoint that stages began with, for what does not learn.
        pieces: of a state, each a file of safetensors, by name.

    Raises:
        CheckpointError: a file cannot be read, or the pieces are not those of this model, all that learns.
        ConfigurationError, UnsupportedModelError: `base` is gone, or of a model that is not known.
        OSError, SafetensorError: nothing can be written.
    """
    checkpoint = Checkpoint.open(base)
    skeleton = Skeleton(
        build_config(checkpoint.config), dtype=torch.float32, device=torch.device("cpu")
    )
    learned = _Learned(pieces)
    files = _Files(folder)
    for layer_id in range(skeleton.num_layers):
        blob = checkpoint.layer_blob(layer_id)
        with blob.held():
            tensors = parse_blob(bytearray().join(blob.chunks()))
        skeleton.load_layer(layer_id, tensors)
        del tensors
        layer = skeleton.layer(layer_id)
        skeleton.drop_layer(layer_id)
        files.add(
            skeleton.in_checkpoint(learned.within(layer, f"{skeleton.layer_name(layer_id)}."))
        )
    skeleton.load_ends(checkpoint.end_tensors(torch.float32))
    files.add(skeleton.in_checkpoint(learned.within(skeleton.model, "")))
    learned.require_all_used()
    files.finish()
    skeleton.config.dtype = "float32"
    skeleton.config.architectures = [type(skeleton.model).__name__]
    with quiet_transformers():
        skeleton.config.save_pretrained(folder)
    if checkpoint.generation_config:
        _write_json(folder / _GENERATION_CONFIG, checkpoint.generation_config)


class _Learned:
    """Tensors that learn, in the pieces of a state; those of the optimisers are left out."""

    def __init__(self, pieces: Mapping[str, Path]) -> None:
        self._tensors = WeightFiles(list(pieces.values()))
        self._unused = {name for name in self._tensors if "/" not in name}

    def within(self, module: nn.Module, prefix: str) -> dict[str, Tensor]:
        """The tensors of a module that was loaded, as they are now; tied ones once.

        Args:
            prefix: of the module's names in the whole model.

        Raises:
            CheckpointError: one is missing, or has another shape.
        """
        once = dict(module.named_parameters())
        tied = dict(module.named_parameters(remove_duplicate=False)).keys() - once.keys()
        found = {name: each for name, each in module.state_dict().items() if name not in tied}
        for name, parameter in once.items():
            if parameter.is_floating_point():
                found[name] = self._take(prefix + name, parameter.shape)
        return {prefix + name: each for name, each in found.items()}

    def _take(self, name: str, shape: torch.Size) -> Tensor:
        if name not in self._unused:
            raise CheckpointError(f"the stages have told nothing of {name}, which the model has")
        self._unused.discard(name)
        tensor = self._tensors[name]
        if tensor.shape != shape or tensor.dtype != torch.float32:
            raise CheckpointError(
                f"the stages have learned {name} of shape {list(tensor.shape)}, {tensor.dtype}; the model has it of "
                f"{list(shape)}, torch.float32"
            )
        return tensor

    def require_all_used(self) -> None:
        """Raises CheckpointError where something was learned that the model has not."""
        for name in sorted(self._unused):
            raise CheckpointError(
                f"the stages have learned {name[:120]!r}, which the model has not"
            )


class _Files:
    """The files of a checkpoint's weights, one begun after the other."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begun: dict[str, Tensor] = {}
        self._names: list[list[str]] = []
        self._num_bytes = self._num_begun_bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors by their names in the checkpoint."""
        self._begun |= tensors
        self._num_begun_bytes += sum(each.nbytes for each in tensors.values())
        if self._num_begun_bytes >= _FILE_BYTES:
            self._write()

    def finish(self) -> None:
        """Write what is left, and the index where there are several files."""
        if self._begun:
            self._write()
        count = len(self._names)
        if count == 1:
            self._draft(1).rename(self._folder / "model.safetensors")
            return
        where: dict[str, str] = {}
        for number, names in enumerate(self._names, 1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            self._draft(number).rename(self._folder / file)
            where |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": where}
        _write_json(self._folder / INDEX_FILE, index)

    def _write(self) -> None:
        self._names.append(sorted(self._begun))
        tensors = {name: each.detach().contiguous() for name, each in self._begun.items()}
        save_file(tensors, self._draft(len(self._names)), metadata={"format": "pt"})
        self._begun = {}
        self._num_bytes += self._num_begun_bytes
        self._num_begun_bytes = 0

    def _draft(self, number: int) -> Path:
        """A file whose name waits for how many there are."""
        return self._folder / f"model-{number:05d}.safetensors"


def _write_json(file: Path, table: Mapping[str, object]) -> None:
    file.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
