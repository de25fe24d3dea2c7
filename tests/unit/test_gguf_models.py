"""Models in GGUF, from the file to logits: those that transformers' own model has with the same weights."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from neurogrid.errors import CheckpointError, ConfigurationError, ModelError, UnsupportedModelError
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.files.blob import LayerBlob, parse_blob
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.checkpoint_files import judge_checkpoint
from neurogrid.model.files.config import build_config, eos_token_ids
from neurogrid.model.files.quantization import CodesForm, Quantization, gather_codes
from neurogrid.model.stages.cost import layer_cost
from neurogrid.model.stages.stage import Ends, Stage
from tests.gguf_models import ARCHITECTURES, File, make_gguf, save_gguf, tokens_of

MIXED = ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q5_K", "Q5_0", "Q5_1", "Q4_1", "IQ4_NL", "IQ4_XS")
PLAIN = ("F16", "BF16", "F32")
IDS = list(range(3, 45))


@dataclasses.dataclass
class Served:
    """A model that is computed in two stages, by the parts that machines get."""

    checkpoint: Checkpoint
    ends: Ends
    quantization: Quantization | None
    dtype: torch.dtype = torch.float32

    @classmethod
    def open(cls, path: Path, method: str | None = None) -> Served:
        checkpoint = Checkpoint.open(path)
        ends = Ends(build_config(checkpoint.config), dtype=cls.dtype, device=torch.device("cpu"))
        ends.load(checkpoint.end_tensors())
        return cls(checkpoint, ends, checkpoint.quantization(method, ends))

    def stage(self, layers: range) -> Stage:
        config = build_config(self.checkpoint.config)
        stage = Stage(config, dtype=self.dtype, device="cpu", quantization=self.quantization)
        for layer_id in layers:
            stage.load_layer(layer_id, parse_blob(self.blob(layer_id)))
        return stage

    def blob(self, layer_id: int) -> bytearray:
        return bytearray(b"".join(self.checkpoint.layer_blob(layer_id, self.quantization).chunks()))

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        num_layers = self.checkpoint.num_layers
        hidden = self.ends.embed(token_ids, position=0)
        for layers in (range(1), range(1, num_layers)):
            stage = self.stage(layers)
            hidden = stage.forward(
                hidden,
                start=layers.start,
                stop=layers.stop,
                position=0,
                cache=stage.new_cache(),
            )
        return self.ends.logits(hidden, position=0)


def assert_same(served: Served, dense: Any) -> None:
    with torch.inference_mode():
        expected = dense(torch.tensor([IDS])).logits[0, -1]
    assert (served.logits(IDS) - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_model_is_that_of_transformers_with_the_same_weights(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    dense = save_gguf(name, path, MIXED, ends="Q6_K")
    served = Served.open(path)
    assert_same(served, dense)
    assert judge_checkpoint(path) == dense.config.num_hidden_layers
    # What the planner counts is what travels, layer by layer, but for tables and headers.
    assert served.quantization is not None
    costs = layer_cost(build_config(served.checkpoint.config), torch.float32, served.quantization)
    sizes = [served.checkpoint.layer_blob(i, served.quantization).num_bytes for i in range(2)]
    for cost, size in zip(costs, sizes, strict=False):
        assert abs(cost.weight_bytes - size) < 0.03 * size
    assert costs[0].weight_bytes != costs[1].weight_bytes


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_each_type_by_itself(kind: str, tmp_path: Path) -> None:
    dense = save_gguf("llama", tmp_path / "m.gguf", (kind,), ends=kind, num_hidden_layers=2)
    served = Served.open(tmp_path / "m.gguf")
    assert served.quantization is not None
    assert len(served.quantization.forms) == 1
    assert {runs for _, runs in served.quantization.matrices} == {((0, 2),)}
    assert_same(served, dense)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_plain_numbers_travel_as_they_lie(name: str, kind: str, tmp_path: Path) -> None:
    dense = save_gguf(name, tmp_path / "m.gguf", (kind,), ends=kind)
    served = Served.open(tmp_path / "m.gguf")
    assert served.quantization is None
    assert_same(served, dense)
    expected = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}[kind]
    assert served.checkpoint.config["dtype"] == expected


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_transformers_reads_the_same_tensors_and_config_of_the_file(
    name: str, tmp_path: Path
) -> None:
    """Its own reader goes another way, by the format's package, and unpacks everything."""
    path = tmp_path / "m.gguf"
    dense = save_gguf(name, path, MIXED, ends="Q8_0")
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=dense)
    served = Served.open(path)
    mine = dict(served.checkpoint.end_tensors())
    assert served.quantization is not None
    for layer_id in range(served.checkpoint.num_layers):
        plain, codes = gather_codes(parse_blob(served.blob(layer_id)), served.quantization)
        mine |= plain | {key: each.dense(torch.float32) for key, each in codes.items()}
    assert mine.keys() == theirs["tensors"].keys()
    for key, tensor in theirs["tensors"].items():
        assert torch.equal(mine[key], tensor), key
    config = build_config(served.checkpoint.config)
    for key, value in theirs["config"].items():
        # What is in rope_parameters, and what is of the tokenizer.
        if key not in ("rope_theta", "unk_token_id"):
            assert getattr(config, key) == value, key


