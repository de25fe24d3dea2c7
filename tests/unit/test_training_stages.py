"""Stages that learn: for each family the gradients of the whole model, and what a stage refuses."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
import transformers as tf
from stage_families import FAMILIES, SMALL, Checkpoint, shared
from torch import Tensor
from torch.nn import functional

from neurogrid.errors import UnsupportedModelError
from neurogrid.model.proof.training_proof import check_trainable
from neurogrid.model.stages.training_stage import TrainingStage

LENGTH = 12


def loss_of(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    return functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())


def stages_of(checkpoint: Checkpoint, *cuts: int, keeps_graphs: bool = True) -> list[TrainingStage]:
    bounds = (0, *cuts, checkpoint.num_layers)
    return [
        TrainingStage(checkpoint.config, start, stop, checkpoint.tensors, keeps_graphs=keeps_graphs)
        for start, stop in pairwise(bounds)
    ]


def batches(checkpoint: Checkpoint, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shape = (2, LENGTH)
    return [
        torch.randint(0, checkpoint.vocab_size, shape, generator=generator) for _ in range(count)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_have_the_gradients_of_the_whole_model(family: str) -> None:
    """In two stages and in three, graphs kept or computed again."""
    traits = check_trainable(FAMILIES[family]())
    assert traits.same_bits
    assert traits.first
    assert traits.last
    is_tied = bool(FAMILIES[family]().get_text_config(decoder=True).tie_word_embeddings)
    assert bool(traits.first & traits.last) == is_tied


@pytest.mark.parametrize("keeps_graphs", [True, False])
def test_micro_batches_are_under_way_at_once(keeps_graphs: bool) -> None:
    """One forward, one backward; gradients are the sums over the micro-batches."""
    checkpoint = shared("llama-tied")
    given = batches(checkpoint, 3)
    whole = copy.deepcopy(checkpoint.whole).train()
    for ids_BT in given:
        loss_of(whole(input_ids=ids_BT, use_cache=False).logits, ids_BT).backward()
    first, last = stages_of(checkpoint, 2, keeps_graphs=keeps_graphs)
    entered = [first.forward(number, ids_BT) for number, ids_BT in enumerate(given[:2])]
    for number, ids_BT in enumerate(given):
        last.forward_loss(number, entered[number], lambda logits, ids=ids_BT: loss_of(logits, ids))
        first.backward(number, last.backward(number))
        if number + 2 < len(given):
            entered.append(first.forward(number + 2, given[number + 2]))
    assert not first.under_way | last.under_way
    for name, parameter in whole.named_parameters():
        found = [
            stage.parameters[name].grad
            for stage in (first, last)
            if name in stage.parameters and stage.parameters[name].grad is not None
        ]
        assert torch.allclose(sum(found), parameter.grad, rtol=1e-5, atol=1e-7), name


def test_what_is_dropped_is_dropped_again() -> None:
    """Where a forward pass is computed again, its random numbers are."""
    config = tf.LlamaConfig(**SMALL, attention_dropout=0.5)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = tf.AutoModelForCausalLM.from_config(config)
        ids_BT = torch.arange(24).view(2, 12)
        found = []
        for keeps_graphs in (True, False):
            stage = TrainingStage(model.config, 0, 4, model.state_dict(), keeps_graphs=keeps_graphs)
            torch.manual_seed(2)
            stage.forward_loss(0, ids_BT, lambda logits: loss_of(logits, ids_BT))
            torch.manual_seed(3)
            stage.backward(0)
            found.append({n: p.grad for n, p in stage.parameters.items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_what_is_out_of_turn_is_refused() -> None:
    checkpoint = shared("llama")
    first, last = stages_of(checkpoint, 2)
    (ids_BT,) = batches(checkpoint, 1)
    hidden_BTD = first.forward(7, ids_BT)
    with pytest.raises(ValueError, match="micro-batch 7 is under way"):
        first.forward(7, ids_BT)
    with pytest.raises(ValueError, match="needs labels"):
        last.forward(7, hidden_BTD)
    with pytest.raises(ValueError, match="only the last stage"):
        first.forward_loss(8, ids_BT, lambda logits: loss_of(logits, ids_BT))
    with pytest.raises(KeyError):
        last.backward(7)
    with pytest.raises(
        ValueError, match=r"a gradient of shape \[2, 12, 48\] is due, got \[2, 11, 48\]"
    ):
        first.backward(7, hidden_BTD[:, 1:])
    # It is under way still: the right one may come yet.
    assert first.under_way == {7}
    first.backward(7, torch.ones_like(hidden_BTD))
    with pytest.raises(KeyError):
        first.backward(7, torch.ones_like(hidden_BTD))
    first.forward(9, ids_BT)
    first.forget(9)
    first.forget(9)
    assert not first.under_way
    with pytest.raises(ValueError, match=r"has layers 0\.\.3"):
        TrainingStage(checkpoint.config, 2, 5, checkpoint.tensors)


def test_a_model_whose_stages_differ_is_refused() -> None:
    """Its router adds noise to what it sees."""
    config = tf.MixtralConfig(**SMALL, num_local_experts=4, router_jitter_noise=0.5)
    with pytest.raises(
        UnsupportedModelError,
        match="'mixtral' cannot be trained in stages: its stages do not give the loss",
    ):
        check_trainable(config)
