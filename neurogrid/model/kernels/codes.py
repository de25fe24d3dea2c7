"""Quantised weights in one form: codes of 8 or 4 bits, and a scale for each group of inputs of an output.

A weight is `table[code] * scale + minimum`. The table of 8 bits is the code itself, -128..127, or a float of 8 bits
(e4m3: a sign, 4 bits of exponent, 3 of fraction); that of 4 bits has 16 entries, code - 8 where none is given. Minimums
are for formats that have them. A group is 32 inputs or a multiple of that, or 16 of integers of 8 bits without
minimums. Codes are row-major, so that they are the same bytes for every processor; of 4 bits two share a byte, the even
input in the low half. A row that is no multiple of 32 long is filled up with codes that mean nothing.

Shape legend: O outputs, I inputs, K inputs filled up to a multiple of 32, S scales of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

__all__ = [
    "CODE_GROUP",
    "E4M3",
    "HALF_GROUP",
    "Codes",
    "groups_of_columns",
    "join_rows",
    "quantize",
]

CODE_GROUP: Final = 32
"""Inputs of an output that share a scale; other forms have a multiple of it, or half of it."""
HALF_GROUP: Final = 16
"""Inputs that share a scale in the one form with less."""
E4M3: Final = torch.float8_e4m3fn
"""The dtype of codes that are floats."""

# Elements that are worked on at once: what a cache holds in float32.
_PIECE: Final = 256 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A quantised matrix [O, I].

    Attributes:
        bits: 8 or 4.
        codes: int8 or float8_e4m3fn [O, K], or uint8 [O, K / 2].
        scales: [O, S], float16, bfloat16 or float32; S divides K / 32, or is K / 16.
        num_inputs: I.
        minimums: as the scales, or None.
        table: float32 [16] for codes of 4 bits, or None.
    """

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    num_inputs: int
    minimums: torch.Tensor | None = None
    table: torch.Tensor | None = None

    @property
    def num_outputs(self) -> int:
        """O."""
        return self.codes.shape[0]

    @property
    def num_columns(self) -> int:
        """K."""
        return -(-self.num_inputs // CODE_GROUP) * CODE_GROUP

    @property
    def are_floats(self) -> bool:
        """Whether the codes are floats of 8 bits."""
        return self.codes.dtype == E4M3

    @property
    def has_half_groups(self) -> bool:
        """Whether 16 inputs share a scale."""
        return self.scales.shape[1] * HALF_GROUP == self.num_columns

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """The tensors that it is made of."""
        parts = (self.codes, self.scales, self.minimums, self.table)
        return tuple(part for part in parts if part is not None)

    def to(self, device: torch.device) -> Codes:
        """Return the same codes on a device."""
        minimums, table = self.minimums, self.table
        return Codes(
            self.bits,
            self.codes.to(device),
            self.scales.to(device),
            self.num_inputs,
            None if minimums is None else minimums.to(device),
            None if table is None else table.to(device),
        )

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights [O, I], exact in float32 and then rounded to `dtype`."""
        if not self.codes.is_cpu:
            # In one go: each piece is some calls.
            return self._dense_rows(slice(None), dtype)[:, : self.num_inputs].contiguous()
        result = torch.empty(self.num_outputs, self.num_inputs, dtype=dtype)
        self.write_dense(result)
        return result

    def write_dense(self, into: torch.Tensor) -> None:
        """Write the weights into [O, I] of any float dtype, on the CPU: some rows at a time, as `dense` has them."""
        rows = max(1, _PIECE // self.num_columns)
        for at in range(0, self.num_outputs, rows):
            piece = self._dense_rows(slice(at, at + rows), into.dtype)
            into[at : at + rows] = piece[:, : self.num_inputs]

    def of_inputs(self, start: int, stop: int) -> Codes:
        """The codes of the inputs [start, stop) alone; `start` is a multiple of 32, and `stop` is one, or I."""
        columns = slice(start, stop + -stop % CODE_GROUP)
        per_element = 8 // self.bits
        groups = groups_of_columns(self.num_columns, self.scales.shape[1], columns)
        return Codes(
            self.bits,
            self.codes[:, columns.start // per_element : columns.stop // per_element],
            self.scales[:, groups],
            stop - start,
            None if self.minimums is None else self.minimums[:, groups],
            self.table,
        )

    def _dense_rows(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        codes = self.codes[rows]
        if self.bits == 8:
            values = codes.float() if self.are_floats else codes
        else:
            halves = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
            table = self.table
            values = halves.view(torch.int8) - 8 if table is None else table[halves.int()].float()
        scales = self.scales[rows, :, None].float()
        grouped = values.view(values.shape[0], scales.shape[1], -1)
        if self.minimums is None:
            # Rounded by the product itself: a GPU reads and writes all of it once.
            into = torch.empty(grouped.shape, dtype=dtype, device=grouped.device)
            return torch.mul(grouped, scales, out=into).flatten(-2)
        products = grouped * scales
        products += self.minimums[rows, :, None].float()
        return products.flatten(-2).to(dtype)


def groups_of_columns(num_columns: int, num_scales: int, columns: slice) -> torch.Tensor:
    """Return which of its scales a row has for each 32 of some columns, or each 16: int64 [S of those columns]."""
    group = num_columns // num_scales
    return torch.arange(columns.start, columns.stop, min(group, CODE_GROUP)) // group


def join_rows(codes: Sequence[Codes], order_O: torch.Tensor | None) -> Codes:
    """Join the rows of some matrices into one matrix.

    Args:
        order_O: int64, of all their rows one after another those of the matrix; None for all as they are.

    Raises:
        ValueError: they are not of one form.
    """
    first = codes[0]
    if len(codes) == 1 and order_O is None:
        return first
    if any(_form(each) != _form(first) for each in codes):
        raise ValueError("matrices of several forms, or of several widths, make no single one")
    if first.table is not None and any(
        each.table is None or not torch.equal(each.table, first.table) for each in codes
    ):
        raise ValueError("matrices with several tables make no single one")

    def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        # As bytes: of floats of 8 bits torch moves none.
        rows = torch.cat([part.view(torch.uint8) for part in parts])
        rows = rows if order_O is None else rows[order_O.to(rows.device)]
        return rows.view(parts[0].dtype)

    minimums = [each.minimums for each in codes if each.minimums is not None]
    return Codes(
        first.bits,
        joined([each.codes for each in codes]),
        joined([each.scales for each in codes]),
        first.num_inputs,
        joined(minimums) if minimums else None,
        first.table,
    )


def _form(codes: Codes) -> tuple[object, ...]:
    """Return the form of a matrix; only rows of matrices of one form can be one matrix."""
    parts = [(part.dtype, part.shape[1:]) for part in (codes.codes, codes.scales)]
    return codes.bits, codes.num_inputs, codes.minimums is None, codes.table is None, parts


def quantize(weight: torch.Tensor, bits: int) -> Codes:
    """Codes of 8 or 4 bits, each group's scale by its largest magnitude alone: the same bytes on every machine.

    Of 8 bits the scale is that magnitude / 127. Of 4 bits it is the value of largest magnitude / -8, so that the
    widest range of codes, -8..7, is on its side. A group of zeros has the scale 0.

    Args:
        weight: [O, I], any float dtype, on the CPU.

    Raises:
        ValueError: an element is not finite, or too large for a scale of float16.
    """
    rows = max(1, _PIECE // max(1, weight.shape[1]))
    pieces = [_quantize_rows(piece, bits) for piece in weight.split(rows)]
    codes, scales = (torch.cat(each) for each in zip(*pieces, strict=True))
    return Codes(bits, codes, scales, weight.shape[1])


def _quantize_rows(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    padded = functional.pad(weight.float(), (0, -weight.shape[1] % CODE_GROUP))
    groups = padded.view(padded.shape[0], -1, CODE_GROUP)
    low, high = torch.aminmax(groups, dim=-1)
    largest = torch.where(high >= -low, high, low)
    scales = (largest.abs() / 127 if bits == 8 else largest / -8).half()
    if not torch.isfinite(scales).all():
        raise ValueError("a weight is not finite, or beyond what a scale of float16 reaches")
    steps = torch.where(scales == 0, 1, scales).float().unsqueeze(-1)
    codes = (groups / steps).round_()
    if bits == 8:
        return codes.clamp_(-127, 127).to(torch.int8).flatten(-2), scales
    pairs = codes.add_(8).clamp_(0, 15).to(torch.uint8).view(padded.shape[0], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales
