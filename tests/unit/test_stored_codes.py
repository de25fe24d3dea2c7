"""Checkpoints that are quantised already: their codes travel and are multiplied as they are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.files.blob import parse_blob
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.quantization import CodesForm, Quantization
from neurogrid.model.stages.cost import layer_cost
from neurogrid.model.stages.stage import Stage
from tests.families import FAMILIES, save_checkpoint
from tests.foreign_checkpoints import FORMATS, save_foreign


def loaded(path: Path, **more: Any) -> LoadedModel:
    return LoadedModel.load(path, name=None, max_seq_len=64, dtype="float32", **more)


def logits(model: LoadedModel, token_ids: list[int]) -> torch.Tensor:
    stage = Stage(model.config, dtype=model.dtype, device="cpu", quantization=model.quantization)
    for layer_id in range(model.checkpoint.num_layers):
        blob = bytearray(b"".join(model.layer_blob(layer_id).chunks()))
        stage.load_layer(layer_id, parse_blob(blob))
    hidden = model.ends.embed(token_ids, position=0)
    cache = stage.new_cache()
    hidden = stage.forward(hidden, start=0, stop=stage.num_layers, position=0, cache=cache)
    return model.ends.logits(hidden, position=0)


@pytest.mark.parametrize("name", FORMATS)
def test_the_model_is_that_of_the_same_weights_in_float32(name: str, tmp_path: Path) -> None:
    dense = save_foreign(name, tmp_path)
    model = loaded(tmp_path)
    ids = list(range(3, 25))
    with torch.inference_mode():
        expected = dense(torch.tensor([ids])).logits[0, -1]
    mine = logits(model, ids)
    assert (mine - expected).norm() <= 1e-5 * expected.norm()
    # What the planner counts is what travels, but for norms, tables and headers.
    assert model.quantization is not None
    blob = model.layer_blob(0)
    assert abs(model.costs[0].weight_bytes - blob.num_bytes) < 0.2 * blob.num_bytes
    assert model.costs[0].weight_bytes < 0.5 * sum(
        each.nbytes for each in dense.model.layers[0].parameters()
    )


@pytest.mark.parametrize("is_zero", [True, False])
def test_biases_that_the_model_has_not_are_zeros(is_zero: bool, tmp_path: Path) -> None:
    """As AutoGPTQ writes them for all matrices, those of Qwen2.5-7B-Instruct-GPTQ-Int4 among them."""
    save_foreign("gptq", tmp_path)
    without = logits(loaded(tmp_path), [3, 5, 8])
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".scales")]:
        bias = torch.zeros(tensors[name].shape[1], dtype=torch.float16)
        tensors[name.removesuffix("scales") + "bias"] = bias
    if not is_zero:
        tensors["model.layers.1.mlp.up_proj.bias"][7] = 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    model = loaded(tmp_path)
    if is_zero:
        assert torch.equal(logits(model, [3, 5, 8]), without)
        return
    with pytest.raises(
        CheckpointError, match=r"does not know: model\.layers\.1\.mlp\.up_proj\.bias$"
    ):
        logits(model, [3, 5, 8])


def test_what_is_quantised_is_not_quantised_again(tmp_path: Path) -> None:
    save_foreign("awq", tmp_path)
    with pytest.raises(ConfigurationError, match=r"quantised already \(awq.*leave out --quantize"):
        loaded(tmp_path, quantize="int4")


@pytest.mark.parametrize("is_plain", [True, False])
def test_inputs_out_of_their_order_are_refused_before_anything_is_placed(
    is_plain: bool, tmp_path: Path
) -> None:
    """By the matrices themselves: with static groups `desc_act` changes nothing that is stored."""
    save_foreign("gptq", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    if is_plain:
        assert loaded(tmp_path).quantization is not None
        return
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        UnsupportedModelError,
        match=r"layers\.1\.mlp\.up_proj\.weight: .*grouped by their activations",
    ):
        loaded(tmp_path)


def test_a_method_that_is_not_read_is_named(tmp_path: Path) -> None:
    save_foreign("awq", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "quip#"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="quip#"):
        Checkpoint.open(tmp_path)


def test_a_config_that_says_more_than_the_files_have(tmp_path: Path) -> None:
    save_checkpoint(FAMILIES[0], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = FORMATS["gptq"][0]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="no matrix in its layers is"):
        loaded(tmp_path)


def test_a_scale_of_infinity_is_told_by_the_name_of_its_matrix(tmp_path: Path) -> None:
    save_foreign("gptq", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.scales"][0, 0] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    model = loaded(tmp_path)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight: .*not finite"):
        model.layer_blob(1).digests()


def test_a_layer_in_another_form_than_the_record_has_is_refused(tmp_path: Path) -> None:
    """Its memory was counted by the record."""
    save_foreign("awq", tmp_path)
    model = loaded(tmp_path)
    assert model.quantization is not None
    tensors = parse_blob(bytearray(b"".join(model.layer_blob(1).chunks())))
    for form, words in ((CodesForm(8, 32, "F32", True), "due"), (CodesForm(4, 64), "due")):
        other = dataclasses.replace(model.quantization, forms=(form,))
        stage = Stage(model.config, dtype=model.dtype, device="cpu", quantization=other)
        with pytest.raises(CheckpointError, match=words):
            stage.load_layer(1, tensors)
    # The record has both, and that of layer 1 is the other.
    path, _ = model.quantization.matrices[0]
    both = dataclasses.replace(
        model.quantization,
        forms=(*model.quantization.forms, CodesForm(8)),
        matrices=((path, ((0, 1), (1, 1))), *model.quantization.matrices[1:]),
    )
    stage = Stage(model.config, dtype=model.dtype, device="cpu", quantization=both)
    stage.load_layer(0, parse_blob(bytearray(b"".join(model.layer_blob(0).chunks()))))
    with pytest.raises(CheckpointError, match="in another form than it is to be"):
        stage.load_layer(1, tensors)
    assert stage.held_layers == {0}
    costs = layer_cost(model.config, model.dtype, both)
    assert costs[1].weight_bytes > costs[0].weight_bytes == model.costs[0].weight_bytes


def test_a_part_of_a_model_is_told_by_the_layers_that_are_here(tmp_path: Path) -> None:
    save_foreign("gptq", tmp_path)
    whole = loaded(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if ".layers.1." not in name}
    save_file(kept, tmp_path / "model.safetensors")
    part = Checkpoint.open(tmp_path, partial=True)
    assert part.quantization(None, whole.ends) == whole.quantization
    assert part.layer_blob(0, whole.quantization).blob_id() == whole.layer_blob(0).blob_id()
    assert not part.has_form(None)
    assert not part.has_form(Quantization("int4"))
