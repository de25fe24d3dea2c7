"""Matrix products of one row and of a few, on the CPU in float32, as fast as the matrix can be read.

MKL reads a matrix of 512 inputs at 15 GB/s for `x @ W.T` of one row, as `nn.Linear` asks for it, one of 1024 at 21,
and takes 1.5 to 3 times as long for 2 to 8 rows. Asked for `W @ x.T` of two or four columns it reads narrow matrices
at 24 to 26 GB/s. So one row is halved: W of [out, in] is the same memory as [2 out, in / 2], and its product with the
halves of x as two columns has in every two rows the four sums of which two, added, are the result. Several rows are
columns as they are. Longer inputs than `_MAX_NUMBERS` in all make that way the slower one, and in half precision it
always is. Wide matrices are read at 22 to 24 GB/s as they are, and no slicing of them was faster.

(Medians on an AMD EPYC, one thread, matrices in turn that no cache holds.)

Only for single tokens, [R, 1, D]: what a prompt gives keeps its bits, what a token gives is equal up to rounding.

Source: benchmarks/decode.py and benchmarks/sessions.py show what comes of it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

__all__ = ["speed_up_few_rows"]

_MAX_ROWS, _MAX_NUMBERS = 8, 4096
# Inputs up to this are halved, or padded: products of 2 and 4 columns have kernels that those of 1 and 3 lack.
_NARROW, _PADDED = 1024, {3: 4}
# Wider ones go the other way for so many rows.
_ROWS_OF_WIDE = (2, 3)


class _RowsLinear(nn.Linear):
    """A linear layer that takes the other way for a few rows of [R, 1, in] -> [R, 1, out]."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        shape = input.shape
        if len(shape) != 3 or shape[1] != 1 or shape[0] > _MAX_ROWS:
            return functional.linear(input, self.weight, self.bias)
        if shape[0] == 1:
            return self._one_row(input)
        num_columns = self._columns(shape[0])
        if not num_columns:
            return functional.linear(input, self.weight, self.bias)
        input_CI = input[:, 0]
        if num_columns > shape[0]:
            input_CI = torch.cat([input_CI, input_CI[: num_columns - shape[0]]])
        result_OC = torch.mm(self.weight, input_CI.t())
        if self.bias is not None:
            result_OC += self.bias[:, None]
        return result_OC[:, : shape[0]].t().contiguous()[:, None]

    def _one_row(self, input_11I: torch.Tensor) -> torch.Tensor:
        width = self.in_features
        if width > _NARROW or width % 2:
            return functional.linear(input_11I, self.weight, self.bias)
        halves_2H = input_11I.reshape(2, -1)
        sums = torch.mm(self.weight.view(-1, width // 2), halves_2H.t()).view(1, 1, -1, 4)
        # First half by first, first by second, second by first, second by second.
        result_11O = sums[..., 0] + sums[..., 3]
        if self.bias is not None:
            result_11O += self.bias
        return result_11O

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
            is_plain = weight.device.type == "cpu" and weight.is_contiguous()
            if is_plain and weight.dtype == torch.float32:
                module.__class__ = _RowsLinear
