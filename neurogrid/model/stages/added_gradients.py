"""Layers that add the gradients of their weights where they are: one product or a few rows, and no sum beside it.

Torch makes the gradient of a micro-batch, and then adds it to those of the others before: for weights that are large
beside a micro-batch that is a good part of a backward pass. A product of float32 can begin with what is there. Where a
library makes it in one go over the rows of a micro-batch, which is tried for each shape, that gives the same bits. Of
an embedding only the rows of a micro-batch's own ids change.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["add_gradients_in_place"]

# Rows and columns of a product that is tried: how it is cut along the rows of a micro-batch does not depend on more.
_TRIED: Final = 1024
Layer = TypeVar("Layer", nn.Linear, nn.Embedding)


def add_gradients_in_place(model: nn.Module) -> None:
    """Have the linear layers and embeddings of a model that learn add their gradients so, in float32 on a CPU."""
    modules = list(model.modules())
    uses = Counter(id(each) for module in modules for each in module.parameters(recurse=False))
    for each in modules:
        # An object that is called as a method is: mypy wants a function there.
        if type(each) is nn.Linear and _learns_alone(each.weight, uses):
            each.forward = _AddingLinear(each)  # type: ignore[method-assign, assignment]
        elif type(each) is nn.Embedding and _learns_alone(each.weight, uses) and _is_plain(each):
            each.forward = _AddingEmbedding(each)  # type: ignore[method-assign, assignment]


def _learns_alone(weight: Tensor, uses: Counter[int]) -> bool:
    return weight.requires_grad and uses[id(weight)] == 1


def _is_plain(embedding: nn.Embedding) -> bool:
    return not (embedding.max_norm or embedding.scale_grad_by_freq or embedding.sparse)


class _Adding(Generic[Layer]):
    """The forward pass of a layer whose backward passes add to what is there, and what they have in common."""

    def __init__(self, layer: Layer) -> None:
        self._layer: Layer = layer
        self._last_pass = -1
        # Torch adds up the gradients of a layer that a model comes through more than once first. So it is to do with
        # one whose products are made in pieces, be it for some of its micro-batches: others may be of the same pass.
        self._is_left_to_torch = False

    def _is_possible(self) -> bool:
        """Whether a pass that begins now may add to what is there."""
        weight = self._layer.weight
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and not torch.is_autocast_enabled("cpu")
            and torch.is_grad_enabled()
            and weight.requires_grad
        )

    def gradient(self) -> Tensor | None:
        """The gradient that is there, for a backward pass to add to; None where it gives torch its own."""
        gradient = self._layer.weight.grad
        if gradient is None:
            # As torch's own checkpointing tells backward passes apart.
            number: int = torch._C._current_graph_task_id()
            self._is_left_to_torch |= number == self._last_pass
            self._last_pass = number
        return None if self._is_left_to_torch else gradient


class _AddingLinear(_Adding[nn.Linear]):
    def __call__(self, given: Tensor) -> Tensor:
        weight, bias = self._layer.weight, self._layer.bias
        is_adding = self._is_possible()
        if is_adding:
            rows, columns = (min(size, _TRIED) for size in weight.shape)
            # By the rows alone: what is computed again for a backward pass has to go the same way.
            is_adding = _has_same_bits(given.shape[:-1].numel(), rows, columns)
            self._is_left_to_torch |= not is_adding
        if not is_adding:
            return functional.linear(given, weight, bias)
        # Torch has no types for it.
        result: Tensor = _Linear.apply(given, weight, bias, self)  # type: ignore[no-untyped-call]
        return result


class _Linear(torch.autograd.Function):
    """`functional.linear`."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, adding: _AddingLinear
    ) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.adding = adding
        return functional.linear(given, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given, weight = ctx.saved_tensors
        needs_given, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = gradients[0].reshape(-1, len(weight))
        of_given = (rows @ weight).view_as(given) if needs_given else None
        of_weight = None
        if needs_weight:
            flat = given.reshape(-1, given.shape[-1])
            if (there := ctx.adding.gradient()) is None:
                of_weight = rows.t() @ flat
            else:
                torch.addmm(there, rows.t(), flat, out=there)
        return of_given, of_weight, rows.sum(0) if needs_bias else None, None


class _AddingEmbedding(_Adding[nn.Embedding]):
    def __call__(self, ids: Tensor) -> Tensor:
        weight, padding = self._layer.weight, self._layer.padding_idx
        if not self._is_possible():
            return functional.embedding(ids, weight, padding)
        padded = -1 if padding is None else padding
        # Torch has no types for it.
        result: Tensor = _Embedding.apply(ids, weight, padded, self)  # type: ignore[no-untyped-call]
        return result


class _Embedding(torch.autograd.Function):
    """`functional.embedding`, whose padding is -1 where there is none."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding: int, adding: _AddingEmbedding
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_embeddings, ctx.padding, ctx.adding = len(weight), padding, adding
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        make = torch.ops.aten.embedding_dense_backward
        if (there := ctx.adding.gradient()) is None:
            made = make(gradients[0], ids, ctx.num_embeddings, ctx.padding, False)
            return None, made, None, None
        is_kept = ids != ctx.padding
        # Those of one id are added up first, as torch does.
        own, places = ids[is_kept].unique(return_inverse=True)
        there.index_add_(0, own, make(gradients[0][is_kept], places, len(own), -1, False))
        return None, None, None, None


@cache
def _has_same_bits(num_rows: int, num_out: int, num_in: int) -> bool:
    """Whether a product over so many rows that begins with a sum is the product, and then the sum."""
    generator = torch.Generator().manual_seed(num_rows)
    rows, given, there = (
        torch.randn(shape, generator=generator)
        for shape in ((num_rows, num_out), (num_rows, num_in), (num_out, num_in))
    )
    return torch.equal(torch.addmm(there, rows.t(), given), there + rows.t() @ given)
