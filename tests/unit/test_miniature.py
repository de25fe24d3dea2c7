"""What is served was proven equal on a miniature; what is not equal is refused with the reason."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from stage_families import FAMILIES, Checkpoint, Pipeline, shared

from neurogrid.errors import UnsupportedModelError
from neurogrid.model.caches.cache import StageCache
from neurogrid.model.proof.miniature import _MAX_PARAMETERS, SplitTraits, check_splittable
from neurogrid.model.proof.miniature_config import miniatures
from neurogrid.model.stages import skeleton
from neurogrid.model.stages.skeleton import build_on_meta

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + i / 50 for i in range(48)],
    "long_factor": [1.0 + i for i in range(48)],
    "original_max_position_embeddings": 4096,
}

# The tiny ones, and some as large as on the hub: the defaults of most config classes are a published model's. A layer
# of each kind comes early, so that the miniatures have few.
SERVED = {
    **{name: make() for name, make in FAMILIES.items()},
    "llama": tf.LlamaConfig(num_key_value_heads=8),
    "llama-dynamic": tf.LlamaConfig(
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    ),
    "mistral-window": tf.MistralConfig(sliding_window=4096),
    "mixtral": tf.MixtralConfig(),
    "gemma3": tf.Gemma3TextConfig(layer_types=["sliding_attention", "full_attention"] * 13),
    "granite": tf.GraniteConfig(embedding_multiplier=12.0, logits_scaling=8.0),
    "deepseek-v3": tf.DeepseekV3Config(first_k_dense_replace=1),
    "lfm2": tf.Lfm2Config(layer_types=["conv", "full_attention"] * 16),
    "gpt2": tf.GPT2Config(),
    # As many layers as its SSM has multipliers, in a list that is no list of layers.
    "falcon-h1-five-layers": tf.FalconH1Config(
        num_hidden_layers=5,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_d_ssm=64,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=16,
    ),
    "one-layer": tf.LlamaConfig(num_hidden_layers=1),
    "two-layers": tf.LlamaConfig(num_hidden_layers=2),
}

REFUSED = {
    "mamba": (tf.MambaConfig(), "no cache of the common kind"),
    "rwkv": (tf.RwkvConfig(), "no cache of the common kind"),
    "t5": (tf.T5Config(), "an encoder and a decoder"),
    "bert": (tf.BertConfig(), "decoder layers"),
    "recurrent-gemma": (
        tf.RecurrentGemmaConfig(num_hidden_layers=3),
        "sessions interleaved|logits of the whole model",
    ),
    "gemma3n": (
        tf.Gemma3nTextConfig(
            num_hidden_layers=4,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
        "not one hidden state|a cache of 2 layers for 4 layers",
    ),
    "minimax": (tf.MiniMaxConfig(), "a cache|cache of its own"),
}

# Of those that are served: their rows cannot share a forward pass.
ONE_AFTER_ANOTHER = {"llama-dynamic", "llama4"}
# Nor may several tokens go on from what they keep.
TAKE_NO_CHUNKS = {"jamba", "llama-dynamic", "llama4"}


@pytest.mark.parametrize("name", SERVED)
def test_families_that_split_are_served(name: str) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    traits = check_splittable(SERVED[name])
    assert torch.equal(torch.rand(3), expected)  # the check leaves the random state alone
    assert traits.recompute_at is None
    assert traits.row_bounds == (None if name in ONE_AFTER_ANOTHER else ())
    assert ("off by" in traits.rows_refused) == (name in ONE_AFTER_ANOTHER)
    assert traits.takes_chunks == (name not in TAKE_NO_CHUNKS)
    assert traits.takes_chunks or not traits.same_bits
    can_go_back = StageCache(SERVED[name]).can_go_back
    assert traits.rolls_back == (traits.takes_chunks and can_go_back)


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_do_not_are_refused_with_the_reason(name: str) -> None:
    config, reason = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_splittable(config)
    assert config.model_type in str(caught.value)
    assert "\n" not in str(caught.value)


def test_where_generate_drops_its_cache_is_found_by_watching_it() -> None:
    config = tf.Phi3Config(
        max_position_embeddings=131_072,
        original_max_position_embeddings=4096,
        rope_parameters=LONGROPE,
    )
    assert check_splittable(config) == SplitTraits(
        recompute_at=4097, row_bounds=(4096,), fuses=True
    )
    # The same code drops it without long factors too, where it makes no difference: phi3 above.


def test_recomputing_there_gives_the_tokens_of_generate() -> None:
    checkpoint, bound = shared("phi3-longrope"), 17
    assert check_splittable(checkpoint.config) == SplitTraits(
        recompute_at=bound, row_bounds=(16,), fuses=True
    )
    prompt, total = checkpoint.tokens(6), 30
    expected = checkpoint.whole.generate(
        torch.tensor([prompt]),
        generation_config=tf.GenerationConfig(
            max_new_tokens=total - len(prompt), do_sample=False, pad_token_id=0
        ),
    )[0].tolist()
    assert _greedy(checkpoint, prompt, total, bound) == expected
    assert _greedy(checkpoint, prompt, total, None) != expected


def _greedy(checkpoint: Checkpoint, prompt: list[int], total: int, bound: int | None) -> list[int]:
    pipeline = Pipeline(checkpoint, (2,))
    tokens = list(prompt)
    while len(tokens) < total:
        if bound is not None and pipeline.position < bound <= len(tokens):
            pipeline.restart()
        tokens.append(int(pipeline.step(tokens[pipeline.position :]).argmax()))
    return tokens


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("gemma3", "mask-of-another-layer"),
        ("llama", "length-forgotten"),
        ("granite", "multiplier-lost"),
        ("llama", "layer-skipped"),
    ],
)
def test_a_fault_in_the_stages_is_caught(
    family: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "mask-of-another-layer":
        monkeypatch.setattr(StageCache, "get_mask_sizes", tf.DynamicCache.get_mask_sizes)
    elif fault == "length-forgotten":
        monkeypatch.setattr(StageCache, "get_seq_length", lambda self, layer_idx=0: 0)
        monkeypatch.setattr(StageCache, "get_mask_sizes", lambda self, query, layer: (query, 0))
    elif fault == "multiplier-lost":
        run = skeleton.Skeleton.run_embedding
        monkeypatch.setattr(
            skeleton.Skeleton, "run_embedding", lambda self, *args: run(self, *args) / 12.0
        )
    else:
        layers = skeleton.Skeleton.run_layers
        monkeypatch.setattr(
            skeleton.Skeleton,
            "run_layers",
            lambda self, hidden, start, stop, *rest: (
                hidden if start == 1 else layers(self, hidden, start, stop, *rest)
            ),
        )
    with pytest.raises(UnsupportedModelError, match="cannot be split"):
        check_splittable(SERVED[family])


def test_a_miniature_keeps_ratios_kinds_and_multipliers() -> None:
    small = next(miniatures(tf.Gemma3TextConfig(query_pre_attn_scalar=168))).build()
    assert small.num_attention_heads // small.num_key_value_heads == 2
    assert small.hidden_size / (small.num_attention_heads * small.head_dim) == 2304 / (8 * 256)
    assert small.layer_types == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert small.query_pre_attn_scalar == 168
    assert small.sliding_window == 8
    assert small.tie_word_embeddings

    small = next(miniatures(tf.FalconH1Config())).build()
    whole = build_on_meta(small, torch.float32)
    assert sum(parameter.numel() for parameter in whole.parameters()) <= _MAX_PARAMETERS

    small = next(miniatures(tf.DeepseekV3Config())).build()
    assert (small.first_k_dense_replace, small.num_hidden_layers) == (3, 5)
    assert small.n_routed_experts % small.n_group == 0
    assert small.num_experts_per_tok > 1

    miniature_of = next(
        miniatures(
            tf.Phi3Config(
                max_position_embeddings=131_072,
                original_max_position_embeddings=4096,
                sliding_window=2047,
                rope_parameters=LONGROPE,
            )
        )
    )
    small = miniature_of.build()
    assert [(limit.small, limit.full) for limit in miniature_of.limits] == [(8, 2047), (16, 4096)]
    assert small.max_position_embeddings == 16 * 32
    factors = small.rope_parameters["long_factor"]
    assert len(factors) == small.hidden_size // small.num_attention_heads // 2


def test_a_kind_of_layer_that_comes_late_is_reached() -> None:
    config = tf.Qwen2Config(use_sliding_window=True, sliding_window=4096, max_window_layers=9)
    assert next(miniatures(config)).build().num_hidden_layers == 11
