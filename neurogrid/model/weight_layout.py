"""Matrices of linear layers stored by columns, for decoding on the CPU in float32.

A product of one row takes as long as it takes to read the matrix. MKL reads one that is stored by columns at 24 to
29 GB/s, and one that is stored by rows, as checkpoints have them, at 15 to 22 (measured on an AMD EPYC, one thread);
products of many rows take as long, and keep their bits, those of one row are equal up to rounding. In half precision
it is the other way round: there nothing is done.

Source: benchmarks/decode.py shows what comes of it.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["store_by_columns"]

# A module whose matrices are less of it than that stays as it came: it would take the memory of both forms.
_LEAST_PART = 0.9


def store_by_columns(module: nn.Module, *, is_whole: bool = False) -> bool:
    """Store the linear layers below `module` by columns, if they are most of it; whether that was done.

    Afterwards nothing in it lies in the memory that its tensors came in. Names, shapes and values stay.

    Args:
        is_whole: `module` is to be treated as one thing; False leaves what is not a linear layer where it is, and
            does so whatever part of the whole they are.
    """
    linear = [each for each in module.modules() if type(each) is nn.Linear and _gains(each.weight)]
    matrices = {id(each.weight): each.weight for each in linear}
    others = [each for each in module.parameters() if id(each) not in matrices]
    if is_whole:
        matrix_bytes = sum(each.nbytes for each in matrices.values())
        all_bytes = matrix_bytes + sum(each.nbytes for each in others)
        if not matrices or matrix_bytes < _LEAST_PART * all_bytes:
            return False
        for parameter in others:
            parameter.data = parameter.data.clone()
        for buffer in module.buffers():
            buffer.data = buffer.data.clone()
    for weight in matrices.values():
        # In place: an embedding may be tied to it.
        weight.data = weight.data.t().contiguous().t()
    return bool(matrices)


def _gains(weight: torch.Tensor) -> bool:
    is_hollow = not any(weight.stride())
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and not is_hollow
