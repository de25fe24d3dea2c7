"""Attention masks for a batch whose rows have different lengths, from the family's own mask rule.

A base model asks transformers for its mask by the name of its attention implementation, and the
function registered under that name is given the family's rule (causal, window, chunk), as a function
of the positions of query and key. Ours evaluates the same rule at each row's own positions. It acts
only inside `rows_masked`, in that thread; anything else goes on to transformers' function.

What attends otherwise than by these masks is not served by this; the miniature shows it.

Shape legend: R rows, K places for keys.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionMaskInterface

__all__ = ["rows_masked"]

_registering = threading.Lock()
_registered: set[str] = set()


class _Active(threading.local):
    """The lengths of the rows of the batch that this thread runs, None outside of one."""

    lengths: Sequence[int] | None = None


_active = _Active()


@contextmanager
def rows_masked(lengths: Sequence[int]) -> Iterator[None]:
    """Make the masks of forwards in this block for rows with one token each after `lengths` tokens.

    Keys of a row are where `RowPool` puts them: at their position, or, where there are fewer places
    than the longest row has tokens, at their position modulo the number of places.
    """
    _register()
    _active.lengths = lengths
    try:
        yield
    finally:
        _active.lengths = None


def _register() -> None:
    """Put our functions before transformers', once for the process."""
    functions: Any = AttentionMaskInterface()
    with _registering:
        for name in {"sdpa", "eager"} - _registered:
            AttentionMaskInterface.register(name, _before(functions[name], name))
            _registered.add(name)


def _before(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        lengths = _active.lengths
        if lengths is None:
            return original(*args, **kwargs)
        mask_R11K = _mask(lengths, **kwargs)
        if name == "sdpa":
            return mask_R11K
        dtype = kwargs.get("dtype", torch.float32)
        nothing = torch.zeros((), dtype=dtype, device=mask_R11K.device)
        return torch.where(mask_R11K, nothing, torch.finfo(dtype).min)

    return mask


def _mask(
    lengths: Sequence[int],
    *,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    device: torch.device | str = "cpu",
    **others: Any,  # differ between versions, and say nothing about rows
) -> torch.Tensor:
    """True where a row's token sees a key: [R, 1, 1, K]."""
    num_rows = len(lengths)
    own_R111 = torch.tensor(lengths, device=device).view(-1, 1, 1, 1)
    place_111K = torch.arange(kv_length, device=device).view(1, 1, 1, -1)
    if kv_length > max(lengths):
        key_RK = place_111K
        is_there = place_111K <= own_R111
    else:
        # A ring: the last position that was written to each place.
        key_RK = own_R111 - torch.remainder(own_R111 - place_111K, kv_length)
        is_there = key_RK >= 0
    row_R111 = torch.arange(num_rows, device=device).view(-1, 1, 1, 1)
    head_1111 = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    seen = mask_function(row_R111, head_1111, own_R111, key_RK) & is_there
    return seen.expand(num_rows, 1, 1, kv_length)
