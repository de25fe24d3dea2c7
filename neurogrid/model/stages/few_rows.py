"""Matrix products of one row and of some, on the CPU, as fast as the matrix can be read.

What is fast depends on the processor, so it is measured, once in a process.

In float32: on an AMD EPYC MKL reads a matrix of 512 inputs at 15 GB/s for `x @ W.T` of one row, as `nn.Linear` asks
for it, one of 1024 at 21, and takes 1.5 to 3 times as long for 2 to 8 rows. Asked for `W @ x.T` of two or four columns
it reads narrow matrices at 20 to 26 GB/s. So one row is halved: W of [out, in] is the same memory as [2 out, in / 2],
and its product with the halves of x as two columns has in every two rows the four sums of which two, added, are the
result. Two to four rows are columns as they are. On an Intel Xeon MKL has kernels for up to three rows that read at 13
to 16 GB/s, as fast as memory goes there, and columns take twice as long: it is asked for rows, as `nn.Linear` asks.

oneDNN, which torch brings along and uses for float32 only in what it compiles, takes as long for 8 rows as for 3: 330
us for a matrix of [2048, 512] where MKL takes 510, and half of MKL's time for 20 to 64 rows; on the Xeon 0.6 to 0.8 of
it from 4 rows to 16. It has what columns are no good for: more rows, and more than 4096 numbers in them. One row of a
wide matrix is read at 22 to 24 GB/s by either on the EPYC, and no slicing of it was faster.

So for [R, T, D], the rows of R single tokens (T = 1), and by oneDNN for the few of a short prompt (R = 1), which is
what a conversation goes on with: on the Xeon 0.65 of MKL's time for 8, 0.73 for 16, 0.83 for 32. What this gives is
equal up to rounding; what longer prompts give keeps its bits.

Where the products of `neurogrid.model.kernels` are there, bfloat16 is theirs, and so is float32 that is bfloat16 made
wider: then all rows are, and get the bits that they get alone. Without them:

In bfloat16 torch gives one row to oneDNN, too, which on the Xeon reads a matrix of 512 inputs at 7 GB/s, others at 9
to 12, and one of 14336 at 6. Asked for a matrix times a vector torch uses a loop of its own, and that reads at 9 to
14: 223 us for 306 in [2048, 512], 8.6 ms for 20 in [4096, 14336]. The bits are the same, but for the widest matrices.
In float16 that loop is the slower.

(Medians, one thread, matrices in turn that no cache holds.)

Source: benchmarks/decode.py and benchmarks/sessions.py show what comes of it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from neurogrid.model.kernels import Bfloat16Linear, hold_as_bfloat16, library

__all__ = ["measure_few_rows", "speed_up_few_rows"]

# One row of inputs up to this is halved.
_NARROW: Final = 1024
# So many rows become so many columns (products of 2 and 4 have kernels that those of 3 lack), if that makes no more
# numbers in all.
_COLUMNS: Final = {2: 2, 3: 4, 4: 4}
_MAX_NUMBERS: Final = 4096

# oneDNN's product, which reads the plain matrix; None on a processor, or with a torch, that has none. Looked up once:
# it is called for every matrix of every step.
_onednn_linear: Callable[..., torch.Tensor] | None = (
    torch.ops.mkldnn._linear_pointwise.default
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    else None
)

# What is measured with: matrices of 4 MiB in float32, more of them than a cache holds.
_MEASURED: Final = 2048, 512
_NUM_MEASURED: Final = 16
_ROUNDS: Final = 3
# Rows from which oneDNN is quicker where MKL has kernels for the fewer, and of a prompt up to which it is.
_ONEDNN_ROWS: Final = 4
_MAX_ONEDNN_TOKENS: Final = 64
# oneDNN keeps a kernel of 0.6 MB for each number of rows that matrices of one shape have met, and takes a millisecond
# or more to make it. So more rows than this, or tokens, are filled up to a multiple of so many: 19 numbers for 61.
_EXACT_ROWS: Final = 8
_ROWS_STEP: Final = 4


class _RowsLinear(nn.Linear):
    """A linear layer that takes other ways for few rows, [R, T, in] -> [R, T, out], where MKL is quick for fewer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        shape = input.shape
        if len(shape) == 3:
            num_rows, num_tokens, _ = shape
            if num_tokens == 1:
                return self._single_tokens(input)
            if num_rows == 1 and _ONEDNN_ROWS <= num_tokens <= _MAX_ONEDNN_TOKENS:
                return self._by_onednn(input.transpose(0, 1)).transpose(0, 1)
        return functional.linear(input, self.weight, self.bias)

    def _single_tokens(self, input_R1I: torch.Tensor) -> torch.Tensor:
        if input_R1I.shape[0] < _ONEDNN_ROWS:
            return functional.linear(input_R1I, self.weight, self.bias)
        return self._by_onednn(input_R1I)

    def _by_onednn(self, input_R1I: torch.Tensor) -> torch.Tensor:
        if _onednn_linear is None:
            return functional.linear(input_R1I, self.weight, self.bias)
        num_rows = input_R1I.shape[0]
        if num_rows > _EXACT_ROWS and num_rows % _ROWS_STEP:
            input_R1I = functional.pad(input_R1I, (0, 0, 0, 0, 0, -num_rows % _ROWS_STEP))
        return _onednn_linear(input_R1I, self.weight, self.bias, "none", [], "")[:num_rows]


