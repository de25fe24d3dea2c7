"""Matrices of integers as others quantise them: GPTQ, AWQ, compressed-tensors, and bitsandbytes with 8 bits.

The formats are told in codes.py.

Shape legend: O outputs, I inputs, S groups of inputs that share a scale, P codes in an int32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.files.foreign.layout import (
    FLOATS,
    Described,
    Expected,
    Layout,
    Shapes,
    Sized,
    Tensors,
    dtype_of,
    finished,
    matrix_sizes,
)
from neurogrid.model.kernels import Codes

__all__ = ["G_IDX", "INTEGERS", "ZERO_POINT"]

_QWEIGHT, _QZEROS, _SCALES, G_IDX = ".qweight", ".qzeros", ".scales", ".g_idx"
_WEIGHT, _PACKED, _SCALE = ".weight", ".weight_packed", ".weight_scale"
_SHAPE, ZERO_POINT = ".weight_shape", ".weight_zero_point"
_SCB, _WEIGHT_FORMAT = ".SCB", ".weight_format"

# Where output i of eight lies in an int32 of awq.
_AWQ_PLACES: Final = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
_INTEGER_DTYPES: Final = (torch.int8, torch.uint8, torch.int32, torch.int64)


def _bytes(words_RC: torch.Tensor) -> torch.Tensor:
    """uint8 [R, 4 C] of int32; processors have the lowest bits in the first byte, as files do."""
    # In one dimension first: a size of 1 can leave a stride that no other dtype is viewed through.
    return words_RC.reshape(-1).view(torch.uint8).view(words_RC.shape[0], -1)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, C] to its codes, uint8 [R, C P]."""
    bytes_ = _bytes(words)
    return bytes_ if bits == 8 else torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).flatten(-2)


