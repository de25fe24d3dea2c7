"""Checkpoint directories: what is read from good ones, and what is said about bad ones."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import safetensors.torch
import torch
from blake3 import blake3
from transformers import LlamaConfig, LlamaForCausalLM

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.blob import parse_blob
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import eos_token_ids
from neurogrid.model.files.quantization import AS_STORED, CodesForm, Quantization

NUM_LAYERS = 4
INDEX = "model.safetensors.index.json"


def save_model(folder: Path, *, max_shard_size: str = "5GB", tied: bool = False) -> None:
    for name, data in saved_files(max_shard_size, tied).items():
        (folder / name).write_bytes(data)


@functools.cache
def saved_files(max_shard_size: str, tied: bool) -> dict[str, bytes]:
    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        vocab_size=40,
        tie_word_embeddings=tied,
    )
    with TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=max_shard_size)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_model(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_model(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def edit_json(file: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    table = json.loads(file.read_text())
    edit(table)
    file.write_text(json.dumps(table))


def weight_map(folder: Path) -> dict[str, str]:
    table: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return table


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(safetensors.torch.load_file(file))
    return tensors


def fails(folder: Path, *, partial: bool = False) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder, partial=partial)
    text = str(caught.value)
    assert "\n" not in text
    assert str(folder) in text
    return text


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_blobs_and_ends_hold_every_tensor(layout: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(layout)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.num_layers == NUM_LAYERS
    assert checkpoint.present_layers == frozenset(range(NUM_LAYERS))
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation_config["eos_token_id"] == 2
    found = checkpoint.end_tensors()
    assert sorted(found) == ["lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]
    for layer_id in range(NUM_LAYERS):
        blob = checkpoint.layer_blob(layer_id)
        data = bytearray(b"".join(blob.chunks()))
        assert blob.num_bytes == len(data)
        digests = b"".join(blake3(chunk).digest() for chunk in blob.chunks())
        assert blob.blob_id() == blake3(digests).digest()
        tensors = parse_blob(data)
        assert all(name.startswith(f"model.layers.{layer_id}.") for name in tensors)
        found.update(tensors)
    expected = all_tensors(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_layout_of_the_files_does_not_change_a_blob(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    save_model(tmp_path / "one")
    save_model(tmp_path / "many", max_shard_size="10KB")
    one, many = Checkpoint.open(tmp_path / "one"), Checkpoint.open(str(tmp_path / "many"))
    ids = [one.layer_blob(i).blob_id() for i in range(NUM_LAYERS)]
    assert ids == [many.layer_blob(i).blob_id() for i in range(NUM_LAYERS)]
    assert len(set(ids)) == NUM_LAYERS


def test_a_blob_outlives_its_checkpoint_and_is_made_once(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    blob = checkpoint.layer_blob(1)
    assert checkpoint.layer_blob(1) is blob
    del checkpoint
    (single / "model.safetensors").unlink()
    assert "model.layers.1.mlp.up_proj.weight" in parse_blob(bytearray(b"".join(blob.chunks())))


def test_bare_shards_without_an_index(sharded: Path) -> None:
    shards = sorted(sharded.glob("*.safetensors"))
    for number, shard in enumerate(shards):
        shard.rename(sharded / f"part{number}.safetensors")
    (sharded / INDEX).unlink()
    assert Checkpoint.open(sharded).present_layers == frozenset(range(NUM_LAYERS))


def test_the_second_copy_of_the_weights_is_left_alone(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    (sharded / "consolidated.safetensors").write_bytes(b"in a layout of its own")
    assert len(Checkpoint.open(sharded).present_layers) == NUM_LAYERS


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere does not exist"):
        Checkpoint.open(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="file is a file, not a directory"):
        Checkpoint.open(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_no_permission(single: Path) -> None:
    (single / "model.safetensors").chmod(0)
    assert "cannot be read: Permission denied" in fails(single)


def test_no_config(single: Path) -> None:
    (single / "config.json").unlink()
    assert "config.json: missing" in fails(single)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b"null", "not a JSON object"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_malformed_json(sharded: Path, name: str, data: bytes, says: str) -> None:
    (sharded / name).write_bytes(data)
    assert f"{name}: {says}" in fails(sharded)


def test_a_directory_where_a_file_should_be(single: Path) -> None:
    (single / "config.json").unlink()
    (single / "config.json").mkdir()
    assert "config.json: cannot be read" in fails(single)


def test_unknown_architecture(single: Path) -> None:
    edit_json(single / "config.json", lambda config: config.update(model_type="nobody"))
    with pytest.raises(UnsupportedModelError, match="'nobody' is unknown to transformers"):
        Checkpoint.open(single)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_other_formats(single: Path, name: str) -> None:
    (single / "model.safetensors").rename(single / name)
    text = fails(single)
    assert f"{name}: only safetensors and GGUF are read; convert it" in text


def test_no_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    assert "no weights; model.safetensors" in fails(single)
    (single / "adapter_model.safetensors").touch()
    assert "has an adapter without its model: name the model, and --adapter" in fails(single)


@pytest.mark.parametrize(
    "entry",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8"},
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False},
        {"bits": 4},
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_quantised(single: Path, entry: dict[str, Any], nested: bool) -> None:
    addition = {"quantization_config": entry}
    edit_json(
        single / "config.json",
        lambda config: config.update({"text_config": addition} if nested else addition),
    )
    with pytest.raises(UnsupportedModelError, match="use the float16, bfloat16 or float32"):
        Checkpoint.open(single)


@pytest.mark.parametrize(
    "entry",
    [None, {}, {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}],
)
def test_a_quantisation_entry_that_quantises_nothing(single: Path, entry: object) -> None:
    edit_json(single / "config.json", lambda config: config.update(quantization_config=entry))
    assert len(Checkpoint.open(single).present_layers) == NUM_LAYERS


def test_fp8_weights(single: Path) -> None:
    tensors = all_tensors(single)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    safetensors.torch.save_file(tensors, single / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=rf"'{name}' is F8_E4M3: quantised"):
        Checkpoint.open(single)
    # Nor where others have scales.
    entry = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_json(single / "config.json", lambda config: config.update(quantization_config=entry))
    checkpoint = Checkpoint.open(single)
    some = Quantization(AS_STORED, forms=(CodesForm(8),), matrices=(("a", ((0, 1),)),))
    with pytest.raises(UnsupportedModelError, match=rf"'{name}' is F8_E4M3: quantised"):
        checkpoint.layer_blob(0, some)


def test_fp8_outside_the_layers(single: Path) -> None:
    tensors = all_tensors(single)
    tensors["lm_head.weight"] = torch.ones(320, 64).to(torch.float8_e4m3fn)
    safetensors.torch.save_file(tensors, single / "model.safetensors")
    entry = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_json(single / "config.json", lambda config: config.update(quantization_config=entry))
    with pytest.raises(UnsupportedModelError, match=r"'lm_head\.weight' is F8_E4M3: quantised"):
        Checkpoint.open(single).end_tensors()
    tensors["lm_head.weight_scale_inv"] = torch.full((3, 1), 0.5)
    safetensors.torch.save_file(tensors, single / "model.safetensors")
    head = Checkpoint.open(single).end_tensors()["lm_head.weight"]
    assert torch.equal(head, torch.full((320, 64), 0.5))


def test_integers_without_a_scale(single: Path) -> None:
    """Loading would take the codes for weights."""
    tensors = all_tensors(single)
    name = "model.layers.1.mlp.up_proj.weight"
    codes = {
        f"{prefix}.mlp.up_proj.{each}": made
        for prefix in ("model.layers.0", "model.layers.1")
        for each, made in (
            ("weight", torch.ones(tensors[name].shape, dtype=torch.int8)),
            ("SCB", torch.ones(tensors[name].shape[0])),
        )
    }
    del codes["model.layers.1.mlp.up_proj.SCB"]
    safetensors.torch.save_file(tensors | codes, single / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"mlp\.up_proj\.weight' is I8: quantised"):
        Checkpoint.open(single)
    # Nor where others have scales.
    entry = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    edit_json(single / "config.json", lambda config: config.update(quantization_config=entry))
    checkpoint = Checkpoint.open(single)
    some = Quantization(AS_STORED, forms=(CodesForm(8),), matrices=(("a", ((0, 1),)),))
    assert checkpoint.layer_blob(0, some).num_bytes
    with pytest.raises(UnsupportedModelError, match=rf"'{name}' is I8: quantised"):
        checkpoint.layer_blob(1, some)
    tensors["lm_head.weight"] = torch.ones(320, 64, dtype=torch.uint8)
    safetensors.torch.save_file(tensors, single / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"'lm_head\.weight' is U8: quantised"):
        Checkpoint.open(single).end_tensors()


def test_integers_that_are_no_weights(single: Path) -> None:
    tensors = all_tensors(single)
    tensors["model.layers.0.self_attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    tensors["model.vision_tower.layers.0.fc1.weight"] = torch.ones(4, 4, dtype=torch.int8)
    safetensors.torch.save_file(tensors, single / "model.safetensors")
    assert len(Checkpoint.open(single).present_layers) == NUM_LAYERS


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1, -1000])
def test_truncated(single: Path, keep: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    text = fails(single)
    assert "model.safetensors: " in text
    assert "truncated" in text or "too short" in text
    assert "fetch the file again" in text


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-4])
    assert f"{shard.name}: truncated" in fails(sharded)


def test_corrupt_header(single: Path) -> None:
    file = single / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[20:24] = b"\xff\xff\xff\xff"
    file.write_bytes(data)
    assert "header is corrupt" in fails(single)
    file.write_bytes(b"PK\x03\x04 this is a zip file, in truth")
    assert "not a safetensors file" in fails(single)


def test_overlap_in_a_file(single: Path) -> None:
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + b"abcd"
    (single / "model.safetensors").write_bytes(data)
    assert "'b' overlaps the tensor before it" in fails(single)


def test_missing_shard(sharded: Path) -> None:
    lost = weight_map(sharded)["model.layers.2.mlp.up_proj.weight"]
    (sharded / lost).unlink()
    assert f"{lost}: missing, and {INDEX} names it (1 of " in fails(sharded)


def test_partial_has_what_is_whole(sharded: Path) -> None:
    shards = weight_map(sharded)
    lost = shards["model.layers.2.mlp.up_proj.weight"]
    (sharded / lost).unlink()
    checkpoint = Checkpoint.open(sharded, partial=True)
    touched = {
        int(name.split(".")[2]) for name, s in shards.items() if s == lost and "layers" in name
    }
    assert 2 in touched
    assert checkpoint.present_layers == frozenset(range(NUM_LAYERS)) - touched
    with pytest.raises(CheckpointError, match="layer 2 is not in this checkpoint"):
        checkpoint.layer_blob(2)
    (layer_id, *_) = checkpoint.present_layers
    assert checkpoint.layer_blob(layer_id).num_bytes > 0


def test_partial_without_the_ends(sharded: Path) -> None:
    lost = weight_map(sharded)["lm_head.weight"]
    (sharded / lost).unlink()
    checkpoint = Checkpoint.open(sharded, partial=True)
    with pytest.raises(CheckpointError, match=f"{lost}: missing, and it holds lm_head.weight"):
        checkpoint.end_tensors()


@pytest.mark.parametrize("partial", [False, True])
def test_shards_without_the_index_that_would_tell(sharded: Path, partial: bool) -> None:
    (sharded / INDEX).unlink()
    sorted(sharded.glob("*.safetensors"))[0].unlink()
    assert "fetch the index" in fails(sharded, partial=partial)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/etc/passwd", "", "..", 5, None])
def test_an_index_that_points_elsewhere(sharded: Path, shard: object) -> None:
    edit_json(
        sharded / INDEX,
        lambda index: index["weight_map"].update({"model.norm.weight": shard}),
    )
    assert "'model.norm.weight' is in no file of this directory" in fails(sharded, partial=True)


@pytest.mark.parametrize("weights", [None, [], {}, 5])
def test_an_index_without_a_map(sharded: Path, weights: object) -> None:
    edit_json(sharded / INDEX, lambda index: index.update(weight_map=weights))
    assert "has no weight_map" in fails(sharded)


def test_an_index_that_is_wrong(sharded: Path) -> None:
    edit_json(
        sharded / INDEX,
        lambda index: index["weight_map"].update(new=index["weight_map"]["lm_head.weight"]),
    )
    assert "lacks 'new'" in fails(sharded)


def test_a_tensor_in_two_files(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    shards = sorted(sharded.glob("*.safetensors"))
    (sharded / "copy.safetensors").write_bytes(shards[0].read_bytes())
    assert "remove the file that does not belong" in fails(sharded)


def test_config_of_another_model(single: Path) -> None:
    edit_json(single / "config.json", lambda config: config.update(num_hidden_layers=6))
    text = fails(single)
    assert "no tensors for layer 4 (2 of 6 layers have none)" in text
    assert Checkpoint.open(single, partial=True).present_layers == frozenset(range(NUM_LAYERS))


def test_tied_embeddings(tmp_path: Path) -> None:
    save_model(tmp_path, tied=True)
    ends = Checkpoint.open(tmp_path).end_tensors()
    assert sorted(ends) == ["model.embed_tokens.weight", "model.norm.weight"]


def test_the_embedded_model() -> None:
    checkpoint = Checkpoint.open(embedded_model_path())
    assert checkpoint.present_layers == frozenset(range(checkpoint.num_layers))
    assert "model.embed_tokens.weight" in checkpoint.end_tensors()
    assert eos_token_ids(checkpoint.config, checkpoint.generation_config)
