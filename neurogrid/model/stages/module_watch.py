"""Calls of modules in a pass of a model, and whether what one returns is just what the next is given.

"Just that" is the same memory, not written to in between: what a model does between its modules makes new memory or
counts as a write, even where it changes no number. So it says nothing of values, and a result of zeros will do where
the true one is expensive (`narrow_products`).

Outside of inference mode only: tensors made there do not count writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["Seen", "Watch", "narrow_products"]

# Of a product that is not to be computed as a whole.
_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor, which is kept so that its memory is not used anew, and how often it had been written to."""

    tensor: torch.Tensor
    version: int

    @classmethod
    def now(cls, tensor: torch.Tensor) -> Seen:
        return cls(tensor, tensor._version)

    def is_same(self, other: Seen) -> bool:
        """Whether the same bits stand at the same place, in the same layout."""
        mine, its = self.tensor, other.tensor
        return (
            mine.data_ptr() == its.data_ptr()
            and (mine.shape, mine.dtype, mine.device) == (its.shape, its.dtype, its.device)
            and mine.is_contiguous()
            and its.is_contiguous()
            and self.version == other.version
        )


@dataclass(slots=True)
class _Call:
    module: nn.Module
    given: Seen | None
    result: Seen | None = None


class Watch:
    """Notes the calls of modules inside its block, without those that they make in turn."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._calls: list[_Call] = []
        self._depth = 0
        self._hooks: list[Any] = []

    def __enter__(self) -> Watch:
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._after))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._depth == 0:
            is_one = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
            self._calls.append(_Call(module, Seen.now(args[0]) if is_one else None))
        self._depth += 1

    def _after(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and isinstance(result, torch.Tensor):
            self._calls[-1].result = Seen.now(result)

    def chain(self, entered: Seen, left: Seen) -> tuple[nn.Module, ...]:
        """The modules that made `left` of `entered`, with nothing else done on the way; else none."""
        modules: list[nn.Module] = []
        wanted = left
        for call in reversed(self._calls):
            if call.result is not None and call.result.is_same(wanted):
                if call.given is None:
                    return ()
                modules.append(call.module)
                wanted = call.given
        return tuple(reversed(modules)) if wanted.is_same(entered) else ()


@contextmanager
def narrow_products(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let linear layers of many outputs compute the first of them, and zeros for the others."""
    wide = [
        module
        for module in modules
        if isinstance(module, nn.Linear)
        and module.out_features > _COLUMNS
        and "weight" in module._parameters
        and "forward" not in vars(module)
    ]
    try:
        for module in wide:
            vars(module)["forward"] = _first_columns(module)
        yield
    finally:
        for module in wide:
            vars(module).pop("forward", None)


def _first_columns(linear: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        bias = None if linear.bias is None else linear.bias[:_COLUMNS]
        columns = functional.linear(input, linear.weight[:_COLUMNS], bias)
        return functional.pad(columns, (0, linear.out_features - _COLUMNS))

    return forward
