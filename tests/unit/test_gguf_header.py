"""Headers of GGUF, right and wrong: whatever a stranger's file says is an error of one sentence, or true."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any

import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from neurogrid.errors import CheckpointError, ModelError, UnsupportedModelError
from neurogrid.model.files.gguf.block_types import BLOCK_TYPES, TYPE_NAMES
from neurogrid.model.files.gguf.header import Header, TensorInfo, parse_header
from neurogrid.model.files.gguf.metadata import Metadata
from tests.gguf_models import ARRAY, TEXT, U32, File, text

VALUES = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10_000.0,
    "a.flag": True,
    "a.list": ["x", "", "\u2581the"],
    "some.numbers": [1, -2, 3],
    "some.scores": [0.5, -1.0],
    "nothing": [["a"], ["b", "c"]],
}


def some_file(**changes: Any) -> File:
    tensors = {
        "token_embd.weight": ("F16", (3, 32), bytes(range(192))),
        "blk.0.attn_q.weight": ("Q8_0", (2, 64), bytes(136)),
        "output_norm.weight": ("F32", (5,), bytes(20)),
    }
    return File(**{"values": dict(VALUES), "tensors": tensors, **changes})


def parse(data: bytes) -> Header:
    return parse_header(memoryview(data), "m.gguf")


def refused(data: bytes, error: type[Exception] = CheckpointError) -> str:
    with pytest.raises(error) as told:
        parse(data)
    sentence = str(told.value)
    assert sentence.startswith("m.gguf: ")
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 64])
def test_a_header_is_read_as_it_was_written(version: int, alignment: int) -> None:
    values = {**VALUES, "general.alignment": alignment}
    file = some_file(version=version, alignment=alignment, values=values)
    data = file.data()
    header = parse(data)
    assert header.values == {
        **values,
        "a.list": ("x", "", "\u2581the"),
        "some.numbers": (1, -2, 3),
        "some.scores": (0.5, -1.0),
        "nothing": (("a",), ("b", "c")),
    }
    assert list(header.tensors) == list(file.tensors)
    for name, (kind, shape, content) in file.tensors.items():
        info = header.tensors[name]
        assert (info.type.name, info.shape) == (kind, shape)
        assert data[info.start : info.stop] == content
        assert info.start % alignment == 0


def test_all_types_are_those_of_the_format() -> None:
    for kind in GGMLQuantizationType:
        assert TYPE_NAMES.get(kind.value, kind.name) == kind.name
    for number, known in BLOCK_TYPES.items():
        sizes = GGML_QUANT_SIZES[GGMLQuantizationType(number)]
        assert sizes == (known.num_elements, known.block_bytes)


def test_a_file_that_is_cut_off_anywhere_is_refused() -> None:
    data = some_file().data()
    header = len(some_file().header())
    parse(data)
    for length in range(header):
        assert "truncated" in refused(data[:length]) or length < 4
    # Of the last tensor nothing is missing where its padding is.
    assert parse(data[:-12]).tensors["output_norm.weight"] == TensorInfo(
        BLOCK_TYPES[0], (5,), header + 352, header + 372
    )
    for length in range(header, len(data) - 12, 7):
        assert "truncated" in refused(data[:length])


HUGE = 2**63


@pytest.mark.parametrize("count", [65_537, 2**32, HUGE, 2**64 - 1])
def test_counts_that_no_file_has(count: int) -> None:
    assert "tensors; 65536 is the limit" in refused(b"GGUF" + struct.pack("<IQQ", 3, count, 0))
    assert "keys; 4096 is the limit" in refused(b"GGUF" + struct.pack("<IQQ", 3, 0, count))


def of_value(value: bytes) -> bytes:
    """A header with one key, of a type and a value in bytes."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (struct.pack("<IQ", TEXT, HUGE), "has 9223372036854775808 bytes"),
        (struct.pack("<IQ", TEXT, 100) + b"x", "truncated"),
        (struct.pack("<IQ", TEXT, 1) + b"\xff", "not UTF-8"),
        (struct.pack("<IIQ", ARRAY, U32, HUGE), "elements; 4194304 is the limit"),
        (struct.pack("<IIQ", ARRAY, TEXT, 2**22), "truncated"),
        (struct.pack("<IIQ", ARRAY, ARRAY, 2**22), "truncated"),
        (struct.pack("<IIQ", ARRAY, U32, 1000), "truncated"),
        (struct.pack("<IIQ", ARRAY, 99, 1), "unknown type 99"),
        (struct.pack("<I", 99), "unknown type 99"),
        (struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 9, "arrays in one another"),
        (struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 2) * 9, "arrays in one another"),
        (struct.pack("<IB", 7, 2), "neither true nor false"),
        (struct.pack("<IIQ", ARRAY, 7, 2) + b"\x01\x07", "neither true nor false"),
    ],
)
def test_values_that_are_none(value: bytes, says: str) -> None:
    assert says in refused(of_value(value))


