"""Blocks of GGUF as codes: bit for bit what the format's own package makes of them."""

from __future__ import annotations

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType

from neurogrid.errors import CheckpointError
from neurogrid.model.files.gguf.block_types import BLOCK_TYPES, BlockType
from neurogrid.model.files.gguf.blocks import codes_of_blocks, form_of_blocks
from neurogrid.model.files.quantization import CodesForm, parts_of
from neurogrid.model.kernels import Matrix, library
from tests.gguf_models import BLOCKS, random_blocks

TYPES = {kind.name: kind for kind in BLOCK_TYPES.values() if not kind.is_plain}
# Not one of these is nearly another: all signs, zeros, the smallest, what is just not normal, and the largest.
HALVES = [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x1234]


def codes_and_dense(
    kind: BlockType, blocks: numpy.ndarray, num_rows: int
) -> tuple[object, torch.Tensor]:
    flat = blocks.reshape(num_rows, -1)
    expected = gguf.dequantize(flat, GGMLQuantizationType[kind.name])
    return codes_of_blocks(kind, torch.from_numpy(flat)), torch.from_numpy(expected)


def test_every_type_that_is_read_is_tried() -> None:
    assert set(TYPES) == set(BLOCKS)


@pytest.mark.parametrize("name", TYPES)
def test_random_blocks_are_what_the_format_says(name: str) -> None:
    kind = TYPES[name]
    made = numpy.random.default_rng(3)
    blocks = made.integers(0, 256, (8, 66, kind.block_bytes), dtype=numpy.uint8)
    for at in BLOCKS[name]:
        halves = made.choice(numpy.array(HALVES, numpy.uint16), (8, 66, 1))
        blocks[..., at : at + 2] = halves.view(numpy.uint8)
    codes, expected = codes_and_dense(kind, blocks, 8)
    assert torch.equal(codes.dense(torch.float32), expected)
    form = form_of_blocks(kind)
    assert form.has(codes)
    assert CodesForm.from_record(form.record()) == form
    assert form.read(parts_of(codes), "m").num_inputs == 66 * kind.num_elements


@pytest.mark.parametrize("name", TYPES)
def test_blocks_of_one_byte_are_what_the_format_says(name: str) -> None:
    """Each code by itself: all bits of a block but its scale are the same."""
    kind = TYPES[name]
    blocks = numpy.empty((256, 1, kind.block_bytes), numpy.uint8)
    blocks[:] = numpy.arange(256, dtype=numpy.uint8)[:, None, None]
    for at in BLOCKS[name]:
        blocks[..., at : at + 2] = numpy.array([0x00, 0x2E], numpy.uint8)
    codes, expected = codes_and_dense(kind, blocks, 256)
    assert torch.equal(codes.dense(torch.float32), expected)


@pytest.mark.parametrize("name", TYPES)
def test_blocks_multiply_as_their_dense_matrix(name: str) -> None:
    kind = TYPES[name]
    raw, dense = random_blocks(name, (48, 512), 0.1, 5)
    blocks = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(48, -1)
    found = library()
    assert found is not None
    matrix = Matrix.of_codes(found, codes_of_blocks(kind, blocks), None, by_int8=False)
    assert torch.equal(matrix.dense(torch.float32), dense)
    x = torch.randn(7, 512)
    expected = x.double() @ dense.double().t()
    assert (matrix.multiply(x) - expected).norm() <= 1e-6 * expected.norm()
    assert 0.05 < dense.std() < 0.2


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
@pytest.mark.parametrize("name", TYPES)
def test_a_scale_that_is_not_finite_is_refused(name: str, bits: int) -> None:
    kind = TYPES[name]
    for at in BLOCKS[name]:
        raw, _ = random_blocks(name, (4, 512), 0.1, 5)
        blocks = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(4, -1, kind.block_bytes)
        blocks[2, 1, at], blocks[2, 1, at + 1] = bits & 255, bits >> 8
        codes = codes_of_blocks(kind, blocks.view(4, -1))
        with pytest.raises(CheckpointError, match=r"m\.(scales|minimums) is not finite"):
            form_of_blocks(kind).read(parts_of(codes), "m")
