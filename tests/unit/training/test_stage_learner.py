"""Learners of stages: together they are one learner of the whole model, wherever it is cut."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given as draw
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from neurogrid.errors import CheckpointError, ConfigurationError
from neurogrid.model.proof.miniature_split import saved_tensors
from neurogrid.training.runs.inner_optimizer import make_optimizer, rates_of
from neurogrid.training.runs.run_file import InnerSection
from neurogrid.training.runs.run_file.stage_sections import AdapterSection
from neurogrid.training.stages import stage_learner
from neurogrid.training.stages.stage_learner import StageLearner
from neurogrid.training.stages.stage_settings import StageSettings
from tests.simulated_device import FIRST, SECOND, seeds, simulated_devices

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS = {
    "untied": lambda: tf.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": lambda: tf.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mixture": lambda: tf.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8),
    # Layers that differ.
    "hybrid": lambda: tf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"] * 2),
    "dropout": lambda: tf.GPT2Config(
        n_embd=32, n_layer=4, n_head=4, vocab_size=64, n_positions=32, bos_token_id=1
    ),
}
INNER = InnerSection(lr=1e-2, schedule="cosine", warmup=2, clip=0.5)
NUM_STEPS, NUM_MICRO_BATCHES = 5, 3


@dataclass(frozen=True)
class Batch:
    """Micro-batches of a step: ids and labels [B, T] each, of unequal numbers of labels."""

    pieces: list[tuple[Tensor, Tensor]]

    @property
    def num_labels(self) -> int:
        return sum(int((labels != -100).sum()) for _, labels in self.pieces)


@functools.cache
def model_of(family: str) -> Any:
    """A model whose weights are not so small that nothing depends on them. Not to be changed."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = tf.AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


@functools.cache
def tensors_of(family: str) -> dict[str, Tensor]:
    return saved_tensors(model_of(family))


def batch_of(step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + step)
    pieces = []
    for number in range(NUM_MICRO_BATCHES):
        ids_BT = torch.randint(0, 64, (2, 9), generator=generator)
        labels_BT = ids_BT[:, 1:].clone()
        labels_BT[0, : 2 * number] = -100
        pieces.append((ids_BT[:, :-1].contiguous(), labels_BT))
    return Batch(pieces)


def settings_of(family: str, start: int = 0, stop: int = 4, **more: Any) -> StageSettings:
    config = json.dumps(model_of(family).config.to_dict())
    return StageSettings(config, start, stop, **{"inner": INNER, "total_steps": 10, **more})


