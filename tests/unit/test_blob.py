"""A layer's blob: deterministic, chunked without copies, and safe to read from a stranger."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import safetensors.torch
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from neurogrid.errors import CheckpointError, ModelError, UnsupportedModelError
from neurogrid.model.files.blob import CHUNK_BYTES, LayerBlob, parse_blob
from neurogrid.model.files.safetensors_header import MAX_HEADER_BYTES, TensorEntry, encode_header
from tests.unit.vectors import in_turn

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8", torch.int64: "I64"}


def make_blob(tensors: dict[str, torch.Tensor]) -> LayerBlob:
    table = {}
    for name, tensor in tensors.items():
        raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
        entry = TensorEntry(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), 0, len(raw))
        table[name] = (entry, memoryview(raw))
    return LayerBlob(table)


def small_tensors() -> dict[str, torch.Tensor]:
    return {
        "model.layers.3.b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "model.layers.3.a": torch.ones(5, dtype=torch.uint8),
        "model.layers.3.c": torch.tensor(7, dtype=torch.int64),
        "model.layers.3.empty": torch.empty((0, 4), dtype=torch.bfloat16),
    }


def raw_file(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def one_tensor(**changes: object) -> dict[str, object]:
    return {"t": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **changes}}


def test_blob_opens_with_safetensors_and_with_ours() -> None:
    tensors = small_tensors()
    data = b"".join(make_blob(tensors).chunks())
    for read in (safetensors.torch.load(data), parse_blob(bytearray(data)), parse_blob(data)):
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype
            assert torch.equal(read[name], tensor)


def test_bytes_do_not_depend_on_the_order_given() -> None:
    tensors = small_tensors()
    backwards = dict(reversed(tensors.items()))
    data = b"".join(make_blob(tensors).chunks())
    assert data == b"".join(make_blob(backwards).chunks())
    header = data[8 : 8 + int.from_bytes(data[:8], "little")]
    assert (8 + len(header)) % 64 == 0
    assert list(json.loads(header)) == sorted(tensors)
    assert b"__metadata__" not in header


@in_turn("layer_blob")
def test_vectors_in_either_order(name: str, case: Any) -> None:
    for tensors in (case["tensors"], case["tensors"][::-1]):
        table = {}
        for tensor in tensors:
            raw = bytes.fromhex(tensor["data"])
            entry = TensorEntry(tensor["dtype"], tuple(tensor["shape"]), 0, len(raw))
            table[tensor["name"]] = (entry, memoryview(raw))
        blob = LayerBlob(table)
        assert b"".join(blob.chunks()).hex() == case["bytes"]
        assert (blob.blob_id().hex(), blob.num_bytes) == (case["blob_id"], case["num_bytes"])


@in_turn("layer_blob")
def test_vectors_are_safetensors(name: str, case: Any) -> None:
    """As the format's own reader sees them, and ours, whatever wrote them."""
    data = bytes.fromhex(case["bytes"])
    expected = {tensor["name"]: tensor for tensor in case["tensors"]}
    for read in (safetensors.torch.load(data), parse_blob(data)):
        assert read.keys() == expected.keys()
        for key, tensor in read.items():
            assert list(tensor.shape) == expected[key]["shape"]
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert raw.hex() == expected[key]["data"]


def test_golden_bytes() -> None:
    data = b"".join(make_blob({"w": torch.tensor([1, 2, 3], dtype=torch.uint8)}).chunks())
    header = b'{"w":{"data_offsets":[0,3],"dtype":"U8","shape":[3]}}   '
    assert data == b"\x38\0\0\0\0\0\0\0" + header + b"\x01\x02\x03"
    # The id's rule written out: the BLAKE3 of the one chunk's BLAKE3.
    expected = blake3(blake3(data).digest()).digest()
    assert make_blob({"w": torch.tensor([1, 2, 3], dtype=torch.uint8)}).blob_id() == expected


@pytest.mark.parametrize("sizes", [(3 * CHUNK_BYTES,), (700_000, 700_000, 5, CHUNK_BYTES, 900_000)])
def test_chunks_are_full_but_the_last(sizes: tuple[int, ...]) -> None:
    noise = random.Random(7)
    parts = {f"t{i}": noise.randbytes(size) for i, size in enumerate(sizes)}
    blob = LayerBlob(
        {
            name: (TensorEntry("U8", (len(part),), 0, len(part)), memoryview(part))
            for name, part in parts.items()
        }
    )
    chunks = list(blob.chunks())
    data = b"".join(chunks)
    assert [len(chunk) for chunk in chunks[:-1]] == [CHUNK_BYTES] * (len(chunks) - 1)
    assert 0 < len(chunks[-1]) <= CHUNK_BYTES
    assert len(chunks) == blob.num_chunks
    assert len(data) == blob.num_bytes
    backwards = [bytes(blob.chunk(index)) for index in reversed(range(blob.num_chunks))]
    assert b"".join(reversed(backwards)) == data
    for index in (-1, blob.num_chunks):
        with pytest.raises(IndexError):
            blob.chunk(index)
    digests = b"".join(blake3(chunk).digest() for chunk in chunks)
    assert blob.blob_id() == blake3(digests).digest()
    assert {n: bytes(t.numpy()) for n, t in parse_blob(bytearray(data)).items()} == parts


def test_a_blob_that_ends_with_a_chunk() -> None:
    entry = TensorEntry("U8", (0,), 0, 0)
    overhead = LayerBlob({"t": (entry, memoryview(b""))}).num_bytes
    for size in range(CHUNK_BYTES - overhead - 16, CHUNK_BYTES - overhead + 1):
        part = bytes(size)
        blob = LayerBlob({"t": (TensorEntry("U8", (size,), 0, size), memoryview(part))})
        assert sum(map(len, blob.chunks())) == blob.num_bytes
        assert len(list(blob.chunks())) == blob.num_chunks


