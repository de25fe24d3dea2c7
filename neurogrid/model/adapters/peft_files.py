"""Adapters in PEFT's files: adapter_config.json and adapter_model.safetensors of a directory.

The tensors decide what an adapter changes; the config says by how much, and whether it is plain LoRA. What computes
anything else is refused by name, never left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.model.adapters.layer_adapter import Matrices
from neurogrid.model.files.tensors import is_finite
from neurogrid.p2p.wire.limits import MAX_ADAPTER_RANK

__all__ = ["PeftAdapter", "is_peft", "read_peft"]

CONFIG_FILE: Final = "adapter_config.json"
TENSORS_FILE: Final = "adapter_model.safetensors"
_MAX_CONFIG_BYTES: Final = 16 * 1024 * 1024
_PREFIX: Final = "base_model.model."
_A: Final = ".lora_A.weight"
_B: Final = ".lora_B.weight"
# Keys of PEFT's config that change what an adapter computes, or the weights beside it; set means refused.
_OTHER_FORMS: Final[Mapping[str, str]] = {
    "use_dora": "DoRA, which scales the weights beside it",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "biases of its own (lora_bias)",
    "fan_in_fan_out": "weights that lie transposed (fan_in_fan_out)",
    "alora_invocation_tokens": "activated LoRA, which depends on the tokens",
    "modules_to_save": "whole modules of its own (modules_to_save)",
    "trainable_token_indices": "embeddings of its own (trainable_token_indices)",
    "target_parameters": "matrices beside parameters that are no linear layers (target_parameters)",
    "layer_replication": "layers that are there twice (layer_replication)",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
    "arrow_config": "Arrow routing",
}
# Others begin with other weights of the model, and mean those.
_INITIAL: Final = (True, False, "gaussian")
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# As factors travel.
_MAX_ALPHA: Final = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """An adapter from files.

    Attributes:
        directory: where it was.
        matrices: beside each linear layer, by the path of its module in the whole model.
        base: a directory or a name on the hub, of the model that it is for; empty where it does not say.
    """

    directory: Path
    matrices: Mapping[str, Matrices]
    base: str = ""


def is_peft(directory: Path) -> bool:
    """Whether a directory has an adapter, by its files."""
    return (directory / CONFIG_FILE).is_file()


def read_peft(directory: Path) -> PeftAdapter:
    """Read an adapter.

    Raises:
        ConfigurationError: there is none in the directory.
        CheckpointError: it is damaged.
        UnsupportedModelError: it is no LoRA beside linear layers; says what else it has.
    """
    if not is_peft(directory):
        raise ConfigurationError(
            f"{directory}: is no adapter: there is no {CONFIG_FILE}, which PEFT and `neurogrid train` write"
        )
    file = directory / CONFIG_FILE
    try:
        with file.open("rb") as opened:
            config: Any = json.loads(opened.read(_MAX_CONFIG_BYTES))
        tensors = load_file(directory / TENSORS_FILE)
    except (OSError, ValueError, RecursionError, SafetensorError) as exc:
        raise CheckpointError(f"{directory}: the adapter cannot be read: {exc}") from exc
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: is no JSON object")
    _require_lora(file, config)
    matrices: dict[str, Matrices] = {}
    for path in _paths(directory, tensors):
        a, b = tensors[f"{_PREFIX}{path}{_A}"], tensors[f"{_PREFIX}{path}{_B}"]
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            raise CheckpointError(
                f"{directory}: {path} has matrices {list(a.shape)} and {list(b.shape)}, which are not of one rank"
            )
        if a.dtype not in _FLOATS or b.dtype not in _FLOATS:
            raise CheckpointError(
                f"{directory}: {path} has matrices of {a.dtype} and {b.dtype}, which are not read; save it in float32"
            )
        if a.itemsize > 4 or a.dtype != b.dtype:
            a, b = a.float(), b.float()
        if not (is_finite(a) and is_finite(b)):
            raise CheckpointError(f"{directory}: {path} has what is no finite number")
        matrices[path] = Matrices(a, b, _scaling(file, config, path, a.shape[0]))
    base = config.get("base_model_name_or_path")
    return PeftAdapter(directory, matrices, base if isinstance(base, str) else "")


def _require_lora(file: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        kind = str(config.get("peft_type"))[:40]
        raise UnsupportedModelError(f"{file}: is an adapter of {kind}, and LoRA alone is served")
    for key, what in _OTHER_FORMS.items():
        # 0 is a value: of tokens.
        if config.get(key) or type(config.get(key)) is int:
            raise UnsupportedModelError(
                f"{file}: the adapter has {what}, and LoRA beside linear layers alone is served"
            )
    if config.get("bias", "none") != "none":
        raise UnsupportedModelError(
            f"{file}: the adapter has biases of the model's own (bias = {str(config['bias'])[:40]!r}), and LoRA beside "
            "linear layers alone is served"
        )
    if config.get("init_lora_weights", True) not in _INITIAL:
        raise UnsupportedModelError(
            f"{file}: the adapter began with other weights of the model (init_lora_weights = "
            f"{str(config['init_lora_weights'])[:40]!r}): save it with "
            "PEFT's path_initial_model_for_weight_conversion"
        )


def _paths(directory: Path, tensors: Mapping[str, Tensor]) -> list[str]:
    """The modules that the adapter has matrices for, both of them."""
    paths = set()
    for name in tensors:
        path = name.removesuffix(_A).removesuffix(_B)
        if path == name or not name.startswith(_PREFIX):
            raise UnsupportedModelError(
                f"{directory / TENSORS_FILE}: {name[:120]!r} is no matrix of LoRA beside a linear layer"
            )
        paths.add(path.removeprefix(_PREFIX))
    for path in paths:
        for part in (_A, _B):
            if f"{_PREFIX}{path}{part}" not in tensors:
                raise CheckpointError(f"{directory}: the adapter lacks {_PREFIX}{path}{part}")
    if not paths:
        raise CheckpointError(f"{directory}: the adapter has no matrices")
    return sorted(paths)


def _scaling(file: Path, config: Mapping[str, Any], path: str, rank: int) -> float:
    """The factor of one module, as PEFT has it: alpha over r, or over its root."""
    alpha = _by_pattern(config, "alpha_pattern", path, config.get("lora_alpha"))
    told = _by_pattern(config, "rank_pattern", path, config.get("r"))
    if told != rank:
        raise CheckpointError(
            f"{file}: says rank {str(told)[:20]} of {path}, whose matrices have {rank}"
        )
    if rank > MAX_ADAPTER_RANK:
        raise UnsupportedModelError(
            f"{file}: {path} has rank {rank}, and adapters are served up to {MAX_ADAPTER_RANK}"
        )
    if not rank:
        raise CheckpointError(f"{file}: {path} has matrices of rank 0, which add nothing")
    # NaN is not below it either; a whole number of any size can be compared.
    if isinstance(alpha, bool) or not (isinstance(alpha, int | float) and abs(alpha) <= _MAX_ALPHA):
        raise CheckpointError(
            f"{file}: lora_alpha {str(alpha)[:40]!r} of {path} is no number that float32 has"
        )
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _by_pattern(config: Mapping[str, Any], key: str, path: str, otherwise: Any) -> Any:
    """A value of a table by patterns, the first that fits, as PEFT looks it up."""
    patterns = config.get(key)
    if not isinstance(patterns, dict):
        return otherwise
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", path):
                return value
        except re.error as exc:
            raise CheckpointError(
                f"{CONFIG_FILE}: {key} has {pattern[:80]!r}, which is no pattern: {exc}"
            ) from exc
    return otherwise
