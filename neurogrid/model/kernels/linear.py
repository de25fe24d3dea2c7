"""Linear layers whose weights stay as they came: bfloat16 multiplied in float32, or codes.

`module.weight` is there for code that reads it, made anew each time in the dtype that the module computes in.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

from neurogrid.model.kernels.chosen import library
from neurogrid.model.kernels.codes import CODE_GROUP, Codes
from neurogrid.model.kernels.compiled import ELEMENT_TYPES, Library
from neurogrid.model.kernels.gpu_codes import GpuMatrix, gpu_matrix
from neurogrid.model.kernels.int4 import Int4Matrix, int4_matrix
from neurogrid.model.kernels.matrix import Matrix

__all__ = [
    "Bfloat16Linear",
    "CodesLinear",
    "NarrowLinear",
    "held_codes",
    "hold_as_bfloat16",
    "in_shape_only",
    "matrix_of",
]


# Elements of a weight that are made float32 at once, 4 MiB: nobody counts memory for them.
_WIDENED: Final = 2**20
_memory = threading.local()


class _HeldLinear(nn.Linear):
    """A linear layer without a weight of its own.

    Attributes:
        dtype: what it computes in.
    """

    _held: Codes | Matrix | Int4Matrix | GpuMatrix | _NarrowWeight

    def __init__(self, shape: tuple[int, int], bias: nn.Parameter | None, dtype: torch.dtype):
        # nn.Linear's own would take the memory of a weight.
        nn.Module.__init__(self)
        self.out_features, self.in_features = shape
        self.register_parameter("bias", bias)
        self.dtype = dtype
        self.train(False)

    def _hold(self, held: Codes | Matrix | Int4Matrix | GpuMatrix | _NarrowWeight) -> None:
        """Keep what is multiplied, as parameters, too: whoever counts a module's memory counts those."""
        self._held = held
        for number, part in enumerate(held.parts):
            self.register_parameter(f"held_{number}", nn.Parameter(part, requires_grad=False))

    @property
    def held_device(self) -> torch.device:
        """Device that the weights, or codes, lie on."""
        return self._held.parts[0].device

    def __getattr__(self, name: str) -> Any:
        return self._held.dense(self.dtype) if name == "weight" else super().__getattr__(name)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.requires_grad and torch.is_grad_enabled():
            product: torch.Tensor = _ProductToLearnThrough.apply(input, self)  # type: ignore[no-untyped-call]
            return product
        return self.multiply(input)

    def multiply(self, input: torch.Tensor) -> torch.Tensor:
        """[..., I] to [..., O], without a gradient."""
        if isinstance(self._held, Matrix):
            return self._held.multiply(input)
        if isinstance(self._held, Int4Matrix | GpuMatrix):
            result = self._held.multiply(input)
            return result if self.bias is None else result + self.bias
        return functional.linear(input, self._held.dense(self.dtype), self.bias)

    def pull_back(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient [..., I] of what went in, of that of what came out, [..., O]."""
        return gradient @ self._held.dense(gradient.dtype)


class _ProductToLearnThrough(torch.autograd.Function):
    """A product that what goes in has a gradient of: by the dense weight, which is made for that moment alone.

    The weight itself does not learn. Where activations are rounded to 8 bits, the gradient is as if they were not.
    """

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, module: _HeldLinear) -> torch.Tensor:
        ctx.module = module
        ctx.dtype = input.dtype
        return module.multiply(input)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        return ctx.module.pull_back(gradient).to(ctx.dtype), None


class _WideLinear(_HeldLinear):
    """Weights in bfloat16, activations and sums in float32: exact, and half the memory."""

    def __init__(self, found: Library, weight: torch.Tensor, bias: nn.Parameter | None) -> None:
        super().__init__((weight.shape[0], weight.shape[1]), bias, torch.float32)
        self._hold(Matrix.of_bfloat16(found, weight, _bias_of_products(bias), by_dot=False))


class CodesLinear(_HeldLinear):
    """A linear layer of codes, multiplied as codes where there are products for that, else made dense for each.

    On the CPU there are, and on CUDA.

    Args:
        codes: where the products are to be, on that device.
        bias: of the layer, or None.
        dtype: of activations.
        by_int8: round activations to 8 bits in groups of 32, where that is faster. Not for codes with a table.
    """

    def __init__(
        self, codes: Codes, bias: nn.Parameter | None, dtype: torch.dtype, *, by_int8: bool
    ) -> None:
        super().__init__((codes.num_outputs, codes.num_inputs), bias, dtype)
        on_gpu = int4_matrix(codes, dtype) or gpu_matrix(codes, dtype)
        self._hold(on_gpu or held_codes(codes, bias, dtype, by_int8=by_int8))

    def pull_back(self, gradient: torch.Tensor) -> torch.Tensor:
        """See `_HeldLinear.pull_back`."""
        held = self._held
        if not isinstance(held, Codes | Matrix) or self.held_device.type != "cpu":
            return super().pull_back(gradient)
        result = gradient.new_empty(*gradient.shape[:-1], self.in_features)
        # By inputs and not by outputs: no result is a sum of parts then, whose bits would be others.
        step = max(1, _WIDENED // self.out_features // CODE_GROUP) * CODE_GROUP
        for start in range(0, self.in_features, step):
            codes = held.of_inputs(start, min(start + step, self.in_features))
            num_elements = codes.num_outputs * codes.num_inputs
            widened = _widened(num_elements).view(gradient.dtype)[:num_elements]
            weight = widened.view(codes.num_outputs, codes.num_inputs)
            codes.write_dense(weight)
            result[..., start : start + step] = gradient @ weight
        return result


class NarrowLinear(_HeldLinear):
    """A linear layer whose weight does not learn and lies in bfloat16; products are in float32, by torch.

    Args:
        linear: with that weight, and a bias in float32 or none.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__((linear.out_features, linear.in_features), linear.bias, torch.float32)
        self._hold(_NarrowWeight(linear.weight.detach()))

    def multiply(self, input: torch.Tensor) -> torch.Tensor:
        """See `_HeldLinear.multiply`."""
        parts = [
            functional.linear(input, rows, None if self.bias is None else self.bias[at])
            for at, rows in self._parts()
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def pull_back(self, gradient: torch.Tensor) -> torch.Tensor:
        """See `_HeldLinear.pull_back`."""
        parts = (gradient[..., at] @ rows for at, rows in self._parts())
        result = next(parts)
        for part in parts:
            result += part
        return result

    def _parts(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows of the weight in float32, until the next are asked for, and which outputs they are of."""
        (weight,) = self._held.parts
        step = max(1, _WIDENED // self.in_features)
        widened = _widened(step * self.in_features)
        for start in range(0, self.out_features, step):
            rows = weight[start : start + step]
            wide = widened[: rows.numel()].view(rows.shape)
            yield slice(start, start + step), wide.copy_(rows)


def _widened(num_elements: int) -> torch.Tensor:
    """Memory for so many elements in float32, a thread's own. It is kept: holes that it left would not be filled."""
    found: torch.Tensor | None = getattr(_memory, "widened", None)
    if found is None or len(found) < num_elements:
        found = _memory.widened = torch.empty(max(num_elements, _WIDENED))
    return found


class _NarrowWeight:
    """A weight that is made as wide as it is multiplied in, each time.

    Attributes:
        parts: the weight alone.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.parts = (weight,)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """[O, I] in `dtype`."""
        return self.parts[0].to(dtype)


class Bfloat16Linear(nn.Linear):
    """A linear layer in bfloat16, on the CPU, whose weight is multiplied where it lies."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.matrix().multiply(input)

    def matrix(self) -> Matrix:
        """Return the matrix that the layer multiplies with; make it where there is none of its weight."""
        # In __dict__, and made when it is first needed: the class is given to modules that are there.
        held = self.__dict__.get("_matrix")
        if held is None or held[0] != self.weight.data_ptr():
            held = self.__dict__["_matrix"] = (self.weight.data_ptr(), self._make_matrix())
        matrix: Matrix = held[1]
        return matrix

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the matrix, whose pointers are of this very module: a copy makes its own."""
        return {name: value for name, value in vars(self).items() if name != "_matrix"}

    def _make_matrix(self) -> Matrix:
        found = library()
        assert found is not None
        bias, weight = _bias_of_products(self.bias), self.weight.detach()
        return Matrix.of_bfloat16(found, weight, bias, by_dot=found.has_bf16_dot)


def held_codes(
    codes: Codes, bias: torch.Tensor | None, dtype: torch.dtype, *, by_int8: bool
) -> Codes | Matrix:
    """Return a matrix of `codes` and bias to multiply with on their device, or the codes, to be made dense each time.

    Args: as of `CodesLinear`.
    """
    found = library() if codes.codes.is_cpu and dtype in ELEMENT_TYPES else None
    if found is None:
        return codes
    return Matrix.of_codes(found, codes, _bias_of_products(bias), by_int8=by_int8)


@contextmanager
def in_shape_only(module: nn.Module) -> Iterator[None]:
    """Have the layers in a module whose weight is made each time show zeros without memory in its place.

    For whoever looks at dtype, device and shape of a weight alone, and that often.
    """
    held = [each for each in module.modules() if isinstance(each, _HeldLinear)]
    for each in held:
        weight = torch.zeros((), dtype=each.dtype, device=each.held_device)
        each.__dict__["weight"] = weight.expand(each.out_features, each.in_features)
    try:
        yield
    finally:
        for each in held:
            del each.__dict__["weight"]


def hold_as_bfloat16(linear: nn.Linear) -> nn.Linear:
    """The layer with its float32 weight in bfloat16, if that is exact and can be multiplied; else the layer itself.

    A checkpoint in bfloat16 that is computed in float32 takes half the memory so, and is read twice as fast.
    """
    weight, found = linear.weight.detach(), library()
    if found is None or weight.dtype != torch.float32 or not _is_bfloat16(weight):
        return linear
    return _WideLinear(found, weight.bfloat16(), linear.bias)


def matrix_of(linear: nn.Module) -> Matrix | None:
    """Return the matrix that a linear layer multiplies with, bias and all; None where torch multiplies."""
    if isinstance(linear, Bfloat16Linear):
        return linear.matrix()
    held = linear._held if isinstance(linear, _HeldLinear) else None
    return held if isinstance(held, Matrix) else None


def _bias_of_products(bias: torch.Tensor | None) -> torch.Tensor | None:
    """float32 [out], as products add it."""
    return None if bias is None else bias.detach().float().contiguous()


def _is_bfloat16(weight: torch.Tensor) -> bool:
    """Whether no element has bits that bfloat16 lacks; most that do show it in the first row."""
    bits = weight.view(torch.int32)
    return not any(bool((rows & 0xFFFF).any()) for rows in (bits[:1], *bits.split(1024)))
