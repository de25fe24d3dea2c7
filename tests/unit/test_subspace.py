"""Subspaces: what is drawn by the seed, what travels, which parameters are projected, and which families cannot."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_families import FAMILIES, SMALL

from neurogrid.errors import UnsupportedModelError
from neurogrid.model.proof.subspace_proof import check_subspace, subspace_of
from neurogrid.model.stages.subspace import (
    Subspace,
    SubspaceTraits,
    Writer,
    project_gradients,
    project_weights,
)
from neurogrid.model.stages.training_stage import TrainingStage
from tests.unit.vectors import in_turn


def drawn(num_dims: int = 12, size: int = 48, seed: int = 5) -> Subspace:
    return Subspace(num_dims, size, seed=seed, scale=0.02)


@in_turn("stage_subspaces")
def test_what_is_drawn_is_that_of_the_vector(name: str, case: Any) -> None:
    sizes = case["num_dims"], case["hidden_size"]
    subspace = Subspace(*sizes, seed=int(case["seed"]), scale=math.sqrt(1 / 3))
    assert subspace.digest(case["vocab_size"]).hex() == case["digest"]
    rows_VD = subspace.rows(torch.arange(case["vocab_size"])) * float(1 << 24)
    assert rows_VD.flatten()[-4:].tolist() == pytest.approx(case["table_numbers"], rel=1e-6)
    first = case["basis_numbers"][0]
    # Of a QR whose R has no negative diagonal, the first column of Q is that of the matrix, of length 1.
    assert float(subspace.basis_DK[0, 0]) * first > 0


@settings(deadline=None, max_examples=20)
@given(size=st.integers(2, 80), seed=st.integers(0, 2**63 - 1), data=st.data())
def test_the_basis_is_orthonormal(size: int, seed: int, data: st.DataObject) -> None:
    num_dims = data.draw(st.integers(1, size - 1))
    basis_DK = Subspace(num_dims, size, seed=seed, scale=1).basis_DK
    assert basis_DK.shape == (size, num_dims)
    torch.testing.assert_close(basis_DK.T @ basis_DK, torch.eye(num_dims), rtol=0, atol=1e-6)


def test_the_table_is_noise() -> None:
    rows_VD = Subspace(8, 64, seed=1, scale=0.02).rows(torch.arange(4096))
    assert float(rows_VD.std()) == pytest.approx(0.02, rel=0.01)
    assert abs(float(rows_VD.mean())) < 1e-4
    columns = torch.corrcoef(rows_VD.T) - torch.eye(64)
    assert float(columns.abs().max()) < 0.1
    assert len(rows_VD.unique()) > 0.98 * rows_VD.numel()
    ids = torch.tensor([[7, 7], [9, 4095]])
    assert torch.equal(Subspace(8, 64, seed=1, scale=0.02).rows(ids), rows_VD[ids])


def test_what_lies_in_the_subspace_comes_back() -> None:
    subspace = drawn()
    ids_BT = torch.randint(0, 96, (2, 7), generator=torch.Generator().manual_seed(0))
    sent_BTK = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(1))
    hidden_BTD = subspace.expand(sent_BTK, ids_BT)
    assert hidden_BTD.shape == (2, 7, 48)
    again_BTK = subspace.compress(hidden_BTD, ids_BT)
    torch.testing.assert_close(again_BTK, sent_BTK, rtol=0, atol=1e-5)
    assert subspace.outside(hidden_BTD, ids_BT) < 1e-6
    assert subspace.outside(torch.randn(2, 7, 48), ids_BT) > 0.5


@settings(deadline=None, max_examples=30)
@given(shape=st.lists(st.integers(1, 4), max_size=3), dim=st.integers(0, 3), seed=st.integers(0, 9))
def test_a_tensor_is_projected_by_any_of_its_dimensions(
    shape: list[int], dim: int, seed: int
) -> None:
    subspace, dim = drawn(), min(dim, len(shape))
    shape = [*shape[:dim], 48, *shape[dim:]]
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    wanted = (tensor.movedim(dim, -1) @ (subspace.basis_DK @ subspace.basis_DK.T)).movedim(-1, dim)
    for given_tensor in (tensor.clone(), tensor.movedim(0, -1).contiguous().movedim(-1, 0)):
        subspace.project(given_tensor, dim)
        torch.testing.assert_close(given_tensor, wanted, rtol=0, atol=1e-5)


def test_large_tensors_are_projected_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    subspace = drawn()
    embedding_VD = torch.randn(96, 48, generator=torch.Generator().manual_seed(3))
    pieces = embedding_VD.clone()
    subspace.project_embedding(embedding_VD)
    digest, ids_BT = subspace.digest(96), torch.arange(40).view(4, 10)
    rows_BTD = subspace.rows(ids_BT)
    monkeypatch.setattr("neurogrid.model.stages.subspace._MAX_ELEMENTS", 100)
    subspace.project_embedding(pieces)
    torch.testing.assert_close(pieces, embedding_VD, rtol=0, atol=1e-6)
    assert subspace.digest(96) == digest
    assert torch.equal(subspace.rows(ids_BT), rows_BTD)
    ids_T = torch.arange(96)
    assert subspace.outside(embedding_VD[None], ids_T[None]) < 1e-6


def test_the_last_layers_and_what_is_not_named_stay_as_they_are() -> None:
    subspace = drawn()
    writer = "model.layers.{}.mlp.down_proj.weight"
    names = ["model.embed_tokens.weight", "lm_head.weight", *(writer.format(n) for n in range(4))]
    generator = torch.Generator().manual_seed(2)
    parameters = {
        name: torch.nn.Parameter(torch.randn(48, 48, generator=generator)) for name in names
    }
    before = {name: each.detach().clone() for name, each in parameters.items()}
    for each in parameters.values():
        each.grad = torch.randn(48, 48, generator=generator)
    parameters[writer.format(1)].grad = None
    gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
    traits = SubspaceTraits(names[0], (Writer(writer.format("#"), 0),))
    project_weights(subspace, traits, parameters, 4)
    project_gradients(subspace, traits, parameters, 4)
    changed = {name for name, each in parameters.items() if not torch.equal(each, before[name])}
    assert changed == {names[0], writer.format(0), writer.format(1)}
    changed = {n for n, g in gradients.items() if not torch.equal(parameters[n].grad, g)}
    assert changed == {names[0], writer.format(0)}


WRITERS = {
    "llama": {("mlp.down_proj.weight", 0), ("self_attn.o_proj.weight", 0)},
    "mixtral": {("mlp.experts.down_proj", 1), ("self_attn.o_proj.weight", 0)},
    "deepseek-v3": {
        ("mlp.down_proj.weight", 0),
        ("mlp.experts.down_proj", 1),
        ("mlp.shared_experts.down_proj.weight", 0),
        ("self_attn.o_proj.weight", 0),
    },
    "lfm2": {
        ("conv.out_proj.weight", 0),
        ("feed_forward.w2.weight", 0),
        ("self_attn.out_proj.weight", 0),
    },
    "gpt-oss": {
        ("mlp.experts.down_proj", 2),
        ("mlp.experts.down_proj_bias", 1),
        ("self_attn.o_proj.weight", 0),
        ("self_attn.o_proj.bias", 0),
    },
    "gpt2": {
        ("attn.c_proj.weight", 1),
        ("attn.c_proj.bias", 0),
        ("mlp.c_proj.weight", 1),
        ("mlp.c_proj.bias", 0),
        ("transformer.wpe.weight", 1),
    },
    "jamba": {
        ("feed_forward.down_proj.weight", 0),
        ("feed_forward.experts.down_proj", 1),
        ("mamba.out_proj.weight", 0),
        ("self_attn.o_proj.weight", 0),
    },
}
REFUSED = {
    "gemma2": "not the embedding of tokens as it is",
    "gemma3": "not the embedding of tokens as it is",
    "granite": "not the embedding of tokens as it is",
    "bloom": "not the embedding of tokens as it is",
    "olmo2": "layer 0 writes what no projection of its matrices keeps there",
    "opt": "embeds tokens in 32 dimensions, and has hidden states of 48",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_stay_in_the_subspace_or_the_model_is_refused(family: str) -> None:
    """In the proof: after three steps at most 1e-4 is outside, and gradients in stages are the unsplit model's."""
    if family in REFUSED:
        with pytest.raises(UnsupportedModelError, match="hidden states of model type") as refused:
            check_subspace(FAMILIES[family]())
        assert REFUSED[family] in str(refused.value)
        return
    traits = check_subspace(FAMILIES[family]())
    found = {(writer.pattern.rpartition("#.")[2], writer.dim) for writer in traits.writers}
    assert found == WRITERS.get(family, found)
    assert traits.embedding.endswith(
        ("embed_tokens.weight", "wte.weight", "embed_in.weight", "embeddings.weight")
    )