def _codes_of_words(words_OW: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of int32 [O, I / P]: bytes as they lie, those of 8 bits less 128."""
    bytes_ = _bytes(words_OW)
    return bytes_ if bits == 4 else torch.bitwise_xor(bytes_, 0x80).view(torch.int8)


# gptq and gptq_v2.


def _measure_gptq(given: Described, shapes: Shapes, told: torch.Tensor | None) -> Sized:
    per_word = 32 // given.bits
    num_words, num_outputs = matrix_sizes(given, shapes, _QWEIGHT)
    num_inputs = num_words * per_word
    num_groups = given.num_groups(num_inputs)
    # One of another shape is refused for that.
    if told is not None and told.shape == (num_inputs,):
        _require_plain_order(given, told)
    return (num_outputs, num_inputs), {
        _QZEROS: (num_groups, _num_zero_words(given, num_outputs)),
        _SCALES: (num_groups, num_outputs),
        G_IDX: (num_inputs,),
    }


def _require_plain_order(given: Described, groups_I: torch.Tensor) -> None:
    num_inputs = len(groups_I)
    if not torch.equal(groups_I.long(), torch.arange(num_inputs) // (given.group or num_inputs)):
        raise UnsupportedModelError(
            f"{given.name}: the inputs of a matrix are grouped by their activations (desc_act, g_idx), and "
            "only groups of neighbours are supported"
        )


def _num_zero_words(given: Described, num_outputs: int) -> int:
    per_word = 32 // given.bits
    if num_outputs % per_word:
        raise CheckpointError(
            f"{given.name}: {num_outputs} outputs, whose zeros do not fill an int32"
        )
    return num_outputs // per_word


def _decode_gptq(given: Described, tensors: Tensors, sizes: tuple[int, int]) -> Codes:
    num_inputs, middle = sizes[1], 2 ** (given.bits - 1)
    if G_IDX in tensors:
        _require_plain_order(given, tensors[G_IDX])
    zeros_SO = _unpacked(tensors[_QZEROS], given.bits).int()
    if given.are_zeros_less_one:
        zeros_SO += 1
    if not given.has_minimums:
        if not (zeros_SO == middle).all():
            raise CheckpointError(f"{given.name}: zeros other than {middle} in a symmetric matrix")
    elif (zeros_SO == 2 * middle).any():
        # What reads this format takes it for 0 or for one more than the largest code.
        raise UnsupportedModelError(
            f"{given.name}: a zero is stored as {2 * middle - 1}: ambiguous"
        )
    return finished(
        given,
        _codes_of_words(tensors[_QWEIGHT].t(), given.bits),
        tensors[_SCALES].t(),
        num_inputs,
        zeros_SO.t() - middle if given.has_minimums else None,
    )


# awq.


def _measure_awq(given: Described, shapes: Shapes, _: torch.Tensor | None) -> Sized:
    num_inputs, num_words = matrix_sizes(given, shapes, _QWEIGHT)
    num_groups = given.num_groups(num_inputs)
    if num_inputs % 2:
        raise UnsupportedModelError(f"{given.name}: an odd number of inputs, {num_inputs}")
    return (num_words * 8, num_inputs), {
        _QZEROS: (num_groups, num_words),
        _SCALES: (num_groups, num_words * 8),
    }


def _decode_awq(given: Described, tensors: Tensors, sizes: tuple[int, int]) -> Codes:
    codes_OI, zeros_OS = (
        _unpacked(tensors[suffix], 4).unflatten(-1, (-1, 8))[..., _AWQ_PLACES].flatten(-2).t()
        for suffix in (_QWEIGHT, _QZEROS)
    )
    pairs = codes_OI[:, 0::2] | codes_OI[:, 1::2] << 4
    return finished(given, pairs, tensors[_SCALES].t(), sizes[1], zeros_OS.int() - 8)


# compressed-tensors.


def _measure_packed(given: Described, shapes: Shapes, _: torch.Tensor | None) -> Sized:
    per_word = 32 // given.bits
    num_outputs, num_words = matrix_sizes(given, shapes, _PACKED)
    num_inputs = num_words * per_word
    num_groups = given.num_groups(num_inputs)
    expected: Expected = {_SCALE: (num_outputs, num_groups), _SHAPE: (2,)}
    if given.has_minimums:
        # Zeros are packed along the outputs.
        expected[ZERO_POINT] = (-(-num_outputs // per_word), num_groups)
    return (num_outputs, num_inputs), expected


def _decode_packed(given: Described, tensors: Tensors, sizes: tuple[int, int]) -> Codes:
    if tensors[_SHAPE].tolist() != list(sizes):
        raise UnsupportedModelError(
            f"{given.name}: {_SHAPE} says {tensors[_SHAPE].tolist()} of a matrix that has {list(sizes)}"
        )
    zeros_OS = None
    if given.has_minimums:
        if tensors[ZERO_POINT].dtype != torch.int32:
            raise CheckpointError(f"{given.name}: {ZERO_POINT} is not packed in int32")
        unsigned_SO = _unpacked(tensors[ZERO_POINT].t(), given.bits)[:, : sizes[0]]
        zeros_OS = unsigned_SO.t().int() - 2 ** (given.bits - 1)
    else:
        _check_no_zeros(given, tensors)
    codes = _codes_of_words(tensors[_PACKED], given.bits)
    return finished(given, codes, tensors[_SCALE], sizes[1], zeros_OS)


def _measure_int(given: Described, shapes: Shapes, _: torch.Tensor | None) -> Sized:
    sizes = matrix_sizes(given, shapes, _WEIGHT)
    by_group = (sizes[0], given.num_groups(sizes[1]))
    return sizes, {_SCALE: by_group, ZERO_POINT: by_group}


def _decode_int(given: Described, tensors: Tensors, sizes: tuple[int, int]) -> Codes:
    zeros_OS = None
    if given.has_minimums:
        zeros_OS = tensors[ZERO_POINT]
        if zeros_OS.dtype != torch.int8:
            raise CheckpointError(f"{given.name}: {ZERO_POINT} is {dtype_of(zeros_OS)}")
    else:
        _check_no_zeros(given, tensors)
    return finished(given, tensors[_WEIGHT], tensors[_SCALE], sizes[1], zeros_OS)


def _check_no_zeros(given: Described, tensors: Tensors) -> None:
    """Older files have the zeros of symmetric matrices, too."""
    if ZERO_POINT in tensors and tensors[ZERO_POINT].any():
        raise CheckpointError(f"{given.name}: a zero point in a symmetric matrix")


# bitsandbytes.


def _measure_int8(given: Described, shapes: Shapes, _: torch.Tensor | None) -> Sized:
    sizes = matrix_sizes(given, shapes, _WEIGHT)
    return sizes, {_SCB: (sizes[0],), _WEIGHT_FORMAT: ()}


def _decode_int8(given: Described, tensors: Tensors, sizes: tuple[int, int]) -> Codes:
    if _WEIGHT_FORMAT in tensors and tensors[_WEIGHT_FORMAT].item() != 0:
        raise UnsupportedModelError(f"{given.name}: a matrix is laid out for one kind of GPU")
    return finished(given, tensors[_WEIGHT], tensors[_SCB][:, None] / 127, sizes[1])


INTEGERS: Final[Mapping[str, Layout]] = {
    "gptq": Layout(
        _QWEIGHT,
        _SCALES,
        (_QWEIGHT, _QZEROS, _SCALES),
        (G_IDX,),
        {
            _QWEIGHT: (torch.int32,),
            _QZEROS: (torch.int32,),
            _SCALES: FLOATS,
            G_IDX: (torch.int32, torch.int64),
        },
        _measure_gptq,
        _decode_gptq,
    ),
    "awq": Layout(
        _QWEIGHT,
        _SCALES,
        (_QWEIGHT, _QZEROS, _SCALES),
        (),
        {_QWEIGHT: (torch.int32,), _QZEROS: (torch.int32,), _SCALES: FLOATS},
        _measure_awq,
        _decode_awq,
    ),
    "packed": Layout(
        _PACKED,
        _SCALE,
        (_PACKED, _SCALE, _SHAPE),
        (ZERO_POINT,),
        {
            _PACKED: (torch.int32,),
            _SCALE: FLOATS,
            _SHAPE: (torch.int32, torch.int64),
            ZERO_POINT: _INTEGER_DTYPES,
        },
        _measure_packed,
        _decode_packed,
    ),
    "int": Layout(
        _SCALE,
        _SCALE,
        (_WEIGHT, _SCALE),
        (ZERO_POINT,),
        {_WEIGHT: (torch.int8,), _SCALE: FLOATS, ZERO_POINT: _INTEGER_DTYPES},
        _measure_int,
        _decode_int,
    ),
    "int8": Layout(
        _SCB,
        _SCB,
        (_WEIGHT, _SCB),
        (_WEIGHT_FORMAT,),
        {_WEIGHT: (torch.int8,), _SCB: (torch.float32,), _WEIGHT_FORMAT: (torch.uint8,)},
        _measure_int8,
        _decode_int8,
    ),
}
"""The layouts, by name."""