def test_arrays_have_a_bound_together() -> None:
    array = struct.pack("<IIQ", ARRAY, 0, 2**21) + bytes(2**21)
    keys = b"".join(text(f"k{number}") + array for number in range(3))
    assert "and the arrays before it have 6291456" in refused(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 3) + keys
    )


@pytest.mark.parametrize(
    ("version", "error", "says"),
    [
        (0, UnsupportedModelError, "version 0"),
        (1, UnsupportedModelError, "versions 2 and 3 are read"),
        (4, UnsupportedModelError, "version 4"),
        (3 << 24, UnsupportedModelError, "big-endian"),
    ],
)
def test_versions_that_are_not_read(version: int, error: type[Exception], says: str) -> None:
    assert says in refused(some_file(version=version).data(), error)


def test_what_is_no_gguf() -> None:
    assert "not a GGUF file" in refused(b"PK\x03\x04" + bytes(100))
    assert "not a GGUF file" in refused(b"<html><body>404")


def test_names_stand_once_and_can_be_read() -> None:
    key = text("k") + struct.pack("<II", U32, 1)
    assert "'k' is in the header twice" in refused(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * key)
    info = text("t") + struct.pack("<IQIQ", 1, 4, 0, 0)
    twice = b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + 2 * info + bytes(99)
    assert "'t' is in the header twice" in refused(twice)
    for name in ("", "a\nb", "\x1b[2J"):
        wrong = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(name) + struct.pack("<II", U32, 1)
        assert "empty or unprintable" in refused(wrong)
    assert "256 is the limit" in refused(of_value(b"").replace(text("k"), text("k" * 257)))


def of_tensor(dimensions: list[int], kind: int, offset: int, num_bytes: int = 4096) -> bytes:
    sizes = struct.pack(f"<{len(dimensions)}Q", *dimensions)
    info = text("t") + struct.pack("<I", len(dimensions)) + sizes + struct.pack("<IQ", kind, offset)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info
    return head + bytes(-len(head) % 32) + bytes(num_bytes)


@pytest.mark.parametrize(
    ("tensor", "error", "says"),
    [
        (([8] * 5, 0, 0), CheckpointError, "has 5 dimensions"),
        (([0, 8], 0, 0), CheckpointError, "no shape"),
        (([HUGE], 0, 0), CheckpointError, "no shape"),
        (([2**32, 2**32], 0, 0), CheckpointError, "no shape"),
        (([2**27, 2**26], 0, 0), CheckpointError, "truncated"),
        (([1025], 0, 0), CheckpointError, "truncated"),
        (([8], 0, 32), CheckpointError, "at offset 32 and not 0"),
        (([8], 0, 2**64 - 32), CheckpointError, "at offset"),
        (([33], 8, 0), CheckpointError, "rows of 33, no whole Q8_0"),
        (([128, 2], 12, 0), CheckpointError, "rows of 128, no whole Q4_K"),
        (([256], 10, 0), UnsupportedModelError, "of the type Q2_K; read are F32, F16, Q4_0"),
        (([256], 16, 0), UnsupportedModelError, "of the type IQ2_XXS"),
        (([256], 77, 0), UnsupportedModelError, "of the type 77"),
    ],
)
def test_tensors_that_are_none(
    tensor: tuple[list[int], int, int], error: type[Exception], says: str
) -> None:
    assert says in refused(of_tensor(*tensor), error)


