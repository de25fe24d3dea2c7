"""A checkpoint's config as plain data: code and choices of code dropped, every size bounded.

A config comes from a file or from a peer, and both are strangers. transformers sets every key of a
config as an attribute of an object and lets some of them name code, kernels or files, so what is
no property of the model is dropped before it gets there. Sizes are bounded because config classes
build lists of as many entries as a number says; the memory of the model itself is another matter,
which the worker decides from its cost.

Strategy: one walk, depth first, that copies what may stay. This module knows JSON and no family.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from hashlib import sha256
from typing import cast

from neurogrid.errors import UnsupportedModelError

__all__ = ["DTYPE_NAMES", "FLOAT_TAG", "config_fingerprint", "sanitize_checkpoint_config"]

# Dtypes that a config may name; transformers looks the name up in torch, whatever it is.
DTYPE_NAMES = ("float32", "float16", "bfloat16", "float64")

# transformers' own way to write infinity (Mamba2's time_step_limit) in JSON that others can read.
FLOAT_TAG = "__float__"
_INFINITIES = {math.inf: "Infinity", -math.inf: "-Infinity"}

# A config of a known model is below 64 KiB and has below 2,000 values, four deep.
MAX_JSON_BYTES = 1024 * 1024
MAX_VALUES = 65_536
MAX_DEPTH = 12
MAX_STRING_LENGTH = 4096
MAX_KEY_LENGTH = 256

# Code, kernels and files; then switches of the run, which are ours to choose; then labels of
# classifiers, one number of which makes transformers build a table of that many entries.
_DROPPED_KEYS = frozenset(
    (
        "auto_map",
        "trust_remote_code",
        "name_or_path",
        "custom_pipelines",
        "custom_generate",
        "quantization_config",
        "compression_config",
        "quantization",
        "configuration_files",
        "transformers_weights",
        "gguf_file",
        "kernel_config",
        "use_kernels",
        "extra_files",
        "extra_config_files",
        "distributed_config",
        "tp_plan",
        "pp_plan",
        "device_map",
        "base_model_tp_plan",
        "base_model_pp_plan",
        "base_model_ep_plan",
        "base_model_fsdp_plan",
        "attribute_map",
        "sub_configs",
        "sub_configs_defaults",
        "base_config_key",
        "ignore_keys_at_rope_validation",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_return_dict",
        "torchscript",
        "num_labels",
        "id2label",
        "label2id",
        "problem_type",
        "task_specific_params",
    )
)

# The largest magnitude of a whole number, by what its key contains; the first that matches holds.
# Each leaves room above the largest known: Doge's 16,384 experts, 10 million positions of Llama 4.
_INTEGER_BOUNDS: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern), bound)
    for pattern, bound in (
        (r"theta|base$|param|token_id|_id$|seed", 2**53),
        (r"vocab", 2**23),
        (r"^(hidden_size|n_embd|d_model|dim|model_dim|embed_dim|word_embed_proj_dim)$", 2**17),
        (r"position|ctx", 2**24),
        # Divisors of these are searched for; the widest head known has 576 elements.
        (r"head_?dim|head_size|rotary_dim|kv_channels", 2**16),
        (r"size|dim|width|rank|d_ff|n_inner|length|seq_len|window", 2**31),
        (r"experts?$|experts?_per_tok", 2**15),
        (r"heads?$|groups?$|n_head", 2**15),
        (r"layer|depth|dense|block|attention_types|interval|freq|period|pattern", 1024),
        (r"^(num|n)_", 2**16),
    )
)
_DEFAULT_INTEGER_BOUND = 2**31


def sanitize_checkpoint_config(config: Mapping[str, object]) -> dict[str, object]:
    """A copy of `config` that is safe to build a model from; sanitising it again changes nothing.

    At any depth it drops: keys that begin with an underscore; what names code, files or kernels
    (`auto_map`, quantisation, anything that ends with `_implementation`), and switches of the run.
    `torch_dtype` becomes `dtype`. Infinities become
    `{"__float__": "Infinity"}`, as transformers writes them, so that the result is plain JSON.

    Raises:
        UnsupportedModelError: a bound is exceeded, NaN, an unknown dtype, or what is not JSON.
    """
    walk = _Walk()
    sanitized = cast("dict[str, object]", walk.copy(config, "", "", 0))
    num_bytes = len(_canonical_json(sanitized))
    if num_bytes > MAX_JSON_BYTES:
        raise UnsupportedModelError(
            f"the model's config is {num_bytes} bytes long; {MAX_JSON_BYTES} is the limit"
        )
    return sanitized


def config_fingerprint(config: Mapping[str, object]) -> bytes:
    """32 bytes that are equal for two configs exactly when they are the same once sanitised.

    Raises UnsupportedModelError as `sanitize_checkpoint_config` does.
    """
    return sha256(_canonical_json(sanitize_checkpoint_config(config))).digest()


def _canonical_json(config: Mapping[str, object]) -> bytes:
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


class _Walk:
    """Copies a config while it counts what it has seen."""

    def __init__(self) -> None:
        self._num_values = 0

    def copy(self, value: object, key: str, path: str, depth: int) -> object:
        """`value`, which stands under `key` (that of the list, inside a list), checked."""
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise UnsupportedModelError(f"the model's config has more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            raise UnsupportedModelError(
                f"the model's config is nested deeper than {MAX_DEPTH} levels"
            )
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return _bounded(value, key, path)
        if isinstance(value, float):
            return _number(value, path)
        if isinstance(value, str):
            if len(value) > MAX_STRING_LENGTH:
                raise _refused(path, f"is longer than {MAX_STRING_LENGTH} characters")
            return value
        if isinstance(value, list | tuple):
            return [self.copy(item, key, path, depth + 1) for item in value]
        if isinstance(value, Mapping):
            return self._copy_mapping(value, path, depth)
        raise _refused(path, f"is a {type(value).__name__}, which JSON does not have")

    def _copy_mapping(
        self, mapping: Mapping[object, object], path: str, depth: int
    ) -> dict[str, object]:
        tag = mapping.get(FLOAT_TAG)
        if len(mapping) == 1 and isinstance(tag, str) and tag in _INFINITIES.values():
            return {FLOAT_TAG: tag}
        result: dict[str, object] = {}
        for key, value in mapping.items():
            if not isinstance(key, str) or not 0 < len(key) <= MAX_KEY_LENGTH:
                raise UnsupportedModelError("the model's config has a key that is no usable name")
            self._num_values += 1  # dropped ones too: they were sent, and are walked past
            if _is_dropped(key):
                continue
            inner = f"{path}.{key}" if path else key
            if key in ("dtype", "torch_dtype"):
                name = _dtype_name(value, inner)
                if name is not None and (key == "dtype" or mapping.get("dtype") is None):
                    result["dtype"] = name
                continue
            result[key] = self.copy(value, key, inner, depth + 1)
        return result


def _is_dropped(key: str) -> bool:
    return key.startswith("_") or key in _DROPPED_KEYS or key.endswith("_implementation")


def _dtype_name(value: object, path: str) -> str | None:
    if not isinstance(value, str):
        return None
    name = value.removeprefix("torch.")
    if name == "auto":
        return None
    if name not in DTYPE_NAMES:
        raise _refused(path, f"is {value[:32]!r}, which is none of {', '.join(DTYPE_NAMES)}")
    return name


def _bounded(value: int, key: str, path: str) -> int:
    bound = next(
        (bound for pattern, bound in _INTEGER_BOUNDS if pattern.search(key)),
        _DEFAULT_INTEGER_BOUND,
    )
    if abs(value) > bound:
        shown = str(value) if abs(value) < 10**30 else "a number of more than 30 digits"
        raise _refused(path, f"is {shown}; {bound} is the limit")
    return value


def _number(value: float, path: str) -> object:
    if math.isnan(value):
        raise _refused(path, "is not a number")
    if math.isinf(value):
        return {FLOAT_TAG: _INFINITIES[value]}
    return value


def _refused(path: str, what: str) -> UnsupportedModelError:
    shown = path if path.isprintable() else ascii(path)
    return UnsupportedModelError(f"the model's config is refused: {shown[:120]} {what}")
