"""The blocks of a GGUF file's matrices as `Codes`, exactly.

A row is blocks of 32 or 256 neighbouring elements. q is a code, d, m and s numbers of the block:

| type | a block has | an element is | codes of |
|---|---|---|---|
| Q4_0, Q8_0 | d; q of 4, 8 bits | d (q - 8), d q | 4, 8 bits |
| Q4_1 | d, m; q of 4 bits | d q + m | 4 bits with a table, minimums |
| Q5_0, Q5_1 | d, or d and m; q of 5 bits | d (q - 16), d q + m | 8 bits |
| Q4_K, Q5_K | d, e; s, m of 6 bits for each 32; q of 4, 5 bits | (d s) q - (e m) | as Q4_1, Q5_1 |
| Q6_K | d; s of 8 bits for each 16; q of 6 bits | (d s) (q - 32) | 8 bits in groups of 16 |
| IQ4_NL | d; q of 4 bits | d table[q] | 4 bits with a table |
| IQ4_XS | d; s of 6 bits for each 32; q of 4 bits | (d (s - 32)) table[q] | the same |

d, e, and m of 16 bits are float16. Products of those with 6 or 8 bits are exact in float32, and so are the scales and
minimums here; an element is rounded where what reads the format rounds it.

Source: ggml-common.h and ggml-quants.c of ggml.

Shape legend: O outputs, I inputs, B blocks of a row, N bytes of a block, K inputs of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from neurogrid.model.files.gguf.block_types import BlockType
from neurogrid.model.files.quantization import CodesForm
from neurogrid.model.kernels import HALF_GROUP, Codes

__all__ = ["codes_of_blocks", "form_of_blocks"]

_PLAIN_TABLE: Final = torch.arange(16, dtype=torch.float32)
"""Codes that count from 0, which have a minimum."""
_NL_TABLE: Final = torch.tensor(
    [*(-127, -104, -83, -65, -49, -35, -22, -10), *(1, 13, 25, 38, 53, 69, 89, 113)],
    dtype=torch.float32,
)
"""float32 [16], of IQ4."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """Codes of blocks, with their scales and minimums.

    Attributes:
        codes: [O, B, K], of one block one after the other: uint8 of 4 bits, int8 of 8.
        scales, minimums: [O, B, S / B].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor | None = None


_Read: TypeAlias = Callable[[torch.Tensor], _Parts]


def form_of_blocks(kind: BlockType) -> CodesForm:
    """The form of the codes that blocks of this type are."""
    return _TYPES[kind.name].form


def codes_of_blocks(kind: BlockType, blocks_ON: torch.Tensor) -> Codes:
    """The codes of a matrix.

    Args:
        blocks_ON: uint8 [O, B N], on the CPU.
    """
    known = _TYPES[kind.name]
    num_outputs = blocks_ON.shape[0]
    parts = known.read(blocks_ON.view(num_outputs, -1, kind.block_bytes))
    codes_OI = parts.codes.reshape(num_outputs, -1)
    num_inputs = codes_OI.shape[1]
    if known.form.bits == 4:
        codes_OI = codes_OI[:, 0::2] | codes_OI[:, 1::2] << 4
    minimums = parts.minimums
    return Codes(
        known.form.bits,
        codes_OI.contiguous(),
        parts.scales.reshape(num_outputs, -1).contiguous(),
        num_inputs,
        None if minimums is None else minimums.reshape(num_outputs, -1).contiguous(),
        known.table,
    )