def test_a_model_of_two_layers_cannot_be_cut() -> None:
    config = tf.LlamaConfig(**{**SMALL, "num_hidden_layers": 2})
    with pytest.raises(UnsupportedModelError, match="its last 2 layers write anything"):
        check_subspace(config)


def test_a_hidden_state_needs_its_tokens() -> None:
    config = tf.LlamaConfig(**SMALL)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        tensors = tf.AutoModelForCausalLM.from_config(config).state_dict()
    subspace = subspace_of(config, 12, seed=0)
    first, last = (
        TrainingStage(config, start, stop, tensors, subspace=subspace)
        for start, stop in ((0, 2), (2, 4))
    )
    ids_BT = torch.arange(14).view(2, 7)
    sent_BTK = first.forward(0, ids_BT)
    assert sent_BTK.shape == (2, 7, 12)
    with pytest.raises(ValueError, match="says nothing without its token ids"):
        last.forward_loss(0, sent_BTK, torch.sum)
    with pytest.raises(ValueError, match="says nothing without its token ids"):
        last.infer(sent_BTK)
    last.forward_loss(0, sent_BTK, torch.sum, ids_BT)
    gradient_BTK = last.backward(0)
    assert gradient_BTK is not None
    assert gradient_BTK.shape == (2, 7, 12)
    first.backward(0, gradient_BTK)


@pytest.mark.parametrize("num_dims", [0, 48, 49])
def test_a_subspace_is_smaller_than_the_whole(num_dims: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 47"):
        drawn(num_dims)
