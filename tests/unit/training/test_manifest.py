"""Manifests: what one says of slices has to go together, whoever wrote it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from neurogrid.errors import ConfigurationError, RemoteProtocolError
from neurogrid.p2p.transfer import BlobInfo, BytesSource
from neurogrid.training.data.manifest import MAX_MANIFEST_BYTES, Manifest, SliceInfo
from neurogrid.training.data.slices import SliceError, open_slice, read_manifest
from tests.unit.vectors import in_turn


def info(number: int, num_samples: int = 3, num_bytes: int = 3 * 8 * 4 + 88) -> SliceInfo:
    return SliceInfo(bytes([number]) * 32, num_samples, num_bytes)


TEXT = Manifest(
    "text",
    (info(1), info(2)),
    (info(3),),
    sequence_length=8,
    vocab_size=500,
    tokenizer="sha256:00",
    source="bücher.jsonl",
    licence="CC0",
    seed=7,
)
IMAGES = Manifest(
    "images", (info(1, 2, 2 * (12 + 8) + 136),), shape=(3, 2, 2), num_classes=4, seed=2**64 - 1
)


@pytest.mark.parametrize("manifest", [TEXT, IMAGES], ids=["text", "images"])
def test_there_and_back(manifest: Manifest) -> None:
    data = manifest.encode()
    assert Manifest.decode(data) == manifest
    assert Manifest.decode(data).encode() == data


def test_what_it_counts() -> None:
    assert (TEXT.num_samples, TEXT.sizes, TEXT.tokens_per_sample) == (6, (3, 3), 8)
    assert IMAGES.tokens_per_sample == 1


@in_turn("training_manifest")
def test_what_the_vectors_have(name: str, case: Any) -> None:
    data = bytes.fromhex(case["hex"])
    if case["result"] == "valid":
        assert Manifest.decode(data).encode() == data
        return
    with pytest.raises(RemoteProtocolError):
        Manifest.decode(data)


def test_its_bytes_are_pinned() -> None:
    """Those of protocol_spec/training/data.md."""
    manifest = Manifest("text", (info(1),), sequence_length=8, vocab_size=500)
    assert manifest.encode() == (
        b'{"held_out":[],"kind":"text","licence":"","num_classes":0,"seed":0,"sequence_length":8,"shape":[],'
        b'"slices":[["'
        + b"01" * 32
        + b'",3,184]],"source":"","tokenizer":"","version":1,"vocab_size":500}'
    )


LIES: list[tuple[dict[str, Any], str]] = [
    ({"version": 2}, "version"),
    ({"version": None}, "version"),
    ({"kind": "sound"}, "kind is 'sound'"),
    ({"kind": "images"}, "sequence_length is 8"),
    ({"kind": 3}, "kind is"),
    ({"slices": []}, "1 to 100000 slices"),
    ({"slices": {}}, "slices is"),
    ({"slices": [["01" * 31, 3, 184]]}, "id has 31 bytes"),
    ({"slices": [["xy" * 32, 3, 184]]}, "non-hexadecimal"),
    ({"slices": [["01" * 32, 3]]}, "not enough values"),
    ({"slices": [["01" * 32, 0, 88]]}, "number of samples is 0"),
    ({"slices": [["01" * 32, -3, 184]]}, "number of samples is -3"),
    ({"slices": [["01" * 32, True, 120]]}, "number of samples is True"),
    ({"slices": [["01" * 32, 3.0, 184]]}, "number of samples is 3.0"),
    ({"slices": [["01" * 32, 3, 2**60]]}, "number of bytes is"),
    # More samples than the file has room for, and a file that has much besides.
    ({"slices": [["01" * 32, 300, 184]]}, "of 300 samples cannot have 184 B"),
    ({"slices": [["01" * 32, 3, 96]]}, "of 3 samples cannot have 96 B"),
    ({"slices": [["01" * 32, 3, 96 + 4097]]}, "of 3 samples cannot have"),
    ({"held_out": [["01" * 32, 3, 184]]}, "held out is one to train on"),
    ({"sequence_length": 1}, "sequence_length is 1"),
    ({"sequence_length": "8"}, "sequence_length is 8"),
    ({"sequence_length": 2**40}, "sequence_length is"),
    ({"vocab_size": 0}, "vocab_size is 0"),
    ({"vocab_size": 2**31}, "vocab_size is"),
    ({"shape": [3, 2, 2]}, "shape has 3"),
    ({"num_classes": 2}, "num_classes is 2"),
    ({"seed": -1}, "seed is -1"),
    ({"seed": 2**64}, "seed is"),
    ({"licence": "x" * 4097}, "licence has more"),
    ({"source": None}, "source is"),
    ({"more": 1}, "its fields are not"),
]


@pytest.mark.parametrize(("change", "reason"), LIES, ids=[str(each)[:40] for each, _ in LIES])
def test_a_manifest_that_lies_is_refused(change: dict[str, Any], reason: str) -> None:
    record = json.loads(TEXT.encode()) | change
    with pytest.raises(RemoteProtocolError, match=reason):
        Manifest.decode(canonical(record))


@pytest.mark.parametrize(
    "change",
    [{"shape": [3, 2]}, {"shape": [3, 0, 2]}, {"shape": [3, 2**20, 2]}, {"num_classes": 0}],
)
def test_images_that_are_none_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError, match=r"shape|num_classes"):
        Manifest.decode(canonical(json.loads(IMAGES.encode()) | change))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b"1" * 10_000,
        TEXT.encode() + b" ",
        b" " + TEXT.encode(),
        TEXT.encode().replace(b'"seed":7', b'"seed":7,"seed":7'),
        TEXT.encode().replace(b'"seed":7', b'"seed":7.0'),
        TEXT.encode().replace(b'"seed":7', b'"seed":NaN'),
        TEXT.encode().replace(b'"CC0"', b'"\\ud800"'),
        TEXT.encode().replace("ü".encode(), b"\\u00fc"),
        TEXT.encode().replace(b"01" * 32, b"0A" * 32),
        TEXT.encode().replace(b"01" * 32, b"01 " * 32),
    ],
    ids=lambda data: data[:12].hex(),
)
def test_other_bytes_are_no_manifest(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="manifest"):
        Manifest.decode(data)


def test_too_many_bytes_are_not_read() -> None:
    with pytest.raises(RemoteProtocolError, match="at most"):
        Manifest.decode(b" " * (MAX_MANIFEST_BYTES + 1))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_as_a_peers(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Manifest.decode(data)


@given(
    st.sampled_from(sorted(json.loads(TEXT.encode()))),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3),
    ),
)
def test_any_value_of_a_field_is_refused_or_stands_for_itself(name: str, value: Any) -> None:
    try:
        data = canonical(json.loads(TEXT.encode()) | {name: value})
        manifest = Manifest.decode(data)
    except (RemoteProtocolError, UnicodeEncodeError):
        return
    assert manifest.encode() == data


def test_a_directory_without_a_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"manifest\.json: No such file.*prepare"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=r"manifest\.json: these bytes are no manifest"):
        read_manifest(tmp_path)


# Slices, against what their manifest says


def slice_of(path: Path, tensors: dict[str, torch.Tensor], num_samples: int) -> SliceInfo:
    save_file(tensors, path)
    source = BytesSource(path.read_bytes())
    blob = BlobInfo.of_digests(source.digests(), source.num_bytes)
    return SliceInfo(blob.blob_id, num_samples, blob.num_bytes)


IDS = torch.arange(24, dtype=torch.int32).reshape(3, 8)


def test_a_slice_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "slice"
    one = slice_of(path, {"input_ids": IDS}, 3)
    assert torch.equal(open_slice(path, TEXT, one)["input_ids"], IDS)
    pixels = torch.rand(2, 3, 2, 2)
    labels = torch.tensor([3, 0])
    one = slice_of(path, {"pixel_values": pixels, "labels": labels}, 2)
    opened = open_slice(path, replace(IMAGES, slices=(one,)), one)
    assert torch.equal(opened["pixel_values"], pixels)
    assert torch.equal(opened["labels"], labels)
    # However large: they are finite, and their sum is not.
    large = torch.full((2, 3, 2, 2), 3e38)
    one = slice_of(path, {"pixel_values": large, "labels": labels}, 2)
    opened = open_slice(path, replace(IMAGES, slices=(one,)), one)
    assert torch.equal(opened["pixel_values"], large)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"input_ids": IDS.long()}, "torch.int64"),
        ({"input_ids": IDS[:2]}, r"\[2, 8\] instead of"),
        ({"input_ids": IDS.reshape(8, 3)}, r"\[8, 3\] instead of"),
        ({"input_ids": IDS + 480}, "480 to 503, and not 0 to 499"),
        ({"input_ids": IDS - 1}, "-1 to 22"),
        ({"labels": IDS}, "instead of"),
        ({"input_ids": IDS, "labels": IDS.clone()}, "instead of"),
    ],
)
def test_a_slice_that_is_not_what_its_manifest_says_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], reason: str
) -> None:
    path = tmp_path / "slice"
    one = slice_of(path, tensors, 3)
    with pytest.raises(SliceError, match=reason):
        open_slice(path, TEXT, one)


@pytest.mark.parametrize(
    ("pixels", "labels", "reason"),
    [
        (torch.rand(2, 3, 2, 2), torch.tensor([0, 4]), "labels are 0 to 4, and not 0 to 3"),
        (torch.full((2, 3, 2, 2), torch.nan), torch.tensor([0, 1]), "not finite"),
        (
            torch.rand(2, 3, 2, 2).put_(torch.tensor(5), torch.tensor(torch.nan)),
            torch.tensor([0, 1]),
            "not finite",
        ),
        (
            torch.rand(2, 3, 2, 2).put_(torch.tensor(5), torch.tensor(-torch.inf)),
            torch.tensor([0, 1]),
            "not finite",
        ),
        (torch.rand(2, 3, 2, 2).half(), torch.tensor([0, 1]), "float16"),
    ],
)
def test_images_that_are_not_what_their_manifest_says_are_refused(
    tmp_path: Path, pixels: torch.Tensor, labels: torch.Tensor, reason: str
) -> None:
    path = tmp_path / "slice"
    one = slice_of(path, {"pixel_values": pixels, "labels": labels}, 2)
    with pytest.raises(SliceError, match=reason):
        open_slice(path, IMAGES, one)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "slice"
    with pytest.raises(SliceError, match="cannot be read"):
        open_slice(path, TEXT, info(1))
    path.write_bytes(bytes(184))
    with pytest.raises(SliceError, match="cannot be read"):
        open_slice(path, TEXT, info(1))
    path.write_bytes(bytes(183))
    with pytest.raises(SliceError, match="183 B instead of 184"):
        open_slice(path, TEXT, info(1))


def canonical(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    return text.encode()