def test_what_is_quantised_is_not_quantised_again(tmp_path: Path) -> None:
    save_gguf("llama", tmp_path / "m.gguf", ("Q8_0", "Q6_K"))
    with pytest.raises(
        ConfigurationError, match=r"quantised already \(GGUF: Q6_K, Q8_0\): leave out --quantize"
    ):
        Served.open(tmp_path / "m.gguf", "int8")


@pytest.mark.parametrize("kind", PLAIN)
def test_what_is_not_quantised_can_be(kind: str, tmp_path: Path) -> None:
    dense = save_gguf("llama", tmp_path / "m.gguf", (kind,))
    served = Served.open(tmp_path / "m.gguf", "int8")
    assert served.quantization == Quantization("int8")
    with torch.inference_mode():
        expected = dense(torch.tensor([IDS])).logits[0, -1]
    assert (served.logits(IDS) - expected).norm() < 0.05 * expected.norm()


def test_a_whole_model_is_loaded_and_proven(tmp_path: Path) -> None:
    save_gguf("llama 3.1", tmp_path / "tiny.Q4_K_M.gguf", ("Q4_K", "Q6_K"), ends="Q6_K")
    model = LoadedModel.load(tmp_path / "tiny.Q4_K_M.gguf", name=None, max_seq_len=64, dtype=None)
    assert model.name == "tiny.Q4_K_M"
    assert model.dtype == torch.float32
    assert model.eos_token_ids == {model.tokenizer.encode("<|im_end|>")[0]} | {
        model.tokenizer.encode("<|endoftext|>")[0]
    }
    assert CodesForm(8, 16, "F32") in model.quantization.forms  # type: ignore[union-attr]
    assert len({cost.weight_bytes for cost in model.costs}) > 1
    # What no `--quantize` makes smaller is advised none by the planner.
    assert model.size(num_sessions=1).is_quantised


# Where a model is


