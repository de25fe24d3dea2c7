"""Configs: what is dropped, what is refused, and that the rest is what transformers would make."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    Lfm2Config,
    Llama4Config,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from neurogrid.errors import ConfigurationError, ModelError, UnsupportedModelError
from neurogrid.model.files.config import (
    build_config,
    config_fingerprint,
    eos_token_ids,
    model_config_message,
    resolve_dtype,
    sanitize_checkpoint_config,
)
from neurogrid.model.files.sanitize import _DROPPED_KEYS
from neurogrid.p2p.wire.model_config import deserialize_config, serialize_config
from tests.unit.vectors import SPECIFICATION, in_turn

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200,
    "eos_token_id": [2, 7],
    "torch_dtype": "bfloat16",
}

FAMILIES = [
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    MixtralConfig,
    Phi3Config,
    Gemma3TextConfig,
    GraniteConfig,
    DeepseekV3Config,
    Lfm2Config,
    GPT2Config,
    Mamba2Config,
]


def keys_at_any_depth(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from keys_at_any_depth(item)
    elif isinstance(value, list):
        for item in value:
            yield from keys_at_any_depth(item)


def saved(config: PreTrainedConfig, folder: Path) -> dict[str, Any]:
    config.save_pretrained(folder)
    table: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return table


def test_the_hub_is_off() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    program = "import neurogrid.model.files.tensor_names, huggingface_hub.constants as c; assert c.HF_HUB_OFFLINE"
    environment = {**os.environ, "HF_HUB_OFFLINE": "0"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_what_transformers_makes(family: type[PreTrainedConfig], tmp_path: Path) -> None:
    raw = saved(family(), tmp_path)
    expected = AutoConfig.from_pretrained(tmp_path)
    expected.name_or_path = ""
    built = build_config(raw)
    assert type(built) is type(expected)
    assert built.to_dict() == expected.to_dict()
    # And again on the far side of the wire.
    message = model_config_message(built, raw, model_name="m", max_seq_len=64, dtype=torch.float32)
    received = deserialize_config(serialize_config(message))
    assert received.checkpoint_config is not None
    assert build_config(received.checkpoint_config).to_dict() == expected.to_dict()
    assert received.checkpoint_config == sanitize_checkpoint_config(received.checkpoint_config)


def test_old_files_are_read_as_transformers_reads_them() -> None:
    old = LLAMA | {
        "rope_theta": 500000.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    built = build_config(old)
    assert built.rope_parameters["rope_theta"] == 500000.0
    assert built.rope_parameters["rope_type"] == "linear"
    assert resolve_dtype(built, None) == torch.bfloat16
    mixed = LLAMA | {
        "model_type": "mistral",
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 8,
    }
    assert build_config(mixed).model_type == "ministral"


def test_infinity_survives() -> None:
    raw = Mamba2Config().to_dict()
    assert math.inf in raw["time_step_limit"]
    sanitized = sanitize_checkpoint_config(raw)
    json.dumps(sanitized, allow_nan=False)
    assert sanitized == sanitize_checkpoint_config(sanitized)
    assert list(build_config(sanitized).time_step_limit) == list(raw["time_step_limit"])


POISON: dict[str, Any] = {
    "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
    "_attn_implementation": "evil/kernels",
    "_attn_implementation_internal": "evil/kernels",
    "attn_implementation": "evil/kernels",
    "experts_implementation": "evil/kernels",
    "_experts_implementation": "evil/kernels",
    "quantization_config": {"quant_method": "evil"},
    "trust_remote_code": True,
    "name_or_path": "evil/model",
    "_name_or_path": "evil/model",
    "_auto_class": "AutoConfig",
    "__class__": "evil",
    "__dict__": {},
    "configuration_files": ["config.evil.json"],
    "transformers_weights": "evil.safetensors",
    "attribute_map": {"hidden_size": "vocab_size"},
    "sub_configs": {},
    "base_model_tp_plan": {"layers.*": "evil"},
    "num_labels": 2_000_000_000,
    "output_attentions": True,
    "return_dict": False,
    "torchscript": True,
}


def test_what_names_code_is_dropped_at_any_depth() -> None:
    nested = {"deep": [{"deeper": dict(POISON)}]}
    sanitized = sanitize_checkpoint_config(LLAMA | POISON | nested)
    assert not POISON.keys() & set(keys_at_any_depth(sanitized))
    assert sanitized["hidden_size"] == 64
    assert sanitized["deep"] == [{"deeper": {}}]


def test_a_poisoned_config_builds_the_same_model() -> None:
    methods = dict.fromkeys(("to_dict", "get_text_config", "to_json_string", "update"), "x")
    built = build_config(LLAMA | POISON | methods)
    assert built.to_dict() == build_config(LLAMA).to_dict()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(built)
    assert model.config._attn_implementation == "sdpa"
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": None}, "has no model_type"),
        ({"model_type": 5}, "has no model_type"),
        ({"model_type": "nobody"}, f"unknown to transformers {transformers.__version__}"),
        ({"model_type": "nobody"}, "pip install --upgrade transformers"),
        ({"model_type": "nobody", "auto_map": {"AutoConfig": "a.B"}}, "code that it brings"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "t5"}, "no causal language model"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"vocab_size": -5}, "vocab_size must be"),
        ({"hidden_size": "wide"}, "is refused"),
        ({"hidden_size": 2**17 + 1}, "hidden_size is 131073; 131072 is the limit"),
        ({"vocab_size": 2**40}, "vocab_size"),
        ({"num_hidden_layers": 1025}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**4000}, "more than 30 digits"),
        ({"num_local_experts": 50_000}, "num_local_experts"),
        ({"max_position_embeddings": 2**25}, "max_position_embeddings"),
        ({"num_attention_heads": 2**16}, "num_attention_heads"),
        ({"intermediate_size": -(2**32)}, "intermediate_size"),
        ({"anything": 2**32}, "anything"),
        ({"nested": {"list": [[{"num_layers": 2**20}]]}}, "nested.list.num_layers"),
        ({"attention_types": [[["global"], 2**20]]}, "attention_types"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is not a number"),
        ({"name": "x" * 5000}, "longer than 4096"),
        ({"x" * 300: 1}, "no usable name"),
        ({"list": list(range(100_000))}, "more than 65536 values"),
        ({"list": ["y" * 4000] * 500}, "1048576 is the limit"),
        ({"dtype": "load"}, "dtype is 'load'"),
        ({"inner": {"torch_dtype": "int8"}}, "inner.torch_dtype"),
        ({"set": {1, 2}}, "a set"),
        ({"rope_scaling": "evil"}, "is refused"),
    ],
)
def test_refused_in_one_line(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        build_config(LLAMA | changes)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_a_size_of_its_own_for_a_layer_is_refused_or_ignored(name: str) -> None:
    try:
        built = build_config(LLAMA | {"per_layer_config": {"1": {name: 9}}})
    except UnsupportedModelError:
        return
    assert getattr(built, name) == LLAMA[name]


def test_every_family_passes_unchanged_or_is_refused() -> None:
    num_passed = 0
    for config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            raw = config_class().to_dict()
        except Exception:  # noqa: BLE001  some have no defaults; each says so in its own way
            continue
        try:
            built = build_config(raw)
        except UnsupportedModelError:
            continue
        message = model_config_message(
            built, raw, model_name="m", max_seq_len=64, dtype=torch.float32
        )
        received = deserialize_config(serialize_config(message)).checkpoint_config
        assert received is not None
        assert build_config(received).to_dict() == built.to_dict()
        num_passed += 1
    assert num_passed > 100


def test_deep_nesting_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"d": deep}
    with pytest.raises(UnsupportedModelError, match="nested deeper than 12"):
        sanitize_checkpoint_config(deep)


def test_a_key_that_is_no_string_is_refused() -> None:
    odd: Any = {5: 1}
    with pytest.raises(UnsupportedModelError, match="no usable name"):
        sanitize_checkpoint_config(odd)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=8) | st.sampled_from([*LLAMA, *POISON]), JSON_VALUES, max_size=6
    )
)
def test_sanitised_is_plain_json_and_stays(config: dict[str, Any]) -> None:
    try:
        sanitized = sanitize_checkpoint_config(config)
    except UnsupportedModelError:
        return
    assert json.loads(json.dumps(sanitized, allow_nan=False)) == sanitized
    assert sanitize_checkpoint_config(sanitized) == sanitized
    assert not POISON.keys() & set(keys_at_any_depth(sanitized))


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*LLAMA, "rope_scaling", "head_dim", "hidden_act"]), JSON_VALUES, max_size=4
    )
)
def test_any_values_build_or_raise_a_model_error(changes: dict[str, Any]) -> None:
    try:
        built = build_config({**LLAMA, **changes, "model_type": "llama"})
    except ModelError:
        return
    assert built.hidden_size >= 1


def test_the_text_part_of_a_composite_config() -> None:
    built = build_config(Llama4Config().to_dict())
    assert built.model_type == "llama4_text"
    with pytest.raises(UnsupportedModelError, match="multimodal"):
        build_config(Gemma3Config().to_dict())


def test_fingerprint() -> None:
    assert len(config_fingerprint(LLAMA)) == 32
    assert config_fingerprint(LLAMA) == config_fingerprint(dict(reversed(LLAMA.items())))
    assert config_fingerprint(LLAMA) == config_fingerprint(LLAMA | POISON)
    assert config_fingerprint(LLAMA) != config_fingerprint(LLAMA | {"rms_norm_eps": 1e-5})
    # An integer is not the float of that value: families tell them apart in validation.
    assert config_fingerprint({"a": 1}) != config_fingerprint({"a": 1.0})


def test_message_fields() -> None:
    raw = Gemma3TextConfig(num_hidden_layers=6).to_dict()
    built = build_config(raw)
    message = model_config_message(
        built, raw, model_name="gemma", max_seq_len=512, dtype=torch.bfloat16
    )
    assert message.num_layers == 6
    assert message.head_dim == 256
    assert message.dtype == "bfloat16"
    assert message.layer_types == tuple(built.layer_types)
    assert message.rope_theta in (10_000.0, 1_000_000.0)
    assert message.rms_norm_eps == 1e-6
    assert message.tie_embeddings is True
    gpt2 = GPT2Config(n_embd=64, n_head=4, n_layer=2)
    message = model_config_message(
        build_config(gpt2.to_dict()), {}, model_name="gpt2", max_seq_len=8, dtype=torch.float32
    )
    fields = (message.num_layers, message.hidden_size, message.intermediate_size)
    assert fields == (2, 64, 256)
    assert (message.num_heads, message.num_kv_heads, message.head_dim) == (4, 4, 16)
    assert message.rms_norm_eps == 1e-5


@pytest.mark.parametrize(
    ("stored", "requested", "expected"),
    [
        ("bfloat16", None, torch.bfloat16),
        ("torch.float16", None, torch.float16),
        (None, None, torch.float32),
        ("auto", None, torch.float32),
        ("bfloat16", "float32", torch.float32),
        ("float64", "float16", torch.float16),
    ],
)
def test_resolve_dtype(stored: str | None, requested: str | None, expected: torch.dtype) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    assert resolve_dtype(build_config(config | {"dtype": stored}), requested) == expected


def test_dtype_errors() -> None:
    with pytest.raises(ConfigurationError, match=r"--dtype must be one of .*float16.*'int8'"):
        resolve_dtype(build_config(LLAMA), "int8")
    with pytest.raises(UnsupportedModelError, match="float64; choose --dtype"):
        resolve_dtype(build_config({**LLAMA, "torch_dtype": "float64"}), None)


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        ({"eos_token_id": 2}, {}, {2}),
        ({"eos_token_id": 2}, None, {2}),
        ({"eos_token_id": [2, 3]}, {}, {2, 3}),
        ({"eos_token_id": 2}, {"eos_token_id": [4, 5]}, {4, 5}),
        ({"eos_token_id": 2}, {"bos_token_id": 1}, set()),
        ({"text_config": {"eos_token_id": 9}}, {}, {9}),
        ({"eos_token_id": None}, {}, set()),
        ({"eos_token_id": -1}, {}, set()),
        ({"eos_token_id": True}, {}, set()),
        ({}, {}, set()),
    ],
)
def test_eos_token_ids(
    config: dict[str, object], generation_config: dict[str, object] | None, expected: set[int]
) -> None:
    assert eos_token_ids(config, generation_config) == expected


@in_turn("config_fingerprint")
def test_fingerprint_vectors(name: str, case: Any) -> None:
    assert sha256(case["json"].encode("ascii")).hexdigest() == case["fingerprint"]
    assert config_fingerprint(json.loads(case["config"])).hex() == case["fingerprint"]


def test_the_specification_names_the_keys_that_are_left_out() -> None:
    text = (SPECIFICATION / "messages.md").read_text(encoding="utf-8")
    start = text.index("At any depth these keys are left out")
    listed = set(re.findall(r"`([^`]+)`", text[start : text.index("- `torch_dtype`", start)]))
    assert listed == _DROPPED_KEYS | {"_", "_implementation"}
