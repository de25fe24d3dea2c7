"""Products in bfloat16: whether a device has them, and how a stage whose weights lie in it does without.

A processor without them takes torch a hundred times as long for a product in bfloat16 as for one in float32. There all
is computed in float32, and the large weights that do not learn lie in bfloat16 all the same.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Collection
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from neurogrid.model.files.model_code import MODEL_CODE_ERRORS
from neurogrid.model.kernels import CodesLinear, NarrowLinear

__all__ = ["compute_wide", "has_narrow_products"]

# Rows, outputs and inputs of the products that are tried, so often, and how much longer the narrow one may take.
_TRIED: Final = (16, 128, 256)
_TRIES: Final = 8
_MAX_RATIO: Final = 4.0


def has_narrow_products(device: torch.device) -> bool:
    """Whether products in bfloat16 take a device about as long as those in float32, or less."""
    return device.type != "cpu" or _processor_has()


@cache
def _processor_has() -> bool:
    rows, outputs, inputs = _TRIED
    # As in a backward pass, in which a gradient meets the weight as it lies.
    given, weight = torch.ones(rows, outputs), torch.ones(outputs, inputs)
    wide = min(_seconds_of(given, weight) for _ in range(_TRIES))
    # One is enough: a busy machine makes any take long.
    return any(
        _seconds_of(given.bfloat16(), weight.bfloat16()) < _MAX_RATIO * wide for _ in range(_TRIES)
    )


def _seconds_of(given: Tensor, weight: Tensor) -> float:
    began = time.perf_counter()
    given @ weight
    return time.perf_counter() - began


def compute_wide(module: nn.Module) -> None:
    """Have a module whose weights are bfloat16, and do not learn, compute in float32.

    Weights of linear layers and embeddings stay as they are, and codes do; all others become float32.
    """
    for name, each in list(module.named_modules()):
        if isinstance(each, CodesLinear):
            each.dtype = torch.float32
            _widen(each, {"bias"})
        elif isinstance(each, nn.Embedding):
            _widen(each, {name for name, _ in each.named_parameters(recurse=False)} - {"weight"})
            # An object that is called as a method is: mypy wants a function there.
            each.forward = _LookUp(each)  # type: ignore[method-assign]
        elif name and isinstance(each, nn.Linear) and _is_narrow(each) and _only_multiplies(each):
            _widen(each, {"bias"})
            module.set_submodule(name, NarrowLinear(each))
        else:
            _widen(each, {name for name, _ in each.named_parameters(recurse=False)})


def _is_narrow(linear: nn.Linear) -> bool:
    return linear.weight.dtype == torch.bfloat16


def _only_multiplies(linear: nn.Linear) -> bool:
    """Whether a linear layer does what `nn.Linear` does; one of a class of its own is tried with little weights."""
    if type(linear) is nn.Linear:
        return True
    num_outputs, num_inputs = _TRIED[1:]
    generator = torch.Generator().manual_seed(0)
    little = nn.Linear(num_inputs, num_outputs, bias=linear.bias is not None, device="meta")
    tried = copy.copy(linear)
    tried._parameters = {
        name: None if each is None else nn.Parameter(torch.randn(each.shape, generator=generator))
        for name, each in little._parameters.items()
    }
    if tried._parameters.keys() != linear._parameters.keys():
        return False
    tried.out_features, tried.in_features = num_outputs, num_inputs
    given = torch.randn(_TRIED[0], num_inputs, generator=generator)
    try:
        result = tried(given)
    except MODEL_CODE_ERRORS:
        return False
    expected = functional.linear(given, tried.weight, tried.bias)
    return isinstance(result, Tensor) and torch.allclose(result, expected, atol=1e-3)


def _widen(module: nn.Module, names: Collection[str]) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if name in names and parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()


class _LookUp:
    """The forward pass of an embedding, in which rows become float32 when they are looked up.

    What an embedding of a family's own makes of them is made in float32 then, as with a weight in that.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        self._forward = embedding.forward

    def __call__(self, *given: Any, **named: Any) -> Tensor:
        with _WideRows():
            result: Tensor = self._forward(*given, **named)
        return result.float()


class _WideRows(TorchFunctionMode):
    """Makes float32 of what is looked up within the block."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.float() if func is functional.embedding else result