def test_a_model_by_its_importances_is_one(tmp_path: Path) -> None:
    dense = save_gguf("qwen3", tmp_path / "m-imatrix-Q8_0.gguf")
    (tmp_path / "imatrix.gguf").write_bytes(b"GGUF")
    assert_same(Served.open(tmp_path), dense)
    (tmp_path / "m-imatrix-Q8_0.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"imatrix.gguf: truncated"):
        Checkpoint.open(tmp_path)


def test_a_directory_with_one_model_is_that_model(tmp_path: Path) -> None:
    save_gguf("qwen3", tmp_path / "m.gguf")
    for name in ("mmproj-m", "M.MMPROJ-F16", "imatrix", "imatrix_m", "m-imatrix", "M.imatrix"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.files == {tmp_path / "m.gguf"}
    assert checkpoint.name == tmp_path.name
    shutil.copy(tmp_path / "m.gguf", tmp_path / "n.gguf")
    for read in (Checkpoint.open, judge_checkpoint):
        with pytest.raises(
            ConfigurationError, match=r"2 models in GGUF \(m.gguf, n.gguf\): give the file of one"
        ):
            read(tmp_path)
    # Safetensors are the model where they are.
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"config.json: missing"):
        Checkpoint.open(tmp_path)


def in_shards(file: File, folder: Path, **changes: Any) -> list[Path]:
    """The same in three files."""
    paths = []
    names = list(file.tensors)
    for number in range(3):
        part = {name: file.tensors[name] for name in names[number::3]}
        values = {**file.values} if number == 0 else {}
        values |= {"split.no": number, "split.count": 3, "split.tensors.count": len(names)}
        path = folder / f"m-0000{number + 1}-of-00003.gguf"
        paths.append(File({**values, **changes}, part).save(path))
    return paths


def test_shards_are_one_model(tmp_path: Path) -> None:
    dense, file = make_gguf("qwen2", ("Q8_0", "Q6_K"))
    paths = in_shards(file, tmp_path)
    for path in (tmp_path, paths[0], paths[2]):
        served = Served.open(path)
        assert served.checkpoint.files == set(paths)
    assert served.checkpoint.layer_files(0) == set(paths)
    assert_same(served, dense)


def test_shards_that_do_not_belong_together(tmp_path: Path) -> None:
    _, file = make_gguf("qwen2", ("Q8_0",), num_hidden_layers=1)
    for changes, says in (
        ({"split.count": 4}, "one of 4 shards by its header, and 3 by its name"),
        ({"split.no": 1}, "another shard by its header than by its name"),
        ({"split.tensors.count": 5}, "not as many as its header says"),
    ):
        paths = in_shards(file, tmp_path, **changes)
        with pytest.raises(CheckpointError, match=says):
            Checkpoint.open(tmp_path)
    paths = in_shards(file, tmp_path)
    shutil.copy(paths[2], tmp_path / "alone.gguf")
    with pytest.raises(CheckpointError, match="and there is 1 file: give its shards the names"):
        Checkpoint.open(tmp_path / "alone.gguf")
    (tmp_path / "alone.gguf").unlink()
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003.gguf: missing \(1 of 3 shards"):
        Checkpoint.open(paths[0])
    data = paths[2].read_bytes().replace(b"split.no", b"split.nn")
    in_shards(file, tmp_path)
    paths[2].write_bytes(data)
    with pytest.raises(CheckpointError, match="another shard"):
        Checkpoint.open(tmp_path)


def test_shards_that_were_put_together_are_one_file(tmp_path: Path) -> None:
    """gguf-split leaves their keys in the file that it merges them into, but for how many they are."""
    values = {"split.no": 0, "split.count": 0, "split.tensors.count": 12}
    assert Checkpoint.open(changed(tmp_path, "qwen2", values)).num_layers == 1


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    _, file = make_gguf("qwen2", ("Q8_0",), num_hidden_layers=1)
    for number in (1, 2):
        values = {**file.values, "split.no": number - 1, "split.count": 2}
        File(values, file.tensors).save(tmp_path / f"m-0000{number}-of-00002.gguf")
    with pytest.raises(CheckpointError, match=r"is in m-00001-of-00002.gguf too"):
        Checkpoint.open(tmp_path)


# What a file may say


def changed(
    tmp_path: Path, name: str, values: dict[str, Any], without: str = "", **changes: Any
) -> Path:
    """A model with other keys; one that is None is left out."""
    _, file = make_gguf(name, ("Q8_0",), num_hidden_layers=1, **changes)
    file.values |= values
    file.values = {key: value for key, value in file.values.items() if value is not None}
    file.tensors = {key: each for key, each in file.tensors.items() if key != without}
    return file.save(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("name", "values", "error", "says"),
    [
        ("llama", {"general.architecture": "falcon"}, UnsupportedModelError, "'falcon'; read are"),
        ("llama", {"general.architecture": None}, CheckpointError, "lacks general.architecture"),
        ("llama", {"general.type": "adapter"}, UnsupportedModelError, "'adapter' and not a model"),
        ("llama", {"llama.block_count": 2}, CheckpointError, "lacks 'blk.1"),
        ("llama", {"llama.block_count": 70_000}, UnsupportedModelError, "70000 layers"),
        ("llama", {"llama.embedding_length": 0}, CheckpointError, "embedding_length is 0"),
        ("llama", {"llama.attention.head_count": 7}, ModelError, "7 heads|refused"),
        ("llama", {"llama.attention.value_length": 32}, UnsupportedModelError, "another size"),
        (
            "llama",
            {"llama.expert_count": 8},
            UnsupportedModelError,
            "expert_count is 8, and only",
        ),
        ("qwen3", {"qwen3.attention.causal": False}, UnsupportedModelError, "see those behind"),
        ("llama", {"llama.rope.dimension_count": 32}, UnsupportedModelError, "a part of each head"),
        ("llama", {"llama.rope.scaling.type": "longrope"}, UnsupportedModelError, "'longrope'"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, CheckpointError, "original_context_length"),
        ("qwen2", {"qwen2.rope.scaling.attn_factor": 2.0}, UnsupportedModelError, "only 1.0 is"),
        ("qwen2", {"qwen2.rope.scaling.factor": -4.0}, CheckpointError, "scaled by -4"),
        ("qwen2", {"qwen2.context_length": None}, CheckpointError, "lacks qwen2.context_length"),
        ("qwen3moe", {"qwen3moe.expert_count": 5}, CheckpointError, "4 experts, and 5 by its keys"),
        ("phi3", {"phi3.attention.sliding_window": None}, CheckpointError, "sliding_window"),
        ("phi3", {"phi3.rope.scaling.type": "longrope"}, UnsupportedModelError, "are not there"),
        ("llama", {"tokenizer.ggml.tokens": ["a"]}, CheckpointError, "1 tokens, and an embedding"),
        ("llama", {"general.quantization_version": 3}, UnsupportedModelError, "of version 3, and"),
        (
            "llama",
            {"llama.something.new": [1, 2]},
            UnsupportedModelError,
            r"new is \(1, 2\), whi",
        ),
        (
            "llama",
            {"llama.attention.scale": 0.5},
            UnsupportedModelError,
            "scale is 0.5, and only",
        ),
        ("llama", {"llama.logit_scale": 4.0}, UnsupportedModelError, "logit_scale is 4.0, and"),
        ("llama", {"llama.pooling_type": 1}, UnsupportedModelError, "pooling_type is 1, and"),
        (
            "qwen2",
            {"qwen2.attention.sliding_window": 64},
            UnsupportedModelError,
            "window is 64, ",
        ),
        ("qwen2", {"qwen2.rope.scaling.yarn_ext_factor": 0.5}, UnsupportedModelError, "only -1.0"),
        ("qwen3", {"qwen3.final_logit_softcapping": 30.0}, UnsupportedModelError, "is 30.0, and"),
        ("qwen3moe", {"qwen3moe.expert_gating_func": 2}, UnsupportedModelError, "only 1 is read"),
        ("qwen3moe", {"qwen3moe.expert_weights_scale": 2.5}, UnsupportedModelError, "only 1 is"),
        ("qwen3moe", {"qwen3moe.expert_group_count": 4}, UnsupportedModelError, "count is 4, "),
        ("qwen3moe", {"qwen3moe.nextn_predict_layers": 1}, UnsupportedModelError, "only 0 is"),
        (
            "gemma2",
            {"gemma2.attention.sliding_window_pattern": 6},
            UnsupportedModelError,
            "one of 6",
        ),
        ("gemma2", {"gemma2.rope.freq_base_swa": 9.0}, UnsupportedModelError, "kinds of positions"),
        (
            "gemma3",
            {"gemma3.rope.global.freq_base": 1e6},
            UnsupportedModelError,
            "which is not read",
        ),
        ("phi3", {"phi3.rope.scaling.factor": 4.0}, UnsupportedModelError, "is 4.0, and only 1"),
        ("phi3", {"phi3.rope.scaling.attn_factor": 1.2}, UnsupportedModelError, "only 1.0 is"),
        ("phi3 longrope", {"phi3.rope.scaling.type": "yarn"}, UnsupportedModelError, "by 'yarn'"),
    ],
)
def test_keys_that_are_not_read(
    name: str, values: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    path = changed(tmp_path, name, values)
    with pytest.raises(error, match=says) as told:
        Served.open(path)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("llama", {".vocab_size": 320, ".rope.scaling.finetuned": True, ".pooling_type": 3}),
        ("llama", {".tensor_data_layout": "Meta AI original pth", ".expert_count": 0}),
        ("qwen2", {".attention.sliding_window": 0, ".rope.scaling.yarn_beta_fast": 16.0}),
        ("qwen3moe", {".expert_gating_func": 1, ".expert_weights_scale": 0.0}),
        ("qwen3moe", {".expert_weights_norm": True, ".expert_feed_forward_length": 256}),
        ("qwen2moe", {".expert_weights_norm": False, ".expert_shared_feed_forward_length": 256}),
        ("gemma2", {".attention.sliding_window_pattern": 2, ".rope.freq_base_swa": 10_000.0}),
    ],
)
def test_keys_that_change_nothing(name: str, values: dict[str, Any], tmp_path: Path) -> None:
    expected = Checkpoint.open(changed(tmp_path, name, {})).config
    told = {name.split()[0] + key: value for key, value in values.items()}
    assert Checkpoint.open(changed(tmp_path, name, told)).config == expected


@pytest.mark.parametrize(("name", "norms"), [("qwen2moe", True), ("qwen3moe", False)])
def test_weights_of_experts_add_up_to_1_where_the_file_says_so(
    name: str, norms: bool, tmp_path: Path
) -> None:
    dense, file = make_gguf(name, ("Q8_0",), norm_topk_prob=norms)
    file.values[f"{name}.expert_weights_norm"] = norms
    assert_same(Served.open(file.save(tmp_path / "m.gguf")), dense)


def test_tensors_that_are_missing_or_strange(tmp_path: Path) -> None:
    path = changed(tmp_path, "llama", {}, without="blk.0.ffn_up.weight")
    with pytest.raises(CheckpointError, match=r"lacks 'blk.0.ffn_up.weight' \(1 tensors"):
        judge_checkpoint(path)
    path = changed(tmp_path, "llama", {}, without="token_embd.weight")
    with pytest.raises(CheckpointError, match=r"lacks 'token_embd.weight'"):
        judge_checkpoint(path)
    path = changed(tmp_path, "llama tied, with biases", {}, without="blk.0.attn_k.bias")
    with pytest.raises(CheckpointError, match=r"lacks 'blk.0.attn_k.bias'"):
        judge_checkpoint(path)
    _, file = make_gguf("llama", ("Q8_0",), num_hidden_layers=1)
    for name in ("blk.0.attn_sinks.weight", "blk.1.attn_norm.weight", "v.patch_embd.weight"):
        other = File(file.values, {**file.tensors, name: ("F32", (4,), bytes(16))})
        with pytest.raises(UnsupportedModelError, match=rf"has '{name}', which"):
            judge_checkpoint(other.save(tmp_path / "m.gguf"))
    other = File(file.values, {**file.tensors, "output_norm.weight": ("F32", (1, 4), bytes(16))})
    with pytest.raises(CheckpointError, match=r"'output_norm.weight' has 2 dimensions, and 1 are"):
        judge_checkpoint(other.save(tmp_path / "m.gguf"))
    other = File(file.values, {**file.tensors, "output_norm.weight": ("Q8_0", (256,), bytes(272))})
    with pytest.raises(UnsupportedModelError, match="is Q8_0, and only matrices are read"):
        Served.open(other.save(tmp_path / "m.gguf"))
    other = File(
        file.values, {**file.tensors, "blk.0.attn_norm.weight": ("Q8_0", (256,), bytes(272))}
    )
    with pytest.raises(UnsupportedModelError, match="is Q8_0, and only matrices are read"):
        Served.open(other.save(tmp_path / "m.gguf"))


def test_a_matrix_of_another_shape_is_refused(tmp_path: Path) -> None:
    _, file = make_gguf("llama", ("Q8_0",), num_hidden_layers=1)
    file.tensors["blk.0.ffn_up.weight"] = "Q8_0", (512, 128), bytes(512 * 4 * 34)
    with pytest.raises(CheckpointError, match=r"up_proj.weight is \[512, 128\], and by the config"):
        Served.open(file.save(tmp_path / "m.gguf"))
    file.tensors["blk.0.attn_q.weight"] = "Q8_0", (254, 256), bytes(254 * 8 * 34)
    with pytest.raises(CheckpointError, match="has 254 rows, and those of 4 heads are due"):
        Served.open(file.save(tmp_path / "m.gguf"))


@pytest.mark.parametrize("name", ["blk.0.attn_q.weight", "blk.0.ffn_down.weight"])
def test_a_scale_of_infinity_is_told_by_the_name_of_its_matrix(name: str, tmp_path: Path) -> None:
    _, file = make_gguf("llama", ("Q6_K",), num_hidden_layers=1)
    kind, shape, data = file.tensors[name]
    wrong = bytearray(data)
    wrong[210 * 5 + 208 : 210 * 6] = struct.pack("<e", float("inf"))
    file.tensors[name] = kind, shape, bytes(wrong)
    served = Served.open(file.save(tmp_path / "m.gguf"))
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\..*_proj.weight.scales is not"):
        served.blob(0)


def test_an_embedding_with_a_scale_of_infinity_is_refused(tmp_path: Path) -> None:
    _, file = make_gguf("llama", ("Q8_0",), num_hidden_layers=1, ends="Q8_0")
    kind, shape, data = file.tensors["token_embd.weight"]
    file.tensors["token_embd.weight"] = kind, shape, struct.pack("<e", float("nan")) + data[2:]
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight.scales is not finite"):
        Served.open(file.save(tmp_path / "m.gguf"))


@pytest.mark.parametrize("name", ["qwen2moe", "qwen3moe"])
def test_experts_are_codes_where_gate_and_up_are_of_one_type(name: str, tmp_path: Path) -> None:
    """Which transformers puts together; in two forms they are made plain, exactly."""
    dense = save_gguf(name, tmp_path / "m.gguf", MIXED, parts_experts=True)
    served = Served.open(tmp_path / "m.gguf")
    assert_same(served, dense)
    assert served.quantization is not None
    matrices = dict(served.quantization.matrices)
    assert matrices["mlp.experts.down_proj.#"][0][0] >= 0
    assert "mlp.experts.gate_up_proj.#" not in matrices
    tensors = parse_blob(served.blob(0))
    half = dense.config.moe_intermediate_size
    for expert in range(4):
        gate = tensors[f"model.layers.0.mlp.experts.{expert}.gate_proj.weight"]
        assert gate.dtype == torch.float32
        both = dense.model.layers[0].mlp.experts.gate_up_proj[expert]
        assert torch.equal(gate, both[:half])
        assert f"model.layers.0.mlp.experts.{expert}.down_proj.weight.codes" in tensors
    dense = save_gguf(name, tmp_path / "m.gguf", ("Q4_K",))
    served = Served.open(tmp_path / "m.gguf")
    assert served.quantization is not None
    matrices = dict(served.quantization.matrices)
    assert matrices["mlp.experts.gate_up_proj.#"] == ((0, 3),)
    assert_same(served, dense)
    costs = layer_cost(build_config(served.checkpoint.config), torch.float32, served.quantization)
    size = sum(parameter.nbytes for parameter in dense.model.layers[0].parameters())
    assert costs[0].weight_bytes < 0.22 * size


TINY = make_gguf(
    *("llama", ("Q8_0",)),
    ends="Q4_0",
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=64,
    head_dim=16,
    num_attention_heads=2,
    num_key_value_heads=1,
)[1]
STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, 40),
    st.sampled_from([2**31, 2**32 - 1]),
    st.floats(width=32),
    st.text(max_size=5),
    st.lists(st.integers(-2, 5), min_size=1, max_size=4),
    st.lists(st.text(max_size=3), min_size=1, max_size=4),
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_file_with_strange_keys_and_shapes_is_served_or_refused(data: st.DataObject) -> None:
    """By an error of ours; nothing else may come out of it."""
    values = dict(TINY.values)
    for key in data.draw(st.lists(st.sampled_from([*values, "llama.x"]), max_size=3)):
        values[key] = data.draw(STRANGE)
    tensors = dict(TINY.tensors)
    for name in data.draw(st.lists(st.sampled_from([*tensors]), max_size=2, unique=True)):
        kind, shape, content = tensors.pop(name)
        if data.draw(st.booleans()):
            other = data.draw(st.sampled_from([name, "rope_freqs.weight", "blk.1.attn_k.bias"]))
            tensors[other] = kind, data.draw(st.permutations(shape)), content
    values = {key: value for key, value in values.items() if value is not None}
    with TemporaryDirectory() as folder:
        path = File(values, tensors).save(Path(folder) / "m.gguf")
        with suppress(ModelError, ConfigurationError):
            judge_checkpoint(path)
        with suppress(ModelError, ConfigurationError):
            served = Served.open(path)
            served.logits([1, 2, 3])
            served.checkpoint.open_tokenizer()


