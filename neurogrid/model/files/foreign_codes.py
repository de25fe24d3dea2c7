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

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch.nn import functional

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.kernels import CODE_GROUP, E4M3, Codes

__all__ = ["E2M1", "MAX_SIZE", "NF4", "ForeignFormat"]

_Tensors: TypeAlias = Mapping[str, torch.Tensor]
_Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
_Expected: TypeAlias = dict[str, tuple[int, ...]]

NF4: Final = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)
"""float32 [16]: the quantiles of a normal distribution (Dettmers and others, 2023)."""
E2M1: Final = torch.tensor(
    [sign * each for sign in (1, -1) for each in (0.0, 0.5, 1, 1.5, 2, 3, 4, 6)]
)
"""float32 [16]: floats of a sign, two bits of exponent and one of fraction."""
_TABLES: Final = {"nf4": NF4, "mxfp4": E2M1}

_QWEIGHT, _QZEROS, _SCALES, _G_IDX = ".qweight", ".qzeros", ".scales", ".g_idx"
_WEIGHT, _PACKED, _SCALE = ".weight", ".weight_packed", ".weight_scale"
_SHAPE, _ZERO_POINT = ".weight_shape", ".weight_zero_point"
_ABSMAX, _MAP = ".weight.absmax", ".weight.quant_map"
_STATE = ".weight.quant_state.bitsandbytes__nf4"
_SCB, _WEIGHT_FORMAT = ".SCB", ".weight_format"
_SCALE_INV = ".weight_scale_inv"
_BLOCKS, _EXPONENTS = "_blocks", "_scales"

_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32)
# Where output i of eight lies in an int32 of awq.
_AWQ_PLACES: Final = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
_MXFP4_BLOCK: Final = 32
# A quant_state has some 80 bytes.
_MAX_STATE_BYTES: Final = 4096
# What a file can say of a block, or of a size: more is nonsense, and never computed with.
MAX_SIZE: Final = 2**40


@dataclass(frozen=True, slots=True)
class ForeignFormat:
    """How a checkpoint has its quantised matrices.

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

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of the tensors that make a matrix, those that it may lack among them."""
        layout = _LAYOUTS[self.layout]
        return (*layout.required, *layout.optional)

    @property
    def required(self) -> tuple[str, ...]:
        """The suffixes of those that every matrix has."""
        required = _LAYOUTS[self.layout].required
        if self.layout == "gptq" and self.is_order_told:
            return (*required, _G_IDX)
        if self.layout in ("packed", "int") and self.has_minimums:
            return (*required, _ZERO_POINT)
        return required

    @property
    def marker(self) -> str:
        """The suffix that tells a quantised matrix from one that is not."""
        return _LAYOUTS[self.layout].marker

    @property
    def shape_teller(self) -> str | None:
        """The suffix of the little tensor that `shape` has to see, if there is one."""
        return _STATE if self.layout == "nf4" else None

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
        return self.layout if self.layout in _TABLES else None

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """Of the codes that are made; None for that of the checkpoint's scales."""
        if self.layout == "mxfp4":
            return torch.bfloat16
        is_float32 = self.has_minimums or self.layout in ("nf4", "int8")
        return torch.float32 if is_float32 else None

    def shape(self, shapes: _Shapes, told: torch.Tensor | None = None) -> tuple[int, int]:
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

    def decode(self, tensors: _Tensors) -> Codes:
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
                raise CheckpointError(f"{self.name}: {suffix} is {_dtype(tensor)}")
        return layout.decode(self, tensors, sizes)

    def group_of(self, shape: tuple[int, int], scales: tuple[int, ...]) -> int:
        """Inputs of an output that share a scale in the codes of a matrix [O, I]; 0 for all inputs.

        Args:
            scales: the shape of the tensor of its scales.
        """
        if self.layout == "fp8":
            return _group_of_fp8(self, shape[1])
        return 0 if self.group is None else shape[0] * shape[1] // math.prod(scales)

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


_Sized: TypeAlias = tuple[tuple[int, int], _Expected]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the tensors of a matrix have what.

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
    measure: Callable[[ForeignFormat, _Shapes, torch.Tensor | None], _Sized]
    decode: Callable[[ForeignFormat, _Tensors, tuple[int, int]], Codes]


