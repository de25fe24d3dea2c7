"""Products with codes of 4 bits on CUDA by torch's own kernel, which reads the codes and not a matrix made of them.

torch has it for bfloat16, on NVIDIA's from compute capability 8.0 (and some of AMD's, which go by the same name), and
for the CPU with the same arguments, by which ours are tested where there is no GPU. There a weight is
(code - 8) * scale + zero with scale and zero in bfloat16, so scales in float16 lose three bits of eleven: about as much
as a matrix loses that is rounded to bfloat16 for a product.

The kernel reads all codes anew for each 16 rows. So for more of them the weights are made once, by a kernel of ours,
where there are such (launches.py): for 512 rows of a matrix [8192, 2048] that takes an H200 17 us, and 25 the product
with them, where torch's kernel takes 610.

What it does not take goes elsewhere: codes of 8 bits, those with a table, odd sizes. So does all where the kernel is
not what it should be, which is tried once for each device and group.

Shape legend: O outputs, I inputs, S scales of a row, R rows.

Source: aten/src/ATen/native/cuda/int4mm.cu of PyTorch 2.13.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Final

import torch
from torch.nn import functional

from neurogrid.model.kernels.codes import CODE_GROUP, Codes, quantize
from neurogrid.model.kernels.launches import Launcher, what_is_wrong

__all__ = ["Int4Matrix", "int4_matrix"]

logger = logging.getLogger(__name__)

# Inputs that share a scale.
_GROUPS: Final = (32, 64, 128, 256)
# The kernel takes 16 inputs at a time, so many times over; the most is the quickest.
_INNER_TILES: Final = (8, 4, 2)
_TILE: Final = 16
# Outputs are 8 to a tile on NVIDIA's, 16 on AMD's.
_OUTPUT_TILE: Final = 16
_MIN_CAPABILITY: Final = (8, 0)
# Off the product of the dense matrix, relative to the whole result: two roundings to bfloat16 of every weight.
_MAX_ERROR: Final = 1e-2
# Of the check; rows that fill a tile and rows that do not.
_CHECKED_ROWS: Final = (1, 16, 21)
# Up to so many rows codes are multiplied, where the weights can be made at once.
_MAX_ROWS: Final = 16
# Outputs, and 32 inputs, that a program has of those.
_DENSE_TILE: Final = (8, 16)
# Rows of the identity that are multiplied at once to get the weights back.
_DENSE_ROWS: Final = 1024


class Int4Matrix:
    """A matrix [O, I] of codes of 4 bits as torch's kernel reads it.

    Args:
        codes: that pass `_takes`, on CUDA; on the CPU, for tests.
        makes_dense: whether our kernel makes the weights of it.

    Attributes:
        parts: the tensors that it is made of.
    """

    def __init__(self, codes: Codes, *, makes_dense: bool = False) -> None:
        self._group = _group(codes)
        self._num_inputs = codes.num_inputs
        self._is_cpu = codes.codes.is_cpu
        self._packed = _packed(codes)
        self._scales_and_zeros = _scales_and_zeros(codes)
        self.parts = (self._packed, self._scales_and_zeros)
        self._shape = codes.num_outputs, codes.num_inputs
        self._make_dense = None
        if makes_dense:
            outputs, units = _DENSE_TILE
            constants = {
                "TILES": _num_tiles(codes),
                "GROUP": self._group,
                "OUTPUTS": outputs,
                "UNITS": units,
            }
            name = "make_dense_of_tiles"
            self._make_dense = Launcher(name, self.parts, self._shape, constants)

    def multiply(self, input: torch.Tensor) -> torch.Tensor:
        """[..., I] in bfloat16 -> [..., O]."""
        if not input.numel():  # the kernel takes no grid of nothing
            return input.new_empty(*input.shape[:-1], self._shape[0])
        input_RI = input.reshape(-1, self._num_inputs).contiguous()
        if self._make_dense is not None and len(input_RI) > _MAX_ROWS:
            return functional.linear(input, self.dense(input.dtype))
        product = torch._weight_int4pack_mm_for_cpu if self._is_cpu else torch._weight_int4pack_mm
        result_RO = product(input_RI, self._packed, self._group, self._scales_and_zeros)
        return result_RO.view(*input.shape[:-1], -1)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights [O, I] as the kernel has them, in bfloat16."""
        device = self._packed.device
        if self._make_dense is not None:
            result = torch.empty(self._shape, dtype=torch.bfloat16, device=device)
            sizes = zip(self._shape, (1, CODE_GROUP), _DENSE_TILE, strict=True)
            outputs, units = (-(-size // (each * tile)) for size, each, tile in sizes)
            self._make_dense((outputs, units, 1), (result,))
            return result.to(dtype)
        # What it makes of the rows of an identity matrix.
        places = torch.arange(self._num_inputs, device=device)
        pieces = [
            self.multiply((rows[:, None] == places).to(torch.bfloat16))
            for rows in places.split(_DENSE_ROWS)
        ]
        return torch.cat(pieces).t().to(dtype).contiguous()


def int4_matrix(codes: Codes, dtype: torch.dtype) -> Int4Matrix | None:
    """The codes as the kernel reads them; None where it cannot multiply them, or not rightly."""
    device = codes.codes.device
    if device.type != "cuda" or not _takes(codes, dtype):
        return None
    if not _is_right(device, _group(codes)):
        return None
    return Int4Matrix(codes, makes_dense=_makes_dense(device, _group(codes), _num_tiles(codes)))


def _takes(codes: Codes, dtype: torch.dtype) -> bool:
    return (
        codes.bits == 4
        and codes.table is None
        and dtype == torch.bfloat16
        and codes.num_outputs % _OUTPUT_TILE == 0
        and codes.num_inputs % (_INNER_TILES[-1] * _TILE) == 0
        and _group(codes) in _GROUPS
    )


def _group(codes: Codes) -> int:
    return codes.num_columns // codes.scales.shape[1]


@cache
def _is_right(device: torch.device, group: int) -> bool:
    """Whether the kernel is there, and gives what the dense matrix gives."""
    try:
        if torch.get_device_module(device).get_device_capability(device) < _MIN_CAPABILITY:
            wrong = "has no kernel for it"
        else:
            wrong = _wrong_product(device, group)
    except torch.OutOfMemoryError:
        raise  # it says nothing of the kernel, and is not to be remembered
    except RuntimeError as exc:
        wrong = f"refuses it ({str(exc).partition(chr(10))[0]})"
    if wrong:
        logger.warning(
            "codes of 4 bits in groups of %d are made dense for each product: %s %s",
            group,
            device,
            wrong,
        )
    return not wrong


def _wrong_product(device: torch.device, group: int) -> str:
    """Return the fault of products with a matrix of random codes, in words; empty if there is none."""
    codes = _checked_codes(group).to(device)
    matrix, dense = Int4Matrix(codes), codes.dense(torch.float32)
    generator = torch.Generator().manual_seed(group)
    for num_rows in _CHECKED_ROWS:
        given = torch.randn(num_rows, codes.num_inputs, generator=generator).bfloat16().to(device)
        expected = given.float() @ dense.t()
        error = float((matrix.multiply(given).float() - expected).norm() / expected.norm())
        if not error <= _MAX_ERROR:
            return f"multiplies them wrongly (off by {error:.1e})"
    return ""


@cache
def _makes_dense(device: torch.device, group: int, num_tiles: int) -> bool:
    """Whether our kernel is there, and makes the weights that torch's multiplies with."""
    wrong = what_is_wrong(partial(_wrong_weights, device, group, num_tiles))
    if wrong:
        logger.warning(
            "codes of 4 bits in groups of %d are slow for prompts on %s: of our kernels, %s",
            group,
            device,
            wrong,
        )
    return not wrong


def _wrong_weights(device: torch.device, group: int, num_tiles: int) -> str:
    """Return the fault of weights that our kernel makes of random codes, in words; empty if there is none."""
    # As many inputs as so many tiles divide, and not twice as many.
    codes = _checked_codes(group, 3 * max(group, num_tiles * _TILE)).to(device)
    assert _num_tiles(codes) == num_tiles
    weights = Int4Matrix(codes, makes_dense=True).dense(torch.bfloat16)
    expected = Int4Matrix(codes).dense(torch.bfloat16)
    return "" if torch.equal(weights, expected) else "weights are made wrongly"


def _checked_codes(group: int, num_inputs: int = 3 * 256) -> Codes:
    """Codes with scales of that group and minimums, which look like those of a model."""
    generator = torch.Generator().manual_seed(group)
    codes = quantize(torch.randn(4 * _OUTPUT_TILE, num_inputs, generator=generator), 4)
    scales = codes.scales[:, :: group // 32].contiguous()
    minimums = torch.randn(scales.shape, generator=generator).half()
    return Codes(4, codes.codes, scales, codes.num_inputs, minimums)


def _num_tiles(codes: Codes) -> int:
    """Return the number of tiles of 16 inputs that go together."""
    return next(each for each in _INNER_TILES if codes.num_inputs % (each * _TILE) == 0)


def _packed(codes: Codes) -> torch.Tensor:
    """The codes in the order in which the kernel reads them."""
    tiles = _num_tiles(codes)
    if codes.codes.is_cpu:
        plain_OI = torch.stack([codes.codes & 15, codes.codes >> 4], dim=-1).flatten(-2).int()
        return torch._convert_weight_to_int4pack_for_cpu(plain_OI, tiles)
    return torch._convert_weight_to_int4pack(_halves_swapped(codes.codes), tiles)


def _halves_swapped(codes: torch.Tensor) -> torch.Tensor:
    """Codes as CUDA's kernel is given them: the even input in the high half of a byte."""
    return codes << 4 | codes >> 4


def _scales_and_zeros(codes: Codes) -> torch.Tensor:
    """Scale and zero of each group: [S, O, 2] in bfloat16."""
    zeros = torch.zeros_like(codes.scales) if codes.minimums is None else codes.minimums
    pairs_OS2 = torch.stack([codes.scales, zeros], dim=-1).to(torch.bfloat16)
    return pairs_OS2.transpose(0, 1).contiguous()
