"""A checkpoint's config: built into transformers' own object, and told to others as a message.

The object is the one that transformers itself would make from the same `config.json`, with all
that it does to old or odd files, except that code, quantisation and choices of kernels were
dropped first (sanitize.py). No family is named here. The attention is left to transformers'
default, sdpa where the model has it and eager where not: no config can choose another, its key
was dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.model.files.model_code import quiet_transformers
from neurogrid.model.files.quantization import Quantization
from neurogrid.model.files.sanitize import (
    FLOAT_TAG,
    config_fingerprint,
    sanitize_checkpoint_config,
)
from neurogrid.model.files.tensors import TORCH_DTYPES
from neurogrid.model.files.text_models import know_text_model
from neurogrid.p2p.wire import CONFIG_DTYPES
from neurogrid.p2p.wire.model_config import ModelConfig
from neurogrid.temporary import temporary_directory

__all__ = [
    "COMPUTE_DTYPES",
    "PreTrainedConfig",
    "build_config",
    "build_image_config",
    "build_whole_config",
    "config_fingerprint",
    "eos_token_ids",
    "model_config_message",
    "resolve_dtype",
    "sanitize_checkpoint_config",
]

# What stages compute in; the wire has a name for each.
COMPUTE_DTYPES: Mapping[str, torch.dtype] = {
    name: TORCH_DTYPES[on_wire] for name, on_wire in CONFIG_DTYPES.items()
}

# What config classes raise on values that they do not like, their own validation included.
_BUILD_ERRORS = (
    StrictDataclassError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)

_DEFAULT_ROPE_THETA = 10_000.0
_MAX_LAYER_TYPE_LENGTH = 64
_MAX_IMAGE_CLASSES = 2**16


def build_config(config: Mapping[str, object]) -> PreTrainedConfig:
    """The config object of the text model that `config` (a config.json, of any origin) describes.

    That is what AutoModelForCausalLM would use: of a composite config whose causal model is the
    text model alone, the text part.

    Raises:
        UnsupportedModelError: a bound of sanitize.py is exceeded; transformers does not know the
            model type, or has no causal language model for it; the model is multimodal; the values
            are not what the family takes.
        CheckpointError: this machine has no room to write it down, where transformers reads it.
    """
    sanitized = sanitize_checkpoint_config(config)
    model_type = _known_model_type(sanitized, config)
    shown = repr(model_type[:64])
    know_text_model(CONFIG_MAPPING[model_type])
    if CONFIG_MAPPING[model_type] not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"model type {shown} has no causal language model in transformers "
            f"{transformers.__version__}; only models that generate text can be served"
        )
    try:
        built = _text_config(_as_transformers_would(sanitized, CONFIG_MAPPING[model_type]))
        for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
            value = getattr(built, name, None)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a positive integer")
    except _BUILD_ERRORS as exc:
        raise UnsupportedModelError(
            f"the config of model type {shown} is refused: {_one_line(exc)}"
        ) from exc
    return built


def build_image_config(config: Mapping[str, object]) -> PreTrainedConfig:
    """The config object of the image classifier that `config` (a config.json, of any origin) describes.

    Raises:
        UnsupportedModelError: as of `build_config`; or transformers has no image classifier for the model type.
    """
    sanitized = sanitize_checkpoint_config(config)
    model_type = _known_model_type(sanitized, config)
    shown = repr(model_type[:64])
    if CONFIG_MAPPING[model_type] not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        raise UnsupportedModelError(
            f"model type {shown} has no image classifier in transformers {transformers.__version__}"
        )
    try:
        built = _as_transformers_would(sanitized, CONFIG_MAPPING[model_type])
        built.num_labels = _num_image_classes(config)
    except _BUILD_ERRORS as exc:
        raise UnsupportedModelError(
            f"the config of model type {shown} is refused: {_one_line(exc)}"
        ) from exc
    return built


def build_whole_config(config: Mapping[str, object]) -> PreTrainedConfig:
    """The config object of all that `config` (a config.json, of any origin) describes, towers of images included.

    Raises:
        UnsupportedModelError: as of `build_config`, but for what kind of model it is.
    """
    sanitized = sanitize_checkpoint_config(config)
    model_type = _known_model_type(sanitized, config)
    try:
        return _as_transformers_would(sanitized, CONFIG_MAPPING[model_type])
    except _BUILD_ERRORS as exc:
        raise UnsupportedModelError(
            f"the config of model type {model_type[:64]!r} is refused: {_one_line(exc)}"
        ) from exc


def model_config_message(
    config: PreTrainedConfig,
    raw: Mapping[str, object],
    *,
    model_name: str,
    max_seq_len: int,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
) -> ModelConfig:
    """The message that tells a worker the model.

    Args:
        config: what `build_config` made of `raw`.
        raw: the checkpoint's config.json; it travels sanitised and whole.
        max_seq_len: tokens of the longest sequence that will be asked for.
        dtype: what stages compute in, one of COMPUTE_DTYPES.
        quantization: what of the layers is codes.

    The fields beside `checkpoint_config` are for readers that know no other (1.0.0). Where a family
    has no such number, they get the usual one: 4 hidden sizes for the intermediate size, as many
    key-value heads as heads.
    """
    hidden_size = config.hidden_size
    # Some configs have one of their own for each layer, and refuse to answer for all at once.
    is_mixed = getattr(config, "is_heterogeneous", False)
    parts = tuple(config.per_layer_config) if is_mixed else (config,)
    num_heads = _size(parts, ("num_attention_heads",), 1)
    return ModelConfig(
        model_name=model_name,
        hidden_size=hidden_size,
        intermediate_size=_size(parts, ("intermediate_size", "ffn_dim"), 4 * hidden_size),
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=_size(parts, ("num_key_value_heads",), num_heads),
        head_dim=_size(parts, ("head_dim", "v_head_dim"), max(1, hidden_size // num_heads)),
        vocab_size=config.vocab_size,
        max_seq_len=max_seq_len,
        rms_norm_eps=_norm_epsilon(parts[0]),
        rope_theta=_rope_theta(parts[0]),
        layer_types=_layer_types(parts[0], config.num_hidden_layers),
        tie_embeddings=bool(getattr(parts[0], "tie_word_embeddings", False)),
        dtype=next(name for name, value in COMPUTE_DTYPES.items() if value == dtype),
        model_type=config.model_type,
        checkpoint_config=sanitize_checkpoint_config(raw),
        quantization=None if quantization is None else quantization.record(),
    )


def resolve_dtype(config: PreTrainedConfig, requested: str | None) -> torch.dtype:
    """Return the dtype that stages compute in: the one asked for, else the checkpoint's, else float32.

    Raises:
        ConfigurationError: `requested` (the flag `--dtype`) is not one of COMPUTE_DTYPES.
        UnsupportedModelError: nothing was asked for, and the checkpoint's dtype is another.
    """
    names = ", ".join(COMPUTE_DTYPES)
    if requested is not None:
        if requested not in COMPUTE_DTYPES:
            raise ConfigurationError(f"--dtype must be one of {names}, got {requested!r}")
        return COMPUTE_DTYPES[requested]
    stored = config.dtype
    if stored is None:
        return torch.float32
    name = str(stored).removeprefix("torch.")
    if name not in COMPUTE_DTYPES:
        raise UnsupportedModelError(f"the model is in {name}; choose --dtype from {names}")
    return COMPUTE_DTYPES[name]


def eos_token_ids(
    config: Mapping[str, object], generation_config: Mapping[str, object] | None
) -> frozenset[int]:
    """The ids of which any one ends a generation, as `generate()` takes them.

    Args:
        config: the checkpoint's config.json.
        generation_config: its generation_config.json; where there is one, it decides alone.
    """
    if generation_config:
        return _token_ids(generation_config.get("eos_token_id"))
    found = _token_ids(config.get("eos_token_id"))
    text_config = config.get("text_config")
    if not found and isinstance(text_config, Mapping):
        return _token_ids(text_config.get("eos_token_id"))
    return found


def _known_model_type(sanitized: Mapping[str, object], config: Mapping[str, object]) -> str:
    model_type = sanitized.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedModelError("the model's config has no model_type")
    if model_type not in CONFIG_MAPPING:
        code = ", and the code that it brings is never run" if config.get("auto_map") else ""
        raise UnsupportedModelError(
            f"model type {model_type[:64]!r} is unknown to transformers {transformers.__version__}{code}; "
            "a newer transformers may know it: pip install --upgrade transformers"
        )
    return model_type


def _num_image_classes(config: Mapping[str, object]) -> int:
    """The classes that a config has names for, or counts; sanitised ones have neither."""
    names = config.get("id2label")
    count = len(names) if isinstance(names, Mapping) else config.get("num_labels", 2)
    if type(count) is not int or not 0 < count <= _MAX_IMAGE_CLASSES:
        raise ValueError(f"num_labels must be from 1 to {_MAX_IMAGE_CLASSES}")
    return count


def _as_transformers_would(
    sanitized: Mapping[str, object], config_class: type[PreTrainedConfig]
) -> PreTrainedConfig:
    # Through a file, because what transformers does to old and odd configs is done by the readers
    # of files alone (a `mistral` that has `layer_types` is a `ministral`, for one).
    text = json.dumps(_as_file(sanitized, _method_names(config_class)))
    with quiet_transformers(), _folder_of(text) as folder:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    config.name_or_path = ""
    return config


@contextmanager
def _folder_of(text: str) -> Iterator[Path]:
    """A directory with a config.json, for as long as the block runs.

    Raises:
        CheckpointError: it cannot be written, which is no fault of the config.
    """
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary_directory("neurogrid-config-"))
            (folder / "config.json").write_text(text, encoding="ascii")
        except OSError as exc:
            raise CheckpointError(
                f"the config cannot be written for transformers to read: {exc}; make room there, or name another "
                "directory in TMPDIR"
            ) from exc
        yield folder


def _text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part that AutoModelForCausalLM.from_config would use."""
    text_class = config.sub_configs.get("text_config")
    if text_class is None:
        return config
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "config_class", None) is text_class:
        return config.get_text_config(decoder=True)
    raise UnsupportedModelError(
        f"model type {config.model_type!r} is multimodal ({model_class.__name__}); only text "
        "models can be served yet: save its text model as a checkpoint of its own and use that"
    )


