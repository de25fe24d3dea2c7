"""Layers as codes: which matrices become them, the bytes that travel, and what is computed with them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_safetensors
from torch import nn

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.model.files.blob import parse_blob
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.hash_cache import HashCache
from neurogrid.model.files.quantization import (
    AS_STORED,
    METHODS,
    CodesForm,
    Quantization,
    choose_quantization,
    gather_codes,
    model_fingerprint,
    record_of_stored,
)
from neurogrid.model.files.tensor_names import path_in_layer
from neurogrid.model.files.tensors import tensor_from_bytes, tensor_to_bytes
from neurogrid.model.kernels import Codes, CodesLinear, quantize
from neurogrid.model.stages.experts import expert_weights
from neurogrid.model.stages.stage import Stage
from neurogrid.p2p.wire.blob_id import BlobHasher
from tests.families import FAMILIES, save_checkpoint
from tests.unit.vectors import in_turn

BY_NAME = {family.name: family for family in FAMILIES}
# What stays: norms; what chooses experts.
SKIPPED = {
    "llama-untied-sharded": set(),
    "qwen3": set(),
    "phi3": set(),
    "gemma3": set(),
    "mixtral": set(),
}


@pytest.fixture(scope="module", params=SKIPPED)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path, Any]]:
    path = tmp_path_factory.mktemp(request.param)
    yield request.param, path, save_checkpoint(BY_NAME[request.param], path)
    loaded.cache_clear()


@cache
def loaded(path: Path, method: str, dtype: str = "float32") -> LoadedModel:
    """The same one for all tests of a checkpoint: they change nothing in it, and proving it takes most of the time."""
    return LoadedModel.load(path, name=None, max_seq_len=64, dtype=dtype, quantize=method)


def stage_of(model: LoadedModel) -> Stage:
    stage = Stage(model.config, dtype=model.dtype, device="cpu", quantization=model.quantization)
    for layer_id in range(model.checkpoint.num_layers):
        stage.load_layer(layer_id, parse_blob(blob_bytes(model, layer_id)))
    return stage


def blob_bytes(model: LoadedModel, layer_id: int) -> bytearray:
    return bytearray(b"".join(model.layer_blob(layer_id).chunks()))


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_layers_hold_the_codes_of_their_matrices_and_compute_with_them(
    saved: tuple[str, Path, Any], method: str
) -> None:
    name, path, original = saved
    whole = copy.deepcopy(original)
    model = loaded(path, method)
    assert model.quantization is not None
    assert set(model.quantization.skipped) == SKIPPED[name]
    stage = stage_of(model)
    bits = model.quantization.forms[0].bits
    layers = next(each for each in whole.modules() if isinstance(each, nn.ModuleList))
    for layer_id, expected in enumerate(layers):
        held = stage.layer(layer_id)
        pairs = list(zip(held.named_modules(), expected.named_modules(), strict=True))
        linears = [(mine, its) for (_, mine), (_, its) in pairs if isinstance(its, nn.Linear)]
        assert linears
        for mine, its in linears:
            assert type(mine) is CodesLinear
            its.weight.data = quantize(its.weight.data, bits).dense(torch.float32)
            assert torch.equal(mine.weight, its.weight)
        for matrix in [each for of in expert_weights(expected) for each in of.matrices(expected)]:
            matrix[:] = quantize(matrix, bits).dense(torch.float32)
        # What the planner counts is what is there.
        num_bytes = sum(each.nbytes for each in (*held.parameters(), *held.buffers()))
        names = [name for name, _ in held.named_parameters()]
        tables = 64 * sum(name.endswith("0") and "held_" in name for name in names) * (bits == 4)
        assert num_bytes - tables == model.costs[layer_id].weight_bytes
    ids = torch.arange(3, 20)
    with torch.inference_mode():
        logits = whole(ids[None]).logits[0, -1]
    hidden = model.ends.embed(ids.tolist(), position=0)
    hidden = stage.forward(
        hidden, start=0, stop=stage.num_layers, position=0, cache=stage.new_cache()
    )
    mine = model.ends.logits(hidden, position=0)
    # Activations are rounded to 8 bits: half a percent a product.
    assert (mine - logits).norm() < 0.05 * logits.norm()


def test_prompt_and_single_tokens_get_the_same_bits(saved: tuple[str, Path, Any]) -> None:
    _, path, _ = saved
    model = loaded(path, "int8")
    layer = stage_of(model).layer(1)
    linear = next(each for each in layer.modules() if type(each) is CodesLinear)
    x = torch.randn(1, 9, linear.in_features)
    with torch.inference_mode():
        assert torch.equal(linear(x), torch.cat([linear(x[:, i : i + 1]) for i in range(9)], dim=1))


def test_the_bytes_are_the_same_for_whoever_makes_them(saved: tuple[str, Path, Any]) -> None:
    _, path, _ = saved
    model, again = loaded(path, "int4"), loaded(path, "int4", dtype="bfloat16")
    assert model.quantization == again.quantization
    for layer_id in range(model.checkpoint.num_layers):
        blob = model.layer_blob(layer_id)
        data = blob_bytes(model, layer_id)
        assert blob.num_bytes == len(data)
        assert blob.blob_id() == again.layer_blob(layer_id).blob_id()
        hasher = BlobHasher()
        hasher.update(data)
        assert hasher.digests() == blob.digests()
        assert (
            blob.num_bytes < 0.3 * model.checkpoint.layer_blob(layer_id).num_bytes
            or model.quantization.skipped
        )
        # A safetensors file like any other.
        names = set(load_safetensors(bytes(data)))
        assert any(name.endswith(".weight.codes") for name in names)


def test_only_layers_that_are_under_way_are_in_memory(saved: tuple[str, Path, Any]) -> None:
    _, path, _ = saved
    model = loaded(path, "int8")
    for layer_id in range(model.checkpoint.num_layers):
        model.layer_blob(layer_id).digests()
    assert len(model.checkpoint._recent._made) == 1
    with model.layer_blob(0).held():
        assert model.layer_blob(0).chunk(0)
    assert not model.checkpoint._recent._made


def test_hashes_are_kept_for_each_form(
    saved: tuple[str, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, path, _ = saved
    monkeypatch.setattr("neurogrid.model.files.hash_cache._TICK_NS", 0)
    quantization = loaded(path, "int4").quantization
    for form in (None, quantization):
        checkpoint = Checkpoint.open(path)
        cache = HashCache.open(tmp_path, checkpoint, form)
        assert cache.num_known == 0
        for layer_id in range(checkpoint.num_layers):
            checkpoint.layer_blob(layer_id, form).digests()
        cache.save()
    for form in (None, quantization):
        checkpoint = Checkpoint.open(path)
        assert HashCache.open(tmp_path, checkpoint, form).num_known == checkpoint.num_layers
        assert not checkpoint._recent._made


def test_where_nothing_can_be_quantised_that_is_said(tmp_path: Path) -> None:
    # Its matrices are transposed, and in no linear layers.
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="none of the matrices"):
        loaded(tmp_path, "int8")


def test_a_weight_that_is_no_number_is_told_by_its_name(tmp_path: Path) -> None:
    model = save_checkpoint(BY_NAME["qwen3"], tmp_path)
    model.model.layers[2].mlp.up_proj.weight.data[3, 3] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"model\.layers\.2\.mlp\.up_proj\.weight cannot be quantised"
    ):
        loaded(tmp_path, "int4").layer_blob(2).digests()


# What a peer may send


def some_layer() -> tuple[dict[str, torch.Tensor], Quantization]:
    codes = quantize(torch.randn(64, 96), 4)
    tensors = {
        "model.layers.0.mlp.up_proj.weight.codes": codes.codes,
        "model.layers.0.mlp.up_proj.weight.scales": codes.scales,
        "model.layers.0.norm.weight": torch.ones(64),
    }
    return tensors, Quantization("int4")


def test_codes_are_gathered_by_the_name_of_their_matrix() -> None:
    tensors, quantization = some_layer()
    plain, codes = gather_codes(tensors, quantization)
    assert set(plain) == {"model.layers.0.norm.weight"}
    assert set(codes) == {"model.layers.0.mlp.up_proj.weight"}
    found: Codes = codes["model.layers.0.mlp.up_proj.weight"]
    assert (found.num_outputs, found.num_inputs, found.bits) == (64, 96, 4)


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("codes", torch.zeros(64, 40, dtype=torch.uint8), "no matrix of codes"),
        ("codes", torch.zeros(63, 48, dtype=torch.uint8), "scales is .* is due"),
        ("codes", torch.zeros(64, 96, dtype=torch.int8), "is due"),
        ("codes", torch.zeros(64, dtype=torch.uint8), "no matrix of codes"),
        ("codes", torch.zeros((), dtype=torch.uint8), "no matrix of codes"),
        ("codes", torch.zeros(0, 0, dtype=torch.uint8), "no matrix of codes"),
        ("scales", torch.ones(64, 3), "is due"),
        ("scales", torch.ones(64, 4, dtype=torch.float16), "is due"),
        ("scales", None, "is due"),
        ("minimums", torch.ones(64, 3, dtype=torch.float16), "is due"),
        ("table", torch.ones(16), "is due"),
        ("scales", torch.full((64, 3), torch.inf, dtype=torch.float16), "not finite"),
        ("scales", torch.full((64, 3), torch.nan, dtype=torch.float16), "not finite"),
    ],
)
def test_codes_that_do_not_fit_are_refused(
    part: str, value: torch.Tensor | None, words: str
) -> None:
    tensors, quantization = some_layer()
    tensors.pop(f"model.layers.0.mlp.up_proj.weight.{part}", None)
    if value is not None:
        tensors[f"model.layers.0.mlp.up_proj.weight.{part}"] = value
    with pytest.raises(CheckpointError, match=words):
        gather_codes(tensors, quantization)


def test_codes_of_what_is_no_linear_layer_of_its_own_are_refused(
    saved: tuple[str, Path, Any],
) -> None:
    _, path, _ = saved
    model = loaded(path, "int8")
    stage = Stage(model.config, dtype=torch.float32, device="cpu", quantization=model.quantization)
    tensors = parse_blob(blob_bytes(model, 0))
    name = next(each for each in tensors if "norm" in each and each.endswith(".weight"))
    codes = quantize(torch.randn(64, 64), 8)
    tensors[f"{name}.codes"], tensors[f"{name}.scales"] = codes.codes, codes.scales
    del tensors[name]
    with pytest.raises(CheckpointError, match="layer 0"):
        stage.load_layer(0, tensors)
    lone = parse_blob(blob_bytes(model, 0))
    del lone[next(each for each in lone if each.endswith(".scales"))]
    with pytest.raises(CheckpointError):
        stage.load_layer(0, lone)


def test_what_the_record_has_as_codes_must_come_as_codes(saved: tuple[str, Path, Any]) -> None:
    """Their memory was counted so; and what it skips must not."""
    _, path, _ = saved
    model = loaded(path, "int4")
    assert model.quantization is not None
    tensors = parse_blob(blob_bytes(model, 0))
    name = next(
        each for each in tensors if each.endswith(".codes") and "experts" not in each
    ).removesuffix(".codes")
    stage = Stage(model.config, dtype=torch.float32, device="cpu", quantization=model.quantization)
    dense = {each: tensor for each, tensor in tensors.items() if not each.startswith(name)}
    num_outputs, num_bytes = tensors[f"{name}.codes"].shape
    dense[name] = torch.zeros(num_outputs, 2 * num_bytes)
    with pytest.raises(CheckpointError, match="is to be quantised, and is not"):
        stage.load_layer(0, dense)
    skipping = dataclasses.replace(
        model.quantization,
        skipped=(*model.quantization.skipped, path_in_layer(name).removesuffix(".weight")),
    )
    stage = Stage(model.config, dtype=torch.float32, device="cpu", quantization=skipping)
    with pytest.raises(CheckpointError, match="no linear layer that is to be so"):
        stage.load_layer(0, tensors)
    assert not stage.held_layers


def test_what_one_kind_of_layer_skips_all_do_under_either_name() -> None:
    class Model:
        def linear_shapes(self, layer_id: int) -> dict[str, tuple[int, int]]:
            return {"a": (64, 64), "b": (64, 64)}

        def linear_names(self, layer_id: int, shapes: Any) -> dict[str, str]:
            # In layer 1 nothing becomes `a`, which `old` is the name of in the files.
            named = {"layers.0.old.weight": "a", "layers.0.b.weight": "b", "layers.1.b.weight": "b"}
            return {name: named[name] for name in shapes if name in named}

    shape = (64, 64)
    layers = [
        {"layers.0.old.weight": shape, "layers.0.b.weight": shape},
        {"layers.1.b.weight": shape, "layers.1.c.weight": shape},
    ]
    assert choose_quantization("int8", layers, Model()).skipped == ("a", "c", "old")


def test_a_peer_that_names_many_forms_fills_no_memory(saved: tuple[str, Path, Any]) -> None:
    _, path, _ = saved
    checkpoint = Checkpoint.open(path)
    for number in range(20):
        checkpoint.layer_blob(0, Quantization("int8", (f"path{number}",)))
    assert len(checkpoint._blobs) == 4


@in_turn("codes")
def test_codes_are_those_of_the_vectors(name: str, case: Any) -> None:
    """Written from the specification, with numbers of Python."""
    weight = tensor_from_bytes(bytes.fromhex(case["weight"]), torch.float32, case["shape"])
    codes = quantize(weight, METHODS[case["method"]].bits)
    assert tensor_to_bytes(codes.codes).hex() == case["codes"]
    assert tensor_to_bytes(codes.scales).hex() == case["scales"]


RECORD = Quantization("int4", ("mlp.gate",)).record()


def test_a_record_is_read_as_it_was_written() -> None:
    assert Quantization.from_record(RECORD) == Quantization("int4", ("mlp.gate",))
    assert Quantization.from_record({**RECORD, "another": 1}) == Quantization("int4", ("mlp.gate",))
    assert Quantization.from_record(None) is None


FORMS = (CodesForm(4, 128, "F32", True, True), CodesForm(8, 32, "F16"))
FLOATS = CodesForm(8, 128, "BF16", is_float=True)
STORED = Quantization(
    AS_STORED,
    forms=FORMS,
    matrices=(("mlp.down", ((0, 2), (-1, 1), (1, 3))), ("mlp.up", ((1, 1),))),
)


def test_the_forms_of_a_checkpoint_that_has_codes_are_read_as_they_were_written() -> None:
    assert Quantization.from_record(STORED.record()) == STORED
    assert hash(Quantization.from_record(STORED.record())) == hash(STORED)


def test_each_layer_has_its_own_form() -> None:
    shape = (64, 256)
    down = [STORED.form(layer_id, "mlp.down", shape) for layer_id in range(8)]
    assert down == [FORMS[0], FORMS[0], None, FORMS[1], FORMS[1], FORMS[1], None, None]
    assert [STORED.form(layer_id, "mlp.up", shape) for layer_id in range(2)] == [FORMS[1], None]
    assert STORED.form(0, "mlp.gate", shape) is None
    assert STORED.form(0, "mlp.down", (64, 96)) is None


def test_a_form_of_floats_is_read_as_it_was_written() -> None:
    floats = dataclasses.replace(STORED, forms=(FORMS[0], FLOATS))
    assert Quantization.from_record(floats.record()) == floats
    assert "float" not in FORMS[0].record()
    for wrong in ({"bits": 4}, {"minimums": True}, {"table": True}, {"group": 16}):
        with pytest.raises(UnsupportedModelError, match="names no form"):
            CodesForm.from_record({**FLOATS.record(), **wrong})


def test_floats_that_are_no_numbers_are_refused() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    codes = (torch.randn(64, 128) * 60).to(torch.float8_e4m3fn)
    tensors = {f"{name}.codes": codes, f"{name}.scales": torch.ones(64, 1).bfloat16()}
    quantization = Quantization(AS_STORED, forms=(FLOATS,), matrices=(("mlp.up_proj", ((0, 1),)),))
    _, found = gather_codes(tensors, quantization)
    assert torch.equal(found[name].dense(torch.float32), codes.float())
    for byte in (0x7F, 0xFF):
        codes.view(torch.uint8)[3, 5] = byte
        with pytest.raises(CheckpointError, match="codes is not finite"):
            gather_codes(tensors, quantization)
    with pytest.raises(CheckpointError, match="is due"):
        gather_codes({**tensors, f"{name}.codes": codes.view(torch.int8)}, quantization)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 5},
        {"bits": True},
        {"group": 48},
        {"group": -32},
        {"group": 2**40},
        {"scale": "F64"},
        {"scale": None},
        {"minimums": 1},
        {"float": 1},
        {"float": True},
        {"table": "nf4"},
        {"bits": 8},
    ],
)
def test_a_form_that_codes_cannot_have_is_refused(wrong: dict[str, object]) -> None:
    record = {**STORED.record(), "forms": [{**FORMS[0].record(), **wrong}]}
    with pytest.raises(UnsupportedModelError, match="names no form"):
        Quantization.from_record(record)


@pytest.mark.parametrize("forms", [None, {}, [], [1], [None], [FORMS[0].record()] * 17])
def test_forms_that_are_none_are_refused(forms: object) -> None:
    with pytest.raises(UnsupportedModelError, match="form"):
        Quantization.from_record({**STORED.record(), "forms": forms})


@pytest.mark.parametrize(
    "matrices",
    [
        None,
        [],
        {},
        {"x" * 257: [[0, 1]]},
        {f"path{number}": [[0, 1]] for number in range(1025)},
        {"path": None},
        {"path": []},
        {"path": [0, 1]},
        {"path": [[0]]},
        {"path": [[0, 1, 1]]},
        {"path": [[0, 1], None]},
        {"path": [[2, 1]]},
        {"path": [[-2, 1]]},
        {"path": [[0, 0]]},
        {"path": [[0, -1]]},
        {"path": [[True, 1]]},
        {"path": [[0, 1.0]]},
        {"path": [[0, 2**63]]},
        {"path": [[0, 65_536], [1, 1]]},
        {"path": [[0, 1]] * 1025},
    ],
)
def test_matrices_that_are_none_are_refused(matrices: object) -> None:
    with pytest.raises(UnsupportedModelError, match="the record of what is quantised"):
        Quantization.from_record({**STORED.record(), "matrices": matrices})


class TwoLinears:
    """A model of four layers with `a` and a list of two."""

    def linear_shapes(self, layer_id: int) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(("a", "list.0", "list.1"), (64, 64))

    def linear_names(self, layer_id: int, shapes: Any) -> dict[str, str]:
        names = {f"layers.{layer_id}.{path}.weight": path for path in self.linear_shapes(layer_id)}
        return {name: names[name] for name in shapes if name in names}


def test_what_is_stored_in_several_forms_is_told_layer_by_layer() -> None:
    shape, (first, second) = (64, 64), (CodesForm(4), CodesForm(8, 64))
    layers: Any = {
        0: {"layers.0.a.weight": (shape, second)},
        1: {f"layers.1.list.{i}.weight": (shape, first) for i in (0, 1)},
        # Layer 2 is not here: as the one before.
        3: {"layers.3.a.weight": (shape, second)},
    }
    found = record_of_stored(layers, TwoLinears(), 4)
    assert found.forms == (second, first)
    assert dict(found.matrices) == {
        "a": ((0, 1), (-1, 2), (0, 1)),
        "list.#": ((-1, 1), (1, 2)),
    }


def test_what_is_stored_must_be_alike_within_a_list() -> None:
    shape, forms = (64, 64), (CodesForm(4), CodesForm(8))
    both: Any = {f"layers.0.list.{i}.weight": (shape, forms[i]) for i in (0, 1)}
    for matrices in (both, dict(list(both.items())[:1])):
        with pytest.raises(
            UnsupportedModelError, match=r"list\.1 of layer 0 is quantised otherwise"
        ):
            record_of_stored({0: matrices}, TwoLinears(), 1)
    fused: Any = {"layers.0.qkv.weight": (shape, forms[0])}
    with pytest.raises(UnsupportedModelError, match="put together with others"):
        record_of_stored({0: fused}, TwoLinears(), 1)


@in_turn("quantization")
def test_records_are_those_of_the_vectors(name: str, case: Any) -> None:
    if case["result"] == "invalid":
        with pytest.raises(UnsupportedModelError):
            Quantization.from_record(case["record"])
        return
    found = Quantization.from_record(case["record"])
    assert found is not None
    for path, numbers in case["matrices"].items():
        forms = [found.form(layer_id, path, (2**20, 2**20)) for layer_id in range(len(numbers))]
        assert forms == [None if number is None else found.forms[number] for number in numbers]


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "int2"},
        {"method": None},
        {"method": ["int4"]},
        {"bits": 8},
        {"bits": 2**70},
        {"group": 64},
        {"group": None},
        {"skipped": "mlp.gate"},
        {"skipped": [1]},
        {"skipped": ["x" * 300]},
        {"skipped": ["x"] * 2000},
    ],
)
def test_a_record_that_is_not_known_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModelError):
        Quantization.from_record({**RECORD, **wrong})


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=3),
    )
)
def test_any_record_is_read_or_refused(record: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModelError):
        Quantization.from_record(record)


def test_a_model_has_another_number_for_each_form() -> None:
    config = {"model_type": "llama", "hidden_size": 64}
    int8 = Quantization("int8")
    forms = [None, int8, Quantization("int4"), dataclasses.replace(int8, skipped=("mlp.gate",))]
    assert len({model_fingerprint(config, form) for form in forms}) == len(forms)
