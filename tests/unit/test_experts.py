"""Experts of mixtures as codes: found in what transformers makes of a checkpoint, and multiplied one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.files.blob import LayerBlob, parse_blob
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import build_config
from neurogrid.model.files.foreign.formats import foreign_format
from neurogrid.model.files.quantization import Quantization
from neurogrid.model.files.tensor_names import layer_of
from neurogrid.model.kernels import Codes, join_rows, quantize
from neurogrid.model.proof.miniature_experts import check_experts
from neurogrid.model.stages.cost import layer_cost
from neurogrid.model.stages.experts import expert_weights, hold_experts
from neurogrid.model.stages.stage import Ends, Row, Stage
from tests.foreign_checkpoints import MXFP4_CONFIG, save_foreign_mixture, save_mxfp4
from tests.mixtures import MIXTURES, mixture_config, save_mixture

IDS = list(range(3, 30))


class Served:
    """What a coordinator has of a checkpoint, without the proof of its config, which takes the longest."""

    def __init__(self, path: Path, method: str | None) -> None:
        self.checkpoint = Checkpoint.open(path)
        self.config = build_config(self.checkpoint.config)
        self.dtype = torch.float32
        self.ends = Ends(self.config, dtype=self.dtype, device="cpu")
        self.ends.load(self.checkpoint.end_tensors())
        self.quantization = self.checkpoint.quantization(method, self.ends)
        self.costs = layer_cost(self.config, self.dtype, self.quantization)

    def layer_blob(self, layer_id: int) -> LayerBlob:
        return self.checkpoint.layer_blob(layer_id, self.quantization)


def stage_of(model: Served) -> Stage:
    stage = Stage(model.config, dtype=model.dtype, device="cpu", quantization=model.quantization)
    for layer_id in range(model.checkpoint.num_layers):
        data = bytearray(b"".join(model.layer_blob(layer_id).chunks()))
        stage.load_layer(layer_id, parse_blob(data))
    return stage


def logits(model: Served, stage: Stage, token_ids: list[int]) -> torch.Tensor:
    hidden = model.ends.embed(token_ids, position=0)
    hidden = stage.forward(
        hidden, start=0, stop=stage.num_layers, position=0, cache=stage.new_cache()
    )
    return model.ends.logits(hidden, position=0)


def dense_of(path: Path, model: Served, into: Path) -> Any:
    """transformers' own model of the weights that the codes are."""
    into.mkdir()
    tensors = load_file(path / "model.safetensors")
    assert model.quantization is not None
    for name, tensor in tensors.items():
        if layer_of(name, model.checkpoint.num_layers) is not None and model.quantization.makes_of(
            name, tensor.shape
        ):
            tensors[name] = quantize(tensor, model.quantization.forms[0].bits).dense(torch.float32)
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    (into / "config.json").write_bytes((path / "config.json").read_bytes())
    return AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("name", "method"), [("qwen3-moe", "int8"), *((name, "int4") for name in MIXTURES)]
)
def test_the_model_is_that_of_the_same_weights(
    name: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Off by their rounding activations would be.
    monkeypatch.setattr(Quantization, "by_int8", False)
    save_mixture(name, tmp_path)
    model = Served(tmp_path, method)
    assert model.quantization is not None
    assert set(model.quantization.skipped) == MIXTURES[name][2]
    stage = stage_of(model)
    whole = dense_of(tmp_path, model, tmp_path / "dense")
    with torch.inference_mode():
        expected = whole(torch.tensor([IDS])).logits[0, -1]
    mine = logits(model, stage, IDS)
    assert (mine - expected).norm() <= 1e-5 * expected.norm()
    layers = next(each for each in whole.modules() if isinstance(each, nn.ModuleList))
    for layer_id, its in enumerate(layers):
        held = stage.layer(layer_id)
        # Every one is the matrix that transformers puts together of the same numbers, to the bit.
        for weight in expert_weights(its):
            module: Any = held.get_submodule(weight.module)
            for expert, matrix in enumerate(weight.matrices(its)):
                codes = getattr(module, "_held_matrices", {}).get(weight.name)
                mine = (
                    weight.matrices(held)[expert]
                    if codes is None
                    else codes[expert].dense(torch.float32)
                )
                assert torch.equal(mine, matrix)
        # What the planner counts is what is there.
        tensors = [*held.parameters(), *held.buffers()]
        tables = sum(
            64 for name, each in held.named_parameters() if ".held_" in name and each.shape == (16,)
        )
        num_bytes = sum(each.nbytes for each in tensors)
        assert num_bytes - tables == model.costs[layer_id].weight_bytes


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3-moe")
    save_mixture("qwen3-moe", path)
    return path


def experts_of(stage: Stage, layer_id: int = 0) -> Any:
    return stage.layer(layer_id).get_submodule("mlp.experts")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_gets_the_same_bits_in_any_company(qwen3: Path, dtype: torch.dtype) -> None:
    model = Served(qwen3, "int8")
    stage = Stage(model.config, dtype=dtype, device="cpu", quantization=model.quantization)
    stage.load_layer(0, parse_blob(bytearray(b"".join(model.layer_blob(0).chunks()))))
    experts = experts_of(stage)
    hidden = torch.randn(700, 64, dtype=dtype)
    chosen = torch.stack([torch.randperm(6)[:3] for _ in hidden])
    weights = torch.rand(700, 3)
    with torch.inference_mode():
        tokens = zip(hidden.split(1), chosen.split(1), weights.split(1), strict=True)
        expected = torch.cat([experts(*token) for token in tokens])
        for count in (2, 7, 700):
            together = experts(hidden[:count], chosen[:count], weights[:count])
            assert together.dtype == dtype
            assert torch.equal(together, expected[:count])


def test_several_sessions_get_what_each_gets_alone(qwen3: Path) -> None:
    model = Served(qwen3, "int4")
    stage = stage_of(model)
    num_layers = stage.num_layers
    rows, expected = [], []
    for length in (3, 5, 9):
        hidden = model.ends.embed(IDS[:length], position=0)
        token = model.ends.embed([length], position=length)
        caches = [stage.new_cache(), stage.new_cache()]
        for cache in caches:
            stage.forward(hidden, start=0, stop=num_layers, position=0, cache=cache)
        rows.append(Row(token, length, caches[0]))
        expected.append(
            stage.forward(token, start=0, stop=num_layers, position=length, cache=caches[1])
        )
    for mine, its in zip(stage.forward_rows(rows, start=0, stop=num_layers), expected, strict=True):
        assert (mine - its).norm() <= 1e-5 * its.norm()


def test_without_compiled_products_one_expert_at_a_time_is_made_dense(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Served(qwen3, "int4")
    monkeypatch.setattr(Quantization, "by_int8", False)
    expected = logits(model, stage_of(model), IDS)
    monkeypatch.setattr("neurogrid.model.kernels.linear.library", lambda: None)
    stage = stage_of(model)
    held = experts_of(stage)._held_matrices
    assert all(isinstance(each, Codes) for each in held["gate_up_proj"])
    mine = logits(model, stage, IDS)
    assert (mine - expected).norm() <= 1e-5 * expected.norm()


def test_an_expert_that_there_is_not_gives_nothing(qwen3: Path) -> None:
    """Families number what takes a token past the experts behind them."""
    experts = experts_of(stage_of(Served(qwen3, "int8")))
    hidden, weights = torch.randn(2, 64), torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    with torch.inference_mode():
        mine = experts(hidden, torch.tensor([[2, 6], [3, 1]]), weights)
        alone = experts(hidden[:1], torch.tensor([[2]]), torch.tensor([[0.5]]))
    assert torch.equal(mine[:1], alone)


def test_a_step_reads_of_the_codes_the_active_experts(qwen3: Path) -> None:
    costs = Served(qwen3, "int8").costs[0]
    experts = 6 * (64 * 64 + 64 * 32) * 34 // 32
    assert costs.step_bytes == costs.weight_bytes - experts // 2


class _Largest(TorchDispatchMode):
    """The largest memory that any operation gave back, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor) and not each.is_meta:
                self.num_bytes = max(self.num_bytes, each.untyped_storage().nbytes())
        return result


def test_no_more_than_single_matrices_is_ever_dense(tmp_path: Path) -> None:
    save_mixture("qwen3-moe", tmp_path, num_experts=48, num_hidden_layers=1)
    model = Served(tmp_path, "int4")
    tensors = {name: each.clone() for name, each in blob_tensors(model).items()}
    stage = Stage(model.config, dtype=torch.float32, device="cpu", quantization=model.quantization)
    with _Largest() as largest:
        stage.load_layer(0, tensors)
    # All experts' would be 48 x 64 x 64 x 4. What tells the rows has a number for each, and one for each input.
    assert largest.num_bytes <= 2 * 48 * 64 * 4


def blob_tensors(model: Served) -> dict[str, torch.Tensor]:
    return parse_blob(bytearray(b"".join(model.layer_blob(0).chunks())))


def test_an_expert_that_is_missing_or_in_another_form_is_refused(qwen3: Path) -> None:
    model = Served(qwen3, "int8")
    stage = Stage(model.config, dtype=torch.float32, device="cpu", quantization=model.quantization)
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    lacking = {key: each for key, each in blob_tensors(model).items() if not key.startswith(name)}
    words = r"experts\.\w+\.\d of layer 0 is to be quantised, and is not"
    with pytest.raises(CheckpointError, match=words):
        stage.load_layer(0, lacking)
    dense = {**lacking, name: torch.zeros(32, 64)}
    with pytest.raises(CheckpointError, match=words):
        stage.load_layer(0, dense)
    wide = quantize(torch.randn(64, 64), 8)
    other = {**lacking, f"{name}.codes": wide.codes, f"{name}.scales": wide.scales}
    with pytest.raises(CheckpointError, match=words):
        stage.load_layer(0, other)
    assert not stage.held_layers


def test_rows_of_several_forms_make_no_matrix() -> None:
    weight = torch.randn(8, 64)
    with pytest.raises(ValueError, match="several forms"):
        join_rows([quantize(weight, 8), quantize(weight, 4)], None)
    with pytest.raises(ValueError, match="several widths"):
        join_rows([quantize(weight, 8), quantize(weight[:, :32], 8)], None)
    order = torch.tensor([3, 0, 2, 1])
    halves = [quantize(weight[:2], 4), quantize(weight[2:4], 4)]
    dense = torch.cat([each.dense(torch.float32) for each in halves])
    assert torch.equal(join_rows(halves, order).dense(torch.float32), dense[order])


# Checkpoints that are quantised already.


@pytest.mark.parametrize("stored", ["gptq", "compressed-tensors int8", "bitsandbytes nf4", "fp8"])
def test_a_mixture_that_is_quantised_already_is_served_as_it_is(
    stored: str, tmp_path: Path
) -> None:
    dense = save_foreign_mixture(
        stored,
        tmp_path,
        save_mixture(
            "qwen3-moe", tmp_path, moe_intermediate_size=64, num_experts=4, num_hidden_layers=2
        ),
    )
    model = Served(tmp_path, None)
    stage = stage_of(model)
    assert type(experts_of(stage)).__name__ == "CodesQwen3MoeExperts"
    with torch.inference_mode():
        expected = dense(torch.tensor([IDS])).logits[0, -1]
    mine = logits(model, stage, IDS)
    assert (mine - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_other_names_and_shared_experts(name: str, tmp_path: Path) -> None:
    dense = save_foreign_mixture(
        "compressed-tensors int4", tmp_path, save_mixture(name, tmp_path, num_hidden_layers=2)
    )
    model = Served(tmp_path, None)
    with torch.inference_mode():
        expected = dense(torch.tensor([IDS])).logits[0, -1]
    mine = logits(model, stage_of(model), IDS)
    assert (mine - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_biases_of_zeros_that_experts_have_not(name: str, tmp_path: Path) -> None:
    """GPTQ's tools write them, and transformers calls some experts otherwise than the checkpoint does."""
    dense = save_foreign_mixture(
        "gptq", tmp_path, save_mixture(name, tmp_path, num_hidden_layers=2)
    )
    tensors = load_file(tmp_path / "model.safetensors")
    for key in [key for key in tensors if key.endswith(".scales")]:
        tensors[key.removesuffix("scales") + "bias"] = torch.zeros(tensors[key].shape[1])
    save_file(tensors, tmp_path / "model.safetensors")
    model = Served(tmp_path, None)
    with torch.inference_mode():
        expected = dense(torch.tensor([IDS])).logits[0, -1]
    mine = logits(model, stage_of(model), IDS)
    assert (mine - expected).norm() <= 1e-5 * expected.norm()
    bias = next(key for key in tensors if key.endswith("bias") and ".experts.1." in key)
    tensors[bias][3] = 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="that the model does not know: "):
        stage_of(Served(tmp_path, None))


def test_an_expert_that_is_not_quantised_among_others_is_refused(tmp_path: Path) -> None:
    save_foreign_mixture("gptq", tmp_path, save_mixture("qwen3-moe", tmp_path, num_hidden_layers=2))
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.1.mlp.experts.2.up_proj"
    for suffix in (".qweight", ".qzeros", ".scales", ".g_idx"):
        del tensors[prefix + suffix]
    tensors[f"{prefix}.weight"] = torch.zeros(32, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="put together with others by this family"):
        Served(tmp_path, None)


def test_mxfp4_is_served_as_it_is(tmp_path: Path) -> None:
    dense = save_mxfp4(tmp_path, save_mixture("gpt-oss", tmp_path))
    model = Served(tmp_path, None)
    assert model.quantization is not None
    assert {path for path, _ in model.quantization.matrices} == {
        "mlp.experts.down_proj.#",
        "mlp.experts.gate_up_proj.#",
    }
    stage = stage_of(model)
    with torch.inference_mode():
        expected = dense(torch.tensor([IDS])).logits[0, -1]
    mine = logits(model, stage, IDS)
    assert (mine - expected).norm() <= 1e-5 * expected.norm()
    parameter = dense.model.layers[0].mlp.experts.down_proj
    for expert, codes in enumerate(experts_of(stage)._held_matrices["down_proj"]):
        assert torch.equal(codes.dense(torch.float32), parameter[expert].t())
    # The codes of 4 bits with their scales in 16, and what is not quantised.
    blob = model.layer_blob(0)
    assert abs(model.costs[0].weight_bytes - blob.num_bytes) < 0.2 * blob.num_bytes


@pytest.mark.parametrize(
    ("suffix", "change", "words"),
    [
        ("_scales", lambda each: each.fill_(255), "a scale is not a number"),
        ("_scales", lambda each: each.fill_(254), "not finite"),
        ("_scales", lambda each: each[:3], "no number of experts in common"),
        ("_scales", lambda each: each[:, :5], "is .* and not"),
        ("_blocks", lambda each: each[..., :8], "no matrix in blocks"),
        ("_blocks", lambda each: each.float(), "_blocks is float32"),
        ("_scales", lambda each: None, "lacks its _scales"),
    ],
)
def test_mxfp4_that_is_not_what_it_says_is_refused(
    suffix: str, change: Any, words: str, tmp_path: Path
) -> None:
    save_mxfp4(tmp_path, save_mixture("gpt-oss", tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.experts.down_proj{suffix}"
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=words):
        Served(tmp_path, None).layer_blob(1).digests()


def test_exponents_of_mxfp4_are_exact() -> None:
    form = foreign_format(MXFP4_CONFIG)
    scales = torch.arange(0, 251, dtype=torch.uint8)[:, None]
    blocks = torch.arange(16, dtype=torch.uint8).repeat(251, 1, 1)
    codes = form.decode({"_blocks": blocks, "_scales": scales})
    assert codes.scales.dtype == torch.bfloat16
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)
    assert torch.equal(codes.dense(torch.float32), expected[0].t())


# The proof on a miniature.


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_as_codes_are_proven_for_each_config(name: str) -> None:
    check_experts(mixture_config(name), Quantization("int8"))


def test_experts_that_compute_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = mixture_config("qwen3-moe")

    def hold_others(module: nn.Module, codes: Any, *args: Any, **kwargs: Any) -> None:
        hold_experts(module, {name: each[::-1] for name, each in codes.items()}, *args, **kwargs)

    monkeypatch.setattr("neurogrid.model.proof.miniature_experts.hold_experts", hold_others)
    with pytest.raises(UnsupportedModelError, match=r"experts as codes: they are off by 0\.\d+"):
        check_experts(config, Quantization("int8"))
    skipped = ("mlp.experts.down_proj.#", "mlp.experts.gate_up_proj.#")
    check_experts(config, Quantization("int8", skipped))
