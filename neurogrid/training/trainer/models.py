"""A model to be trained: made by transformers from a config or a checkpoint, no code of others, weights in float32."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.checkpoint_files import read_model_config, weight_files
from neurogrid.model.files.config import build_config, build_image_config
from neurogrid.model.files.model_code import MODEL_CODE_ERRORS, one_line, quiet_transformers
from neurogrid.training.trainer.memory import is_out_of_memory
from neurogrid.training.trainer.shared import make_shared, map_shared

__all__ = ["make_model", "parse_config", "save_model", "trained_parameters"]

# Bytes from which on a tensor lies in a file of its own.
_LARGE: Final = 1024**2
_CLASSES: dict[str, Any] = {
    "causal-lm": AutoModelForCausalLM,
    "image-classification": AutoModelForImageClassification,
}


def parse_config(config: str) -> dict[str, Any]:
    """A config.json as it was written.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        raw = json.loads(config)
    except (ValueError, RecursionError) as exc:
        raise ConfigurationError("the config of the model is not valid JSON") from exc
    if not isinstance(raw, dict):
        raise ConfigurationError("the config of the model is not a JSON object")
    return raw


def make_model(
    kind: str, config: str, *, seed: int, checkpoint: Path | None, folder: Path | None = None
) -> torch.nn.Module:
    """The model, on the CPU, in float32.

    Args:
        kind: as of [model].
        config: JSON of transformers' config.
        seed: of random weights.
        checkpoint: a directory with safetensors; None for random weights.
        folder: a directory where random weights lie, so that there may be more of them than memory; None for memory.

    Raises:
        UnsupportedModelError: transformers has no such model, or the weights are quantised.
        CheckpointError: the checkpoint is damaged, or is of another model.
        ConfigurationError: the config is no JSON, or there is no such directory, or no room in `folder`.
    """
    raw = parse_config(config)
    built = build_config(raw) if kind == "causal-lm" else build_image_config(raw)
    if checkpoint is not None:
        _check_checkpoint(kind, checkpoint)
    torch.manual_seed(seed)
    try:
        with quiet_transformers():
            if checkpoint is None:
                with nullcontext() if folder is None else _InFiles(folder):
                    made: torch.nn.Module = _CLASSES[kind].from_config(built, dtype=torch.float32)
                    return made
            model, found = _CLASSES[kind].from_pretrained(
                checkpoint,
                config=built,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, *MODEL_CODE_ERRORS) as exc:
        if is_out_of_memory(exc):
            raise
        if checkpoint is None:
            raise UnsupportedModelError(
                f"transformers makes no model of this config: {one_line(exc)}"
            ) from exc
        raise CheckpointError(
            f"{checkpoint}: transformers does not load it: {one_line(exc)}"
        ) from exc
    if missing := sorted(found["missing_keys"]):
        raise CheckpointError(
            f"{checkpoint}: has no {missing[0][:80]} ({len(missing)} tensors of the model are missing); config and "
            "weights do not belong together"
        )
    return model  # type: ignore[no-any-return]


def trained_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name, in the order of the model; tied ones once.

    Raises:
        UnsupportedModelError: there are none.
    """
    found: dict[str, Tensor] = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    if not found:
        raise UnsupportedModelError("the model has no parameters that are trained")
    return found


def save_model(model: torch.nn.Module, directory: Path, *, file_bytes: int | str = "50GB") -> None:
    """Write config.json and safetensors as transformers opens them, buffers too.

    Args:
        file_bytes: the most of a file, unless a tensor has more; so much is in memory a second time meanwhile.

    Raises:
        OSError: it cannot be written.
    """
    save: Any = model.save_pretrained
    try:
        with quiet_transformers():
            save(directory, max_shard_size=file_bytes)
    except SafetensorError as exc:
        raise OSError(str(exc)) from exc


class _InFiles(TorchFunctionMode):
    """Large tensors of float32 that are made meanwhile lie in files, whose memory the system can take back.

    Args:
        folder: where there is room for them; there is nothing to be seen of them there.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._path = folder / ".tensor"

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            asked = torch.empty(*args, **{**kwargs, "device": "meta"})
            device = kwargs.get("device")
            is_here = device is None or torch.device(device).type == "cpu"
            if is_here and asked.dtype == torch.float32 and asked.nbytes >= _LARGE:
                make_shared(self._path, asked.numel())
                try:
                    made = map_shared(self._path, asked.numel()).view(asked.shape)
                finally:
                    self._path.unlink()
                return made.requires_grad_(asked.requires_grad)
        return func(*args, **kwargs)


def _check_checkpoint(kind: str, checkpoint: Path) -> None:
    if kind == "causal-lm":
        if Checkpoint.open(checkpoint).has_codes:
            raise UnsupportedModelError(
                f"{checkpoint}: its weights are quantised, and cannot be trained; use the float16, bfloat16 or float32 "
                "checkpoint"
            )
        return
    if read_model_config(checkpoint).get("quantization_config"):
        raise UnsupportedModelError(f"{checkpoint}: its weights are quantised")
    weight_files(checkpoint)
