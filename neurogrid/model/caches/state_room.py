"""Key and value states with room behind them: a token is written to its place, and the others stay where they are.

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
        self, states_BHTD: torch.Tensor, token_BH1D: torch.Tensor, *, max_length: int | None
    ) -> torch.Tensor:
        """The states and a token behind them, [B, H, T + 1, D]; values as `torch.cat` along T has them.

        In the memory of `states_BHTD` where that was made here and has room. What does not fit as it is, in shape or
        dtype, is `torch.cat`'s to convert or to refuse: written to its place it would be cast and spread in silence.

        Args:
            max_length: tokens for which there may be memory; None for any number.
        """
        length, one = states_BHTD.shape[-2], states_BHTD[..., :1, :]
        if token_BH1D.shape != one.shape or token_BH1D.dtype != one.dtype:
            return torch.cat([states_BHTD, token_BH1D], dim=-2)
        is_mine = self._made is not None and self._made() is states_BHTD
        if not is_mine or length >= self._capacity:
            states_BHTD = self._moved(states_BHTD, max_length)
        shape = (*states_BHTD.shape[:-2], length + 1, states_BHTD.shape[-1])
        longer = states_BHTD.as_strided(shape, states_BHTD.stride())
        longer[..., length:, :] = token_BH1D
        self._made = ref(longer)
        return longer

    def _moved(self, states_BHTD: torch.Tensor, max_length: int | None) -> torch.Tensor:
        """A copy with room behind it."""
        *rows, length, size = states_BHTD.shape
        self._capacity = length + max(length // _PART, _LEAST)
        if max_length is not None:
            self._capacity = max(min(self._capacity, max_length), length + 1)
        room = states_BHTD.new_empty(*rows, self._capacity, size)
        moved = room[..., :length, :]
        moved.copy_(states_BHTD)
        return moved