class Chain:
    """Learners of all stages, in this process."""

    def __init__(self, family: str, *cuts: int, **more: Any) -> None:
        tensors = tensors_of(family)
        self.stages = [
            StageLearner(settings_of(family, start, stop, **more), tensors)
            for start, stop in pairwise((0, *cuts, 4))
        ]

    def compute(self, step: int, batch: Batch | None = None) -> float:
        """The loss of a step; gradients lie at the stages. Two micro-batches are under way."""
        batch = batch or batch_of(step)
        *others, last = self.stages
        losses = []
        waiting: list[int] = []
        for number, (ids_BT, labels_BT) in enumerate(batch.pieces):
            hidden = ids_BT
            for stage in others:
                hidden = stage.forward(number, hidden, step=step)
            losses.append(last.forward_loss(number, hidden, labels_BT, batch.num_labels, step=step))
            waiting.append(number)
            if len(waiting) > 1:
                self.go_back(waiting.pop(0))
        for number in waiting:
            self.go_back(number)
        return sum(losses)

    def go_back(self, number: int) -> None:
        gradient = None
        for stage in reversed(self.stages):
            gradient = stage.backward(number, gradient)
        assert gradient is None

    def exchange(self) -> None:
        first, last = self.stages[0], self.stages[-1]
        assert first.is_tied == last.is_tied
        if first.is_tied:
            ours, theirs = first.tied_gradient(), last.tied_gradient()
            first.add_tied_gradient(theirs)
            last.add_tied_gradient(ours)

    def apply(self, step: int, **more: float) -> float:
        """The norm of the step."""
        self.exchange()
        norm = sum(stage.squared_norm() for stage in self.stages) ** 0.5
        for stage in self.stages:
            stage.apply(step, norm, **more)
        return norm

    def step(self, step: int) -> float:
        loss = self.compute(step)
        self.apply(step)
        return loss

    def weights(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for stage in self.stages:
            own = stage.weights()
            assert not own.keys() & found.keys()
            found |= {name: tensor.clone() for name, tensor in own.items()}
        return found

    def pieces(self) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        for stage in self.stages:
            for title, piece in stage.pieces().items():
                assert title not in found
                found[title] = {name: tensor.clone() for name, tensor in piece.items()}
        return found

    def load(self, pieces: Mapping[str, Mapping[str, Tensor]]) -> None:
        for stage in self.stages:
            stage.load_pieces({title: pieces[title] for title in stage.wanted_pieces})


@functools.cache
def plain_loop(
    family: str, inner: InnerSection
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and weights of the whole model after all steps, by torch alone."""
    model = copy.deepcopy(model_of(family)).train()
    parameters = list(model.parameters())
    optimizer = make_optimizer(inner, parameters)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        batch = batch_of(step)
        total = 0.0
        for ids_BT, labels_BT in batch.pieces:
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
            loss = (
                functional.cross_entropy(
                    logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum"
                )
                / batch.num_labels
            )
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, inner.clip or math.inf)))
        for group in optimizer.param_groups:
            group["lr"] = rates_of(inner, 10)(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses, norms, saved_tensors(model)


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def same_pieces(
    one: Mapping[str, Mapping[str, Tensor]], other: Mapping[str, Mapping[str, Tensor]]
) -> bool:
    return one.keys() == other.keys() and all(same(one[title], other[title]) for title in one)


@pytest.mark.parametrize("cuts", [(), (2,), (1, 3)])
@pytest.mark.parametrize("family", ["untied", "tied", "mixture"])
def test_stages_learn_what_the_whole_model_learns(family: str, cuts: Sequence[int]) -> None:
    """Losses have the same bits until the first clipping: norms are summed up in another order, and so round."""
    losses, norms, expected = plain_loop(family, INNER)
    assert max(norms) > INNER.clip
    chain = Chain(family, *cuts)
    found = []
    for step in range(NUM_STEPS):
        found.append(chain.compute(step))
        assert chain.apply(step) == pytest.approx(norms[step], rel=1e-6)
    assert found[0] == losses[0]
    assert found == pytest.approx(losses, abs=1e-6)
    weights = chain.weights()
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        # AdamW divides by gradients, some of which are near zero: last bits of a norm are some thousandths of a step.
        assert torch.allclose(tensor, expected[name], rtol=0, atol=5e-3 * INNER.lr), name
        assert not torch.equal(tensor, tensors_of(family)[name]), name


@pytest.mark.parametrize("family", ["untied", "mixture"])
def test_what_is_not_clipped_has_the_bits_of_the_whole_model(family: str) -> None:
    """Of tied embeddings it has not: their gradients are added up in another order."""
    inner = replace(INNER, clip=0.0)
    losses, _, expected = plain_loop(family, inner)
    chain = Chain(family, 1, 3, inner=inner)
    assert [chain.step(step) for step in range(NUM_STEPS)] == losses
    assert same(chain.weights(), expected)


@pytest.mark.parametrize("clip", [0.0, 0.25])
def test_a_rate_and_a_clip_that_are_told_are_those_of_a_run_file_that_has_them(clip: float) -> None:
    other = replace(INNER, lr=3e-3, schedule="linear", clip=clip)
    told, has = Chain("tied", 2), Chain("tied", 2, inner=other)
    for step in range(NUM_STEPS):
        assert told.compute(step) == has.compute(step)
        norm = told.apply(step, rate=rates_of(other, 10)(step), clip=clip)
        assert has.apply(step) == norm > clip
    assert same_pieces(told.pieces(), has.pieces())
    assert not same(told.weights(), Chain("tied", 2).weights())


@pytest.mark.parametrize("family", ["tied", "dropout"])
def test_recomputing_gives_the_same_bits(family: str) -> None:
    chains = [Chain(family, 2), Chain(family, 2, recompute=True)]
    losses = [[chain.step(step) for step in range(2)] for chain in chains]
    assert losses[0] == losses[1]
    assert same(chains[0].weights(), chains[1].weights())


def test_copies_of_what_is_tied_stay_the_same() -> None:
    chain = Chain("tied", 1, 3)
    for step in range(3):
        chain.step(step)
    first, _, last = chain.stages
    name = "model.embed_tokens.weight"
    assert name in first.names
    assert name in last.names
    assert torch.equal(first._parameters[name], last._parameters[name])
    assert name not in last.weights()
    assert last.wanted_pieces == {"first", "layer.3", "last"}
    assert not Chain("tied").stages[0].is_tied
    assert not Chain("untied", 2).stages[0].is_tied


@pytest.mark.parametrize("family", ["tied", "dropout"])
def test_a_step_that_is_done_again_has_the_same_bits(family: str) -> None:
    """It was left with a micro-batch under way, and gradients of others."""
    undisturbed, chain = Chain(family, 2), Chain(family, 2)
    for each in (undisturbed, chain):
        each.step(0)
    expected = undisturbed.step(1)
    chain.compute(1)
    first, last = chain.stages
    last.add_tied_gradient(first.tied_gradient())
    hidden_BTD = first.forward(7, batch_of(1).pieces[0][0], step=1)
    last.forward_loss(7, hidden_BTD, *batch_of(1).pieces[0][1:], 10, step=1)
    torch.manual_seed(99)
    for stage in chain.stages:
        stage.forget_all()
        assert not stage.under_way
        assert all(parameter.grad is None for parameter in stage._parameters.values())
    assert chain.step(1) == expected
    assert same(chain.weights(), undisturbed.weights())


def test_what_is_dropped_depends_on_step_and_micro_batch() -> None:
    first = Chain("dropout", 2).stages[0]
    ids_BT = batch_of(0).pieces[0][0]

    def computed(number: int, step: int) -> Tensor:
        hidden_BTD = first.forward(number, ids_BT, step=step)
        first.forget_all()
        return hidden_BTD

    once = computed(0, 0)
    assert torch.equal(computed(0, 0), once)
    assert not torch.equal(computed(1, 0), once)
    assert not torch.equal(computed(0, 1), once)
    others = Chain("dropout", 2, seed=1).stages[0]
    assert not torch.equal(others.forward(0, ids_BT, step=0), once)


def test_what_is_dropped_on_the_second_accelerator_depends_on_its_own_seed() -> None:
    settings, tensors = settings_of("dropout", 0, 2, device=str(SECOND)), tensors_of("dropout")
    seeds().clear()
    with simulated_devices():
        learner = StageLearner(settings, tensors)
        learner.forward(0, batch_of(0).pieces[0][0], step=0)
        assert torch.accelerator.current_device_index() == FIRST.index
    assert seeds() == {SECOND.index: torch.default_generator.initial_seed()}


@pytest.mark.parametrize("family", ["untied", "tied", "mixture", "dropout"])
def test_pieces_go_on_with_the_same_bits(family: str) -> None:
    """In the same cut; in another one the same pieces come back, and with them nearly the same weights."""
    undisturbed = Chain(family, 1, 3)
    for step in range(2):
        undisturbed.step(step)
    pieces = undisturbed.pieces()
    assert pieces.keys() == {"first", *(f"layer.{n}" for n in range(4)), "last"}
    again, elsewhere, whole = Chain(family, 1, 3), Chain(family, 2), Chain(family)
    again.step(0)
    again.compute(1)
    for chain in (again, elsewhere, whole):
        chain.load(pieces)
        assert same_pieces(chain.pieces(), pieces)
    loss = undisturbed.step(2)
    assert again.step(2) == loss
    assert same_pieces(again.pieces(), undisturbed.pieces())
    if family == "dropout":
        return  # what is dropped depends on the cut
    for chain in (elsewhere, whole):
        assert chain.step(2) == loss
        for name, tensor in chain.weights().items():
            assert torch.allclose(tensor, undisturbed.weights()[name], rtol=0, atol=1e-6), name


def test_momentum_of_sgd_is_in_pieces() -> None:
    inner = InnerSection(optimizer="sgd", lr=0.1, momentum=0.9, clip=0)
    undisturbed, again = (Chain("untied", 2, inner=inner) for _ in range(2))
    again.load(undisturbed.pieces())  # before its first step there is none
    undisturbed.step(0)
    pieces = undisturbed.pieces()
    assert "momentum_buffer/model.norm.weight" in pieces["last"]
    undisturbed.step(1)
    again.load(pieces)
    again.step(1)
    assert same(again.weights(), undisturbed.weights())
    with pytest.raises(CheckpointError, match="belongs to another model or optimiser"):
        Chain("untied", 2).load(pieces)


def test_pieces_that_are_none() -> None:
    chain = Chain("tied", 2)
    chain.step(0)
    pieces = chain.pieces()
    name = "model.layers.0.mlp.up_proj.weight"
    before = chain.weights()

    def changed(title: str, **changes: Tensor | None) -> dict[str, dict[str, Tensor]]:
        piece = {**pieces[title], **changes}
        return {**pieces, title: {n: t for n, t in piece.items() if t is not None}}

    for given, words in (
        ({t: p for t, p in pieces.items() if t != "layer.1"}, "lacks its piece 'layer.1'"),
        (changed("layer.0", **{name: None}), f"lacks {name}"),
        (changed("layer.0", **{f"exp_avg/{name}": None}), "lacks a part of what belongs to"),
        (changed("layer.0", **{name: torch.zeros(3)}), r"float32 \[3\], and the model has"),
        (changed("layer.0", **{name: pieces["layer.0"][name].half()}), "is torch.float16"),
        (changed("layer.0", other=torch.zeros(1)), "has 'other'"),
        (changed("first", **{"step/model.embed_tokens.weight": torch.zeros(2)}), r"\[2\]"),
    ):
        with pytest.raises(CheckpointError, match=words):
            chain.stages[0].load_pieces(given)
    assert same(chain.weights(), before)


@pytest.mark.parametrize("family", ["tied", "dropout"])
def test_evaluating_leaves_all_as_it_was(family: str) -> None:
    chain, undisturbed = Chain(family, 2, recompute=True), Chain(family, 2, recompute=True)
    first, last = chain.stages
    batch = batch_of(0)
    (ids_BT, labels_BT), *_ = batch.pieces
    hidden_BTD = first.forward(0, ids_BT, step=0)
    share = last.forward_loss(0, hidden_BTD, labels_BT, batch.num_labels, step=0)
    entered = first.evaluate(ids_BT)
    assert isinstance(entered, Tensor)
    total = last.evaluate(entered, labels_BT)
    model = model_of(family).eval()
    with torch.no_grad():
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    expected = functional.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="sum"
    )
    assert total == float(expected)
    if family == "tied":  # nothing is dropped
        assert share == pytest.approx(total / batch.num_labels, rel=1e-6)
    chain.go_back(0)
    only = replace(batch, pieces=batch.pieces[:1])
    hidden_BTD = undisturbed.stages[0].forward(0, only.pieces[0][0], step=0)
    undisturbed.stages[1].forward_loss(0, hidden_BTD, labels_BT, batch.num_labels, step=0)
    undisturbed.go_back(0)
    assert chain.apply(0) == undisturbed.apply(0)
    assert same(chain.weights(), undisturbed.weights())


def test_products_in_bfloat16_beside_masters_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are those of the whole model under autocast."""
    monkeypatch.setattr(stage_learner, "has_narrow_products", lambda device: True)
    inner = replace(INNER, precision="bfloat16")
    chain = Chain("untied", 2, inner=inner)
    model = copy.deepcopy(model_of("untied")).train()
    batch = batch_of(0)
    loss = chain.compute(0)
    expected = 0.0
    for ids_BT, labels_BT in batch.pieces:
        with torch.autocast("cpu", torch.bfloat16):
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
            share = functional.cross_entropy(
                logits_BTV.float().flatten(0, 1), labels_BT.flatten(), reduction="sum"
            )
        (share / batch.num_labels).backward()
        expected += float((share / batch.num_labels).detach())
    assert loss == expected
    assert loss != Chain("untied", 2).compute(0)
    for stage in chain.stages:
        for name, parameter in stage._parameters.items():
            assert parameter.dtype == torch.float32
            assert torch.equal(parameter.grad, dict(model.named_parameters())[name].grad), name


def test_products_are_in_float32_where_the_device_has_no_narrower_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stage_learner, "has_narrow_products", lambda device: False)
    chain = Chain("untied", 2, inner=replace(INNER, precision="bfloat16"))
    assert chain.compute(0) == Chain("untied", 2).compute(0)


def test_running_out_of_memory_is_the_callers() -> None:
    """What a backward pass leaves behind where it fails in the middle."""
    undisturbed, chain = Chain("untied", 2), Chain("untied", 2)
    expected = undisturbed.step(0)
    first, last = chain.stages
    ids_BT, labels_BT = batch_of(0).pieces[0]

    def fail(_: Tensor) -> None:
        raise torch.OutOfMemoryError("out of memory")

    hook = last._parameters["model.layers.2.self_attn.q_proj.weight"].register_hook(fail)
    last.forward_loss(0, first.forward(0, ids_BT, step=0), labels_BT, 10, step=0)
    with pytest.raises(torch.OutOfMemoryError):
        last.backward(0)
    hook.remove()
    assert last.squared_norm() > 0
    for stage in chain.stages:
        stage.forget_all()
        assert stage.squared_norm() == 0
    assert chain.step(0) == expected
    assert same(chain.weights(), undisturbed.weights())


def test_what_is_not_finite_is_told_and_not_learned() -> None:
    chain = Chain("untied", 2)
    before = chain.weights()
    chain.compute(0)
    first = chain.stages[0]
    first._parameters["model.layers.0.mlp.up_proj.weight"].grad[0, 0] = float("nan")
    norm = first.squared_norm()
    assert norm != norm
    with pytest.raises(ValueError, match="nothing is learned from gradients whose norm is nan"):
        first.apply(0, norm)
    for stage in chain.stages:
        stage.drop()
        assert stage.squared_norm() == 0
    assert same(chain.weights(), before)


def test_what_is_out_of_turn_is_refused() -> None:
    first, last = Chain("tied", 2).stages
    (middle,) = Chain("tied", 1, 3).stages[1:2]
    ids_BT, labels_BT = batch_of(0).pieces[0]
    hidden_BTD = torch.zeros(2, 8, 32)
    with pytest.raises(ValueError, match="other stage's gradient of what is tied is missing"):
        first.squared_norm()
    with pytest.raises(ValueError, match="other stage's gradient of what is tied is missing"):
        last.apply(0, 1.0)
    with pytest.raises(ValueError, match="nothing in this stage is tied"):
        middle.tied_gradient()
    with pytest.raises(ValueError, match=r"torch.float32 \[2048\] is due, got torch.float32 \[7\]"):
        first.add_tied_gradient(torch.zeros(7))
    first.add_tied_gradient(torch.zeros(2048))
    with pytest.raises(ValueError, match="whole already"):
        first.add_tied_gradient(torch.zeros(2048))
    middle.forward(3, hidden_BTD, step=0)
    with pytest.raises(ValueError, match="micro-batch 3 is under way"):
        middle.apply(0, 1.0)
    for given, words in (
        (ids_BT.int(), "int64 are due, got torch.int32"),
        (ids_BT + 60, "token ids are from 0 to 63"),
        (ids_BT - 60, "token ids are from 0 to 63"),
        (hidden_BTD, "token ids"),
        (ids_BT[:0], "are due"),
    ):
        with pytest.raises(ValueError, match=words):
            first.forward(0, given, step=0)
    for given in (ids_BT, hidden_BTD[..., 1:], hidden_BTD.int()):
        with pytest.raises(ValueError, match=r"a hidden state \[B, T, 32\] is due"):
            middle.forward(0, given, step=0)
    for labels, words in (
        (labels_BT[:, 1:], r"labels \[2, 8\] are due"),
        (labels_BT + 64, "labels are from 0 to 63"),
        (labels_BT - 200, "labels are from 0 to 63"),
    ):
        with pytest.raises(ValueError, match=words):
            last.forward_loss(0, hidden_BTD, labels, 10, step=0)
    with pytest.raises(ValueError, match="labels are for the last stage"):
        last.evaluate(hidden_BTD)
    with pytest.raises(ValueError, match="labels are for the last stage"):
        first.evaluate(ids_BT, labels_BT)
    with pytest.raises(ValueError, match=r"has layers 0\.\.3"):
        StageLearner(settings_of("tied", 3, 5), tensors_of("tied"))
    with pytest.raises(ConfigurationError, match="not valid JSON"):
        StageLearner(StageSettings("{", 0, 1), {})
    with pytest.raises(CheckpointError, match="norm and head lacks lm_head"):
        StageLearner(settings_of("tied", 0, 2), {})
    with pytest.raises(CheckpointError, match=r"layer 1 lacks model\.layers\.1"):
        StageLearner(settings_of("tied", 1, 2), {})


adapters = st.builds(
    AdapterSection,
    r=st.integers(0, 64),
    alpha=st.floats(0.1, 100),
    targets=st.lists(st.sampled_from(("q_proj", "v_proj", "up_proj")), unique=True).map(tuple),
    dropout=st.floats(0, 0.9),
)


@draw(adapters, st.integers(0, 2**63 - 1), st.booleans(), st.text(min_size=1, max_size=50))
def test_settings_come_back_as_they_went(
    adapter: AdapterSection, seed: int, recompute: bool, config: str
) -> None:
    settings = StageSettings(
        config, 1, 3, INNER, adapter, seed=seed, device="cuda:1", recompute=recompute
    )
    assert StageSettings.parse(settings.text()) == settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": ""}, "config is a config.json of at most 1 MiB"),
        ({"start": 2}, "start is a whole number from 0 to 1, not '2'"),
        ({"stop": 0}, "stop is a whole number from 1"),
        ({"total_steps": 0}, "total_steps is a whole number from 1"),
        ({"seed": -1}, "seed is a whole number"),
        ({"device": 5}, "device is a device of torch"),
        ({"recompute": 1}, "recompute is true or false"),
        ({"quantization": "{}"}, "quantization is JSON of at most 1 MiB, with an adapter"),
    ],
)
def test_what_a_stage_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{words}"):
        replace(StageSettings("{}", 0, 2), **changes)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"inner": 5}', StageSettings("{}", 0, 2).text()[:-1] + ', "x": 1}']
)
def test_what_are_no_settings(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no settings of a stage"):
        StageSettings.parse(text)