def _method_names(config_class: type[PreTrainedConfig]) -> frozenset[str]:
    # A key becomes an attribute, and would shadow the method of that name.
    return frozenset(
        name for name in dir(config_class) if callable(getattr(config_class, name, None))
    )


def _as_file(value: object, dropped: frozenset[str]) -> object:
    """`value` as config.json would have it: infinities as such, no key in `dropped`."""
    if isinstance(value, Mapping):
        if FLOAT_TAG in value:
            return float(value[FLOAT_TAG])
        return {key: _as_file(item, dropped) for key, item in value.items() if key not in dropped}
    if isinstance(value, list):
        return [_as_file(item, dropped) for item in value]
    return value


def _size(parts: Sequence[PreTrainedConfig], names: Sequence[str], default: int) -> int:
    """The first of the attributes that is a size; the largest, where it differs between layers."""
    for name in names:
        values: list[object] = []
        for part in parts:
            value = getattr(part, name, None)
            values += value if isinstance(value, list | tuple) else [value]
        sizes = [value for value in values if isinstance(value, int) and value > 0]
        if sizes:
            return max(sizes)
    return default


def _norm_epsilon(config: PreTrainedConfig) -> float:
    for name in ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon"):
        value = _positive(getattr(config, name, None))
        if value is not None:
            return value
    return 1e-6


def _rope_theta(config: PreTrainedConfig) -> float:
    return (
        next(_thetas(getattr(config, "rope_parameters", None)), None)
        or _positive(getattr(config, "rope_theta", None))
        or _DEFAULT_ROPE_THETA
    )


def _thetas(rope: object) -> Iterator[float]:
    """The rope bases in `rope_parameters`, which some families have one of for each layer type."""
    if isinstance(rope, Mapping):
        theta = _positive(rope.get("rope_theta"))
        if theta is not None:
            yield theta
        for inner in rope.values():
            yield from _thetas(inner)


def _positive(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    return None


def _layer_types(config: PreTrainedConfig, num_layers: int) -> tuple[str, ...] | None:
    layer_types = getattr(config, "layer_types", None)
    if not isinstance(layer_types, list | tuple) or len(layer_types) != num_layers:
        return None
    if not all(isinstance(t, str) and len(t) <= _MAX_LAYER_TYPE_LENGTH for t in layer_types):
        return None
    return tuple(layer_types)


def _token_ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list | tuple) else (value,)
    return frozenset(item for item in values if type(item) is int and item >= 0)


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split())[:300] or type(exc).__name__
