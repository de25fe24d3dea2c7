"""Stages whose hidden states are in a subspace: what travels, and that what is learned does not depend on the cut."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from neurogrid.errors import ConfigurationError, UnsupportedModelError
from neurogrid.model.proof.miniature_split import saved_tensors
from neurogrid.model.stages.subspace import NUM_FREE_LAYERS
from neurogrid.training.runs.run_file import InnerSection
from neurogrid.training.runs.run_file.stage_sections import AdapterSection
from neurogrid.training.stages.chain_estimate import FREE_LAYERS
from neurogrid.training.stages.stage_learner import StageLearner
from neurogrid.training.stages.stage_settings import StageSettings

NUM_DIMS, HIDDEN, NUM_LAYERS = 8, 32, 5
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
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
    "positions": lambda: tf.GPT2Config(
        n_embd=HIDDEN, n_layer=NUM_LAYERS, n_head=4, vocab_size=64, n_positions=32, bos_token_id=1,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    ),
}  # fmt: skip
# Without momentum of squares, which makes of a last bit a whole step.
INNER = InnerSection(optimizer="sgd", lr=0.5, momentum=0.9, clip=0.5)
NUM_STEPS = 4


def config_of(family: str) -> tuple[Any, dict[str, Tensor]]:
    """A config, and random weights of it."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = tf.AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=torch.float32)
    return model.config, saved_tensors(model)


