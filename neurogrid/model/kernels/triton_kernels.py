"""Kernels for codes on a GPU, in Triton: a product of few rows that reads codes, and the weights made of codes at once.

Imported only where there is Triton (launches.py). The same source serves every GPU that Triton compiles for.

Inputs are worked on in units: 32 of them, or 16 where so few share a scale. `SHARED` units have one scale. `UNITS` of
a row, and `OUTPUTS` rows, are worked on at once. Codes that are floats come as bytes.

Shape legend: O outputs, I inputs, R rows of activations.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.errors import TritonError

__all__ = ["TritonError", "make_dense", "make_dense_of_tiles", "multiply_rows"]


@triton.jit
def _values(codes, ARE_FLOATS: tl.constexpr):
    """Return the values of codes of 8 bits, float32."""
    if ARE_FLOATS:
        codes = codes.to(tl.float8e4nv, bitcast=True)
    return codes.to(tl.float32)


@triton.jit
def _pair(codes, table, HAS_TABLE: tl.constexpr):
    """Return the values of the two codes of 4 bits in each byte: of the even inputs, and of the odd ones."""
    even, odd = codes & 15, codes >> 4
    if HAS_TABLE:
        return tl.load(table + even.to(tl.int32)), tl.load(table + odd.to(tl.int32))
    return even.to(tl.float32) - 8, odd.to(tl.float32) - 8


@triton.jit(do_not_specialize=["num_outputs", "num_units", "num_rows"])
def multiply_rows(
    codes,
    scales,
    minimums,
    table,
    num_outputs,
    num_inputs,
    num_units,
    given,
    result,
    num_rows,
    BITS: tl.constexpr,
    ARE_FLOATS: tl.constexpr,
    UNIT: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    UNITS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """[R, I] to [R, O], a program for `OUTPUTS` outputs of `ROWS` rows; products and sums in float32."""
    WIDTH: tl.constexpr = UNIT * BITS // 8  # bytes of a unit
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, WIDTH)[None, None, :]
    row = r[:, None, None, None] * num_inputs
    is_row = r[:, None, None, None] < num_rows
    is_output = o[:, None, None] < num_outputs
    sums = tl.zeros([ROWS, OUTPUTS, UNITS], tl.float32)
    for first in range(0, num_units, UNITS):
        u = first + tl.arange(0, UNITS)[None, :, None]
        is_unit = is_output & (u < num_units)
        place = o[:, None, None].to(tl.int64) * num_units + u
        held = tl.load(codes + place * WIDTH + j, mask=is_unit, other=0)
        place = place // SHARED  # a row has whole scales
        scale = tl.load(scales + place, mask=is_unit, other=0).to(tl.float32)
        i = (u * UNIT + tl.arange(0, UNIT)[None, None, :])[None]
        x = tl.load(given + row + i, mask=is_row & (i < num_inputs), other=0).to(tl.float32)
        if BITS == 8:
            products = x * _values(held, ARE_FLOATS)[None]
        else:
            even, odd = _pair(held, table, HAS_TABLE)
            x_even, x_odd = tl.split(tl.reshape(x, [ROWS, 1, UNITS, WIDTH, 2]))
            products = x_even * even[None] + x_odd * odd[None]
        sums += tl.sum(products, 3) * tl.sum(scale, 2)[None]
        if HAS_MINIMUMS:
            least = tl.load(minimums + place, mask=is_unit, other=0).to(tl.float32)
            sums += tl.sum(x, 3) * tl.sum(least, 2)[None]
    place_RO = r[:, None] * num_outputs + o[None]
    is_there = (r[:, None] < num_rows) & (o[None] < num_outputs)
    tl.store(result + place_RO, tl.sum(sums, 2).to(result.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["num_outputs", "num_units"])
def make_dense(
    codes,
    scales,
    minimums,
    table,
    num_outputs,
    num_inputs,
    num_units,
    result,
    BITS: tl.constexpr,
    ARE_FLOATS: tl.constexpr,
    UNIT: tl.constexpr,
    SHARED: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    UNITS: tl.constexpr,
):
    """The weights [O, I]: in float32, then rounded."""
    WIDTH: tl.constexpr = UNIT * BITS // 8
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None, None]
    u = tl.program_id(1) * UNITS + tl.arange(0, UNITS)[None, :, None]
    is_unit = (o < num_outputs) & (u < num_units)
    place = o.to(tl.int64) * num_units + u
    held = tl.load(
        codes + place * WIDTH + tl.arange(0, WIDTH)[None, None, :], mask=is_unit, other=0
    )
    place = place // SHARED  # a row has whole scales
    scale = tl.load(scales + place, mask=is_unit, other=0).to(tl.float32)
    if BITS == 8:
        values = _values(held, ARE_FLOATS)
    else:
        even, odd = _pair(held, table, HAS_TABLE)
        values = tl.reshape(tl.join(even, odd), [OUTPUTS, UNITS, UNIT])
    values = values * scale
    if HAS_MINIMUMS:
        values += tl.load(minimums + place, mask=is_unit, other=0).to(tl.float32)
    i = u * UNIT + tl.arange(0, UNIT)[None, None, :]
    there = result + o.to(tl.int64) * num_inputs + i
    tl.store(there, values.to(result.dtype.element_ty), mask=is_unit & (i < num_inputs))


@triton.jit(do_not_specialize=["num_outputs"])
def make_dense_of_tiles(
    packed,
    scales_and_zeros,
    num_outputs,
    num_inputs,
    result,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    UNITS: tl.constexpr,
):
    """The weights [O, I] of codes of 4 bits in the order of torch's own kernel for NVIDIA's, rounded once.

    That takes tiles of 8 outputs and 16 inputs, `TILES` along the inputs at once. A thread of its 32 has, of each pair
    of tiles, one output's inputs 2t, 2t + 1, 2t + 8, 2t + 9 in both: those that are even in the low half of a word.
    """
    WIDTH: tl.constexpr = 16 * TILES
    o = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[:, None, None]
    u = tl.program_id(1) * UNITS + tl.arange(0, UNITS)[None, :, None]
    j = tl.arange(0, 32)[None, None, :]
    i = u * 32 + j
    is_there = (o < num_outputs) & (i < num_inputs)
    tile = o // 8 * (num_inputs // WIDTH) + u * 32 // WIDTH
    thread = o % 8 * 4 + j % 8 // 2
    word = (tile * 32 + thread) * (TILES // 2) + u * 32 % WIDTH // 32
    shift = (j % 2 * 4 + j // 16 * 2 + j % 16 // 8) * 4
    codes = (tl.load(packed + word, mask=is_there, other=0) >> shift) & 15
    is_unit = (o < num_outputs) & (u * 32 < num_inputs)
    place = (u * 32 // GROUP * num_outputs + o) * 2
    scale = tl.load(scales_and_zeros + place, mask=is_unit, other=0).to(tl.float32)
    zero = tl.load(scales_and_zeros + place + 1, mask=is_unit, other=0).to(tl.float32)
    values = (codes - 8).to(tl.float32) * scale + zero
    there = result + o.to(tl.int64) * num_inputs + i
    tl.store(there, values.to(result.dtype.element_ty), mask=is_there)