def _half(blocks_OBN: torch.Tensor, at: int) -> torch.Tensor:
    """float16 [O, B, 1] at a byte of each block."""
    return blocks_OBN[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    """[..., n] to [..., 2 n]: the low halves of n bytes, then the high ones."""
    return torch.cat([bytes_ & 15, bytes_ >> 4], dim=-1)


def _fifth_bits(blocks_OBN: torch.Tensor, at: int) -> torch.Tensor:
    """uint8 [O, B, 32], 0 or 16: of 4 bytes, lowest bit first."""
    bits = blocks_OBN[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2) << 4


def _read_q4_0(blocks_OBN: torch.Tensor) -> _Parts:
    return _Parts(_nibbles(blocks_OBN[..., 2:]), _half(blocks_OBN, 0))


def _read_q4_1(blocks_OBN: torch.Tensor) -> _Parts:
    return _Parts(_nibbles(blocks_OBN[..., 4:]), _half(blocks_OBN, 0), _half(blocks_OBN, 2))


def _read_q5_0(blocks_OBN: torch.Tensor) -> _Parts:
    codes = _nibbles(blocks_OBN[..., 6:]) | _fifth_bits(blocks_OBN, 2)
    return _Parts(codes.to(torch.int8) - 16, _half(blocks_OBN, 0))


def _read_q5_1(blocks_OBN: torch.Tensor) -> _Parts:
    codes = _nibbles(blocks_OBN[..., 8:]) | _fifth_bits(blocks_OBN, 4)
    return _Parts(codes.to(torch.int8), _half(blocks_OBN, 0), _half(blocks_OBN, 2))


def _read_q8_0(blocks_OBN: torch.Tensor) -> _Parts:
    return _Parts(blocks_OBN[..., 2:].view(torch.int8), _half(blocks_OBN, 0))


def _k_scales(blocks_OBN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums of Q4_K and Q5_K, float32 [O, B, 8]: twelve bytes have 6 bits of each."""
    first, second, third = blocks_OBN[..., 4:16].split(4, dim=-1)
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], dim=-1)
    minimums = torch.cat([second & 63, third >> 4 | second >> 6 << 4], dim=-1)
    of_scales, of_minimums = _half(blocks_OBN, 0).float(), _half(blocks_OBN, 2).float()
    return of_scales * scales, -(of_minimums * minimums)


def _k_nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    """uint8 [O, B, 128] to [O, B, 8, 32]: 32 bytes have 32 codes in their low halves, the next 32 in the high ones."""
    halves: torch.Tensor = _nibbles(bytes_.unflatten(-1, (4, 32))).unflatten(-1, (2, 32))
    return halves.flatten(-3, -2)


def _read_q4_k(blocks_OBN: torch.Tensor) -> _Parts:
    scales, minimums = _k_scales(blocks_OBN)
    return _Parts(_k_nibbles(blocks_OBN[..., 16:]), scales, minimums)


def _read_q5_k(blocks_OBN: torch.Tensor) -> _Parts:
    scales, minimums = _k_scales(blocks_OBN)
    bit = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks_OBN[..., None, 16:48] >> bit & 1) << 4
    codes = _k_nibbles(blocks_OBN[..., 48:]) | fifth
    return _Parts(codes.to(torch.int8), scales, minimums)


def _read_q6_k(blocks_OBN: torch.Tensor) -> _Parts:
    # Two halves of 128 codes: 64 bytes with four bits of each, and 32 with two.
    low = blocks_OBN[..., :128].unflatten(-1, (2, 1, 64))
    low = low >> torch.tensor([0, 4], dtype=torch.uint8)[:, None] & 15
    high = blocks_OBN[..., 128:192].unflatten(-1, (2, 1, 32))
    high = high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    codes = low.flatten(-3) | high.flatten(-3) << 4
    scales = _half(blocks_OBN, 208).float() * blocks_OBN[..., 192:208].view(torch.int8)
    return _Parts(codes.to(torch.int8) - 32, scales)


def _read_iq4_xs(blocks_OBN: torch.Tensor) -> _Parts:
    low = blocks_OBN[..., 4:8, None] >> torch.tensor([0, 4], dtype=torch.uint8) & 15
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    high = blocks_OBN[..., 2:4, None] >> shifts & 3
    steps = (low.flatten(-2) | high.flatten(-2) << 4).to(torch.int8) - 32
    codes = _nibbles(blocks_OBN[..., 8:].unflatten(-1, (8, 16)))
    return _Parts(codes, _half(blocks_OBN, 0).float() * steps)


@dataclass(frozen=True, slots=True)
class _Type:
    """A type of blocks as codes: its form, what reads its blocks, and its table."""

    form: CodesForm
    read: _Read
    table: torch.Tensor | None = None


_TYPES: Final[Mapping[str, _Type]] = {
    "Q4_0": _Type(CodesForm(4), _read_q4_0),
    "Q4_1": _Type(CodesForm(4, has_minimums=True, has_table=True), _read_q4_1, _PLAIN_TABLE),
    "Q5_0": _Type(CodesForm(8), _read_q5_0),
    "Q5_1": _Type(CodesForm(8, has_minimums=True), _read_q5_1),
    "Q8_0": _Type(CodesForm(8), _read_q8_0),
    "Q4_K": _Type(
        CodesForm(4, scale="F32", has_minimums=True, has_table=True), _read_q4_k, _PLAIN_TABLE
    ),
    "Q5_K": _Type(CodesForm(8, scale="F32", has_minimums=True), _read_q5_k),
    "Q6_K": _Type(CodesForm(8, HALF_GROUP, "F32"), _read_q6_k),
    "IQ4_NL": _Type(CodesForm(4, has_table=True), _read_q4_0, _NL_TABLE),
    "IQ4_XS": _Type(CodesForm(4, scale="F32", has_table=True), _read_iq4_xs, _NL_TABLE),
}
