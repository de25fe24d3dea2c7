"""Matrices of quantised checkpoints as others publish them, decoded into `Codes` exactly or refused.

A checkpoint has several tensors in the place of a matrix PREFIX.weight, all of them named PREFIX and a suffix. The
suffixes here begin with the full stop, but those of mxfp4, which has the matrices PREFIX.NUMBER.weight of all experts.
Everything comes from a stranger's files: nothing is computed with before its dtype and shape are what the format says.

| format | of a matrix [O, I] | a weight is |
|---|---|---|
| gptq, gptq_v2 | qweight [I / P, O], qzeros [S, O / P], scales [S, O], g_idx [I] | (code - zero) * scale |
| awq | qweight [I, O / 8], qzeros [S, O / 8], scales [S, O] | (code - zero) * scale |
| compressed-tensors | weight_packed [O, I / P] or weight [O, I], weight_scale [O, S], weight_shape [2] | the same |
| bitsandbytes nf4 | weight [O I / 2, 1], absmax [O S], quant_map [16], a quant_state in JSON | table[code] * scale |
| bitsandbytes int8 | weight [O, I], SCB [O] | code * SCB / 127 |
| fp8 | weight [O, I], weight_scale_inv [blocks of O, blocks of I] | float * scale |
| mxfp4 | _blocks [E, O, S, 16], _scales [E, O, S] | table[code] * 2 ^ (scale - 127) |

An int32 has P = 32 / bits codes, the first in its lowest bits. gptq stores zeros less one, gptq_v2 does not; awq has
the outputs of an int32 in the order 0 2 4 6 1 3 5 7; nf4 has the first of two codes in the high half of its byte,
mxfp4 in the low.
Scales that are float16 or bfloat16 give exactly the weight of the formula; with zeros and float32 scales, a weight is
off by a rounding in float32 of the largest in its group.

Sources: the formats as AutoGPTQ and GPTQModel, AutoAWQ, compressed-tensors 0.20 and bitsandbytes 0.50 write them; OCP
Microscaling Formats 1.0 (E2M1, E8M0), as gpt-oss has them; fp8 in blocks, as DeepSeek-V3 has it.

Shape legend: E experts, O outputs, I inputs, S groups of inputs that share a scale, P codes in an int32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from neurogrid.errors import CheckpointError
from neurogrid.model.files.foreign.floats import LITTLE_FLOATS, STATE, group_of_fp8
from neurogrid.model.files.foreign.integers import G_IDX, INTEGERS, ZERO_POINT
from neurogrid.model.files.foreign.layout import (
    Described,
    Layout,
    Shapes,
    Tensors,
    dtype_of,
)
from neurogrid.model.kernels import Codes

__all__ = ["ForeignFormat"]

_LAYOUTS: Final[Mapping[str, Layout]] = {**INTEGERS, **LITTLE_FLOATS}


@dataclass(frozen=True, slots=True)
class ForeignFormat(Described):
    """Format of a checkpoint's quantised matrices.

    Attributes: those of `Described`, and what follows from them.
    """

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of the tensors that make a matrix, also of those that it may lack."""
        layout = _LAYOUTS[self.layout]
        return (*layout.required, *layout.optional)

    @property
    def required(self) -> tuple[str, ...]:
        """The suffixes of those that every matrix has."""
        required = _LAYOUTS[self.layout].required
        if self.layout == "gptq" and self.is_order_told:
            return (*required, G_IDX)
        if self.layout in ("packed", "int") and self.has_minimums:
            return (*required, ZERO_POINT)
        return required

    @property
    def marker(self) -> str:
        """The suffix that tells a quantised matrix from one that is not."""
        return _LAYOUTS[self.layout].marker

    @property
    def shape_teller(self) -> str | None:
        """The suffix of the little tensor that `shape` has to see, if there is one."""
        if self.layout == "gptq":
            # Read for each matrix before any is: only where it may say something.
            return G_IDX if self.is_order_told else None
        return STATE if self.layout == "nf4" else None

    @property
    def scales(self) -> str:
        """The suffix of the tensor of scales."""
        return _LAYOUTS[self.layout].scales

    @property
    def are_floats(self) -> bool:
        """Whether the codes that are made are floats."""
        return self.layout == "fp8"

    @property
    def is_stacked(self) -> bool:
        """Whether its tensors have the matrices of several experts, one after another."""
        return self.layout == "mxfp4"

    @property
    def table(self) -> str | None:
        """The table of the codes that are made, a name."""
        return self.layout if self.layout in ("nf4", "mxfp4") else None

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """Dtype of the scales of the codes that are made; None for that of the checkpoint's scales."""
        if self.layout == "mxfp4":
            return torch.bfloat16
        is_float32 = self.has_minimums or self.layout in ("nf4", "int8")
        return torch.float32 if is_float32 else None

    def shape(self, shapes: Shapes, told: torch.Tensor | None = None) -> tuple[int, int]:
        """(O, I) of a matrix.

        Args:
            shapes: of its tensors, by suffix.
            told: the tensor of `shape_teller`, where there is one.

        Raises:
            CheckpointError: a tensor is missing or too many, or they do not belong together.
            UnsupportedModelError: its groups are not such that Codes can have them.
        """
        for suffix in self.required:
            if suffix not in shapes:
                raise CheckpointError(f"{self.name}: a matrix lacks its {suffix}")
        if others := sorted(shapes.keys() - set(self.suffixes)):
            raise CheckpointError(f"{self.name}: {others[0][:80]!r} belongs to no matrix")
        sizes, expected = _LAYOUTS[self.layout].measure(self, shapes, told)
        for suffix, shape in expected.items():
            if suffix in shapes and tuple(shapes[suffix]) != shape:
                raise CheckpointError(
                    f"{self.name}: {suffix} is {list(shapes[suffix])} and not {list(shape)}, as a matrix "
                    f"{list(sizes)} has it"
                )
        return sizes

    def decode(self, tensors: Tensors) -> Codes:
        """The codes of a matrix; they may share memory with its tensors.

        Args:
            tensors: on the CPU, by suffix.

        Raises:
            CheckpointError: tensors that are not what the format says.
            UnsupportedModelError: no codes are exactly this matrix.
        """
        layout = _LAYOUTS[self.layout]
        told = None if self.shape_teller is None else tensors.get(self.shape_teller)
        sizes = self.shape({suffix: tuple(each.shape) for suffix, each in tensors.items()}, told)
        for suffix, tensor in tensors.items():
            if tensor.dtype not in layout.dtypes[suffix]:
                raise CheckpointError(f"{self.name}: {suffix} is {dtype_of(tensor)}")
        return layout.decode(self, tensors, sizes)

    def group_of(self, shape: tuple[int, int], scales: tuple[int, ...]) -> int:
        """Inputs of an output that share a scale in the codes of a matrix [O, I]; 0 for all inputs.

        Args:
            scales: the shape of the tensor of its scales.
        """
        if self.layout == "fp8":
            return group_of_fp8(self, shape[1])
        return 0 if self.group is None else shape[0] * shape[1] // math.prod(scales)
