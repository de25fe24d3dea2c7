"""Matrix products of a few rows on the CPU, as fast as those of one.

A product of 2 to 8 rows should cost what it costs to read the matrix, as a product of one row does. MKL's takes 1.5
to 3 times as long when it is asked for `x @ W.T`, as `nn.Linear` does, and no longer when asked for `W @ x.T`, as
long as the rows are few and short (measured on an AMD EPYC, one thread, float32; benchmarks/sessions.py shows it).

Only for rows of several sessions, [R, 1, D]: what runs alone keeps the bits of the whole model.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["speed_up_few_rows"]

# Beyond so many rows, or numbers in all of them, `nn.Linear` is as fast or faster.
_MAX_ROWS, _MAX_NUMBERS = 8, 4096


class _RowsLinear(nn.Linear):
    """A linear layer that takes the other way for a few rows of [R, 1, in] -> [R, 1, out]."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dim() != 3 or input.shape[1] != 1 or not 2 <= input.shape[0] <= self._most:
            return functional.linear(input, self.weight, self.bias)
        result_OR = torch.mm(self.weight, input[:, 0].t())
        if self.bias is not None:
            result_OR += self.bias[:, None]
        return result_OR.t().contiguous()[:, None]

    @property
    def _most(self) -> int:
        return min(_MAX_ROWS, max(2, _MAX_NUMBERS // self.in_features))


def speed_up_few_rows(model: nn.Module) -> None:
    """Let the linear layers in `model` be fast for a few rows, where it makes a difference."""
    for module in model.modules():
        # Not its subclasses: what they do is theirs.
        if type(module) is nn.Linear:
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype == torch.float32:
                module.__class__ = _RowsLinear
