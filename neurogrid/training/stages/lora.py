"""Adapters: small matrices beside the linear layers of a stage learn, by PEFT's own layers, and its files in and out.

Names are PEFT's, those of its file: `base_model.model.`, the name of the linear layer in the whole model, and
`.lora_A.weight` or `.lora_B.weight`. A new adapter's A depends on seed, layer and name alone, B is zero.

PEFT is imported where an adapter is made: training without one does not need it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from neurogrid.errors import CheckpointError, ConfigurationError
from neurogrid.model.kernels import in_shape_only
from neurogrid.training.runs.run_file.stage_sections import AdapterSection

__all__ = [
    "Adapters",
    "StoredAdapter",
    "is_adapter",
    "is_adapter_tensor",
    "num_adapter_parameters",
    "read_adapter",
    "require_peft",
    "require_targets",
    "write_adapter",
]

_PREFIX: Final = "base_model.model."
_PARTS: Final = ("lora_A", "lora_B")
# PEFT keeps several adapters by their names; we have one.
_ADAPTER: Final = "default"
_CONFIG_FILE: Final = "adapter_config.json"
_TENSORS_FILE: Final = "adapter_model.safetensors"
_MAX_CONFIG_BYTES: Final = 16 * 1024 * 1024
# Keys of PEFT's config that change what an adapter computes, beyond what ours do; set means refused.
_OTHER_FORMS: Final = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "fan_in_fan_out",
    "alora_invocation_tokens",
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "layers_pattern",
    "layers_to_transform",
    "exclude_modules",
    "rank_pattern",
    "alpha_pattern",
    "velora_config",
    "monteclora_config",
    "kasa_config",
    "arrow_config",
)


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter from files.

    Attributes:
        section: what it is.
        tensors: float32, by PEFT's names; a `StageLearner` takes them beside those of the model.
        base: a directory or a name on the hub, of the model that it is for; empty where it does not say.
    """

    section: AdapterSection
    tensors: dict[str, Tensor]
    base: str = ""


class Adapters:
    """Puts adapters into layers: an `Adapt` of a training stage.

    Args:
        adapter: what they are like.
        seed: of the A of new ones.
        tensors: of those that there are, by PEFT's names, of all layers that get some; empty for new ones.
    """

    def __init__(self, adapter: AdapterSection, seed: int, tensors: Mapping[str, Tensor]) -> None:
        self._adapter = adapter
        self._seed = seed
        self._tensors = tensors

    def __call__(self, layer_id: int, name: str, layer: nn.Module) -> dict[str, nn.Parameter]:
        """Put adapters into a layer; what learns in it, by PEFT's names.

        Args:
            layer_id: its number.
            name: of its module in the whole model.
            layer: changed.

        Raises:
            ConfigurationError: PEFT is missing.
            CheckpointError: a tensor is missing, or of a wrong shape.
        """
        paths = _linear_paths(layer, self._adapter.targets)
        if paths:
            # Within a module without a config, by which PEFT would take it for a whole model. Names are whole paths.
            inside = nn.ModuleDict({"layer": layer})
            config = _peft_config(self._adapter, [f"layer.{path}" for path in paths])
            # It looks at each weight some twenty times, and those of codes are made each time.
            with in_shape_only(layer):
                _import_peft().inject_adapter_in_model(config, inside)
        learning: dict[str, nn.Parameter] = {}
        for path in paths:
            adapted: Any = layer.get_submodule(path)
            # What goes in has the dtype of the products: autocast would make that again of each float32 copy.
            adapted.cast_input_dtype_enabled = False
            for part in _PARTS:
                linear = getattr(adapted, part)[_ADAPTER]
                full_name = f"{_PREFIX}{name}.{path}.{part}.weight"
                value = self._value(full_name, part, layer_id, path, linear.weight.shape)
                linear.weight = nn.Parameter(value.to(linear.weight.device, torch.float32))
                learning[full_name] = linear.weight
        given = {each for each in self._tensors if each.startswith(f"{_PREFIX}{name}.")}
        if strangers := sorted(given - learning.keys()):
            raise CheckpointError(
                f"{strangers[0][:120]!r} is no matrix of the adapter as it is to be"
            )
        return learning

    def _value(self, name: str, part: str, layer_id: int, path: str, shape: torch.Size) -> Tensor:
        """Return the values that a matrix begins with, in memory of its own."""
        if not self._tensors:
            value = torch.zeros(shape)
            return value if part == "lora_B" else _start(value, self._seed, layer_id, path)
        given = self._tensors.get(name)
        if given is None:
            raise CheckpointError(f"the adapter lacks {name}")
        if given.shape != shape:
            raise CheckpointError(
                f"{name} of the adapter has shape {list(given.shape)}, and {list(shape)} is due"
            )
        return given.clone()


def require_targets(adapter: AdapterSection, layers: Sequence[nn.Module]) -> None:
    """Check that the layers of a model have what an adapter names.

    Raises:
        ConfigurationError: none of them has a linear layer of a name that it names, or any at all.
    """
    there = {path for layer in layers for path in _linear_paths(layer, ())}
    for target in adapter.targets:
        if not any(_is_target(path, target) for path in there):
            leaves = ", ".join(sorted({path.rpartition(".")[2] for path in there})) or "none"
            raise ConfigurationError(
                f"[adapter] targets: no layer of the model has a linear layer {target!r}; there are {leaves}"
            )
    if not there:
        raise ConfigurationError("[adapter] the layers of the model have no linear layers")


