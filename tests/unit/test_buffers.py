"""What may be sent as a tensor, and that it is not copied."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from neurogrid.errors import LocalProtocolError
from neurogrid.p2p.streams.buffers import tensor_buffer
from neurogrid.p2p.wire import DTYPES

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
NUMPY_DTYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
}


@pytest.mark.parametrize("data", [b"", b"abc", bytearray(b"abc"), memoryview(b"abc")])
def test_bytes_are_a_tensor_of_bytes(data: bytes) -> None:
    buffer = tensor_buffer(data)
    assert (buffer.dtype, buffer.shape) == ("U8", (len(data),))
    assert bytes(buffer.data) == bytes(data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_torch(dtype: str) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).to(TORCH_DTYPES[dtype])
    buffer = tensor_buffer(tensor)
    assert (buffer.dtype, buffer.shape) == (dtype, (2, 3, 4))
    back = torch.frombuffer(bytearray(buffer.data), dtype=TORCH_DTYPES[dtype]).reshape(2, 3, 4)
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_dtype_of_numpy(dtype: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(NUMPY_DTYPES[dtype])
    buffer = tensor_buffer(array)
    assert (buffer.dtype, buffer.shape) == (dtype, (2, 3, 4))
    assert bytes(buffer.data) == array.tobytes()


@pytest.mark.parametrize(
    "tensor", [torch.zeros(4, dtype=torch.bfloat16), np.zeros(4, np.float16), bytearray(8)]
)
def test_nothing_is_copied(tensor: object) -> None:
    buffer = tensor_buffer(tensor)
    memoryview(buffer.data)[0] = 7
    assert bytes(tensor_buffer(tensor).data)[0] == 7


def test_the_buffer_keeps_a_torch_tensor_alive() -> None:
    data = tensor_buffer(torch.full((1 << 16,), 7, dtype=torch.uint8)).data
    gc.collect()
    others = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(8)]
    assert bytes(data) == b"\x07" * (1 << 16)
    assert len(others) == 8


@pytest.mark.parametrize("tensor", [torch.zeros(0, 5), np.zeros((0, 5), np.float32)])
def test_tensors_without_elements(tensor: object) -> None:
    buffer = tensor_buffer(tensor)
    assert (buffer.dtype, buffer.shape, bytes(buffer.data)) == ("F32", (0, 5), b"")


@pytest.mark.parametrize("tensor", [torch.tensor(2.0), np.float32(2.0), np.array(2.0, np.float32)])
def test_tensors_without_dimensions(tensor: object) -> None:
    buffer = tensor_buffer(tensor)
    assert (buffer.dtype, buffer.shape) == ("F32", ())
    assert bytes(buffer.data) == np.float32(2.0).tobytes()


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.zeros(4, 4).T[1:], "contiguous"),
        (np.zeros((4, 4))[:, 1:], "contiguous"),
        (np.zeros(4, ">f4"), "little-endian"),
        (np.zeros(4, np.complex64), "cannot be sent"),
        (np.array(["text"]), "cannot be sent"),
        (np.array([object()]), "cannot be sent"),
        (torch.zeros(4, dtype=torch.complex64), "cannot be sent"),
        (torch.zeros(4, device="meta"), "move it to the CPU"),
        ("text", "cannot be sent"),
        ([1, 2, 3], "cannot be sent"),
        (None, "cannot be sent"),
    ],
)
def test_what_cannot_be_sent_says_why(tensor: object, says: str) -> None:
    with pytest.raises(LocalProtocolError, match=says):
        tensor_buffer(tensor)