def test_chunks_inside_a_tensor_are_views() -> None:
    part = bytes(4 * CHUNK_BYTES)
    entry = TensorEntry("U8", (len(part),), 0, len(part))
    chunks = list(LayerBlob({"t": (entry, memoryview(part))}).chunks())
    assert [isinstance(chunk, memoryview) for chunk in chunks] == [False, True, True, True, True]


def test_parsed_tensors_lie_in_the_buffer() -> None:
    data = bytearray(b"".join(make_blob({"t": torch.zeros(4)}).chunks()))
    tensor = parse_blob(data)["t"]
    data[-4:] = b"\x00\x00\x80\x3f"
    assert tensor.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "too short"),
        (b"\0" * 7, "too short"),
        (b"\xff" * 8, "not a safetensors file"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), "not a safetensors file"),
        (b"\x10" + b"\0" * 7 + b"{}", "truncated inside the header"),
        (raw_file(b"{", b""), "corrupt"),
        (raw_file(b"\xff\xfe", b""), "corrupt"),
        (raw_file(b"[" * 100_000, b""), "corrupt"),
        (raw_file(b'{"t":1' + b"0" * 5000 + b"}", b""), "corrupt"),
        (raw_file([], b""), "not a JSON object"),
        (raw_file({}, b""), "holds no tensor"),
        (raw_file({"__metadata__": {"format": "pt"}}, b""), "holds no tensor"),
        (raw_file(b'{"t":{},"t":{}}', b""), "'t' is in the header twice"),
        (raw_file({"t": 5}, b""), "lacks dtype"),
        (raw_file({"t": {"dtype": "U8", "shape": []}}, b""), "lacks dtype"),
        (raw_file({"": {}}, b""), "name is empty"),
        (raw_file({"x" * 513: {}}, b""), "name is empty, too long"),
        (raw_file({"a\nb": {}}, b""), "unprintable"),
        (raw_file(one_tensor(dtype=1), b"abcd"), "dtype that is not text"),
        (raw_file(one_tensor(dtype="Q8"), b"abcd"), "unknown dtype 'Q8'"),
        (raw_file(one_tensor(shape=4), b"abcd"), "malformed shape"),
        (raw_file(one_tensor(shape=[-4]), b"abcd"), "malformed shape"),
        (raw_file(one_tensor(shape=[True, 4]), b"abcd"), "malformed shape"),
        (raw_file(one_tensor(shape=[2**60, 2**60]), b"abcd"), "malformed shape"),
        (raw_file(one_tensor(shape=[1] * 17), b"abcd"), "malformed shape"),
        (raw_file(one_tensor(shape=[2**50, 2**50]), b"abcd"), "4 bytes where U8"),
        (raw_file(one_tensor(data_offsets=[0, 4.0]), b"abcd"), "malformed data_offsets"),
        (raw_file(one_tensor(data_offsets=[0, 4, 8]), b"abcd"), "malformed data_offsets"),
        (raw_file(one_tensor(data_offsets=[4, 0]), b"abcd"), "-4 bytes where U8"),
        (raw_file(one_tensor(data_offsets=[1, 5]), b"abcde"), "leaves a hole"),
        (raw_file(one_tensor() | {"u": one_tensor()["t"]}, b"abcd"), "overlaps"),
        (raw_file(one_tensor(), b"abc"), "truncated"),
        (raw_file(one_tensor(), b"abcde"), "1 bytes after the last tensor"),
    ],
)
def test_hostile_bytes(data: bytes, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        parse_blob(bytearray(data))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_too_many_tensors_and_too_long_a_header() -> None:
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    with pytest.raises(CheckpointError, match="more than 16384 tensors"):
        parse_blob(raw_file({str(i): empty for i in range(16_385)}, b""))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        parse_blob(raw_file(b"{}" + b" " * (4 * 1024 * 1024), b""))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"])
def test_quantised_dtypes_are_refused_with_the_reason(dtype: str) -> None:
    with pytest.raises(UnsupportedModelError, match="quantised checkpoints are not supported yet"):
        parse_blob(raw_file(one_tensor(dtype=dtype), b"abcd"))


@given(st.binary(max_size=400))
def test_arbitrary_bytes_raise_only_model_errors(data: bytes) -> None:
    with pytest.raises(ModelError):
        parse_blob(data)


GOOD = b"".join(make_blob(small_tensors()).chunks())


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.binary(max_size=3)), max_size=4))
def test_mutated_bytes_parse_or_raise_model_errors(edits: list[tuple[int, bytes]]) -> None:
    data = bytearray(GOOD)
    for at, new in edits:
        data[at : at + len(new)] = new
    try:
        tensors = parse_blob(data)
    except ModelError:
        return
    # What is accepted lies inside the buffer, whatever the header claims.
    assert sum(t.nbytes for t in tensors.values()) <= len(data)


@given(
    st.dictionaries(
        st.text("abc.é", min_size=1, max_size=9),
        st.tuples(
            st.sampled_from(sorted(DTYPE_NAMES.values())), st.lists(st.integers(0, 4), max_size=3)
        ),
        min_size=1,
        max_size=6,
    )
)
def test_written_and_read_again(specs: dict[str, tuple[str, list[int]]]) -> None:
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    tensors = {
        name: torch.full(shape, 3, dtype=dtypes[dtype]) for name, (dtype, shape) in specs.items()
    }
    read = parse_blob(bytearray(b"".join(make_blob(tensors).chunks())))
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_encoded_header_is_ascii_and_padded() -> None:
    header = encode_header({"é": TensorEntry("U8", (1,), 0, 1)})
    assert header[8:].isascii()
    assert len(header) % 64 == 0
