"""Linear layers that add the gradients of their weights where they are: one product, and no sum beside it.

Torch makes the gradient of a micro-batch, and then adds it to those of the others before: for weights that are large
beside a micro-batch that is a good part of a backward pass. A product of float32 can begin with what is there. Where a
library makes it in one go over the rows of a micro-batch, which is tried for each shape, that gives the same bits.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["add_gradients_in_place"]

# Rows and columns of a product that is tried: how it is cut along the rows of a micro-batch does not depend on more.
_TRIED: Final = 1024


def add_gradients_in_place(model: nn.Module) -> None:
    """Have the linear layers of a model that learn add their gradients so, in float32 on a CPU."""
    modules = list(model.modules())
    uses = Counter(id(each) for module in modules for each in module.parameters(recurse=False))
    for each in modules:
        if type(each) is nn.Linear and each.weight.requires_grad and uses[id(each.weight)] == 1:
            # An object that is called as a method is: mypy wants a function there.
            each.forward = _Adding(each)  # type: ignore[method-assign, assignment]


class _Adding:
    """The forward pass of a layer."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self._last_pass = -1
        # Torch adds up the gradients of a layer that a model comes through more than once first. So it is to do with
        # one whose products are made in pieces, be it for some of its micro-batches: others may be of the same pass.
        self._is_left_to_torch = False

    def __call__(self, given: Tensor) -> Tensor:
        weight, bias, device = self._linear.weight, self._linear.bias, given.device.type
        is_plain = (
            device != "cpu"
            or weight.dtype != torch.float32
            or torch.is_autocast_enabled(device)
            or not (torch.is_grad_enabled() and weight.requires_grad)
        )
        if not is_plain:
            rows, columns = (min(size, _TRIED) for size in weight.shape)
            # By the rows alone: what is computed again for a backward pass has to go the same way.
            is_plain = not _has_same_bits(given.shape[:-1].numel(), rows, columns)
            self._is_left_to_torch |= is_plain
        if is_plain:
            return functional.linear(given, weight, bias)
        # Torch has no types for it.
        result: Tensor = _Linear.apply(given, weight, bias, self)  # type: ignore[no-untyped-call]
        return result

    def gradient(self, rows: Tensor, given: Tensor) -> Tensor | None:
        """Compute the weight's gradient from the rows of a micro-batch, or add it where the others are.

        Args:
            rows: gradients of the outputs, [rows, O].
            given: inputs, [rows, I].

        Returns:
            [O, I]; None where it is added already.
        """
        gradient = self._linear.weight.grad
        if gradient is None:
            # As torch's own checkpointing tells backward passes apart.
            number: int = torch._C._current_graph_task_id()
            self._is_left_to_torch |= number == self._last_pass
            self._last_pass = number
        elif not self._is_left_to_torch:
            torch.addmm(gradient, rows.t(), given, out=gradient)
            return None
        return rows.t() @ given


class _Linear(torch.autograd.Function):
    """`functional.linear`."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, adding: _Adding
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
            of_weight = ctx.adding.gradient(rows, given.reshape(-1, given.shape[-1]))
        return of_given, of_weight, rows.sum(0) if needs_bias else None, None


@cache
def _has_same_bits(num_rows: int, num_out: int, num_in: int) -> bool:
    """Whether a product over so many rows that begins with a sum is the product, and then the sum."""
    generator = torch.Generator().manual_seed(num_rows)
    rows, given, there = (
        torch.randn(shape, generator=generator)
        for shape in ((num_rows, num_out), (num_rows, num_in), (num_out, num_in))
    )
    return torch.equal(torch.addmm(there, rows.t(), given), there + rows.t() @ given)
