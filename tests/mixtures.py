"""Random checkpoints of mixtures of experts, small enough for tests, with matrices that can be codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.families import VOCAB_SIZE

__all__ = ["MIXTURES", "mixture_config", "save_mixture"]

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
# A way to a config, and what of it stays as it is.
MIXTURES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}, set()),
    "qwen3-moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 16}, set()),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {**EXPERTS, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1]},
        {"mlp.shared_expert_gate"},
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 3}, set()),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
        },
        set(),
    ),
    # Without a gate.
    "nemotron-h": (
        "NemotronHConfig",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
            "layers_block_type": ["attention", "moe", "attention"],
        },
        set(),
    ),
    # In three dimensions in their files, too.
    "granitemoe": (
        "GraniteMoeConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"block_sparse_moe.experts.down_proj.#", "block_sparse_moe.experts.gate_up_proj.#"},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        {"mlp.experts.down_proj.#", "mlp.experts.gate_up_proj.#"},
    ),
}


def mixture_config(name: str, **more: Any) -> PreTrainedConfig:
    class_name, sizes, _ = MIXTURES[name]
    return getattr(transformers, class_name)(**{**SMALL, **sizes, **more})


def save_mixture(name: str, folder: Path, **more: Any) -> Any:
    """Save a random model; returns it."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(mixture_config(name, **more), dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model.eval()