def test_what_needs_no_change_is_mapped(tmp_path: Path) -> None:
    save_gguf("qwen2", tmp_path / "m.gguf", ("BF16",))
    checkpoint = Checkpoint.open(tmp_path / "m.gguf")
    assert type(checkpoint.layer_blob(0)) is LayerBlob


# Tokenizers


def tokenizer_of(tmp_path: Path, kind: str, **changes: Any) -> Any:
    values = {f"tokenizer.{key}": value for key, value in changes.items()}
    name = "qwen2" if kind == "gpt2" else "llama"
    return Checkpoint.open(changed(tmp_path, name, values)).open_tokenizer()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_tokenizer_is_that_which_transformers_makes_of_the_file(
    kind: str, tmp_path: Path
) -> None:
    mine = tokenizer_of(tmp_path, kind)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in ("the cat", "  the  cat\n\n", "h\u00e9 \U0001f431!", "It's 42.", ""):
        ids = mine.encode(text)
        assert ids == theirs.encode(text), text
        assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        assert mine.decode(ids).strip() == text.strip()
    assert mine.vocab_size == 320


def test_special_tokens_and_the_template_are_those_of_the_file(tmp_path: Path) -> None:
    mine = tokenizer_of(tmp_path, "gpt2")
    turn = mine.chat_text([{"role": "user", "content": "the"}])
    assert turn == "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    ids = mine.encode(turn, add_special_tokens=False)
    tokens = tokens_of("gpt2")["tokenizer.ggml.tokens"]
    start, end = tokens.index("<|im_start|>"), tokens.index("<|im_end|>")
    assert ids[0] == start
    assert ids.count(end) == 1
    assert "<|im_" not in mine.decode(ids)
    assert not tokenizer_of(tmp_path, "llama").has_chat_template
    assert tokenizer_of(tmp_path, "llama").encode("the")[0] == 1
    without = tokenizer_of(tmp_path, "llama", **{"ggml.add_bos_token": False})
    assert without.encode("the")[0] != 1
    both = tokenizer_of(tmp_path, "llama", **{"ggml.add_eos_token": True})
    assert both.encode("the")[-1] == 2


