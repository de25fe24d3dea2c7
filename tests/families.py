"""Random checkpoints of many model families, small enough for tests, saved as the hub has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

__all__ = ["FAMILIES", "Family", "save_checkpoint"]

# Of all the checkpoints here; ends that tests may use as EOS are outside.
VOCAB_SIZE = 320
SEED = 7


@dataclass(frozen=True)
class Family:
    """A way to make a config, and how its checkpoint is saved."""

    name: str
    config: Callable[[], PreTrainedConfig]
    shard_size: str = "1GB"


def _of(class_name: str, **overrides: Any) -> Callable[[], PreTrainedConfig]:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return lambda: getattr(transformers, class_name)(**{**sizes, **overrides})


FAMILIES = [
    Family("llama-tied", _of("LlamaConfig", tie_word_embeddings=True)),
    Family("llama-untied-sharded", _of("LlamaConfig", tie_word_embeddings=False), "100KB"),
    Family("mistral-sliding", _of("MistralConfig", sliding_window=16)),
    Family("qwen2", _of("Qwen2Config")),
    Family("qwen3", _of("Qwen3Config")),
    Family("mixtral", _of("MixtralConfig", num_local_experts=4, num_experts_per_tok=2)),
    Family("phi3", _of("Phi3Config")),
    # generate() drops its cache where the length crosses 16, and so must we.
    Family(
        "phi3-longrope",
        _of(
            "Phi3Config",
            original_max_position_embeddings=16,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
            },
        ),
    ),
    Family(
        "gemma3",
        _of(
            "Gemma3TextConfig",
            sliding_window=16,
            sliding_window_pattern=3,
            query_pre_attn_scalar=16,
            tie_word_embeddings=False,
        ),
    ),
    Family(
        "granite",
        _of(
            "GraniteConfig",
            embedding_multiplier=6.0,
            attention_multiplier=0.2,
            residual_multiplier=0.5,
            logits_scaling=4.0,
        ),
    ),
    Family(
        "deepseek-v3",
        _of(
            "DeepseekV3Config",
            num_key_value_heads=4,
            first_k_dense_replace=1,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_shared_experts=1,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=32,
            q_lora_rank=32,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=16,
            v_head_dim=16,
            head_dim=8,
        ),
    ),
    Family(
        "lfm2",
        _of(
            "Lfm2Config",
            layer_types=["conv", "conv", "full_attention", "conv", "full_attention", "conv"],
            conv_L_cache=3,
            block_multiple_of=8,
        ),
    ),
]


def save_checkpoint(
    family: Family, directory: Path, *, dtype: torch.dtype = torch.float32, seed: int = SEED
) -> torch.nn.Module:
    """Make a model with random weights, save it to `directory`, and return it, ready to generate."""
    torch.manual_seed(seed)
    config = family.config()
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    # Random initialisations are so small that all logits are alike: greedy tokens would prove little.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3 / parameter.shape[-1] ** 0.25)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory, max_shard_size=family.shard_size)
    return model