def num_adapter_parameters(adapter: AdapterSection, layer: nn.Module) -> int:
    """Parameters of an adapter beside the linear layers of a layer, which may be in shape only."""
    linears: list[Any] = [layer.get_submodule(p) for p in _linear_paths(layer, adapter.targets)]
    return sum(adapter.r * (each.in_features + each.out_features) for each in linears)


def is_adapter_tensor(name: str) -> bool:
    """Whether a tensor is an adapter's, by its name."""
    return name.startswith(_PREFIX)


def is_adapter(directory: Path) -> bool:
    """Whether a directory has an adapter, by its files."""
    return (directory / _CONFIG_FILE).is_file()


def write_adapter(
    directory: Path,
    adapter: AdapterSection,
    tensors: Mapping[str, Tensor],
    base_model_name: str,
) -> None:
    """Write an adapter as PEFT opens it, into a directory that exists.

    Args:
        directory: gets adapter_config.json and adapter_model.safetensors.
        adapter: what it is.
        tensors: of all layers, by PEFT's names.
        base_model_name: a directory or a name on the hub, for whoever opens it.

    Raises:
        ConfigurationError: PEFT is missing.
    """
    targets = adapter.targets or sorted({name.split(".")[-3] for name in tensors})
    config = _peft_config(adapter, targets, base_model_name)
    config.save_pretrained(directory)
    contiguous = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
    save_file(contiguous, directory / _TENSORS_FILE, {"format": "pt"})


def read_adapter(directory: Path) -> StoredAdapter:
    """Read an adapter that PEFT wrote, or `write_adapter`.

    Raises:
        CheckpointError: it is damaged, or none of plain LoRA beside linear layers.
    """
    file = directory / _CONFIG_FILE
    try:
        with file.open("rb") as opened:
            config: Any = json.loads(opened.read(_MAX_CONFIG_BYTES))
        tensors = load_file(directory / _TENSORS_FILE)
    except (OSError, ValueError, RecursionError, SafetensorError) as exc:
        raise CheckpointError(f"{directory}: is no adapter of PEFT: {exc}") from exc
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CheckpointError(f"{file}: is no adapter of LoRA")
    # 0 is a value: of layers.
    other = [key for key in _OTHER_FORMS if config.get(key) or type(config.get(key)) is int]
    if config.get("bias", "none") != "none":
        other.append("bias")
    # The others change the weights that the adapter lies beside.
    if config.get("init_lora_weights", True) not in (True, False, "gaussian"):
        other.append("init_lora_weights")
    if other:
        raise CheckpointError(f"{file}: has {other[0]}, and plain LoRA alone is trained here")
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not targets:
        raise CheckpointError(f"{file}: its target_modules are no list of names")
    known = tuple(f".{part}.weight" for part in _PARTS)
    if strangers := [n for n in tensors if not (is_adapter_tensor(n) and n.endswith(known))]:
        raise CheckpointError(
            f"{directory / _TENSORS_FILE}: {min(strangers)[:80]!r} is no matrix of LoRA beside a linear layer"
        )
    try:
        section = AdapterSection(
            r=config.get("r", -1),
            alpha=config.get("lora_alpha", 0),
            targets=tuple(sorted(targets)),
            dropout=config.get("lora_dropout", 0.0),
        )
    except (ConfigurationError, TypeError) as exc:
        raise CheckpointError(f"{file}: {exc}") from exc
    base = config.get("base_model_name_or_path")
    return StoredAdapter(
        section,
        {name: tensor.float() for name, tensor in tensors.items()},
        base if isinstance(base, str) else "",
    )


def _linear_paths(layer: nn.Module, targets: Sequence[str]) -> list[str]:
    """The paths of the linear layers that targets name; all of them for none."""
    return [
        path
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear)
        and (not targets or any(_is_target(path, target) for target in targets))
    ]


def _is_target(path: str, target: str) -> bool:
    """Whether a target names a linear layer, as PEFT has it: by its path, or the end of one."""
    return path == target or path.endswith(f".{target}")


def _start(matrix: Tensor, seed: int, layer_id: int, path: str) -> Tensor:
    """Fill A as PEFT does, with numbers of its own."""
    text = f"neurogrid adapter {seed} {layer_id} {path}"
    digest = hashlib.sha256(text.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)


def _peft_config(
    adapter: AdapterSection, targets: Sequence[str], base_model_name: str | None = None
) -> Any:
    return _import_peft().LoraConfig(
        r=adapter.r,
        lora_alpha=int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=list(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_model_name,
    )


def require_peft() -> None:
    """Check that an adapter can be made and written here, without importing what that takes.

    Raises:
        ConfigurationError: it cannot.
    """
    if find_spec("peft") is None:
        raise ConfigurationError(
            "[adapter] needs the package peft: pip install -r packaging/requirements/training.txt (in the source), "
            "or leave [adapter] out"
        )


def _import_peft() -> Any:
    require_peft()
    import peft

    return peft
