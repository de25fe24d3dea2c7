"""The calls of decoder layers for one token, recorded before its hidden state is there.

What a base model does around its layers (positions, masks, rotary embeddings) depends on the position and on the
length of the cache alone. With caches that weights have swept it takes a third of a millisecond of each step of each
stage, which lies idle while the others compute: so it is done then (`Stage.prepare`), and the step itself is layer
after layer.

That takes a base model that hands each layer's result to the next as it is, and nothing else that depends on it. Both
are seen: the layers are visited with a marker in place of their results, which must come back as the same object, with
the same bits; and what they are called with must be the same for another marker (`same_calls`).

Shape legend: B batch (1), T tokens (1), D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["LayerCall", "PreparedPass", "Recorder", "markers", "same_calls", "same_values"]


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A base model's call of a layer, without the hidden state and the cache.

    Attributes:
        cache_names: the arguments in which it gets the cache: that is not held here, since it holds this.
    """

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    cache_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PreparedPass:
    """The calls of layers [start, stop) for the token at `position`."""

    start: int
    stop: int
    position: int
    calls: Sequence[LayerCall]

    def run(self, hidden_BTD: torch.Tensor, cache: Any) -> torch.Tensor:
        """Return the hidden state that leaves layer stop - 1; in inference mode."""
        for call in self.calls:
            caches = dict.fromkeys(call.cache_names, cache)
            hidden_BTD = call.layer(hidden_BTD, *call.args, **call.kwargs, **caches)
        return hidden_BTD


@dataclass(slots=True)
class Recorder:
    """Visits layers [start, stop) in place of running them.

    Attributes:
        marker: [1, 1, D], stands for what each layer returns.
        cache: the one that the pass was given.
        calls: those recorded so far.
        is_plain: whether the base model did nothing but hand the marker on.
    """

    start: int
    stop: int
    marker: torch.Tensor
    cache: Any
    calls: list[LayerCall] = field(default_factory=list)
    is_plain: bool = True

    def visit(
        self, layer: nn.Module, hidden_BTD: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """Record a call; whether more is to be seen."""
        if self.calls and hidden_BTD is not self.marker:
            self.is_plain = False
        if any(value is self.cache for value in args):
            self.is_plain = False
        names = tuple(name for name, value in kwargs.items() if value is self.cache)
        kept = {name: value for name, value in kwargs.items() if name not in names}
        self.calls.append(LayerCall(layer, args, kept, names))
        return self.is_plain and len(self.calls) < self.stop - self.start


def markers(like_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two hidden states that have nothing in common; the second changes by all that one does to it."""
    first = torch.zeros_like(like_BTD)
    second = torch.linspace(-3.0, 5.0, like_BTD.numel(), device=like_BTD.device)
    second = second.to(like_BTD.dtype).reshape(like_BTD.shape)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf], device=like_BTD.device)
    second[..., : min(3, second.shape[-1] - 1)] = special[: min(3, second.shape[-1] - 1)]
    return first, second


def same_calls(some: Sequence[LayerCall], others: Sequence[LayerCall]) -> bool:
    """Whether layers are called with the same, tensors by their bits."""
    return len(some) == len(others) and all(
        one.layer is other.layer
        and one.cache_names == other.cache_names
        and same_values(one.args, other.args)
        and same_values(one.kwargs, other.kwargs)
        for one, other in zip(some, others, strict=True)
    )


def same_values(one: object, other: object) -> bool:
    """Whether two arguments are the same: tensors by dtype, shape and bits, containers by what they hold."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(_bits(one), _bits(other))
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_values(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_values, one, other))
    if type(one) is not type(other) or not isinstance(one, int | float | str | bytes | type(None)):
        return False
    return one == other


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