class _ColumnsLinear(_RowsLinear):
    """The same where MKL is quicker for a few columns."""

    def _single_tokens(self, input_R1I: torch.Tensor) -> torch.Tensor:
        num_rows = input_R1I.shape[0]
        if num_rows == 1:
            return self._one_row(input_R1I)
        num_columns = _COLUMNS.get(num_rows)
        if num_columns is not None and num_columns * self.in_features <= _MAX_NUMBERS:
            return self._by_columns(input_R1I[:, 0], num_columns)
        return self._by_onednn(input_R1I)

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

    def _by_columns(self, input_RI: torch.Tensor, num_columns: int) -> torch.Tensor:
        num_rows = input_RI.shape[0]
        if num_columns > num_rows:
            input_RI = torch.cat([input_RI, input_RI[: num_columns - num_rows]])
        result_OC = torch.mm(self.weight, input_RI.t())
        if self.bias is not None:
            result_OC += self.bias[:, None]
        return result_OC[:, :num_rows].t().contiguous()[:, None]


class _VectorLinear(nn.Linear):
    """A linear layer in bfloat16 that takes one row for a vector."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.numel() != self.in_features:
            return functional.linear(input, self.weight, self.bias)
        input_I = input.reshape(-1)
        weight, bias = self.weight, self.bias
        result_O = torch.mv(weight, input_I) if bias is None else torch.addmv(bias, weight, input_I)
        return result_O.view(*input.shape[:-1], -1)


def speed_up_few_rows(model: nn.Module) -> None:
    """Let the linear layers in `model` be fast for single tokens and short prompts, where it makes a difference."""
    num_uses = Counter(
        id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)
    )
    for name, module in list(model.named_modules()):
        # Not its subclasses: what they do is theirs.
        if type(module) is not nn.Linear:
            continue
        weight = module.weight
        if weight.device.type != "cpu" or not weight.is_contiguous():
            continue
        # An embedding that is the head, too, stays what it is.
        held = hold_as_bfloat16(module) if name and num_uses[id(weight)] == 1 else module
        if held is module:
            module.__class__ = _fast_class(weight.dtype)
        else:
            model.set_submodule(name, held)


def measure_few_rows(device: torch.device, dtype: torch.dtype) -> None:
    """Find out what `speed_up_few_rows` needs to know of the processor, once; else its first call does, in 80 ms."""
    if device.type == "cpu":
        _fast_class(dtype)


def _fast_class(dtype: torch.dtype) -> type[nn.Linear]:
    if dtype == torch.float32:
        return _ColumnsLinear if _columns_are_fast() else _RowsLinear
    if dtype == torch.bfloat16 and library() is not None:
        return Bfloat16Linear
    if dtype == torch.bfloat16:
        return _VectorLinear if _vectors_are_fast() else nn.Linear
    return nn.Linear


@cache
def _columns_are_fast() -> bool:
    """Whether this processor multiplies one row sooner as two columns of halves. Takes some 80 ms."""
    half = _MEASURED[1] // 2
    halves_H2 = _ones(2, half, dtype=torch.float32).t()
    return _is_quicker_than_rows(
        lambda matrix: torch.mm(matrix.view(-1, half), halves_H2), torch.float32
    )


@cache
def _vectors_are_fast() -> bool:
    """Whether this processor multiplies one row in bfloat16 sooner as a vector. Takes some 40 ms."""
    vector_I = _ones(_MEASURED[1], dtype=torch.bfloat16)
    return _is_quicker_than_rows(lambda matrix: torch.mv(matrix, vector_I), torch.bfloat16)


def _ones(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    # Not random: what draws numbers elsewhere is not to get others.
    return torch.ones(shape, dtype=dtype, device="cpu")


def _is_quicker_than_rows(
    multiply: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> bool:
    """Whether a way to multiply one row with a matrix takes less time than `nn.Linear`'s.

    By the quickest of many single products, of which some run undisturbed also where every process of a machine starts
    to load at once: by the time of several together, one worker of six once took the slower way for good.
    """
    with torch.inference_mode():
        # In one piece, which the C library gives back when it is let go: of many pieces it would keep 48 MiB.
        matrices = _ones(_NUM_MEASURED, *_MEASURED, dtype=dtype).unbind()
        row_1I = _ones(1, _MEASURED[1], dtype=dtype)
        by_rows = _quickest(lambda matrix: functional.linear(row_1I, matrix), matrices)
        return _quickest(multiply, matrices) < by_rows


def _quickest(
    multiply: Callable[[torch.Tensor], torch.Tensor], matrices: Sequence[torch.Tensor]
) -> float:
    """Seconds of the quickest of some products with each of the matrices, in turn."""
    seconds = math.inf
    for matrix in [*matrices] * _ROUNDS:
        started = time.perf_counter()
        multiply(matrix)
        seconds = min(seconds, time.perf_counter() - started)
    return seconds