def batch_of(step: int) -> list[tuple[Tensor, Tensor]]:
    """Two micro-batches: ids and labels [B, T]."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, 64, (2, 2, 9), generator=generator)
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in ids]


class Chain:
    """Learners of all stages, in this process, and what travels between them.

    Attributes:
        sent: the shapes of all hidden states and gradients so far.
    """

    def __init__(self, family: str, *cuts: int, **more: Any) -> None:
        config, tensors = config_of(family)
        told: dict[str, Any] = {"inner": INNER, "total_steps": 10, "subspace": NUM_DIMS, **more}
        self.stages = [
            StageLearner(StageSettings(json.dumps(config.to_dict()), start, stop, **told), tensors)
            for start, stop in pairwise((0, *cuts, NUM_LAYERS))
        ]
        self.sent: set[tuple[int, ...]] = set()

    def compute(self, step: int) -> float:
        *others, last = self.stages
        losses = []
        batch = batch_of(step)
        num_labels = sum(labels.numel() for _, labels in batch)
        for number, (ids_BT, labels_BT) in enumerate(batch):
            hidden = ids_BT
            for stage in others:
                hidden = stage.forward(number, hidden, step=step, tokens=ids_BT)
                self.sent.add(tuple(hidden.shape))
            losses.append(
                last.forward_loss(number, hidden, labels_BT, num_labels, step=step, tokens=ids_BT)
            )
            gradient: Tensor | None = None
            for stage in reversed(self.stages):
                gradient = stage.backward(number, gradient)
                if gradient is not None:
                    self.sent.add(tuple(gradient.shape))
        first = self.stages[0]
        if first.is_tied:
            ours, theirs = first.tied_gradient(), last.tied_gradient()
            first.add_tied_gradient(theirs)
            last.add_tied_gradient(ours)
        return sum(losses)

    def step(self, step: int) -> tuple[float, float]:
        """Loss, and norm of all gradients."""
        loss = self.compute(step)
        norm = sum(stage.squared_norm() for stage in self.stages) ** 0.5
        for stage in self.stages:
            stage.apply(step, norm)
        return loss, norm

    def weights(self) -> dict[str, Tensor]:
        return {n: t.clone() for stage in self.stages for n, t in stage.weights().items()}

    def pieces(self) -> dict[str, dict[str, Tensor]]:
        return {
            title: {name: tensor.clone() for name, tensor in piece.items()}
            for stage in self.stages
            for title, piece in stage.pieces().items()
        }

    def load(self, pieces: Mapping[str, Mapping[str, Tensor]]) -> None:
        for stage in self.stages:
            stage.load_pieces({title: pieces[title] for title in stage.wanted_pieces})


def test_both_constants_are_one() -> None:
    assert FREE_LAYERS == NUM_FREE_LAYERS


@pytest.mark.parametrize("cuts", [(3,), (1, 2), (1, 3)])
@pytest.mark.parametrize("family", CONFIGS)
def test_stages_learn_what_the_unsplit_model_in_the_subspace_learns(
    family: str, cuts: tuple[int, ...]
) -> None:
    whole, chain = Chain(family), Chain(family, *cuts)
    for step in range(NUM_STEPS):
        expected_loss, expected_norm = whole.step(step)
        loss, norm = chain.step(step)
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    assert chain.sent == {(2, 8, NUM_DIMS)}
    assert not whole.sent
    expected = whole.weights()
    for name, tensor in chain.weights().items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", ["untied", "positions"])
def test_nothing_is_lost_on_the_way_however_many_steps(family: str) -> None:
    """Adam, which leaves the subspace at each step but for the projection."""
    inner = InnerSection(lr=1e-2, weight_decay=0.1)
    chain = Chain(family, 3, inner=inner)
    for step in range(30):
        chain.step(step)
    first = chain.stages[0]
    (ids_BT, _), _ = batch_of(99)
    sent_BTK = first.evaluate(ids_BT)
    assert isinstance(sent_BTK, Tensor)
    subspace, first._stage._subspace = first._stage._subspace, None
    hidden_BTD = first.evaluate(ids_BT)
    first._stage._subspace = subspace
    assert isinstance(hidden_BTD, Tensor)
    assert subspace is not None
    came_BTD = subspace.expand(sent_BTK, ids_BT)
    assert float((came_BTD - hidden_BTD).norm() / hidden_BTD.norm()) < 1e-5
    assert sent_BTK.numel() * HIDDEN == hidden_BTD.numel() * NUM_DIMS


def test_copies_of_what_is_tied_stay_the_same() -> None:
    chain = Chain("tied", 1, 3)
    for step in range(3):
        chain.step(step)
    name = "model.embed_tokens.weight"
    first, _, last = chain.stages
    assert torch.equal(first._parameters[name], last._parameters[name])


@pytest.mark.parametrize("more", [{"recompute": True}, {}])
def test_a_step_that_is_done_again_has_the_same_bits(more: dict[str, Any]) -> None:
    """From its pieces, too: they are not projected once more."""
    undisturbed, again = Chain("tied", 3), Chain("tied", 3, **more)
    undisturbed.step(0)
    again.load(undisturbed.pieces())
    again.compute(1)
    for stage in again.stages:
        stage.forget_all()
    assert again.step(1) == undisturbed.step(1)
    weights = undisturbed.weights()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.weights().items())


def test_evaluating_gives_the_loss() -> None:
    chain = Chain("untied", 2)
    first, last = chain.stages
    (ids_BT, labels_BT), *_ = batch_of(0)
    hidden = first.evaluate(ids_BT, tokens=ids_BT)
    assert isinstance(hidden, Tensor)
    total = last.evaluate(hidden, labels_BT, ids_BT)
    sent = first.forward(0, ids_BT, step=0)
    share = last.forward_loss(0, sent, labels_BT, labels_BT.numel(), step=0, tokens=ids_BT)
    assert total == pytest.approx(share * labels_BT.numel(), rel=1e-6)


def test_products_in_bfloat16_keep_what_they_can() -> None:
    exact = Chain("untied", 3)
    narrow = Chain("untied", 3, inner=replace(INNER, precision="bfloat16"))
    for step in range(3):
        assert narrow.step(step)[0] == pytest.approx(exact.step(step)[0], abs=0.05)


def test_what_is_no_hidden_state_of_the_subspace_is_refused() -> None:
    last = Chain("untied", 3).stages[1]
    (ids_BT, labels_BT), *_ = batch_of(0)
    hidden_BTK = torch.zeros(2, 8, NUM_DIMS)
    for given, tokens, words in (
        (torch.zeros(2, 8, HIDDEN), ids_BT, r"\[B, T, 8\] is due"),
        (hidden_BTK, None, "says nothing without its token ids"),
        (hidden_BTK, ids_BT[:, 1:], r"token ids \[2, 8\] are due, got \[2, 7\]"),
        (hidden_BTK, ids_BT + 64, "token ids are from 0 to 63"),
        (hidden_BTK, ids_BT.int(), "int64 are due"),
    ):
        with pytest.raises(ValueError, match=words):
            last.forward_loss(0, given, labels_BT, 16, step=0, tokens=tokens)
        assert not last.under_way


def test_what_cannot_be_in_a_subspace_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="no cut lies behind layer 2, and this one is before layer 4"
    ):
        Chain("untied", 4)
    with pytest.raises(ConfigurationError, match="from 1 to 31 are wanted"):
        Chain("untied", 2, subspace=32)
    with pytest.raises(ConfigurationError, match="subspace is a whole number from 0 to 0"):
        StageSettings("{}", 0, 1, adapter=AdapterSection(r=4), subspace=8)
    config = tf.GraniteConfig(**SIZES, embedding_multiplier=12.0)
    with torch.random.fork_rng():
        tensors = saved_tensors(tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    with pytest.raises(UnsupportedModelError, match="not the embedding of tokens as it is"):
        StageLearner(StageSettings(json.dumps(config.to_dict()), 0, 2, subspace=8), tensors)
