"""Whose a tensor is, told from its name."""

from __future__ import annotations

import pytest

from neurogrid.model.files.tensor_names import is_end_tensor, layer_of


@pytest.mark.parametrize(
    ("name", "layer_id"),
    [
        ("model.layers.3.self_attn.q_proj.weight", 3),
        ("model.layers.3.mlp.experts.5.w1.weight", 3),
        ("transformer.h.3.attn.c_attn.weight", 3),
        ("h.3.ln_1.bias", 3),
        ("gpt_neox.layers.3.attention.dense.bias", 3),
        ("model.language_model.layers.3.mlp.up_proj.weight", 3),
        ("backbone.layers.3.mixer.A_log", 3),
        ("model.decoder.layers.3.fc1.weight", 3),
        ("transformer.blocks.3.norm_1.weight", 3),
        ("model.layers.3.block.0.weight", 3),
    ],
)
def test_tensors_of_layers(name: str, layer_id: int) -> None:
    assert layer_of(name, 4) == layer_id
    assert not is_end_tensor(name)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.61.enorm.weight",
        "model.mtp.layers.0.fc.weight",
        "mtp.layers.0.mlp.up_proj.weight",
        "mtp.fc.weight",
        "model.vision_tower.encoder.layers.0.fc1.weight",
        "visual.blocks.0.attn.qkv.weight",
        "audio_tower.layers.0.fc1.weight",
        "encoder.block.0.layer.0.SelfAttention.q.weight",
        "model.layers.1234567.x",
    ],
)
def test_tensors_that_are_nobodys(name: str) -> None:
    assert layer_of(name, 61) is None


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight", "transformer.wpe.weight"],
)
def test_tensors_of_the_ends(name: str) -> None:
    assert layer_of(name, 61) is None
    assert is_end_tensor(name)


def test_nobodys_tensors_are_not_of_the_ends() -> None:
    assert not is_end_tensor("model.layers.61.enorm.weight")
    assert not is_end_tensor("mtp.fc.weight")
    assert not is_end_tensor("model.vision_tower.post_layernorm.weight")