# What layouts share.


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _matrix_sizes(given: ForeignFormat, shapes: _Shapes, suffix: str) -> tuple[int, int]:
    sizes = shapes[suffix]
    if len(sizes) != 2 or min(sizes) < 1:
        raise CheckpointError(f"{given.name}: {suffix} is {list(sizes)[:8]}: no matrix")
    return sizes[0], sizes[1]


def _finished(
    given: ForeignFormat,
    codes: torch.Tensor,
    scales_OS: torch.Tensor,
    num_inputs: int,
    zeros_OS: torch.Tensor | None = None,
) -> Codes:
    """Codes of checked tensors.

    Args:
        codes: int8 [O, I] or uint8 [O, I / 2], as `Codes` has them but for the filling.
        zeros_OS: of any integer dtype, what the code of `Codes` is for the weight 0; None for no minimums.
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
    table = None if given.table is None else _TABLES[given.table]
    return Codes(
        given.bits, codes.contiguous(), scales_OS.contiguous(), num_inputs, minimums_OS, table
    )


def _bytes(words_RC: torch.Tensor) -> torch.Tensor:
    """uint8 [R, 4 C] of int32; processors have the lowest bits in the first byte, as files do."""
    # In one dimension first: a size of 1 can leave a stride that no other dtype is viewed through.
    return words_RC.reshape(-1).view(torch.uint8).view(words_RC.shape[0], -1)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [R, C] to its codes, uint8 [R, C P]."""
    bytes_ = _bytes(words)
    return bytes_ if bits == 8 else torch.stack([bytes_ & 15, bytes_ >> 4], dim=-1).flatten(-2)


