"""The config.json that a model in GGUF would have as a checkpoint of transformers, by architecture.

What a key says in a way that has no counterpart there is refused: nothing is left out in silence that changes a number.

Sources: the converter and the loader of llama.cpp; the configs of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.files.gguf.architectures import EMBEDDING, HEAD
from neurogrid.model.files.gguf.header import TensorInfo, Value
from neurogrid.model.files.gguf.metadata import Metadata

__all__ = ["FactorReader", "config_of"]

_Config: TypeAlias = dict[str, object]
FactorReader: TypeAlias = Callable[[str], Sequence[float]]
"""Gives the elements of a vector of the file, by name."""

_DEFAULT_THETA: Final = 10_000.0
_HEAD_FACTORS, _LONG, _SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
# Keys of an architecture that change no number: sizes that the tensors have themselves, what was done before, and what
# is of a scaling of positions, or of norms, that would read it.
_CHANGE_NOTHING: Final = frozenset(
    {
        *(".vocab_size", ".tensor_data_layout", ".rope.scaling.finetuned"),
        *(".expert_feed_forward_length", ".expert_shared_feed_forward_length"),
        *(".rope.scaling.original_context_length", ".attention.layer_norm_epsilon"),
        *(".rope.scaling.yarn_beta_fast", ".rope.scaling.yarn_beta_slow"),
    }
)
# Those that change none at these values; at others, and where an architecture does not read them, they are refused.
_NEUTRAL: Final[Mapping[str, tuple[Value, ...]]] = {
    ".rope.scaling.factor": (1, 0),
    ".rope.scale_linear": (1, 0),
    ".rope.scaling.attn_factor": (1.0,),
    ".rope.scaling.yarn_ext_factor": (-1.0,),
    ".rope.scaling.yarn_attn_factor": (1.0,),
    ".rope.scaling.yarn_log_multiplier": (0.0,),
    ".attention.scale": (0,),
    ".attention.clamp_kqv": (0,),
    ".attention.max_alibi_bias": (0,),
    ".attention.sliding_window": (0,),
    ".attention.temperature_scale": (0,),
    ".attn_logit_softcapping": (0,),
    ".final_logit_softcapping": (0,),
    ".logit_scale": (0, 1),
    ".residual_scale": (0, 1),
    ".embedding_scale": (0, 1),
    ".expert_count": (0,),
    ".expert_used_count": (0,),
    ".expert_shared_count": (0,),
    ".expert_weights_scale": (1, 0),
    # By softmax, or not told.
    ".expert_gating_func": (1, 0),
    ".expert_group_count": (0, 1),
    ".expert_group_used_count": (0, 1),
    ".leading_dense_block_count": (0,),
    ".nextn_predict_layers": (0,),
    ".use_parallel_residual": (False,),
    # Of the hidden states for an embedding: none, or the last.
    ".pooling_type": (3, 0),
}
# Of the blocks of matrices, since before there was this format.
_QUANTIZATION_VERSION: Final = 2
# No length is stretched so far.
_MAX_FACTOR: Final = 2**20
# Layers of the one Gemma whose queries are scaled by the hidden size for each head, and not by the size of a head.
_LARGEST_GEMMA_2: Final = 46
_LARGEST_GEMMA_3: Final = 62
_GEMMA_2_WINDOW: Final = 4096
_GEMMA_2_PATTERN: Final = 2
_GEMMA_3_PATTERN: Final = 6


@dataclass(frozen=True, slots=True)
class _Given:
    """Metadata and sizes of a model, as every architecture has them.

    Attributes:
        metadata, tensors, factors: as of `config_of`.
        hidden_size, num_layers, num_heads, head_size, context: by the keys.
    """

    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    factors: FactorReader
    hidden_size: int
    num_layers: int
    num_heads: int
    head_size: int
    context: int

    def vector(self, name: str, count: int) -> list[float]:
        """Factors of frequencies."""
        found = list(self.factors(name))
        if len(found) != count or not all(0 < factor < _MAX_FACTOR for factor in found):
            raise CheckpointError(
                f"{self.metadata.where}: {name!r} is {len(found)} numbers, and not {count} above 0"
            )
        return found

    def refuse(self, what: str) -> UnsupportedModelError:
        """The error for what is not read."""
        return UnsupportedModelError(f"{self.metadata.where}: {what}")


def config_of(
    metadata: Metadata, tensors: Mapping[str, TensorInfo], factors: FactorReader
) -> _Config:
    """The config of a model.

    Args:
        metadata: of an architecture that is read.
        tensors: checked by `check_tensors`.
        factors: reads the little tensors that change the frequencies of positions.

    Raises:
        CheckpointError: a key is missing, or is nothing that it can be.
        UnsupportedModelError: a key says what cannot be said there.
    """
    hidden_size = metadata.size(".embedding_length")
    num_heads = metadata.size(".attention.head_count")
    head_size = metadata.size(".attention.key_length", max(1, hidden_size // num_heads))
    given = _Given(
        metadata,
        tensors,
        factors,
        hidden_size=hidden_size,
        num_layers=metadata.size(".block_count"),
        num_heads=num_heads,
        head_size=head_size,
        context=metadata.size(".context_length"),
    )
    if metadata.text("general.type", "model") != "model":
        raise given.refuse(f"is {metadata.text('general.type')[:40]!r} and not a model")
    if metadata.size(".attention.value_length", head_size) != head_size:
        raise given.refuse("values of another size than keys, which is not read")
    if not metadata.flag(".attention.causal", True):
        raise given.refuse("its tokens see those behind them (attention.causal), which is not read")
    vocab_size = tensors[EMBEDDING].shape[0]
    num_tokens = len(metadata.texts("tokenizer.ggml.tokens"))
    if num_tokens and num_tokens != vocab_size:
        raise CheckpointError(
            f"{metadata.where}: {num_tokens} tokens, and an embedding of {vocab_size}: they do not belong together"
        )
    version = metadata.count("general.quantization_version", _QUANTIZATION_VERSION)
    if version != _QUANTIZATION_VERSION:
        raise given.refuse(
            f"its blocks are of version {version}, and those of {_QUANTIZATION_VERSION} are read: convert it anew"
        )
    config: _Config = {
        "hidden_size": hidden_size,
        "intermediate_size": metadata.size(".feed_forward_length"),
        "num_hidden_layers": given.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.size(".attention.head_count_kv", num_heads),
        "head_dim": head_size,
        "max_position_embeddings": given.context,
        "rms_norm_eps": metadata.number(".attention.layer_norm_rms_epsilon"),
        "vocab_size": vocab_size,
        "tie_word_embeddings": HEAD not in tensors,
        "bos_token_id": _token(metadata, "bos", vocab_size),
        "eos_token_id": _token(metadata, "eos", vocab_size),
        "pad_token_id": _token(metadata, "padding", vocab_size),
        **_CONFIGS[metadata.architecture](given),
    }
    _refuse_unread(given)
    return config


def _refuse_unread(given: _Given) -> None:
    """Refuse keys that nothing has read, unless they change no number."""
    name = given.metadata.architecture
    for key, value in given.metadata.unread().items():
        if key in _CHANGE_NOTHING:
            continue
        few = value[:8] if isinstance(value, tuple) else value
        shown = f"{name}{key} is {repr(few)[:40]}"
        if key not in _NEUTRAL:
            raise given.refuse(f"{shown}, which is not read; use its safetensors")
        if value not in _NEUTRAL[key]:
            raise given.refuse(
                f"{shown}, and only {_NEUTRAL[key][0]} is read of it; use its safetensors"
            )


def _token(metadata: Metadata, name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in metadata:
        return None
    token_id = metadata.count(key)
    # Beyond the tokens is none, as older files say it.
    return token_id if token_id < vocab_size else None


# Positions.


def _rope(given: _Given) -> _Config:
    """RoPE parameters of the config: all of a head is rotated, at frequencies that may be scaled."""
    metadata, name = given.metadata, given.metadata.architecture
    if metadata.size(".rope.dimension_count", given.head_size) != given.head_size:
        raise given.refuse(f"positions turn a part of each head only, which is not read of {name}")
    rope: _Config = {
        "rope_type": "default",
        "rope_theta": metadata.number(".rope.freq_base", _DEFAULT_THETA),
    }
    # The second is what older files have.
    factor = metadata.number(".rope.scaling.factor", metadata.number(".rope.scale_linear", 1.0))
    how = metadata.text(".rope.scaling.type", "linear" if factor not in (0, 1) else "none")
    if how == "none" or (how == "linear" and factor in (0, 1)):
        return rope
    if factor <= 0:
        raise CheckpointError(f"{metadata.where}: positions are scaled by {factor}")
    if how == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if how == "yarn":
        original = metadata.size(".rope.scaling.original_context_length")
        return rope | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": metadata.number(".rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.number(".rope.scaling.yarn_beta_slow", 1.0),
        }
    raise given.refuse(f"positions are scaled by {how[:40]!r}, which is not read of {name}")


# Architectures.


def _named(name: str, model_type: str) -> _Config:
    return {"architectures": [f"{name}ForCausalLM"], "model_type": model_type}


def _llama(given: _Given) -> _Config:
    metadata, tensors = given.metadata, given.tensors
    rope = _rope(given)
    if _HEAD_FACTORS in tensors:
        # Frequencies are divided by these, as Llama 3.1's are, and those of longrope at every length where both of
        # its lists are the same.
        if rope["rope_type"] != "default":
            raise given.refuse("positions are scaled in two ways")
        found = given.vector(_HEAD_FACTORS, given.head_size // 2)
        rope |= {
            "rope_type": "longrope",
            "short_factor": found,
            "long_factor": found,
            "attention_factor": 1.0,
            "original_max_position_embeddings": given.context,
        }
    window = metadata.count(".attention.sliding_window", 0)
    biases: _Config = {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    if not window:
        return {**_named("Llama", "llama"), "rope_parameters": rope, **biases}
    if any(biases.values()):
        raise given.refuse("a Mistral with biases, which is none")
    return {**_named("Mistral", "mistral"), "rope_parameters": rope, "sliding_window": window}


def _qwen2(given: _Given) -> _Config:
    return {
        **_named("Qwen2", "qwen2"),
        "rope_parameters": _rope(given),
        "use_sliding_window": False,
    }


def _qwen3(given: _Given) -> _Config:
    return {
        **_named("Qwen3", "qwen3"),
        "rope_parameters": _rope(given),
        "attention_bias": False,
        "use_sliding_window": False,
    }


def _experts(given: _Given, *, are_normalised: bool) -> _Config:
    """Keys of a mixture: number and size of its experts, by the first layer's shapes, and how many a token has.

    Args:
        are_normalised: whether their weights add up to 1, where no key says so.
    """
    num_experts, size, _ = given.tensors["blk.0.ffn_up_exps.weight"].shape
    told = given.metadata.size(".expert_count")
    if told != num_experts:
        raise CheckpointError(
            f"{given.metadata.where}: {num_experts} experts, and {told} by its keys"
        )
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": given.metadata.size(".expert_used_count"),
        "moe_intermediate_size": size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": given.metadata.flag(".expert_weights_norm", are_normalised),
        "use_sliding_window": False,
    }


def _qwen2moe(given: _Given) -> _Config:
    return {
        **_named("Qwen2Moe", "qwen2_moe"),
        "rope_parameters": _rope(given),
        **_experts(given, are_normalised=False),
        "shared_expert_intermediate_size": given.tensors["blk.0.ffn_up_shexp.weight"].shape[0],
    }


def _qwen3moe(given: _Given) -> _Config:
    return {
        **_named("Qwen3Moe", "qwen3_moe"),
        "rope_parameters": _rope(given),
        **_experts(given, are_normalised=True),
        "attention_bias": False,
    }


def _query_scalar(given: _Given, largest: int) -> int:
    is_largest = given.num_layers == largest
    return given.hidden_size // given.num_heads if is_largest else given.head_size


def _capping(given: _Given, key: str, default: float) -> float | None:
    return given.metadata.number(key, default) or None


def _gemma2(given: _Given) -> _Config:
    metadata, rope = given.metadata, _rope(given)
    pattern = metadata.size(".attention.sliding_window_pattern", _GEMMA_2_PATTERN)
    if pattern != _GEMMA_2_PATTERN:
        raise given.refuse(
            f"a sliding window in all layers but one of {pattern}, and of gemma2 one of {_GEMMA_2_PATTERN} is read"
        )
    theta = metadata.number(".rope.freq_base", _DEFAULT_THETA)
    if metadata.number(".rope.freq_base_swa", theta) != theta:
        raise given.refuse(
            "two kinds of positions (rope.freq_base_swa), which is not read of gemma2"
        )
    return {
        **_named("Gemma2", "gemma2"),
        "rope_parameters": rope,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(given, _LARGEST_GEMMA_2),
        "sliding_window": given.metadata.size(".attention.sliding_window", _GEMMA_2_WINDOW),
        "attn_logit_softcapping": _capping(given, ".attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _capping(given, ".final_logit_softcapping", 30.0),
    }


def _gemma3(given: _Given) -> _Config:
    metadata = given.metadata
    pattern = metadata.size(".attention.sliding_window_pattern", _GEMMA_3_PATTERN)
    local = metadata.number(".rope.freq_base_swa", _DEFAULT_THETA)
    return {
        **_named("Gemma3", "gemma3_text"),
        "rope_parameters": {
            "full_attention": _rope(given),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _query_scalar(given, _LARGEST_GEMMA_3),
        "sliding_window": metadata.size(".attention.sliding_window"),
        "layer_types": [
            "full_attention" if (layer_id + 1) % pattern == 0 else "sliding_attention"
            for layer_id in range(given.num_layers)
        ],
        "attn_logit_softcapping": _capping(given, ".attn_logit_softcapping", 0.0),
        "final_logit_softcapping": _capping(given, ".final_logit_softcapping", 0.0),
    }


def _phi3(given: _Given) -> _Config:
    metadata, tensors = given.metadata, given.tensors
    turned = metadata.size(".rope.dimension_count", given.head_size)
    original = metadata.size(".rope.scaling.original_context_length", given.context)
    rope: _Config = {
        "rope_type": "default",
        "rope_theta": metadata.number(".rope.freq_base", _DEFAULT_THETA),
        "partial_rotary_factor": turned / given.head_size,
    }
    how = metadata.text(".rope.scaling.type", "none")
    if how not in ("none", "longrope"):
        raise given.refuse(f"positions are scaled by {how[:40]!r}, which is not read of phi3")
    if _LONG in tensors or _SHORT in tensors:
        if not (_LONG in tensors and _SHORT in tensors):
            raise CheckpointError(f"{metadata.where}: has {_LONG!r} or {_SHORT!r}, and not both")
        rope |= {
            "rope_type": "longrope",
            "short_factor": given.vector(_SHORT, turned // 2),
            "long_factor": given.vector(_LONG, turned // 2),
            "original_max_position_embeddings": original,
        }
        if ".rope.scaling.attn_factor" in metadata:
            rope["attention_factor"] = metadata.number(".rope.scaling.attn_factor")
    elif how != "none":
        raise given.refuse("positions are scaled, and the factors are not there: convert it anew")
    return {
        **_named("Phi3", "phi3"),
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
        # Files of before it was written down would be computed with another window than the model has.
        "sliding_window": metadata.count(".attention.sliding_window") or None,
    }


_CONFIGS: Final[Mapping[str, Callable[[_Given], _Config]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen2moe": _qwen2moe,
    "qwen3moe": _qwen3moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
}
