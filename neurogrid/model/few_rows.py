"""Matrix products of one row and of a few, on the CPU in float32, as fast as the matrix can be read.

MKL reads a matrix at 16 to 23 GB/s for `x @ W.T` of one row, as `nn.Linear` asks for it, and takes 1.5 to 3 times as
long for 2 to 8 rows. Asked for `W @ x.T` of two or four columns it reads narrow matrices at up to 29 GB/s, so that
one row is faster as two (measured on an AMD EPYC, one thread). Longer inputs than `_MAX_NUMBERS` in all make that way
the slower one, and in half precision it always is.

Only for single tokens, [R, 1, D]: what a prompt gives keeps its bits, what a token gives is equal up to rounding.

Source: benchmarks/decode.py and benchmarks/sessions.py show what comes of it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["speed_up_few_rows"]

_MAX_ROWS, _MAX_NUMBERS = 8, 4096
# Inputs up to this are padded: products of 2 and 4 columns have kernels that those of 1 and 3 lack.
_NARROW, _PADDED = 1024, {1: 2, 3: 4}
# Wider ones go the other way for so many rows.
_ROWS_OF_WIDE = (2, 3)


class _RowsLinear(nn.Linear):
    """A linear layer that takes the other way for a few rows of [R, 1, in] -> [R, 1, out]."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        num_rows = input.shape[0]
        if input.dim() != 3 or input.shape[1] != 1 or num_rows > _MAX_ROWS:
            return functional.linear(input, self.weight, self.bias)
        num_columns = self._columns(num_rows)
        if not num_columns:
            return functional.linear(input, self.weight, self.bias)
        input_CI = input[:, 0]
        if num_columns > num_rows:
            input_CI = torch.cat([input_CI, input_CI[: num_columns - num_rows]])
        result_OC = torch.mm(self.weight, input_CI.t())
        if self.bias is not None:
            result_OC += self.bias[:, None]
        return result_OC[:, :num_rows].t().contiguous()[:, None]

    def _columns(self, num_rows: int) -> int:
        """Of the product that is fastest for so many rows; 0 for that of `nn.Linear`."""
        width = self.in_features
        if width > _NARROW:
            return num_rows if num_rows in _ROWS_OF_WIDE else 0
        num_columns = _PADDED.get(num_rows, num_rows)
        return num_columns if num_columns * width <= _MAX_NUMBERS else 0


def speed_up_few_rows(model: nn.Module) -> None:
    """Let the linear layers in `model` be fast for a few rows, where it makes a difference."""
    for module in model.modules():
        # Not its subclasses: what they do is theirs.
        if type(module) is nn.Linear:
            weight = module.weight
            if weight.device.type == "cpu" and weight.dtype == torch.float32:
                module.__class__ = _RowsLinear
