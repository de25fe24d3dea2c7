"""Matrices of little floats as others quantise them: bitsandbytes NF4, fp8 in blocks, and mxfp4.

The formats are told in codes.py.

Shape legend: O outputs, I inputs, S groups of inputs that share a scale.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Final

import torch

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.files.foreign.layout import (
    MAX_SIZE,
    Described,
    Layout,
    Shapes,
    Sized,
    Tensors,
    finished,
    matrix_sizes,
)
from neurogrid.model.kernels import CODE_GROUP, E4M3, Codes

__all__ = ["E2M1", "LITTLE_FLOATS", "NF4", "STATE", "group_of_fp8"]

NF4: Final = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)
"""float32 [16]: the quantiles of a normal distribution (Dettmers and others, 2023)."""
E2M1: Final = torch.tensor(
    [sign * each for sign in (1, -1) for each in (0.0, 0.5, 1, 1.5, 2, 3, 4, 6)]
)
"""float32 [16]: floats of a sign, two bits of exponent and one of fraction."""

_WEIGHT = ".weight"
_ABSMAX, _MAP = ".weight.absmax", ".weight.quant_map"
STATE = ".weight.quant_state.bitsandbytes__nf4"
_SCALE_INV = ".weight_scale_inv"
_BLOCKS, _EXPONENTS = "_blocks", "_scales"

# A quant_state has some 80 bytes.
_MAX_STATE_BYTES: Final = 4096
_MXFP4_BLOCK: Final = 32


# bitsandbytes.


def _measure_nf4(given: Described, shapes: Shapes, told: torch.Tensor | None) -> Sized:
    if told is None:
        raise CheckpointError(f"{given.name}: a matrix lacks its {STATE}")
    num_outputs, num_inputs, block = _read_state(given, told)
    if block % CODE_GROUP or num_inputs % block:
        raise UnsupportedModelError(
            f"{given.name}: {num_inputs} inputs in blocks of {block}: they must be whole blocks, and those of a "
            f"multiple of {CODE_GROUP}"
        )
    return (num_outputs, num_inputs), {
        _WEIGHT: (num_outputs * num_inputs // 2, 1),
        _ABSMAX: (num_outputs * num_inputs // block,),
        _MAP: (16,),
    }


def _read_state(given: Described, told: torch.Tensor) -> tuple[int, int, int]:
    """O, I and the size of a block, from a quant_state: uint8 [bytes of JSON]."""
    if told.dtype != torch.uint8 or told.dim() != 1 or told.numel() > _MAX_STATE_BYTES:
        raise CheckpointError(f"{given.name}: {STATE} is no short text")
    try:
        state = json.loads(bytes(told.tolist()))
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{given.name}: {STATE} is not JSON") from exc
    if not isinstance(state, dict):
        raise CheckpointError(f"{given.name}: {STATE} is not a JSON object")
    if state.get("quant_type") != "nf4" or any(key.startswith("nested") for key in state):
        raise UnsupportedModelError(
            f"{given.name}: a matrix is of another type, or its scales are quantised, too"
        )
    shape = state.get("shape")
    sizes = [*shape, state.get("blocksize")] if isinstance(shape, list) else []
    if len(sizes) != 3 or not all(type(size) is int and 0 < size <= MAX_SIZE for size in sizes):
        raise CheckpointError(f"{given.name}: {STATE} has no shape of a matrix, or no blocksize")
    num_outputs, num_inputs, block = sizes
    return num_outputs, num_inputs, block


def _decode_nf4(given: Described, tensors: Tensors, sizes: tuple[int, int]) -> Codes:
    # What reads this format has the table in its code.
    if not torch.equal(tensors[_MAP], NF4):
        raise UnsupportedModelError(f"{given.name}: {_MAP} is not the table of nf4")
    bytes_ = tensors[_WEIGHT].reshape(sizes[0], -1)
    swapped = bytes_ >> 4 | bytes_ << 4
    scales_OS = tensors[_ABSMAX].reshape(sizes[0], -1)
    return finished(given, swapped, scales_OS, sizes[1], table=NF4)


# fp8 in blocks.


def _measure_fp8(given: Described, shapes: Shapes, _: torch.Tensor | None) -> Sized:
    sizes = matrix_sizes(given, shapes, _WEIGHT)
    group_of_fp8(given, sizes[1])
    blocks = tuple(-(-size // block) for size, block in zip(sizes, given.block, strict=True))
    return sizes, {_SCALE_INV: blocks}


def group_of_fp8(given: Described, num_inputs: int) -> int:
    """Inputs that share a scale: as many as a block has, or a part of it where the last one is not whole."""
    group = math.gcd(given.block[1], num_inputs)
    if group % CODE_GROUP:
        raise UnsupportedModelError(
            f"{given.name}: {num_inputs} inputs in blocks of {given.block[1]}: both must be multiples of {CODE_GROUP}"
        )
    return group


def _decode_fp8(given: Described, tensors: Tensors, sizes: tuple[int, int]) -> Codes:
    floats_OI = tensors[_WEIGHT]
    if (floats_OI.view(torch.uint8) & 0x7F == 0x7F).any():
        raise CheckpointError(f"{given.name}: a weight is not a number")
    scales = tensors[_SCALE_INV]
    if not torch.isfinite(scales.float().abs().amax() * torch.finfo(E4M3).max):
        raise CheckpointError(f"{given.name}: a scale is not finite, or makes weights that are not")
    group = group_of_fp8(given, sizes[1])
    outputs, groups = torch.arange(sizes[0]), torch.arange(0, sizes[1], group)
    scales_OS = scales[outputs // given.block[0]][:, groups // given.block[1]]
    return Codes(8, floats_OI.contiguous(), scales_OS.contiguous(), sizes[1])


# mxfp4, of one expert.


def _measure_mxfp4(given: Described, shapes: Shapes, _: torch.Tensor | None) -> Sized:
    sizes = shapes[_BLOCKS]
    if len(sizes) != 3 or min(sizes) < 1 or sizes[2] * 2 != _MXFP4_BLOCK:
        raise CheckpointError(f"{given.name}: {_BLOCKS} is {list(sizes)[:8]}: no matrix in blocks")
    return (sizes[0], sizes[1] * _MXFP4_BLOCK), {_EXPONENTS: (sizes[0], sizes[1])}


def _decode_mxfp4(given: Described, tensors: Tensors, sizes: tuple[int, int]) -> Codes:
    exponents_OS = tensors[_EXPONENTS]
    if (exponents_OS == 255).any():
        raise CheckpointError(f"{given.name}: a scale is not a number")
    # The same exponent in bfloat16; what would be 2 ^ -127 is half of its least one.
    bits_OS = exponents_OS.to(torch.int16) << 7
    bits_OS[exponents_OS == 0] = 1 << 6
    return finished(
        given,
        tensors[_BLOCKS].reshape(sizes[0], -1),
        bits_OS.view(torch.bfloat16),
        sizes[1],
        table=E2M1,
    )


LITTLE_FLOATS: Final[Mapping[str, Layout]] = {
    "nf4": Layout(
        _ABSMAX,
        _ABSMAX,
        (_WEIGHT, _ABSMAX, _MAP, STATE),
        (),
        {
            _WEIGHT: (torch.uint8,),
            _ABSMAX: (torch.float32,),
            _MAP: (torch.float32,),
            STATE: (torch.uint8,),
        },
        _measure_nf4,
        _decode_nf4,
    ),
    "fp8": Layout(
        _SCALE_INV,
        _SCALE_INV,
        (_WEIGHT, _SCALE_INV),
        (),
        {_WEIGHT: (E4M3,), _SCALE_INV: (torch.float32, torch.bfloat16)},
        _measure_fp8,
        _decode_fp8,
    ),
    "mxfp4": Layout(
        _BLOCKS,
        _EXPONENTS,
        (_BLOCKS, _EXPONENTS),
        (),
        {_BLOCKS: (torch.uint8,), _EXPONENTS: (torch.uint8,)},
        _measure_mxfp4,
        _decode_mxfp4,
    ),
}
"""The layouts, by name."""