def test_some_ways_to_split_know_whole_words_and_begin_with_a_token(tmp_path: Path) -> None:
    tokens = list(tokens_of("gpt2")["tokenizer.ggml.tokens"])
    # No merge makes it.
    tokens[310] = "cat"
    kinds = list(tokens_of("gpt2")["tokenizer.ggml.token_type"])
    kinds[310] = 1
    changes = {"ggml.tokens": tokens, "ggml.token_type": kinds, "ggml.bos_token_id": 300}
    plain = tokenizer_of(tmp_path, "gpt2", **changes, **{"ggml.add_bos_token": None})
    assert plain.encode("cat") == [tokens.index(letter) for letter in "cat"]
    changes |= {"ggml.pre": "llama-bpe"}
    whole = tokenizer_of(tmp_path, "gpt2", **changes, **{"ggml.add_bos_token": None})
    assert whole.encode("cat") == [300, 310]
    assert tokenizer_of(tmp_path, "gpt2", **changes).encode("cat") == [310]


def test_a_space_is_put_before_a_text_behind_a_token_of_control_too(tmp_path: Path) -> None:
    """As in llama.cpp, and in the tokenizers of Llama 2 and the first Mistrals for `<s>[INST]`."""
    changes = with_tokens("llama", {300: ("<|im_start|>", 3)})
    mine = tokenizer_of(tmp_path, "llama", **changes)
    the, cat = (changes["ggml.tokens"].index(token) for token in ("\u2581the", "\u2581cat"))
    for text in ("<s>the cat<|im_start|>the", "<s> the cat<|im_start|> the"):
        assert mine.encode(text, add_special_tokens=False) == [1, the, cat, 300, the], text
    assert mine.encode("the cat") == [1, the, cat]