def _codes_of_words(words_OW: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of int32 [O, I / P]: bytes as they lie, those of 8 bits less 128."""
    bytes_ = _bytes(words_OW)
    return bytes_ if bits == 4 else torch.bitwise_xor(bytes_, 0x80).view(torch.int8)


# gptq and gptq_v2.


def _measure_gptq(given: ForeignFormat, shapes: _Shapes, _: torch.Tensor | None) -> _Sized:
    per_word = 32 // given.bits
    num_words, num_outputs = _matrix_sizes(given, shapes, _QWEIGHT)
    num_inputs = num_words * per_word
    num_groups = given.num_groups(num_inputs)
    return (num_outputs, num_inputs), {
        _QZEROS: (num_groups, _num_zero_words(given, num_outputs)),
        _SCALES: (num_groups, num_outputs),
        _G_IDX: (num_inputs,),
    }


def _num_zero_words(given: ForeignFormat, num_outputs: int) -> int:
    per_word = 32 // given.bits
    if num_outputs % per_word:
        raise CheckpointError(
            f"{given.name}: {num_outputs} outputs, whose zeros do not fill an int32"
        )
    return num_outputs // per_word


def _decode_gptq(given: ForeignFormat, tensors: _Tensors, sizes: tuple[int, int]) -> Codes:
    num_inputs, middle = sizes[1], 2 ** (given.bits - 1)
    if _G_IDX in tensors:
        plain = torch.arange(num_inputs) // (given.group or num_inputs)
        if not torch.equal(tensors[_G_IDX].long(), plain):
            raise UnsupportedModelError(
                f"{given.name}: the inputs of a matrix are grouped by their activations (desc_act, g_idx), and "
                "only groups of neighbours are supported"
            )
    zeros_SO = _unpacked(tensors[_QZEROS], given.bits).int()
    if given.are_zeros_less_one:
        zeros_SO += 1
    if not given.has_minimums:
        if not (zeros_SO == middle).all():
            raise CheckpointError(f"{given.name}: zeros other than {middle} in a symmetric matrix")
    elif (zeros_SO == 2 * middle).any():
        # What reads this format takes it for 0 or for one more than the largest code.
        raise UnsupportedModelError(
            f"{given.name}: a zero is stored as {2 * middle - 1}: ambiguous"
        )
    return _finished(
        given,
        _codes_of_words(tensors[_QWEIGHT].t(), given.bits),
        tensors[_SCALES].t(),
        num_inputs,
        zeros_SO.t() - middle if given.has_minimums else None,
    )


# awq.


def _measure_awq(given: ForeignFormat, shapes: _Shapes, _: torch.Tensor | None) -> _Sized:
    num_inputs, num_words = _matrix_sizes(given, shapes, _QWEIGHT)
    num_groups = given.num_groups(num_inputs)
    if num_inputs % 2:
        raise UnsupportedModelError(f"{given.name}: an odd number of inputs, {num_inputs}")
    return (num_words * 8, num_inputs), {
        _QZEROS: (num_groups, num_words),
        _SCALES: (num_groups, num_words * 8),
    }


def _decode_awq(given: ForeignFormat, tensors: _Tensors, sizes: tuple[int, int]) -> Codes:
    codes_OI, zeros_OS = (
        _unpacked(tensors[suffix], 4).unflatten(-1, (-1, 8))[..., _AWQ_PLACES].flatten(-2).t()
        for suffix in (_QWEIGHT, _QZEROS)
    )
    pairs = codes_OI[:, 0::2] | codes_OI[:, 1::2] << 4
    return _finished(given, pairs, tensors[_SCALES].t(), sizes[1], zeros_OS.int() - 8)


# compressed-tensors.


def _measure_packed(given: ForeignFormat, shapes: _Shapes, _: torch.Tensor | None) -> _Sized:
    per_word = 32 // given.bits
    num_outputs, num_words = _matrix_sizes(given, shapes, _PACKED)
    num_inputs = num_words * per_word
    num_groups = given.num_groups(num_inputs)
    expected: _Expected = {_SCALE: (num_outputs, num_groups), _SHAPE: (2,)}
    if given.has_minimums:
        # Zeros are packed along the outputs.
        expected[_ZERO_POINT] = (-(-num_outputs // per_word), num_groups)
    return (num_outputs, num_inputs), expected


def _decode_packed(given: ForeignFormat, tensors: _Tensors, sizes: tuple[int, int]) -> Codes:
    if tensors[_SHAPE].tolist() != list(sizes):
        raise UnsupportedModelError(
            f"{given.name}: {_SHAPE} says {tensors[_SHAPE].tolist()} of a matrix that has {list(sizes)}"
        )
    zeros_OS = None
    if given.has_minimums:
        if tensors[_ZERO_POINT].dtype != torch.int32:
            raise CheckpointError(f"{given.name}: {_ZERO_POINT} is not packed in int32")
        unsigned_SO = _unpacked(tensors[_ZERO_POINT].t(), given.bits)[:, : sizes[0]]
        zeros_OS = unsigned_SO.t().int() - 2 ** (given.bits - 1)
    else:
        _check_no_zeros(given, tensors)
    codes = _codes_of_words(tensors[_PACKED], given.bits)
    return _finished(given, codes, tensors[_SCALE], sizes[1], zeros_OS)


def _measure_int(given: ForeignFormat, shapes: _Shapes, _: torch.Tensor | None) -> _Sized:
    sizes = _matrix_sizes(given, shapes, _WEIGHT)
    by_group = (sizes[0], given.num_groups(sizes[1]))
    return sizes, {_SCALE: by_group, _ZERO_POINT: by_group}


def _decode_int(given: ForeignFormat, tensors: _Tensors, sizes: tuple[int, int]) -> Codes:
    zeros_OS = None
    if given.has_minimums:
        zeros_OS = tensors[_ZERO_POINT]
        if zeros_OS.dtype != torch.int8:
            raise CheckpointError(f"{given.name}: {_ZERO_POINT} is {_dtype(zeros_OS)}")
    else:
        _check_no_zeros(given, tensors)
    return _finished(given, tensors[_WEIGHT], tensors[_SCALE], sizes[1], zeros_OS)


def _check_no_zeros(given: ForeignFormat, tensors: _Tensors) -> None:
    """Older files have the zeros of symmetric matrices, too."""
    if _ZERO_POINT in tensors and tensors[_ZERO_POINT].any():
        raise CheckpointError(f"{given.name}: a zero point in a symmetric matrix")


# bitsandbytes.


def _measure_nf4(given: ForeignFormat, shapes: _Shapes, told: torch.Tensor | None) -> _Sized:
    if told is None:
        raise CheckpointError(f"{given.name}: a matrix lacks its {_STATE}")
    num_outputs, num_inputs, block = _read_state(given, told)
    if block % CODE_GROUP or num_inputs % block:
        raise UnsupportedModelError(
            f"{given.name}: {num_inputs} inputs in blocks of {block}: they must be whole blocks, and those of a "
            f"multiple of {CODE_GROUP}"
        )
    return (num_outputs, num_inputs), {
        _WEIGHT: (num_outputs * num_inputs // 2, 1),
        _ABSMAX: (num_outputs * num_inputs // block,),
        _MAP: (16,),
    }


def _read_state(given: ForeignFormat, told: torch.Tensor) -> tuple[int, int, int]:
    """O, I and the size of a block, from a quant_state: uint8 [bytes of JSON]."""
    if told.dtype != torch.uint8 or told.dim() != 1 or told.numel() > _MAX_STATE_BYTES:
        raise CheckpointError(f"{given.name}: {_STATE} is no short text")
    try:
        state = json.loads(bytes(told.tolist()))
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{given.name}: {_STATE} is not JSON") from exc
    if not isinstance(state, dict):
        raise CheckpointError(f"{given.name}: {_STATE} is not a JSON object")
    if state.get("quant_type") != "nf4" or any(key.startswith("nested") for key in state):
        raise UnsupportedModelError(
            f"{given.name}: a matrix is of another type, or its scales are quantised, too"
        )
    shape = state.get("shape")
    sizes = [*shape, state.get("blocksize")] if isinstance(shape, list) else []
    if len(sizes) != 3 or not all(type(size) is int and 0 < size <= MAX_SIZE for size in sizes):
        raise CheckpointError(f"{given.name}: {_STATE} has no shape of a matrix, or no blocksize")
    num_outputs, num_inputs, block = sizes
    return num_outputs, num_inputs, block


def _decode_nf4(given: ForeignFormat, tensors: _Tensors, sizes: tuple[int, int]) -> Codes:
    # What reads this format has the table in its code.
    if not torch.equal(tensors[_MAP], NF4):
        raise UnsupportedModelError(f"{given.name}: {_MAP} is not the table of nf4")
    bytes_ = tensors[_WEIGHT].reshape(sizes[0], -1)
    swapped = bytes_ >> 4 | bytes_ << 4
    return _finished(given, swapped, tensors[_ABSMAX].reshape(sizes[0], -1), sizes[1])


def _measure_int8(given: ForeignFormat, shapes: _Shapes, _: torch.Tensor | None) -> _Sized:
    sizes = _matrix_sizes(given, shapes, _WEIGHT)
    return sizes, {_SCB: (sizes[0],), _WEIGHT_FORMAT: ()}


def _decode_int8(given: ForeignFormat, tensors: _Tensors, sizes: tuple[int, int]) -> Codes:
    if _WEIGHT_FORMAT in tensors and tensors[_WEIGHT_FORMAT].item() != 0:
        raise UnsupportedModelError(f"{given.name}: a matrix is laid out for one kind of GPU")
    return _finished(given, tensors[_WEIGHT], tensors[_SCB][:, None] / 127, sizes[1])


# fp8 in blocks.


def _measure_fp8(given: ForeignFormat, shapes: _Shapes, _: torch.Tensor | None) -> _Sized:
    sizes = _matrix_sizes(given, shapes, _WEIGHT)
    _group_of_fp8(given, sizes[1])
    blocks = tuple(-(-size // block) for size, block in zip(sizes, given.block, strict=True))
    return sizes, {_SCALE_INV: blocks}


def _group_of_fp8(given: ForeignFormat, num_inputs: int) -> int:
    """Inputs that share a scale: as many as a block has, or a part of it where the last one is not whole."""
    group = math.gcd(given.block[1], num_inputs)
    if group % CODE_GROUP:
        raise UnsupportedModelError(
            f"{given.name}: {num_inputs} inputs in blocks of {given.block[1]}: both must be multiples of {CODE_GROUP}"
        )
    return group


def _decode_fp8(given: ForeignFormat, tensors: _Tensors, sizes: tuple[int, int]) -> Codes:
    floats_OI = tensors[_WEIGHT]
    if (floats_OI.view(torch.uint8) & 0x7F == 0x7F).any():
        raise CheckpointError(f"{given.name}: a weight is not a number")
    scales = tensors[_SCALE_INV]
    if not torch.isfinite(scales.float().abs().amax() * torch.finfo(E4M3).max):
        raise CheckpointError(f"{given.name}: a scale is not finite, or makes weights that are not")
    group = _group_of_fp8(given, sizes[1])
    outputs, groups = torch.arange(sizes[0]), torch.arange(0, sizes[1], group)
    scales_OS = scales[outputs // given.block[0]][:, groups // given.block[1]]
    return Codes(8, floats_OI.contiguous(), scales_OS.contiguous(), sizes[1])


# mxfp4, of one expert.


def _measure_mxfp4(given: ForeignFormat, shapes: _Shapes, _: torch.Tensor | None) -> _Sized:
    sizes = shapes[_BLOCKS]
    if len(sizes) != 3 or min(sizes) < 1 or sizes[2] * 2 != _MXFP4_BLOCK:
        raise CheckpointError(f"{given.name}: {_BLOCKS} is {list(sizes)[:8]}: no matrix in blocks")
    return (sizes[0], sizes[1] * _MXFP4_BLOCK), {_EXPONENTS: (sizes[0], sizes[1])}


def _decode_mxfp4(given: ForeignFormat, tensors: _Tensors, sizes: tuple[int, int]) -> Codes:
    exponents_OS = tensors[_EXPONENTS]
    if (exponents_OS == 255).any():
        raise CheckpointError(f"{given.name}: a scale is not a number")
    # The same exponent in bfloat16; what would be 2 ^ -127 is half of its least one.
    bits_OS = exponents_OS.to(torch.int16) << 7
    bits_OS[exponents_OS == 0] = 1 << 6
    return _finished(
        given, tensors[_BLOCKS].reshape(sizes[0], -1), bits_OS.view(torch.bfloat16), sizes[1]
    )


_INTEGERS: Final = (torch.int8, torch.uint8, torch.int32, torch.int64)
_LAYOUTS: Final[Mapping[str, _Layout]] = {
    "gptq": _Layout(
        _QWEIGHT,
        _SCALES,
        (_QWEIGHT, _QZEROS, _SCALES),
        (_G_IDX,),
        {
            _QWEIGHT: (torch.int32,),
            _QZEROS: (torch.int32,),
            _SCALES: _FLOATS,
            _G_IDX: (torch.int32, torch.int64),
        },
        _measure_gptq,
        _decode_gptq,
    ),
    "awq": _Layout(
        _QWEIGHT,
        _SCALES,
        (_QWEIGHT, _QZEROS, _SCALES),
        (),
        {_QWEIGHT: (torch.int32,), _QZEROS: (torch.int32,), _SCALES: _FLOATS},
        _measure_awq,
        _decode_awq,
    ),
    "packed": _Layout(
        _PACKED,
        _SCALE,
        (_PACKED, _SCALE, _SHAPE),
        (_ZERO_POINT,),
        {
            _PACKED: (torch.int32,),
            _SCALE: _FLOATS,
            _SHAPE: (torch.int32, torch.int64),
            _ZERO_POINT: _INTEGERS,
        },
        _measure_packed,
        _decode_packed,
    ),
    "int": _Layout(
        _SCALE,
        _SCALE,
        (_WEIGHT, _SCALE),
        (_ZERO_POINT,),
        {_WEIGHT: (torch.int8,), _SCALE: _FLOATS, _ZERO_POINT: _INTEGERS},
        _measure_int,
        _decode_int,
    ),
    "nf4": _Layout(
        _ABSMAX,
        _ABSMAX,
        (_WEIGHT, _ABSMAX, _MAP, _STATE),
        (),
        {
            _WEIGHT: (torch.uint8,),
            _ABSMAX: (torch.float32,),
            _MAP: (torch.float32,),
            _STATE: (torch.uint8,),
        },
        _measure_nf4,
        _decode_nf4,
    ),
    "int8": _Layout(
        _SCB,
        _SCB,
        (_WEIGHT, _SCB),
        (_WEIGHT_FORMAT,),
        {_WEIGHT: (torch.int8,), _SCB: (torch.float32,), _WEIGHT_FORMAT: (torch.uint8,)},
        _measure_int8,
        _decode_int8,
    ),
    "fp8": _Layout(
        _SCALE_INV,
        _SCALE_INV,
        (_WEIGHT, _SCALE_INV),
        (),
        {_WEIGHT: (E4M3,), _SCALE_INV: (torch.float32, torch.bfloat16)},
        _measure_fp8,
        _decode_fp8,
    ),
    "mxfp4": _Layout(
        _BLOCKS,
        _EXPONENTS,
        (_BLOCKS, _EXPONENTS),
        (),
        {_BLOCKS: (torch.uint8,), _EXPONENTS: (torch.uint8,)},
        _measure_mxfp4,
        _decode_mxfp4,
    ),
}
