"""Tensors through the pipe between a stage's two processes: what comes out is what went in, to the bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from neurogrid.training.stages.stage_process import PlainTensor
from neurogrid.training.stages.tensor_frames import DTYPES, as_frame, of_frame
from neurogrid.training.trainer.frames import LENGTH_BYTES, pack, unpack

SHAPES = [(1,), (5,), (2, 3), (3, 4, 8), (1, 1, 1), (40, 64)]


def example(dtype: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if dtype == "I32":
        return torch.randint(-100, 2**31 - 1, shape, generator=generator, dtype=torch.int32)
    return torch.randn(shape, generator=generator).to(DTYPES[dtype])


def through_the_pipe(tensor: Tensor) -> Tensor:
    """As it goes from one process to the other."""
    first, *others = pack(as_frame(tensor))
    told, long = unpack(bytes(first[LENGTH_BYTES:]))
    for room, data in zip(long, others, strict=True):
        room[:] = data
    return of_frame(told)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_goes_in_comes_out(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = example(dtype, shape)
    frame = as_frame(tensor)
    assert (frame["dtype"], frame["shape"]) == (dtype, list(shape))
    assert len(bytes(frame["data"])) == tensor.numel() * tensor.element_size()
    for got in (of_frame(frame), through_the_pipe(tensor)):
        # Ids and labels are int64, as torch wants them.
        assert got.dtype == (torch.int64 if dtype == "I32" else tensor.dtype)
        assert got.shape == tensor.shape
        assert torch.equal(got.to(tensor.dtype), tensor)


def test_bytes_are_those_of_messages() -> None:
    """In C order, little-endian: a frame's bytes go into a message as they are."""
    data = {
        "F32": bytes.fromhex("0000803f000000c0"),
        "BF16": bytes.fromhex("803f00c0"),
        "I32": bytes.fromhex("01000000feffffff"),
    }
    for dtype, expected in data.items():
        frame = as_frame(torch.tensor([[1.0], [-2.0]]).to(DTYPES[dtype]))
        assert bytes(frame["data"]) == expected
        plain = PlainTensor(dtype, (2, 1), expected)
        assert of_frame(plain._asdict()).tolist() == [[1], [-2]]


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_numbers_that_are_none_come_out_as_they_are(dtype: str) -> None:
    tensor = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45]).to(DTYPES[dtype])
    got = through_the_pipe(tensor)
    width = torch.int32 if dtype == "F32" else torch.int16
    assert torch.equal(got.view(width), tensor.view(width))


def test_a_view_goes_by_its_elements_and_without_its_gradient() -> None:
    whole = torch.arange(24.0).view(2, 3, 4).requires_grad_()
    for view in (whole.transpose(0, 2), whole[:, 1:2], whole.bfloat16()[1:, :, ::2]):
        got = through_the_pipe(view)
        assert torch.equal(got, view)
        assert not got.requires_grad


def test_what_comes_out_is_memory_of_its_own() -> None:
    """It may be changed, and the frame is as it was; torch warns of memory that must not be written."""
    data = bytes(8)
    got = of_frame({"dtype": "F32", "shape": [2], "data": data})
    got += 1
    assert got.tolist() == [1, 1]
    assert data == bytes(8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.bool])
def test_other_dtypes_do_not_go(dtype: torch.dtype) -> None:
    with pytest.raises(KeyError):
        as_frame(torch.zeros(2, dtype=dtype))


@pytest.mark.parametrize("shape", [(0,), (0, 4), (2, 0, 4)], ids=str)
def test_an_empty_batch_is_refused_where_it_comes_in(shape: tuple[int, ...]) -> None:
    """Messages of stages have none, and a stage's program tells its owner what was wrong."""
    frame = as_frame(torch.zeros(shape))
    assert bytes(frame["data"]) == b""
    with pytest.raises(ValueError, match="0 bytes are no tensor of F32"):
        of_frame(frame)


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"),
    [("F32", [2], 4), ("F32", [2], 12), ("F32", [2], 7), ("BF16", [2, 2], 4), ("I32", [3], 8)],
)
def test_bytes_that_are_not_those_of_the_shape_are_refused(
    dtype: str, shape: list[int], num_bytes: int
) -> None:
    with pytest.raises(ValueError, match=f"^{num_bytes} bytes are no tensor of {dtype}"):
        of_frame({"dtype": dtype, "shape": shape, "data": bytes(num_bytes)})


def test_a_dtype_that_messages_do_not_have_is_refused() -> None:
    with pytest.raises(KeyError):
        of_frame({"dtype": "F64", "shape": [1], "data": bytes(8)})
