"""Key and value states with room behind them: tokens are written to their places, and the others stay where they are.

transformers' `DynamicLayer` makes new states for each token, of the old ones and the token. At 128 tokens of context
nobody sees that; at 1,000 it is a tenth of the time of a token (Llama, 1024 x 16, one thread of a Xeon), and grows.

Shape legend: B batch, H heads, T tokens, D of a head.
"""

from __future__ import annotations

from weakref import ref

import torch

__all__ = ["StateRoom"]

# Room for a part of the tokens that there are, and for some tokens at least.
_PART = 8
_LEAST = 32


class StateRoom:
    """The room behind one tensor of states, which its user holds, and may replace by another at any time."""

    __slots__ = ("_capacity", "_made")

    def __init__(self) -> None:
        self._made: ref[torch.Tensor] | None = None
        self._capacity = 0

    def append(
        self, states_BHTD: torch.Tensor, tokens_BHND: torch.Tensor, *, max_length: int | None
    ) -> torch.Tensor:
        """The states and some tokens behind them, [B, H, T + N, D]; values as `torch.cat` along T has them.

        In the memory of `states_BHTD` where that was made here and has room. What does not fit as it is, in shape or
        dtype, is `torch.cat`'s to convert or to refuse: written to its place it would be cast and spread in silence.

        Args:
            max_length: tokens for which there may be memory; None for any number.
        """
        *rows, length, size = states_BHTD.shape
        num_tokens = tokens_BHND.shape[-2]
        is_alike = [*tokens_BHND.shape[:-2], tokens_BHND.shape[-1]] == [*rows, size]
        if not is_alike or tokens_BHND.dtype != states_BHTD.dtype:
            return torch.cat([states_BHTD, tokens_BHND], dim=-2)
        if not self._made_here(states_BHTD) or length + num_tokens > self._capacity:
            states_BHTD = self._moved(states_BHTD, length + num_tokens, max_length)
        shape = (*rows, length + num_tokens, size)
        longer = states_BHTD.as_strided(shape, states_BHTD.stride())
        longer[..., length:, :] = tokens_BHND
        self._made = ref(longer)
        return longer

    def cut(self, states_BHTD: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """The first tokens of the states, in the same memory: what is appended next takes the place of the others."""
        shorter = states_BHTD[..., :num_tokens, :]
        if self._made_here(states_BHTD):
            self._made = ref(shorter)
        return shorter

    def _made_here(self, states_BHTD: torch.Tensor) -> bool:
        return self._made is not None and self._made() is states_BHTD

    def _moved(
        self, states_BHTD: torch.Tensor, enough: int, max_length: int | None
    ) -> torch.Tensor:
        """A copy with room behind it, for `enough` tokens in all or more."""
        *rows, length, size = states_BHTD.shape
        self._capacity = max(length + max(length // _PART, _LEAST), enough)
        if max_length is not None:
            self._capacity = max(min(self._capacity, max_length), enough)
        room = states_BHTD.new_empty(*rows, self._capacity, size)
        moved = room[..., :length, :]
        moved.copy_(states_BHTD)
        return moved