def test_a_text_without_a_space_before_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="puts no space before a text"):
        tokenizer_of(tmp_path, "llama", **{"ggml.add_space_prefix": False})


def test_all_tokens_that_end_a_turn_end_a_text(tmp_path: Path) -> None:
    def ends(kind: str, **changes: Any) -> frozenset[int]:
        values = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        checkpoint = Checkpoint.open(changed(tmp_path, kind, values))
        return eos_token_ids(checkpoint.config, checkpoint.generation_config)

    tokens = tokens_of("gpt2")["tokenizer.ggml.tokens"]
    assert ends("qwen2") == {tokens.index("<|im_end|>"), tokens.index("<|endoftext|>")}
    assert ends("llama") == {2}
    assert ends("llama", eot_token_id=7, eom_token_id=9) == {2, 7, 9}
    assert ends("llama", eos_token_id=None) == frozenset()
    # What old files have for none.
    assert ends("llama", eos_token_id=2**32 - 1) == frozenset()


@pytest.mark.parametrize("kind", [1, 4, None])
def test_what_ends_a_turn_does_so_whatever_its_kind_is(kind: int | None, tmp_path: Path) -> None:
    """As of `<end_of_turn>` in Gemma's files of its maker, or of `<|im_end|>` in those of some Mistrals."""
    end = tokens_of("gpt2")["tokenizer.ggml.tokens"].index("<|im_end|>")
    kinds = list(tokens_of("gpt2")["tokenizer.ggml.token_type"])
    kinds[end] = kind
    values = {
        "tokenizer.ggml.token_type": None if kind is None else kinds,
        "tokenizer.ggml.eos_token_id": None,
    }
    checkpoint = Checkpoint.open(changed(tmp_path, "qwen2", values))
    assert end in eos_token_ids(checkpoint.config, checkpoint.generation_config)
    tokenizer = checkpoint.open_tokenizer()
    ids = tokenizer.encode("the<|im_end|>")
    assert ids[-1] == end
    assert tokenizer.decode(ids) == "the"


