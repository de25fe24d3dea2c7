"""Products with codes on CUDA by kernels of our own, which Triton compiles.

Few rows are multiplied with the codes as they lie. For more, the weights are made at once, and torch multiplies. Where
the kernels cannot be had, or where a product is not what it is in float64, which is tried once for each form of codes,
all is as on other GPUs: the codes are made dense for each product by torch.

On an H200 a matrix [8192, 2048] of codes of 8 bits takes 11 us for one row and 23 for four, as long as the matrix in
bfloat16 takes for one. To make it dense takes 13 us, and 75 by torch's calls.

Shape legend: O outputs, I inputs, R rows.

Source: benchmarks/gpu.py shows what comes of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import torch
from torch.nn import functional

from neurogrid.model.kernels.codes import CODE_GROUP, E4M3, Codes, quantize
from neurogrid.model.kernels.launches import Launcher, what_is_wrong

__all__ = ["GpuMatrix", "gpu_matrix"]

logger = logging.getLogger(__name__)

# Up to so many rows codes are multiplied; beyond, it is quicker to make the weights first.
_MAX_ROWS: Final = 4
# Up to so many, each row has a program of its own.
_MAX_SINGLE_ROWS: Final = 2
# Outputs and units that a program has at once: of a row, of `_MAX_ROWS`, and of the weights.
_ROW_TILE: Final = (2, 32)
_ROWS_TILE: Final = (4, 32)
_DENSE_TILE: Final = (2, 32)
# Of the check: what real matrices are like, and neither dimension whole. Rows for each tile, full and not, and beyond.
_CHECKED: Final = ((64, 256, (1, 2, 3, 4, 5)), (37, 100, (2, 3)))
# Off float64 by at most so much, relative to the whole result, or by what the dtype rounds.
_MAX_ERROR: Final = 2e-6


@dataclass(frozen=True, slots=True)
class _Form:
    """Form of codes that kernels are compiled for, besides the dtype of what is multiplied."""

    bits: int
    code_dtype: torch.dtype
    scale_dtype: torch.dtype
    unit: int
    shared: int
    minimum_dtype: torch.dtype | None
    has_table: bool

    @classmethod
    def of(cls, codes: Codes) -> _Form:
        group = codes.num_columns // codes.scales.shape[1]
        unit = min(group, CODE_GROUP)
        return cls(
            codes.bits,
            codes.codes.dtype,
            codes.scales.dtype,
            unit,
            group // unit,
            None if codes.minimums is None else codes.minimums.dtype,
            codes.table is not None,
        )


class GpuMatrix:
    """A matrix [O, I] of codes, multiplied by our kernels; those must be there.

    Args:
        codes: on CUDA; on the CPU where Triton interprets, for tests.

    Attributes:
        parts: the tensors that it is made of.
    """

    def __init__(self, codes: Codes) -> None:
        form = _Form.of(codes)
        self._num_outputs, self._num_inputs = codes.num_outputs, codes.num_inputs
        self._num_units = codes.num_columns // form.unit
        self._device = codes.codes.device
        self.parts = codes.parts
        plain, scales = codes.codes.contiguous(), codes.scales.contiguous()
        # What there is none of is not read.
        minimums = scales if codes.minimums is None else codes.minimums.contiguous()
        table = scales if codes.table is None else codes.table.float().contiguous()
        # Floats of 8 bits as bytes.
        plain = plain.view(torch.uint8) if codes.are_floats else plain
        tensors = (plain, scales, minimums, table)
        sizes = (self._num_outputs, self._num_inputs, self._num_units)
        constants = {
            "BITS": codes.bits,
            "ARE_FLOATS": codes.are_floats,
            "UNIT": form.unit,
            "SHARED": form.shared,
            "HAS_MINIMUMS": codes.minimums is not None,
            "HAS_TABLE": codes.table is not None,
        }

        def launcher(name: str, tile: tuple[int, int], **more: int) -> Launcher:
            its = {**constants, "OUTPUTS": tile[0], "UNITS": tile[1], **more}
            # A sum that is rounded once would be another one than torch's.
            return Launcher(name, tensors, sizes, its, enable_fp_fusion=name != "make_dense")

        self._multiply_row = launcher("multiply_rows", _ROW_TILE, ROWS=1)
        self._multiply_rows = launcher("multiply_rows", _ROWS_TILE, ROWS=_MAX_ROWS)
        self._make_dense = launcher("make_dense", _DENSE_TILE)

    def multiply(self, input: torch.Tensor) -> torch.Tensor:
        """[..., I] -> [..., O] in the same dtype; for few rows products and sums are in float32."""
        num_rows = input.numel() // self._num_inputs
        if not 0 < num_rows <= _MAX_ROWS:
            return functional.linear(input, self.dense(input.dtype))
        input = input.contiguous()
        result = input.new_empty(*input.shape[:-1], self._num_outputs)
        if num_rows <= _MAX_SINGLE_ROWS:
            grid = (-(-self._num_outputs // _ROW_TILE[0]), num_rows, 1)
            self._multiply_row(grid, (input, result), num_rows)
        else:
            grid = (-(-self._num_outputs // _ROWS_TILE[0]), 1, 1)
            self._multiply_rows(grid, (input, result), num_rows)
        return result

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights [O, I], exact in float32 and then rounded to `dtype`."""
        result = torch.empty(self._num_outputs, self._num_inputs, dtype=dtype, device=self._device)
        outputs, units = _DENSE_TILE
        grid = (-(-self._num_outputs // outputs), -(-self._num_units // units), 1)
        self._make_dense(grid, (result,))
        return result


def gpu_matrix(codes: Codes, dtype: torch.dtype) -> GpuMatrix | None:
    """The codes as our kernels multiply them; None where those cannot, or not rightly."""
    device = codes.codes.device
    if device.type != "cuda" or not _is_right(device, _Form.of(codes), dtype):
        return None
    return GpuMatrix(codes)


@cache
def _is_right(device: torch.device, form: _Form, dtype: torch.dtype) -> bool:
    """Whether there are kernels for it, which give what float64 gives."""
    wrong = what_is_wrong(partial(_wrong_product, device, form, dtype))
    if wrong:
        logger.warning(
            "codes of %d bits are made dense by torch for each product on %s: of our kernels, %s",
            form.bits,
            device,
            wrong,
        )
    return not wrong


def _wrong_product(device: torch.device, form: _Form, dtype: torch.dtype) -> str:
    """Return the fault of products with matrices of random codes, in words; empty if there is none."""
    generator = torch.Generator().manual_seed(0)
    most = max(_MAX_ERROR, 2 * torch.finfo(dtype).eps)
    for num_outputs, num_inputs, all_rows in _CHECKED:
        codes = _checked_codes(form, num_outputs, num_inputs, generator)
        dense = codes.dense(torch.float32)
        matrix = GpuMatrix(codes.to(device))
        if not torch.equal(matrix.dense(dtype).cpu(), dense.to(dtype)):
            return "weights are made wrongly"
        for num_rows in all_rows:
            given = torch.randn(num_rows, codes.num_inputs, generator=generator).to(dtype)
            expected = given.double() @ dense.double().t()
            got = matrix.multiply(given.to(device)).cpu().double()
            error = float((got - expected).norm() / expected.norm())
            if not error <= most:
                return f"{num_rows} rows are multiplied wrongly (off by {error:.1e})"
    return ""


def _checked_codes(
    form: _Form, num_outputs: int, num_inputs: int, generator: torch.Generator
) -> Codes:
    """Random codes of a form, on the CPU; of more inputs where a scale is for more."""
    group = form.unit * form.shared
    if -(-num_inputs // CODE_GROUP) * CODE_GROUP % group:
        num_inputs = -(-num_inputs // group) * group
    made = quantize(torch.randn(num_outputs, num_inputs, generator=generator), form.bits)
    codes = (made.codes.float() / 16).to(E4M3) if form.code_dtype == E4M3 else made.codes
    shape = (num_outputs, made.num_columns // group)
    scales = torch.rand(shape, generator=generator).to(form.scale_dtype)
    minimums = torch.randn(shape, generator=generator)
    table = torch.randn(16, generator=generator)
    return Codes(
        form.bits,
        codes,
        scales,
        num_inputs,
        None if form.minimum_dtype is None else minimums.to(form.minimum_dtype),
        table if form.has_table else None,
    )
