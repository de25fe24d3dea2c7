"""Costs found without memory are those of layers and caches that are really there."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from stage_families import shared

from neurogrid.model.stages.cost import LayerCost, layer_cost, workspace_bytes


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek-v3", "lfm2", "mixtral"])
def test_costs_are_what_is_allocated(family: str) -> None:
    checkpoint = shared(family)
    costs = layer_cost(checkpoint.config, torch.float32)
    stage = checkpoint.shared_stage(0, checkpoint.num_layers)
    num_tokens = 30
    cache = stage.new_cache()
    hidden = torch.randn(1, num_tokens, stage.hidden_size)
    stage.forward(hidden, start=0, stop=checkpoint.num_layers, position=0, cache=cache)
    for layer_id, cost in enumerate(costs):
        layer = stage.layer(layer_id)
        held = sum(t.numel() * t.itemsize for t in (*layer.parameters(), *layer.buffers()))
        assert cost.weight_bytes == held
        assert cost.cache_bytes(num_tokens) == cache.state_bytes(layer_id)


def test_half_precision_halves_it() -> None:
    config = tf.LlamaConfig(num_hidden_layers=2)
    single, half = layer_cost(config, torch.float32), layer_cost(config, torch.bfloat16)
    assert single[0].weight_bytes == 2 * half[0].weight_bytes
    assert half[0].cache_bytes_per_token == 2 * 2 * 4096


def test_a_mixture_is_read_in_part_and_a_large_one_costs_no_memory_to_look_at() -> None:
    mixtral = layer_cost(tf.MixtralConfig(num_hidden_layers=1), torch.bfloat16)[0]
    assert mixtral.step_bytes is not None
    # Two of eight experts, and the attention.
    assert 0.25 < mixtral.step_bytes / mixtral.weight_bytes < 0.3
    deepseek = layer_cost(tf.DeepseekV3Config(), torch.bfloat16)
    assert len(deepseek) == 61
    assert deepseek[3].weight_bytes > 20 * 2**30
    assert deepseek[0].step_bytes is None  # the first layers have one MLP
    assert deepseek[3].step_bytes is not None
    assert deepseek[3].step_bytes < deepseek[3].weight_bytes / 10
    assert layer_cost(tf.LlamaConfig(num_hidden_layers=1), torch.bfloat16)[0].step_bytes is None


def test_the_workspace_grows_with_the_prompt() -> None:
    config = tf.LlamaConfig()
    short, long = (workspace_bytes(config, torch.bfloat16, n) for n in (512, 4096))
    # The three products of the MLP alone, for 4,096 tokens.
    assert 4096 * 3 * 11008 * 2 < long < 1e9
    assert short < long / 8


def test_what_cannot_run_without_memory_is_bounded() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = tf.LlamaConfig(num_key_value_heads=8, rope_parameters=rope)
    assert layer_cost(config, torch.float32)[0].cache_bytes_per_token == 2 * 4096 * 4


def test_a_window_bounds_the_cache() -> None:
    cost = LayerCost(100, 10, cache_bytes_fixed=5, max_cached_tokens=7)
    assert [cost.cache_bytes(n) for n in (0, 3, 7, 100)] == [5, 35, 75, 75]