def with_tokens(kind: str, named: dict[int, tuple[str, int]]) -> dict[str, Any]:
    """Keys of a tokenizer some of whose tokens have other texts and kinds."""
    tokens = list(tokens_of(kind)["tokenizer.ggml.tokens"])
    kinds = list(tokens_of(kind)["tokenizer.ggml.token_type"])
    for number, (token, its_kind) in named.items():
        tokens[number], kinds[number] = token, its_kind
    return {"ggml.tokens": tokens, "ggml.token_type": kinds}


def test_added_tokens_that_no_alphabet_of_bytes_has(tmp_path: Path) -> None:
    """DeepSeek's, whose bars are wide ones."""
    begin, user = "<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>"
    changes = with_tokens("gpt2", {300: (begin, 3), 301: (user, 4)})
    changes |= {"ggml.bos_token_id": 300, "ggml.add_bos_token": True}
    mine = tokenizer_of(tmp_path, "gpt2", **changes)
    the = tokenizer_of(tmp_path, "gpt2").encode("the")
    assert mine.encode(f"{user}the") == [300, 301, *the]
    assert mine.encode(f"{begin}{user}the", add_special_tokens=False) == [300, 301, *the]
    assert mine.decode([300, 301, *the]) == f"{user}the"
    assert (mine.special_id(begin), mine.special_id(user)) == (300, None)
    assert mine.vocab_size == 320


