"""Products in bfloat16: whether a device has them, and how a stage whose weights lie in it does without.

A processor without them takes torch a hundred times as long for a product in bfloat16 as for one in float32. There all
is computed in float32, and the large weights that do not learn lie in bfloat16 all the same.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn

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

    Weights of plain linear layers and embeddings stay as they are, and codes do; all others become float32.
    """
    for name, each in list(module.named_modules()):
        if isinstance(each, CodesLinear):
            each.dtype = torch.float32
            _widen(each, {"bias"})
        elif type(each) is nn.Embedding:
            each.register_forward_hook(_give_wide)
        elif type(each) is nn.Linear and name and each.weight.dtype == torch.bfloat16:
            _widen(each, {"bias"})
            module.set_submodule(name, NarrowLinear(each))
        else:
            _widen(each, {name for name, _ in each.named_parameters(recurse=False)})


def _widen(module: nn.Module, names: Collection[str]) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if name in names and parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()


def _give_wide(module: nn.Module, given: tuple[Any, ...], result: Tensor) -> Tensor:
    return result.float()
