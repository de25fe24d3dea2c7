"""Tiny configs of many families, and their checkpoints with weights that matter."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file

from neurogrid.model.files.checkpoint import Checkpoint as CheckpointFiles
from neurogrid.model.files.config import model_config_message
from neurogrid.model.files.model_code import quiet_transformers
from neurogrid.model.files.tensor_names import is_end_tensor, layer_of
from neurogrid.model.stages.stage import Ends, Stage
from neurogrid.worker.held_model import HeldModel, proving

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CPU = torch.device("cpu")
MIXED = ["sliding_attention", "full_attention"] * 2


def _rope(kind: str, **more: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0, **more}


def _longrope() -> dict[str, object]:
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 3, 4, 5, 6, 7]}
    return {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 16,
        **factors,
    }


GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
DEEPSEEK: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

# Those that the first issue names.
MAIN_FAMILIES: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "llama": lambda: tf.LlamaConfig(**SMALL),
    "llama-tied": lambda: tf.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "mistral-window": lambda: tf.MistralConfig(**SMALL, sliding_window=8),
    "qwen2": lambda: tf.Qwen2Config(**SMALL),
    "qwen3": lambda: tf.Qwen3Config(**SMALL, head_dim=16),
    "mixtral": lambda: tf.MixtralConfig(**SMALL, num_local_experts=4),
    "phi3": lambda: tf.Phi3Config(**SMALL),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **SMALL, head_dim=16, sliding_window=8, layer_types=MIXED
    ),
    "granite": lambda: tf.GraniteConfig(**SMALL, **GRANITE),
    "deepseek-v3": lambda: tf.DeepseekV3Config(**DEEPSEEK),
    "lfm2": lambda: tf.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"] * 2),
}

OTHER_FAMILIES: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "llama-llama3": lambda: tf.LlamaConfig(
        **SMALL,
        rope_parameters=_rope(
            "llama3",
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama-linear": lambda: tf.LlamaConfig(**SMALL, rope_parameters=_rope("linear")),
    "llama-dynamic": lambda: tf.LlamaConfig(
        **{**SMALL, "max_position_embeddings": 16}, rope_parameters=_rope("dynamic")
    ),
    "llama-yarn": lambda: tf.LlamaConfig(
        **SMALL, rope_parameters=_rope("yarn", original_max_position_embeddings=16)
    ),
    "gemma2": lambda: tf.Gemma2Config(**SMALL, head_dim=16, sliding_window=8),
    "gpt-oss": lambda: tf.GptOssConfig(
        **SMALL, head_dim=16, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
    ),
    "cohere2": lambda: tf.Cohere2Config(**SMALL, sliding_window=8, layer_types=MIXED),
    "smollm3": lambda: tf.SmolLM3Config(**SMALL, no_rope_layers=[1, 0, 1, 0]),
    "qwen2-moe": lambda: tf.Qwen2MoeConfig(
        **SMALL, **EXPERTS, shared_expert_intermediate_size=24, mlp_only_layers=[0, 2]
    ),
    "olmo2": lambda: tf.Olmo2Config(**SMALL),
    "llama4": lambda: tf.Llama4TextConfig(
        **SMALL,
        head_dim=16,
        intermediate_size_mlp=64,
        num_local_experts=4,
        attention_chunk_size=8,
        interleave_moe_layer_step=2,
    ),
    "gpt2": lambda: tf.GPT2Config(n_embd=48, n_layer=4, n_head=4, vocab_size=96),
    "gpt-neox": lambda: tf.GPTNeoXConfig(
        **{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
    ),
    "bloom": lambda: tf.BloomConfig(hidden_size=48, n_layer=4, n_head=4, vocab_size=96),
    "falcon": lambda: tf.FalconConfig(
        hidden_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=96
    ),
    "opt": lambda: tf.OPTConfig(
        hidden_size=48,
        ffn_dim=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=96,
        word_embed_proj_dim=32,
        max_position_embeddings=128,
    ),
    "jamba": lambda: tf.JambaConfig(
        **{**SMALL, "hidden_size": 64},
        attn_layer_period=3,
        attn_layer_offset=1,
        num_experts=4,
        mamba_d_state=4,
    ),
}

FAMILIES = {**MAIN_FAMILIES, **OTHER_FAMILIES}

# Whose caches are made anew where the length crosses 16.
RECOMPUTED: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "phi3-longrope": lambda: tf.Phi3Config(
        **SMALL, original_max_position_embeddings=16, rope_parameters=_longrope()
    ),
}


class Checkpoint:
    """A random checkpoint on disk and in memory, and transformers' own whole model of it."""

    def __init__(
        self, config: tf.PreTrainedConfig, folder: Path, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        with quiet_transformers():
            model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for parameter in model.parameters():
                    # Louder than initialised, so that what is wrong shows in the logits.
                    scale = 6.0 if parameter.dim() > 1 else 1.0
                    parameter.mul_(scale).add_(torch.randn_like(parameter), alpha=0.05)
            model.to(dtype).save_pretrained(folder)
            self.whole = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        # transformers uses the tensors where they lie in the file, at any address, and kernels sum
        # in an order that depends on it: up to 1e-6 off. Stages align theirs, so this one must.
        for parameter in self.whole.parameters():
            parameter.data = parameter.data.clone()
        self.config = self.whole.config
        self.dtype = dtype
        self.num_layers: int = self.config.get_text_config(decoder=True).num_hidden_layers
        self.vocab_size: int = self.config.get_text_config(decoder=True).vocab_size
        self.tensors: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self.tensors |= load_file(path)
        self._shared: dict[tuple[int, int], Stage] = {}

    def layer(self, layer_id: int) -> dict[str, torch.Tensor]:
        return {
            name: tensor
            for name, tensor in self.tensors.items()
            if layer_of(name, self.num_layers) == layer_id
        }

    def stage(self, start: int, stop: int) -> Stage:
        stage = Stage(self.config, dtype=self.dtype, device="cpu")
        for layer_id in range(start, stop):
            stage.load_layer(layer_id, self.layer(layer_id))
        return stage

    def shared_stage(self, start: int, stop: int) -> Stage:
        """The same one each time, for tests that change nothing in it: making one takes as long as 20 tokens."""
        if (start, stop) not in self._shared:
            self._shared[start, stop] = self.stage(start, stop)
        return self._shared[start, stop]

    def ends(self) -> Ends:
        ends = Ends(self.config, dtype=self.dtype, device="cpu")
        ends.load({name: t for name, t in self.tensors.items() if is_end_tensor(name)})
        return ends

    @functools.cached_property
    def shared_ends(self) -> Ends:
        return self.ends()

    def tokens(self, count: int) -> list[int]:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(3, self.vocab_size, (count,), generator=generator).tolist()

    def whole_logits(self, token_ids: list[int], sizes: list[int]) -> list[torch.Tensor]:
        """Logits after each chunk of `sizes` tokens, by the whole model's own forward."""
        whole = self.whole
        if (getattr(self.config, "rope_parameters", None) or {}).get("rope_type") == "dynamic":
            whole = copy.deepcopy(whole)  # it keeps the longest length that it has seen
        cache = tf.DynamicCache(config=self.config)
        logits = []
        position = 0
        for size in sizes:
            with torch.inference_mode():
                output = whole(
                    input_ids=torch.tensor([token_ids[position : position + size]]),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
            logits.append(output.logits[0, -1].float())
            position += size
        return logits


@functools.cache
def shared(family: str, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """The checkpoint of a family, the same one for all tests: they change nothing in it."""
    with TemporaryDirectory() as folder:
        return Checkpoint({**FAMILIES, **RECOMPUTED}[family](), Path(folder), dtype)


def held_model(family: str, num_layers: int, device: torch.device = CPU) -> HeldModel:
    """What a worker holds of it: a config that was proven, and its first layers from their blobs."""
    with TemporaryDirectory() as folder:
        config = Checkpoint(FAMILIES[family](), Path(folder)).config
        files = CheckpointFiles.open(Path(folder))
        message = model_config_message(
            config, files.config, model_name="m", max_seq_len=128, dtype=torch.float32
        )
        model = HeldModel(message, proving(message).result(seconds=60), device=device)
        for layer_id in range(num_layers):
            blob = b"".join(bytes(chunk) for chunk in files.layer_blob(layer_id).chunks())
            model.load(layer_id, memoryview(bytearray(blob)), b"")
    return model


class Pipeline:
    """A checkpoint in stages, and one session through them."""

    def __init__(self, checkpoint: Checkpoint, cuts: tuple[int, ...]) -> None:
        edges = (0, *cuts, checkpoint.num_layers)
        self.ranges = list(pairwise(edges))
        self.stages = [checkpoint.shared_stage(start, stop) for start, stop in self.ranges]
        self.ends = checkpoint.shared_ends
        self.restart()

    def restart(self) -> None:
        self.caches = [stage.new_cache() for stage in self.stages]
        self.position = 0

    def step(self, token_ids: list[int]) -> torch.Tensor:
        position = self.position
        hidden = self.ends.embed(token_ids, position=position)
        for stage, cache, (start, stop) in zip(self.stages, self.caches, self.ranges, strict=True):
            hidden = stage.forward(hidden, start=start, stop=stop, position=position, cache=cache)
        self.position += len(token_ids)
        return self.ends.logits(hidden, position=position)

    def logits(self, token_ids: list[int], sizes: list[int]) -> list[torch.Tensor]:
        result = []
        for size in sizes:
            result.append(self.step(token_ids[self.position : self.position + size]))
        return result
