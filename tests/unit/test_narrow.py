"""Weights in bfloat16 on a processor that has no products of it: all is computed in float32, to the same bits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from neurogrid.model.kernels import NarrowLinear
from neurogrid.model.kernels import linear as linear_module
from neurogrid.model.stages import narrow
from neurogrid.model.stages.narrow import has_narrow_products
from neurogrid.model.stages.training_stage import TrainingStage
from tests.unit.stage_families import shared
from tests.unit.test_training_stages import batches

SCALE = 0.05
# Embeddings that are the head, too; experts; norms, matrices, linear layers and embeddings of a family's own.
SEEN = ("llama-tied", "gemma3", "mixtral", "gpt2", "falcon", "opt", "llama4", "jamba", "phi3")
# They round the number that embeddings are multiplied with to the dtype of the weights.
SCALED = {"gemma3"}


class Nudge:
    """An adapter of a layer: a vector that is added to what it gives."""

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size

    def __call__(self, layer_id: int, name: str, layer: nn.Module) -> dict[str, nn.Parameter]:
        nudge = nn.Parameter(torch.full((self._hidden_size,), SCALE * (layer_id + 1)))

        def add(module: nn.Module, given: object, result: object) -> object:
            if isinstance(result, tuple):
                return (result[0] + nudge, *result[1:])
            assert isinstance(result, Tensor)
            return result + nudge

        layer.register_forward_hook(add)
        return {f"{name}.nudge": nudge}


def trained(family: str, *, is_wide: bool) -> tuple[float, list[Tensor]]:
    """The loss of a batch in two stages, and the gradients of what learns; weights are those of bfloat16."""
    checkpoint = shared(family)
    config = checkpoint.config.get_text_config(decoder=True)
    dtype = torch.bfloat16 if is_wide else torch.float32
    stages = [
        TrainingStage(
            checkpoint.config,
            start,
            stop,
            {name: tensor.bfloat16().to(dtype) for name, tensor in checkpoint.tensors.items()},
            dtype=dtype,
            adapt=Nudge(config.hidden_size),
            is_wide=is_wide,
        )
        for start, stop in pairwise((0, 2, checkpoint.num_layers))
    ]
    (ids_BT,) = batches(checkpoint, 1)
    torch.manual_seed(3)
    hidden_BTD = stages[0].forward(0, ids_BT)
    assert hidden_BTD.dtype == torch.float32
    assert stages[0].infer(ids_BT).dtype == torch.float32
    loss = stages[1].forward_loss(
        0,
        hidden_BTD,
        lambda logits: functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten()
        ),
    )
    stages[0].backward(0, stages[1].backward(0))
    gradients = [each.grad for stage in stages for each in stage.parameters.values()]
    assert all(each is not None and bool(each.any()) for each in gradients)
    return float(loss), [each for each in gradients if each is not None]


@pytest.mark.parametrize("family", SEEN)
def test_bits_are_those_of_the_same_weights_in_float32(family: str) -> None:
    loss, gradients = trained(family, is_wide=True)
    expected, those = trained(family, is_wide=False)
    if family in SCALED:
        assert loss == pytest.approx(expected, rel=2e-3)
        assert all(
            torch.allclose(a, b, rtol=0.1, atol=1e-3) for a, b in zip(gradients, those, strict=True)
        )
        return
    assert loss == expected
    assert all(map(torch.equal, gradients, those))


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon"])
def test_large_weights_stay_narrow(family: str) -> None:
    """Also those of a family's own linear layers, and of embeddings that are scaled."""
    checkpoint = shared(family)
    stage = TrainingStage(
        checkpoint.config,
        0,
        2,
        {name: tensor.bfloat16() for name, tensor in checkpoint.tensors.items()},
        dtype=torch.bfloat16,
        adapt=Nudge(48),
        is_wide=True,
    )
    layer = stage._skeleton.layer(0)
    assert {each.dtype for each in layer.parameters() if each.ndim == 2} == {torch.bfloat16}
    embedding = stage._skeleton.model.get_input_embeddings()
    assert {each.dtype for each in embedding.parameters()} == {torch.bfloat16}
    norms = [each for each in layer.modules() if "Norm" in type(each).__name__]
    assert {each.dtype for norm in norms for each in norm.parameters()} == {torch.float32}


def test_a_scaled_embedding_gives_what_it_gives_in_float32() -> None:
    checkpoint = shared("gemma3")
    stage = TrainingStage(
        checkpoint.config,
        0,
        2,
        {name: tensor.bfloat16() for name, tensor in checkpoint.tensors.items()},
        dtype=torch.bfloat16,
        adapt=Nudge(48),
        is_wide=True,
    )
    embedding: Any = stage._skeleton.model.get_input_embeddings()
    ids = torch.tensor([[3, 5], [0, 7]])
    assert embedding.weight.dtype == torch.bfloat16
    expected = embedding.weight[ids].float() * embedding.embed_scale.float()
    assert torch.equal(embedding(ids), expected)


class Chooser(nn.Linear):
    """A linear layer by its class, and none by what it does."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).softmax(-1)


def test_what_is_no_linear_layer_but_by_its_class_becomes_wide() -> None:
    linears = [nn.Linear(4, 3).bfloat16(), Chooser(4, 3).bfloat16()]
    given = torch.randn(2, 4)
    expected = [
        functional.linear(given, each.weight.float(), each.bias.float()) for each in linears
    ]
    layers = nn.ModuleDict({"one": linears[0], "other": linears[1]})
    narrow.compute_wide(layers.requires_grad_(False))
    assert type(layers["one"]) is NarrowLinear
    assert type(layers["other"]) is Chooser
    assert torch.allclose(layers["one"](given), expected[0], atol=1e-5)
    assert torch.allclose(layers["other"](given), expected[1].softmax(-1), atol=1e-5)


@pytest.mark.parametrize("widened", [1, 60, 2**20])
def test_a_weight_is_made_wide_in_parts(widened: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "_WIDENED", widened)
    linear = nn.Linear(20, 33, dtype=torch.bfloat16)
    linear.bias.data = linear.bias.data.float()
    given = torch.randn(2, 5, 20, requires_grad=True)
    same = given.detach().requires_grad_(True)
    result = NarrowLinear(linear.requires_grad_(False))(given)
    expected = functional.linear(same, linear.weight.float(), linear.bias)
    assert torch.allclose(result, expected, atol=1e-5)
    gradient = torch.randn(2, 5, 33)
    result.backward(gradient)
    expected.backward(gradient)
    assert given.grad is not None
    assert same.grad is not None
    assert torch.allclose(given.grad, same.grad, atol=1e-5)


def test_what_learns_is_not_held_narrow() -> None:
    checkpoint = shared("llama")
    with pytest.raises(ValueError, match="as wide as"):
        TrainingStage(checkpoint.config, 0, 2, checkpoint.tensors, is_wide=True)


@pytest.mark.parametrize("slower", [1.0, 3.0, 40.0])
def test_products_count_as_there_where_one_takes_about_as_long(
    slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second one is disturbed."""
    calls = 0

    def seconds_of(given: Tensor, weight: Tensor) -> float:
        nonlocal calls
        calls += 1
        times = slower if given.dtype == torch.bfloat16 else 1.0
        return times * (50.0 if calls % 2 else 1.0)

    monkeypatch.setattr(narrow, "_seconds_of", seconds_of)
    assert narrow._processor_has.__wrapped__() == (slower < 4)


def test_other_devices_are_not_tried() -> None:
    assert has_narrow_products(torch.device("cuda"))
