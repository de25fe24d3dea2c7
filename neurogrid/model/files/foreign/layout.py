"""Common parts of the formats of others' quantised matrices: their description, and the making of codes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch.nn import functional

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.kernels import CODE_GROUP, Codes

__all__ = [
    "FLOATS",
    "MAX_SIZE",
    "Described",
    "Expected",
    "Layout",
    "Shapes",
    "Sized",
    "Tensors",
    "dtype_of",
    "finished",
    "matrix_sizes",
]

Tensors: TypeAlias = Mapping[str, torch.Tensor]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Expected: TypeAlias = dict[str, tuple[int, ...]]
Sized: TypeAlias = tuple[tuple[int, int], Expected]

FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)
# What a file can say of a block, or of a size: more is nonsense, and never computed with.
MAX_SIZE: Final = 2**40


@dataclass(frozen=True, slots=True)
class Described:
    """Quantised matrices of a checkpoint, as its config describes them.

    Attributes:
        name: for people.
        layout: a key of the table of layouts.
        bits: of a code, 8 or 4.
        group: inputs that share a scale; None where all inputs of an output do. Of nf4 the usual one.
        block: of fp8, how many outputs and inputs share a scale.
        has_minimums: of the codes that are made.
        are_zeros_less_one: of gptq.
        is_order_told: a matrix without the tensor that tells the groups of its inputs is refused.
    """

    name: str
    layout: str
    bits: int
    group: int | None
    has_minimums: bool = False
    are_zeros_less_one: bool = False
    is_order_told: bool = False
    block: tuple[int, int] = (1, 1)

    def num_groups(self, num_inputs: int) -> int:
        """S.

        Raises:
            UnsupportedModelError: the last group is not a whole one.
        """
        if self.group is None:
            return 1
        if num_inputs % self.group:
            raise UnsupportedModelError(
                f"{self.name}: {num_inputs} inputs are no whole number of groups of {self.group}"
            )
        return num_inputs // self.group


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a quantised matrix: suffixes, dtypes and shapes of its tensors, and their decoding.

    Attributes:
        marker, scales, required, optional: suffixes.
        dtypes: that are accepted, by suffix.
        measure: (O, I) and the shapes that the tensors must then have, by suffix.
        decode: the codes, from tensors that are checked for dtype and shape.
    """

    marker: str
    scales: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    dtypes: Mapping[str, tuple[torch.dtype, ...]]
    measure: Callable[[Described, Shapes, torch.Tensor | None], Sized]
    decode: Callable[[Described, Tensors, tuple[int, int]], Codes]


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def matrix_sizes(given: Described, shapes: Shapes, suffix: str) -> tuple[int, int]:
    sizes = shapes[suffix]
    if len(sizes) != 2 or min(sizes) < 1:
        raise CheckpointError(f"{given.name}: {suffix} is {list(sizes)[:8]}: no matrix")
    return sizes[0], sizes[1]


def finished(
    given: Described,
    codes: torch.Tensor,
    scales_OS: torch.Tensor,
    num_inputs: int,
    zeros_OS: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> Codes:
    """Codes of checked tensors.

    Args:
        codes: int8 [O, I] or uint8 [O, I / 2], as `Codes` has them but for the filling.
        zeros_OS: of any integer dtype, what the code of `Codes` is for the weight 0; None for no minimums.
        table: float32 [16], as `Codes` has it.
    """
    largest = scales_OS.float().abs().amax() * 2**given.bits
    if not torch.isfinite(largest):
        raise CheckpointError(f"{given.name}: a scale is not finite, or makes weights that are not")
    if -num_inputs % CODE_GROUP:
        columns = -num_inputs % CODE_GROUP * given.bits // 8
        codes = functional.pad(codes, (0, columns), value=0 if given.bits == 8 else 0x88)
    minimums_OS = None
    if zeros_OS is not None:
        # In float32 the product is exact for scales of 16 bits; in 16 bits it would be rounded.
        scales_OS = scales_OS.float()
        minimums_OS = (-zeros_OS.float() * scales_OS).contiguous()
    return Codes(
        given.bits, codes.contiguous(), scales_OS.contiguous(), num_inputs, minimums_OS, table
    )