def test_tensors_lie_one_behind_the_other() -> None:
    file = some_file()
    right = struct.pack("<IQ", 8, 192)
    for offset in (0, 160, 224, 2**40, 2**63):
        data = file.data().replace(right, struct.pack("<IQ", 8, offset))
        assert f"is at offset {offset} and not 192" in refused(data)


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**20, -1, "32", [32]])
def test_alignments_that_are_none(alignment: Any) -> None:
    values = {"general.alignment": struct.pack("<Ii", 5, -1) if alignment == -1 else alignment}
    assert "no power of two" in refused(some_file(values=values).data())


@given(st.binary(max_size=400))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    with suppress(ModelError):
        parse(b"GGUF" + struct.pack("<I", 3) + data)


WHOLE = some_file().data()


@given(st.integers(0, len(some_file().header()) - 1), st.binary(min_size=1, max_size=9))
def test_a_file_with_some_bytes_changed_is_refused_or_within_itself(at: int, other: bytes) -> None:
    data = WHOLE[:at] + other + WHOLE[at + len(other) :]
    try:
        header = parse(data)
    except ModelError:
        return
    ends = [(info.start, info.stop) for info in header.tensors.values()]
    assert all(0 < start <= stop <= len(data) for start, stop in ends)
    assert ends == sorted(ends)


# Keys


@pytest.mark.parametrize(
    ("values", "read", "says"),
    [
        ({}, lambda m: m.size(".block_count"), "lacks llama.block_count"),
        ({".block_count": 0}, lambda m: m.size(".block_count"), "is 0"),
        ({".block_count": -1}, lambda m: m.size(".block_count"), "is no size"),
        ({".block_count": 2**63}, lambda m: m.count(".block_count"), "is no size"),
        ({".block_count": True}, lambda m: m.count(".block_count"), "is no size"),
        ({".block_count": "2"}, lambda m: m.count(".block_count"), "is no size"),
        ({".block_count": (1, 2)}, lambda m: m.count(".block_count"), "differs between layers"),
        ({".block_count": ()}, lambda m: m.count(".block_count"), "differs between layers"),
        ({".x": float("nan")}, lambda m: m.number(".x"), "no finite number"),
        ({".x": float("inf")}, lambda m: m.number(".x"), "no finite number"),
        ({".x": "1"}, lambda m: m.number(".x"), "no finite number"),
        ({".x": 1}, lambda m: m.flag(".x", False), "neither true nor false"),
        ({".x": 1}, lambda m: m.text(".x"), "is no text"),
        ({".x": 1}, lambda m: m.texts(".x"), "is no array"),
        ({".x": ("a", 1)}, lambda m: m.texts(".x"), "an element that is no str"),
        ({".x": (1, True)}, lambda m: m.counts(".x"), "an element that is no int"),
    ],
)
def test_keys_that_are_no_such_thing(values: dict[str, Any], read: Any, says: str) -> None:
    named = {f"llama{key}": value for key, value in values.items()}
    metadata = Metadata({"general.architecture": "llama", **named}, "m.gguf")
    with pytest.raises(CheckpointError, match=f"m.gguf: .*{says}"):
        read(metadata)


def test_one_value_for_all_layers_is_one() -> None:
    values = {"general.architecture": "llama", "llama.attention.head_count": (4, 4, 4)}
    assert Metadata(values, "m").count(".attention.head_count") == 4
    with pytest.raises(CheckpointError, match=r"lacks general\.architecture"):
        Metadata({}, "m")
