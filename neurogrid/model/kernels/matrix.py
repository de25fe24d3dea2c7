"""One matrix as the compiled products read it: bfloat16 as it lies, or codes with 16 outputs side by side.

Shape legend: O outputs, I inputs, K inputs filled up to a multiple of 32, P outputs filled up to a multiple of 16,
S scales of a row.
"""

from __future__ import annotations

import ctypes
from typing import Final

import torch
from torch.nn import functional

from neurogrid.model.kernels.codes import CODE_GROUP, E4M3, Codes, groups_of_columns
from neurogrid.model.kernels.compiled import ELEMENT_TYPES, Kind, Library, MatrixFields

__all__ = ["Matrix"]

_LANES: Final = 16
_LINEAR_TABLE: Final = torch.arange(_LANES, dtype=torch.float32) - 8


class Matrix:
    """A matrix [O, I] that multiplies rows; each row gets the bits that it gets alone.

    Made by `of_codes` or `of_bfloat16`.

    Attributes:
        num_outputs, num_inputs: O, I.
        kind: of product.
        address: of what describes it to compiled code, as long as this lives.
    """

    def __init__(
        self,
        found: Library,
        kind: Kind,
        shape: tuple[int, int],
        weights: torch.Tensor,
        *,
        scales: torch.Tensor | None = None,
        minimums: torch.Tensor | None = None,
        table: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        scale_groups: int = 1,
    ) -> None:
        self.num_outputs, self.num_inputs = shape
        self.kind = kind
        self._library = found
        self._weights, self._scales, self._minimums, self._table = weights, scales, minimums, table
        # Held: only its pointer goes into the fields.
        self._bias = bias
        self._fields = MatrixFields(
            weights.data_ptr(),
            _pointer(scales),
            _pointer(minimums),
            _pointer(table),
            _pointer(bias),
            self.num_outputs,
            self.num_inputs,
            -(-self.num_inputs // CODE_GROUP) * CODE_GROUP,
            scale_groups,
            kind,
            0 if scales is None else ELEMENT_TYPES[scales.dtype],
        )
        self.address = ctypes.addressof(self._fields)

    @classmethod
    def of_bfloat16(
        cls, found: Library, weight: torch.Tensor, bias: torch.Tensor | None, *, by_dot: bool
    ) -> Matrix:
        """Read a contiguous bfloat16 [O, I] where it lies.

        Args:
            bias: float32 [O], or None.
            by_dot: for activations in bfloat16, by the processor's instruction for that.
        """
        kind = Kind.BF16_DOT if by_dot else Kind.BF16
        return cls(found, kind, (weight.shape[0], weight.shape[1]), weight, bias=bias)

    @classmethod
    def of_codes(
        cls, found: Library, codes: Codes, bias: torch.Tensor | None, *, by_int8: bool
    ) -> Matrix:
        """Lay codes out in lanes, in memory of their own.

        Args:
            bias: float32 [O], or None.
            by_int8: round activations to 8 bits in groups of 32: faster, and off by 0.5 % more. With codes of 8 bits, a
                group beside whose largest number the others are small has 16.

        Raises:
            ValueError: activations of 8 bits were asked for, and the codes are floats, or have a table or groups of 16;
                or what has groups of 16 is no integers of 8 bits without minimums.
        """
        if by_int8 and (codes.table is not None or codes.has_half_groups or codes.are_floats):
            raise ValueError(
                "floats, and codes with a table or groups of 16 multiply no activations of 8 bits"
            )
        if codes.has_half_groups and (
            codes.bits != 8 or codes.minimums is not None or codes.are_floats
        ):
            raise ValueError("groups of 16 are of codes of 8 bits, integers without minimums")
        if codes.are_floats:
            kind, table = Kind.CODES8_E4M3, None
            weights = _lanes_of_bytes(codes.codes.view(torch.uint8))
        elif codes.bits == 8:
            kind = Kind.CODES8_INT8 if by_int8 else Kind.CODES8
            kind = Kind.CODES8_HALF if codes.has_half_groups else kind
            weights, table = _lanes_of_8(codes.codes), None
        else:
            kind = Kind.CODES4_INT8 if by_int8 else Kind.CODES4
            weights = _lanes_of_4(codes.codes)
            table = _LINEAR_TABLE if codes.table is None else codes.table.float().contiguous()
        return cls(
            found,
            kind,
            (codes.num_outputs, codes.num_inputs),
            weights,
            scales=_lanes_of_scales(codes.scales),
            minimums=None if codes.minimums is None else _lanes_of_scales(codes.minimums),
            table=table,
            bias=bias,
            scale_groups=max(1, codes.num_columns // CODE_GROUP // codes.scales.shape[1]),
        )

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """Tensors that it reads, by which memory is counted; not to be written to."""
        parts = (self._weights, self._scales, self._minimums, self._table)
        return tuple(part for part in parts if part is not None)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [O, I] itself, made anew."""
        if self._scales is None:
            return self._weights.to(dtype)
        return self.of_inputs(0, self.num_inputs).dense(dtype)

    def of_inputs(self, start: int, stop: int) -> Codes:
        """The codes of some inputs, as of `Codes.of_inputs`; of a matrix that is made of codes."""
        assert self._scales is not None
        columns = slice(start, stop + -stop % CODE_GROUP)
        is_8 = self.kind not in (Kind.CODES4, Kind.CODES4_INT8)
        in_lane = 4 if is_8 else 8
        lanes = self._weights[:, columns.start // in_lane : columns.stop // in_lane]
        if self.kind == Kind.CODES8_E4M3:
            unlaid = _bytes_of(lanes).view(E4M3)
        else:
            unlaid = _codes_of_8(lanes) if is_8 else _codes_of_4(lanes)
        num_columns = -(-self.num_inputs // CODE_GROUP) * CODE_GROUP
        groups = groups_of_columns(num_columns, self._scales.shape[1], columns)
        return Codes(
            8 if is_8 else 4,
            unlaid[: self.num_outputs],
            self._rows_of(self._scales, groups),
            stop - start,
            None if self._minimums is None else self._rows_of(self._minimums, groups),
            self._table,
        )

    def _rows_of(self, lanes: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
        """Scales of some groups, [O, S], from what `_lanes_of_scales` gave."""
        return lanes[:, groups].transpose(1, 2).flatten(0, 1)[: self.num_outputs]

    def multiply(self, given: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """[..., I] in float32, bfloat16 or float16 to [..., O] in the same dtype; sums are in float32.

        Args:
            into: where the result is to be, contiguous; None for memory of its own.

        Raises:
            ValueError: one has another width, or lies elsewhere than in the CPU's memory.
        """
        # Nothing behind this looks at it again: what reads has an address.
        if given.shape[-1] != self.num_inputs or not given.is_cpu:
            raise ValueError(
                f"rows of {self.num_inputs} on the CPU are due, got {list(given.shape)} on {given.device}"
            )
        given = given.contiguous()
        shape = (*given.shape[:-1], self.num_outputs)
        if into is None:
            into = torch.empty(shape, dtype=given.dtype, device=given.device)
        elif into.shape != shape or not into.is_contiguous() or not into.is_cpu:
            raise ValueError(f"a result of {list(shape)} is due, got {list(into.shape)}")
        self._library.multiply(
            self.address,
            given.view(-1, given.shape[-1]),
            into.view(-1, self.num_outputs),
        )
        return into


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _filled_up(rows: torch.Tensor, value: int) -> torch.Tensor:
    """[O, ...] to [P / 16, 16, ...]."""
    filled = functional.pad(rows, (0, 0, 0, -rows.shape[0] % _LANES), value=value)
    return filled.view(-1, _LANES, rows.shape[1])


def _lanes_of_bytes(bytes_OK: torch.Tensor) -> torch.Tensor:
    lanes: torch.Tensor = _filled_up(bytes_OK, 0).unflatten(-1, (-1, 4)).transpose(1, 2)
    return lanes.contiguous()


def _lanes_of_8(codes_OK: torch.Tensor) -> torch.Tensor:
    return torch.bitwise_xor(_lanes_of_bytes(codes_OK.view(torch.uint8)), 0x80)


def _lanes_of_4(codes_OH: torch.Tensor) -> torch.Tensor:
    """Bring pairs of inputs (0, 1) to pairs (0, 4), (1, 5) and so on, four in a lane."""
    # Eight inputs of a row are four bytes, and become four: [blocks, 16, K / 8, 4].
    bytes_ = _filled_up(codes_OH, 0x88).unflatten(-1, (-1, 4))
    low, high = bytes_ & 15, bytes_ >> 4
    first, second = (
        torch.stack([low[..., at], high[..., at], low[..., at + 1], high[..., at + 1]], dim=-1)
        for at in (0, 2)
    )
    return (first | second << 4).transpose(1, 2).contiguous()


def _bytes_of(lanes: torch.Tensor) -> torch.Tensor:
    """[P, K], from what `_lanes_of_bytes` gave."""
    return lanes.transpose(1, 2).flatten(2).flatten(0, 1)


def _codes_of_8(lanes: torch.Tensor) -> torch.Tensor:
    """[P, K], from what `_lanes_of_8` gave."""
    codes: torch.Tensor = torch.bitwise_xor(_bytes_of(lanes), 0x80).view(torch.int8)
    return codes


def _codes_of_4(lanes: torch.Tensor) -> torch.Tensor:
    """[P, K / 2], from what `_lanes_of_4` gave."""
    blocks = lanes.transpose(1, 2)
    low, high = blocks & 15, blocks >> 4
    pairs = [half[..., at] | half[..., at + 1] << 4 for half in (low, high) for at in (0, 2)]
    return torch.stack(pairs, dim=-1).flatten(2).flatten(0, 1)


def _lanes_of_scales(scales_OS: torch.Tensor) -> torch.Tensor:
    return _filled_up(scales_OS, 0).transpose(1, 2).contiguous()
