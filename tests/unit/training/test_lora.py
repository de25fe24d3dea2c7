"""Adapters in stages: what PEFT has of the whole model, and its files in and out."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trio
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.model.files.quantization import CodesForm, Quantization, parts_of
from neurogrid.model.files.tensor_names import layer_of, path_in_layer
from neurogrid.model.kernels import CodesLinear, quantize
from neurogrid.training.leading.chains.lead import lead_chain
from neurogrid.training.runs.inner_optimizer import make_optimizer, rates_of
from neurogrid.training.runs.run_file.stage_sections import AdapterSection
from neurogrid.training.stages import stage_learner
from neurogrid.training.stages.lora import Adapters, read_adapter, write_adapter
from neurogrid.training.stages.stage_learner import StageLearner
from tests.unit.training.test_stage_learner import (
    INNER,
    Chain,
    batch_of,
    model_of,
    same,
    same_pieces,
    settings_of,
    tensors_of,
)

peft = pytest.importorskip("peft")

ADAPTER = AdapterSection(r=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"))
ALL = replace(ADAPTER, targets=())


def started(family: str = "untied", adapter: AdapterSection = ADAPTER) -> dict[str, Tensor]:
    """An adapter whose B is not zero, so that all of its matrices have gradients."""
    with torch.random.fork_rng():
        torch.manual_seed(8)
        return {
            name: tensor + torch.randn_like(tensor) * 0.05
            for name, tensor in Chain(family, 2, adapter=adapter).weights().items()
        }


def chain_of(tensors: dict[str, Tensor], *cuts: int, family: str = "untied", **more: Any) -> Chain:
    chain = Chain(family, *cuts, **{"adapter": ADAPTER, **more})
    for stage in chain.stages:
        pieces: dict[str, dict[str, Tensor]] = {title: {} for title in stage.wanted_pieces}
        for title, piece in pieces.items():
            piece |= {
                n: t for n, t in tensors.items() if f"{title.replace('layer', 'layers')}." in n
            }
        stage.load_pieces(pieces)
    return chain


def whole_of(tensors: dict[str, Tensor], family: str = "untied", adapter: AdapterSection = ADAPTER):
    """PEFT's own model with the same matrices, and these by name."""
    config = peft.LoraConfig(
        r=adapter.r,
        lora_alpha=adapter.alpha,
        target_modules=sorted({name.split(".")[-3] for name in tensors}),
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(copy.deepcopy(model_of(family)), config).train()
    learning = {
        name.replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert learning.keys() == tensors.keys()
    with torch.no_grad():
        for name, parameter in learning.items():
            parameter.copy_(tensors[name])
    return model, learning


@pytest.mark.parametrize(
    ("family", "cuts", "adapter"),
    [
        ("untied", (2,), ADAPTER),
        ("untied", (1, 3), ALL),
        ("tied", (1, 3), ADAPTER),
        ("mixture", (2,), replace(ADAPTER, targets=("q_proj", "o_proj"))),
    ],
)
def test_stages_learn_what_peft_learns(
    family: str, cuts: tuple[int, ...], adapter: AdapterSection
) -> None:
    """Gradients of the first step have the same bits."""
    tensors = started(family, adapter)
    model, learning = whole_of(tensors, family, adapter)
    chain = chain_of(tensors, *cuts, family=family, adapter=adapter)
    optimizer = make_optimizer(INNER, learning.values())
    assert not any(stage.is_tied for stage in chain.stages)
    for step in range(3):
        batch = batch_of(step)
        expected = 0.0
        for ids_BT, labels_BT in batch.pieces:
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
            loss = functional.cross_entropy(
                logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum"
            )
            (loss / batch.num_labels).backward()
            expected += float((loss / batch.num_labels).detach())
        assert chain.compute(step) == pytest.approx(expected, abs=1e-6)
        if not step:
            for stage in chain.stages:
                for name, parameter in stage._parameters.items():
                    assert torch.equal(parameter.grad, learning[name].grad), name
        norm = float(torch.nn.utils.clip_grad_norm_(learning.values(), INNER.clip))
        assert chain.apply(step) == pytest.approx(norm, rel=1e-6)
        for group in optimizer.param_groups:
            group["lr"] = rates_of(INNER, 10)(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    weights = chain.weights()
    assert weights.keys() == learning.keys()
    for name, tensor in weights.items():
        assert torch.allclose(tensor, learning[name], rtol=0, atol=1e-6), name
        assert not torch.equal(tensor, tensors[name]), name


def test_a_new_adapter_is_the_same_wherever_the_model_is_cut() -> None:
    one, other = Chain("untied", 2, adapter=ALL), Chain("untied", 1, 3, adapter=ALL)
    assert same(one.weights(), other.weights())
    assert not same(one.weights(), Chain("untied", 2, adapter=ALL, seed=1).weights())
    matrices = one.weights()
    name = "base_model.model.model.layers.{}.self_attn.{}.lora_{}.weight"
    assert not matrices[name.format(0, "q_proj", "B")].any()
    first = matrices[name.format(0, "k_proj", "A")]
    # As PEFT has it: uniform, up to 1 / sqrt(inputs).
    assert 0.9 / 32**0.5 < float(first.abs().max()) <= 1 / 32**0.5
    for others in (name.format(1, "k_proj", "A"), name.format(0, "v_proj", "A")):
        assert not torch.equal(matrices[others], first)
    ids_BT, _ = batch_of(0).pieces[0]
    learning_nothing = Chain("untied", 2)
    for chain in (one, learning_nothing):
        hidden_BTD = chain.stages[0].evaluate(ids_BT)
        assert isinstance(hidden_BTD, Tensor)
    assert torch.equal(one.stages[0].evaluate(ids_BT), learning_nothing.stages[0].evaluate(ids_BT))


@pytest.mark.parametrize("recompute", [False, True])
def test_pieces_of_adapters_go_on_with_the_same_bits(recompute: bool) -> None:
    """What is dropped among them; and in another cut where nothing is."""
    for dropout, cuts in ((0.3, (2,)), (0.0, (1, 3))):
        adapter = replace(ADAPTER, dropout=dropout)
        undisturbed = Chain("tied", 2, adapter=adapter, recompute=recompute)
        for step in (1, 2):
            undisturbed.step(step)
        pieces = undisturbed.pieces()
        assert pieces.keys() == {f"layer.{n}" for n in range(4)}
        again = Chain("tied", *cuts, adapter=adapter, recompute=recompute)
        again.load(pieces)
        loss = undisturbed.step(3)
        if dropout:
            bare = Chain("tied", *cuts, adapter=ADAPTER)
            bare.load(pieces)
            assert bare.step(3) != loss
        assert again.step(3) == loss
        if dropout:
            assert same_pieces(again.pieces(), undisturbed.pieces())
        for name, tensor in again.weights().items():
            assert torch.allclose(tensor, undisturbed.weights()[name], rtol=0, atol=1e-6), name


def test_peft_opens_what_is_written(tmp_path: Path) -> None:
    """With the same logits; and what is read back is what was written."""
    model_of("untied").save_pretrained(tmp_path / "base")
    for adapter in (ADAPTER, ALL):
        directory = tmp_path / f"adapter-{len(adapter.targets)}"
        directory.mkdir()
        chain = chain_of(started(adapter=adapter), 2, adapter=adapter)
        write_adapter(directory, adapter, chain.weights(), str(tmp_path / "base"))
        told = json.loads((directory / "adapter_config.json").read_text())
        assert told["base_model_name_or_path"] == str(tmp_path / "base")
        assert (told["lora_alpha"], told["r"], told["task_type"]) == (8, 4, "CAUSAL_LM")
        base = copy.deepcopy(model_of("untied"))
        # A warning, as of matrices that are missing, would be an error.
        opened = peft.PeftModel.from_pretrained(base, directory).eval()
        ids_BT, _ = batch_of(3).pieces[0]
        with torch.no_grad():
            logits_BTV = opened(input_ids=ids_BT, use_cache=False).logits
            bare_BTV = model_of("untied").eval()(input_ids=ids_BT, use_cache=False).logits
        first, last = chain.stages
        found_BTV = last._stage.infer(first.evaluate(ids_BT))
        assert torch.allclose(found_BTV, logits_BTV, rtol=0, atol=1e-5)
        assert not torch.allclose(bare_BTV, logits_BTV, rtol=0, atol=1e-2)
        stored = read_adapter(directory)
        assert same(stored.tensors, chain.weights())
        assert (stored.section.r, stored.section.alpha) == (4, 8.0)
        assert set(adapter.targets) <= set(stored.section.targets)
        again = [
            StageLearner(
                settings_of("untied", start, stop, adapter=stored.section),
                {**tensors_of("untied"), **stored.tensors},
            )
            for start, stop in ((0, 1), (1, 4))
        ]
        taken = {name: t for stage in again for name, t in stage.weights().items()}
        assert same(taken, stored.tensors)


def test_without_peft_a_run_with_an_adapter_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its members would fail one after the other, and its first checkpoint."""
    monkeypatch.setattr("neurogrid.training.stages.lora.find_spec", lambda name: None)
    settings: Any = SimpleNamespace(
        run=SimpleNamespace(adapter=AdapterSection(r=8)), directory=tmp_path / "run"
    )
    nobody: Any = None
    with pytest.raises(ConfigurationError, match="needs the package peft: pip install"):
        trio.run(lead_chain, settings, nobody, nobody)
    assert not settings.directory.exists()


def test_what_peft_writes_is_read(tmp_path: Path) -> None:
    tensors = started()
    model, _ = whole_of(tensors)
    model.save_pretrained(tmp_path)
    stored = read_adapter(tmp_path)
    assert same(stored.tensors, tensors)
    assert stored.section == replace(ADAPTER, targets=tuple(sorted(ADAPTER.targets)))


@pytest.mark.parametrize("has_products", [True, False])
def test_base_weights_in_bfloat16(has_products: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are held in it, and multiplied in it where the device can; what learns is float32, the loss is near."""
    monkeypatch.setattr(stage_learner, "has_narrow_products", lambda device: has_products)
    narrow = replace(INNER, precision="bfloat16")
    chain = Chain("untied", 2, adapter=ADAPTER, inner=narrow)
    wide = Chain("untied", 2, adapter=ADAPTER)
    first = chain.stages[0]
    layer = first._stage._skeleton.layer(0)
    held = {each.dtype for each in layer.parameters() if each.ndim == 2 and not each.requires_grad}
    assert held == {torch.bfloat16}
    for step in (1, 2):
        assert chain.step(step) == pytest.approx(wide.step(step), rel=0.01)
    for name, tensor in chain.weights().items():
        assert tensor.dtype == torch.float32
        assert bool(tensor.any()), name
    computed = torch.bfloat16 if has_products else torch.float32
    assert first.forward(0, batch_of(0).pieces[0][0], step=0).dtype == computed


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_go_through_a_stage_in_which_nothing_learns(recompute: bool) -> None:
    """Layers may differ, and some have nothing of what the adapter names; a first stage of such has nothing to do."""
    adapter = replace(ADAPTER, targets=("q_proj",))
    cut, whole = (
        Chain("hybrid", *cuts, adapter=adapter, recompute=recompute) for cuts in ((1, 2, 3), ())
    )
    assert [len(stage.names) for stage in cut.stages] == [0, 2, 0, 2]
    assert cut.stages[0].pieces() == cut.stages[0].weights() == {}
    for step in (1, 2):
        assert cut.step(step) == pytest.approx(whole.step(step), abs=1e-6)
    for name, tensor in whole.weights().items():
        assert torch.allclose(cut.weights()[name], tensor, rtol=0, atol=1e-6), name


def in_codes(
    family: str, quantization: Quantization
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors with matrices of layers as parts of codes, and with what the codes are in their places."""
    parts, dense = dict(tensors_of(family)), dict(tensors_of(family))
    for name, tensor in tensors_of(family).items():
        layer_id = layer_of(name, 4)
        if layer_id is None or tensor.ndim < 2:
            continue
        form = quantization.form(
            layer_id, path_in_layer(name).removesuffix(".weight"), tensor.shape
        )
        if form is not None:
            codes = quantize(parts.pop(name), form.bits)
            parts |= {name + suffix: part for suffix, part in parts_of(codes).items()}
            dense[name] = codes.dense(torch.float32)
    assert len(parts) > len(dense)
    return parts, dense


STORED = Quantization(
    "codes",
    forms=(CodesForm(8), CodesForm(4)),
    matrices=(("mlp.up_proj", ((1, 4),)), ("self_attn.q_proj", ((0, 2), (1, 2)))),
)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("quantization", "off"),
    [(STORED, 1e-5), (Quantization("int8"), 0.03), (Quantization("int4"), 0.03)],
)
def test_codes_stay_codes_and_gradients_go_through(
    quantization: Quantization, off: float, recompute: bool
) -> None:
    """As through the matrices that they are; where activations are rounded to 8 bits, nearly so."""
    parts, dense = in_codes("untied", quantization)
    start = started()
    chains = []
    for told, tensors in ((json.dumps(quantization.record()), parts), ("", dense)):
        chain = Chain("untied", 2, adapter=ADAPTER)
        chain.stages = [
            StageLearner(
                settings_of(
                    "untied", a, b, adapter=ADAPTER, quantization=told, recompute=recompute
                ),
                tensors | {n: t.clone() for n, t in start.items()},
            )
            for a, b in ((0, 2), (2, 4))
        ]
        chains.append(chain)
    layer: Any = chains[0].stages[0]._stage._skeleton.layer(0)
    assert isinstance(layer.mlp.up_proj, CodesLinear)
    assert isinstance(layer.self_attn.q_proj.base_layer, CodesLinear)
    losses = [chain.compute(0) for chain in chains]
    assert losses[0] == pytest.approx(losses[1], rel=off)
    for one, other in zip(*(chain.stages for chain in chains), strict=True):
        for name, parameter in one._parameters.items():
            expected = other._parameters[name].grad
            assert float((parameter.grad - expected).norm()) <= off * float(expected.norm()), name
    chains[0].apply(0)
    entered = chains[0].stages[0].evaluate(batch_of(0).pieces[0][0])
    assert isinstance(entered, Tensor)
    assert not entered.requires_grad


def test_experts_in_codes_are_refused() -> None:
    record = Quantization("int8", skipped=("mlp.gate",)).record()
    settings = settings_of(
        "mixture",
        0,
        2,
        adapter=replace(ADAPTER, targets=("q_proj",)),
        quantization=json.dumps(record),
    )
    config = json.loads(settings.config) | {"moe_intermediate_size": 32}
    with pytest.raises(UnsupportedModelError, match="are experts in codes, through which no"):
        StageLearner(replace(settings, config=json.dumps(config)), tensors_of("mixture"))


def test_layers_that_there_are_not() -> None:
    with pytest.raises(ConfigurationError, match="has a linear layer 'w3'; there are down_proj, g"):
        Chain("untied", 2, adapter=replace(ADAPTER, targets=("q_proj", "w3")))
    with pytest.raises(ConfigurationError, match="the layers of the model have no linear layers"):
        Chain("dropout", 2, adapter=ALL)


def test_adapters_that_do_not_fit() -> None:
    tensors = started()
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"

    def make(**changes: Tensor | None) -> StageLearner:
        given = {n: t for n, t in {**tensors, **changes}.items() if t is not None}
        return StageLearner(
            settings_of("untied", 0, 2, adapter=ADAPTER), tensors_of("untied") | given
        )

    assert len(make().names) == 2 * 3 * 2
    with pytest.raises(CheckpointError, match=f"the adapter lacks {name}"):
        make(**{name: None})
    with pytest.raises(CheckpointError, match=r"has shape \[4, 3\], and \[4, 48\] is due"):
        make(**{name: torch.zeros(4, 3)})
    with pytest.raises(CheckpointError, match="is no matrix of the adapter as it is to be"):
        make(**{name.replace("down", "up"): torch.zeros(4, 32)})


def test_files_that_are_no_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path, ADAPTER, started(), "base")
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    told = json.loads(config.read_text())
    for changes, words in (
        ({"peft_type": "IA3"}, "is no adapter of LoRA"),
        ({"use_dora": True}, "has use_dora, and plain LoRA alone"),
        ({"layers_to_transform": 0}, "has layers_to_transform"),
        ({"bias": "all"}, "has bias"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights"),
        ({"target_modules": "all-linear"}, "target_modules are no list of names"),
        ({"r": 5000}, "r is"),
    ):
        config.write_text(json.dumps({**told, **changes}))
        with pytest.raises(CheckpointError, match=words):
            read_adapter(tmp_path)
    config.write_text(json.dumps(told))
    save_file({**load_file(weights), "model.norm.weight": torch.zeros(3)}, weights)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is no matrix"):
        read_adapter(tmp_path)
    weights.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="is no adapter of PEFT"):
        read_adapter(tmp_path)
    with pytest.raises(CheckpointError, match="is no adapter of PEFT"):
        read_adapter(tmp_path / "nowhere")


def test_weights_of_codes_are_not_made_to_put_adapters_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PEFT looks at each some twenty times."""
    layer = torch.nn.Module()
    codes = quantize(torch.ones(32, 64), 8)
    layer.proj = CodesLinear(codes, None, torch.float32, by_int8=False)
    made = []
    dense = type(layer.proj._held).dense

    def counted(held: Any, dtype: torch.dtype) -> Tensor:
        made.append(dtype)
        return dense(held, dtype)

    monkeypatch.setattr(type(layer.proj._held), "dense", counted)
    learning = Adapters(AdapterSection(r=4), 0, {})(0, "layers.0", layer)
    assert len(learning) == 2
    assert made == []
    base = layer.proj.base_layer
    assert torch.allclose(base.weight, torch.ones(32, 64), atol=1e-2)
    assert len(made) == 1
