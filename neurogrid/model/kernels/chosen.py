"""The products that this process multiplies with: chosen once, and only if they are right on this processor."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import cache
from typing import Final

import torch
from torch.nn import functional

from neurogrid.model.kernels.codes import CODE_GROUP, E4M3, Codes, quantize
from neurogrid.model.kernels.compiled import VARIABLE, Library, open_library
from neurogrid.model.kernels.matrix import Matrix

__all__ = ["library"]

logger = logging.getLogger(__name__)

# Shapes of the check at load: both dimensions whole, and neither; and one row beyond what goes together.
_CHECKED: Final = ((64, 256, 1), (37, 100, 5), (100, 64, 11))
# Off float64 by at most so much, relative to the whole result.
_MAX_ERROR: Final = 2e-6
_MAX_INT8_ERROR: Final = 2e-2


@cache
def library() -> Library | None:
    """The products of this processor; None where there are none, or wrong ones, which is said once.

    Raises:
        ConfigurationError: `NEUROGRID_KERNELS` names what this processor or this build does not have.
    """
    found = open_library(os.environ.get(VARIABLE))
    if found is not None and (wrong := _wrong_product(found)):
        logger.warning(
            "torch's own products serve: of the compiled ones %s is wrong on this processor", wrong
        )
        return None
    return found


def _wrong_product(found: Library) -> str | None:
    """The first product that is not what it is in float64; None if all are."""
    generator = torch.Generator().manual_seed(0)
    for outputs, inputs, rows in _CHECKED:
        weight = torch.randn(outputs, inputs, generator=generator)
        given = torch.randn(rows, inputs, generator=generator)
        for name, matrix, dense, most in _products(found, weight):
            its = given.bfloat16() if name == "bfloat16 by bfloat16" else given
            result = matrix.multiply(its)
            alone = torch.cat([matrix.multiply(row) for row in its.split(1)])
            expected = its.double() @ dense.double().t()
            error = (result.double() - expected).norm() / expected.norm()
            # In bfloat16 the result is rounded to that.
            if not error <= max(most, 2 * torch.finfo(result.dtype).eps):
                return f"{name} [{outputs}, {inputs}] (off by {error:.1e})"
            if not torch.equal(result, alone):
                return f"{name} [{outputs}, {inputs}] (a row is not what it is alone)"
    return None


def _products(
    found: Library, weight: torch.Tensor
) -> Iterator[tuple[str, Matrix, torch.Tensor, float]]:
    """Name, matrix, the same in float32, and the most that a product may be off, of all kinds."""
    half = weight.bfloat16()
    yield "bfloat16", Matrix.of_bfloat16(found, half, None, by_dot=False), half, _MAX_ERROR
    if found.has_bf16_dot:
        matrix = Matrix.of_bfloat16(found, half, None, by_dot=True)
        yield "bfloat16 by bfloat16", matrix, half, _MAX_ERROR
    for bits in (8, 4):
        codes = quantize(weight, bits)
        for by_int8, most in ((False, _MAX_ERROR), (True, _MAX_INT8_ERROR)):
            matrix = Matrix.of_codes(found, codes, None, by_int8=by_int8)
            dense = codes.dense(torch.float32)
            yield f"int{bits}{' by int8' if by_int8 else ''}", matrix, dense, most
    codes = quantize(weight, 8)
    # A scale for each 16, and those of neighbours are not the same.
    factors = torch.tensor([1.0, 0.5]).repeat(codes.scales.shape[1])
    halved = codes.scales.float().repeat_interleave(2, dim=1) * factors
    codes = Codes(8, codes.codes, halved, codes.num_inputs)
    matrix = Matrix.of_codes(found, codes, None, by_int8=False)
    yield "int8 in groups of 16", matrix, codes.dense(torch.float32), _MAX_ERROR
    # Those without an exponent are lost where denormals are flushed.
    for name, factor in (("float8", 1.0), ("float8 below 2^-6", 2.0**-9)):
        floats = functional.pad(weight * factor, (0, -weight.shape[1] % CODE_GROUP)).to(E4M3)
        codes = Codes(8, floats, torch.full((weight.shape[0], 1), 0.75), weight.shape[1])
        matrix = Matrix.of_codes(found, codes, None, by_int8=False)
        yield name, matrix, codes.dense(torch.float32), _MAX_ERROR
