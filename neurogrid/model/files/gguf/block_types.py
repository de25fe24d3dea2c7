"""The types of a GGUF file's tensors: plain numbers, and blocks of codes with their scales.

Source: ggml.h and ggml-common.h of ggml.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

__all__ = ["BLOCK_TYPES", "TYPE_NAMES", "BlockType"]


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensors.

    Attributes:
        name: as in the format.
        num_elements: of a block, along the last dimension.
        block_bytes: of a block.
    """

    name: str
    num_elements: int
    block_bytes: int

    @property
    def is_plain(self) -> bool:
        """Whether its elements are numbers of a dtype, and no codes."""
        return self.num_elements == 1

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of that shape, whose last dimension is whole blocks."""
        return prod(shape) // self.num_elements * self.block_bytes


TYPE_NAMES: Final[Mapping[int, str]] = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(
        enumerate(
            (
                *("Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"),
                *("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS"),
                *("I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16"),
            ),
            start=6,
        )
    ),
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
}
"""Names of the format's types, by number."""

_BLOCKS: Final = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
}
BLOCK_TYPES: Final[Mapping[int, BlockType]] = {
    number: BlockType(name, *_BLOCKS[name])
    for number, name in TYPE_NAMES.items()
    if name in _BLOCKS
}
"""Types that are read, by number."""