@pytest.mark.parametrize("role", ["padding", "unknown"])
def test_a_token_of_a_text_stays_one_though_it_is_to_fill_up(role: str, tmp_path: Path) -> None:
    """As the first of all, "!", in some files, or that which stands for half a character in Phi-4's."""
    plain = tokenizer_of(tmp_path, "gpt2")
    mark = tokens_of("gpt2")["tokenizer.ggml.tokens"].index("!")
    mine = tokenizer_of(tmp_path, "gpt2", **{f"ggml.{role}_token_id": mark})
    for text in ("the!", "!!", "a cat! the"):
        assert mine.encode(text) == plain.encode(text)
        assert mine.decode(mine.encode(text)) == text


@pytest.mark.parametrize(("kind", "token"), [("gpt2", "<|endoftext|>"), ("llama", "<s>")])
def test_a_tokenizer_has_no_tokens_but_those_of_the_file(
    kind: str, token: str, tmp_path: Path
) -> None:
    number = tokens_of(kind)["tokenizer.ggml.tokens"].index(token)
    changes = with_tokens(kind, {number: ("<|begin|>", 3)})
    mine = tokenizer_of(tmp_path, kind, **changes, **{"ggml.bos_token_id": number})
    assert mine.vocab_size == 320
    ids = mine.encode(token)
    assert max(ids) < 320
    assert mine.decode(ids).strip() == token
    assert mine.encode("<|begin|>", add_special_tokens=False) == [number]


def test_white_space_behind_the_tokens_of_phi_3_is_theirs(tmp_path: Path) -> None:
    """As in its own tokenizer; the file says nothing of it."""
    named = {300: ("<|user|>", 3), 301: ("<|end|>", 4), 302: ("<|endoftext|>", 3)}
    values = {f"tokenizer.{key}": value for key, value in with_tokens("llama", named).items()}
    the = tokens_of("llama")["tokenizer.ggml.tokens"].index("\u2581the")
    text = "<|user|>\nthe<|end|>\n<|endoftext|>\n"

    def encoded(name: str) -> list[int]:
        tokenizer = Checkpoint.open(changed(tmp_path, name, values)).open_tokenizer()
        return tokenizer.encode(text, add_special_tokens=False)

    ids = encoded("phi3")
    assert ids[:4] == [300, the, 301, 302]
    assert len(ids) > 4  # behind the end of all text it is text
    assert encoded("llama")[1] != the


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"ggml.tokens": None}, CheckpointError, "no tokenizer in it"),
        ({"ggml.model": "t5"}, UnsupportedModelError, "of the kind 't5'; read are gpt2 and llama"),
        ({"ggml.pre": "martian"}, UnsupportedModelError, "splits text as 'martian'"),
        ({"ggml.pre": None}, UnsupportedModelError, "splits text as ''"),
        ({"ggml.merges": None}, CheckpointError, "neither merges nor scores"),
        ({"ggml.merges": ["a b c"]}, CheckpointError, "no tokenizer can be made of it"),
        ({"ggml.merges": ["nobody knows"]}, CheckpointError, "no tokenizer can be made of it"),
        ({"ggml.token_type": [1]}, CheckpointError, "320 tokens, and 1 token_type"),
        ({"ggml.scores": [1.0]}, CheckpointError, "320 tokens, and 1 scores"),
        ({"ggml.tokens": ["a"] * 320}, CheckpointError, "a token stands twice"),
        ({"chat_template": 1}, CheckpointError, "chat_template is no text"),
        (
            {"ggml.add_bos_token": True},
            CheckpointError,
            "bos_token is true, and bos_token_id is no",
        ),
        (
            {"ggml.add_eos_token": True, "ggml.eos_token_id": None},
            CheckpointError,
            "eos_token is true, and eos_token_id is no",
        ),
    ],
)
def test_tokenizers_that_are_none(
    changes: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=says):
        tokenizer_of(tmp_path, "gpt2", **changes)


def test_the_config_is_plain_json(tmp_path: Path) -> None:
    save_gguf("llama 3.1", tmp_path / "m.gguf")
    config = Checkpoint.open(tmp_path / "m.gguf").config
    assert json.loads(json.dumps(config)) == config
