"""Files of token ids as other programs write them: what becomes of them, and which are refused, with words."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from neurogrid.errors import ConfigurationError
from neurogrid.training.data.manifest import Manifest
from neurogrid.training.data.preparing import prepare
from neurogrid.training.data.preparing.token_ids import divide_rows, open_ids
from neurogrid.training.data.slices import open_slice, slice_path

MARKS = {2: (20240520, 1), 4: (20240801, 7)}


def write_ids(path: Path, ids: Any, token_bytes: int = 2, *, header: bool = False) -> Path:
    """As llm.c writes it, or without a header as nanoGPT does."""
    path.parent.mkdir(exist_ok=True)
    front = np.zeros(256, "<i4")
    front[:3] = *MARKS[token_bytes], len(ids)
    with path.open("wb") as file:
        if header:
            front.tofile(file)
        np.asarray(ids).astype(f"<u{token_bytes}").tofile(file)
    return path


def rows_of(directory: Path, manifest: Manifest, *, held_out: bool = False) -> list[list[int]]:
    infos = manifest.held_out if held_out else manifest.slices
    found = [open_slice(slice_path(directory, info), manifest, info)["input_ids"] for info in infos]
    rows: list[list[int]] = torch.cat(found).tolist()
    return rows


@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("token_bytes", [2, 4])
def test_samples_are_the_ids_in_a_row(tmp_path: Path, token_bytes: int, header: bool) -> None:
    top = 60_000 if token_bytes == 2 else 120_000
    ids = np.arange(top - 103, top)
    path = write_ids(tmp_path / "ids.bin", ids, token_bytes, header=header)
    told: list[str] = []
    manifest = prepare(
        path,
        tmp_path / "data",
        vocab_size=top,
        sequence_length=10,
        held_out=0.2,
        token_bytes=0 if header else token_bytes,
        say=told.append,
    )
    training = rows_of(tmp_path / "data", manifest)
    held = rows_of(tmp_path / "data", manifest, held_out=True)
    assert sorted(training) == ids[:80].reshape(-1, 10).tolist()
    assert sorted(held) == ids[80:100].reshape(-1, 10).tolist()
    assert told == ["3 ids at the end of ids.bin are left out: a sample has 10"]
    assert (manifest.vocab_size, manifest.tokenizer, manifest.source) == (top, "", "ids.bin")


def test_a_header_changes_no_blob(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, 999)
    made = [
        prepare(
            write_ids(tmp_path / f"{name}.bin", ids, size, header=header),
            tmp_path / name,
            vocab_size=50_000,
            sequence_length=16,
            token_bytes=size,
        )
        for name, size, header in (("a", 2, False), ("b", 2, True), ("c", 4, False), ("d", 4, True))
    ]
    assert {each.slices for each in made} == {made[0].slices}
    assert {each.held_out for each in made} == {made[0].held_out}


def test_no_sample_goes_over_the_end_of_a_file_and_whole_files_are_held_out(tmp_path: Path) -> None:
    """A directory of shards, of either form, in the order of their names; hidden ones are left alone."""
    for number, length in enumerate((57, 33, 100, 41, 8)):
        ids = 1000 * number + np.arange(length)
        write_ids(tmp_path / "shards" / f"{number}.bin", ids, header=number % 2 == 1)
    write_ids(tmp_path / "shards" / ".0.bin", [7] * 100)
    told: list[str] = []
    options: dict[str, Any] = {"vocab_size": 6000, "sequence_length": 10, "slice_samples": 4}
    manifest = prepare(
        tmp_path / "shards", tmp_path / "data", held_out=0.2, say=told.append, **options
    )
    training = rows_of(tmp_path / "data", manifest)
    held = rows_of(tmp_path / "data", manifest, held_out=True)
    assert len(training) + len(held) == 5 + 3 + 10 + 4
    assert all(row == list(range(row[0], row[0] + 10)) for row in (*training, *held))
    assert len({row[0] for row in (*training, *held)}) == 22
    held_files = {row[0] // 1000 for row in held}
    assert not held_files & {row[0] // 1000 for row in training}
    assert 4 <= len(held) <= 8
    assert told == ["19 ids at the end of 4 files are left out: a sample has 10"]
    # The same one by one.
    files = sorted((tmp_path / "shards").glob("[0-9].bin"))
    again = prepare(files, tmp_path / "again", held_out=0.2, **options)
    assert again.slices == manifest.slices
    assert again.source == "0.bin, 1.bin, 2.bin, 3.bin, 4.bin"


def test_the_end_of_the_last_file_is_held_out_where_files_are_large(tmp_path: Path) -> None:
    files = [
        open_ids(write_ids(tmp_path / f"{number}.bin", 500 * number + np.arange(500)), 2000)
        for number in range(3)
    ]
    training, held = divide_rows(files, 10, 0.02, 0, lambda text: None)
    assert (len(training), len(held)) == (147, 3)
    ids = held.load(np.arange(3))["input_ids"]
    assert (ids.dtype, ids[0, 0], ids[-1, -1]) == (np.int32, 1470, 1499)
    numbers = np.array([146, 0, 49, 50, 0])
    assert training.load(numbers)["input_ids"][:, 0].tolist() == [1460, 0, 490, 500, 0]


def test_a_directory_with_text_has_ids_where_somebody_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    write_ids(folder / "ids.bin", np.arange(300))
    (folder / "text.txt").write_text("words and words " * 100)
    options: dict[str, Any] = {"vocab_size": 300, "sequence_length": 10}
    ids = prepare(folder, tmp_path / "a", token_bytes=2, **options)
    text = prepare(folder, tmp_path / "b", **options)
    assert (ids.tokenizer, ids.num_samples) == ("", 29)
    assert text.tokenizer
    with pytest.raises(ConfigurationError, match=r"has token ids, and .* text: .* mixed"):
        prepare([folder / "ids.bin", folder / "text.txt"], tmp_path / "c", **options)


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


HEADER = np.array([20240520, 1, 30, *([0] * 253)], "<i4")


@pytest.mark.parametrize(
    ("content", "token_bytes", "reason"),
    [
        (b"", 0, r"ids\.bin has 0 B, which are no ids of 2 B each"),
        (b"\1\0\2", 2, r"has 3 B, which are no ids of 2 B each"),
        (b"\1\0\2\0\3\0", 4, r"has 6 B, which are no ids of 4 B each"),
        (b"\1\0\0\0" * 50, 0, r"every second id of 2 B is 0.*token_bytes=4"),
        (b"\1\0\2\0" * 50, 4, r"id number 0 is 131,073, .* has 300; .* 2 B, token_bytes=2"),
        (b"\1\0\2\0" * 50 + b"\54\1", 0, r"id number 100 is 300, and the vocabulary has 300"),
        (HEADER.tobytes() + b"\1\0" * 29, 0, r"tells of 30 ids of 2 B, and there are 58 B behind"),
        (HEADER.tobytes() + b"\1\0" * 31, 0, r"tells of 30 ids of 2 B, and there are 62 B behind"),
        (HEADER.tobytes() + b"\1\0" * 30, 4, r"by its header its ids have 2 B: leave out"),
        (HEADER.tobytes() + b"\1\5" * 30, 0, r"id number 0 is 1,281, and the vocabulary has 300$"),
        (
            np.array([20240520, 2, 30, *([0] * 253)], "<i4").tobytes() + b"\1\0" * 30,
            0,
            r"its header is of version 2 of mark 20240520: 1 is known",
        ),
        (
            np.array([20240801, 7, -5, *([0] * 253)], "<i4").tobytes() + b"\1\0" * 30,
            0,
            r"its header tells of -5 ids of 4 B",
        ),
    ],
    ids=lambda value: str(value)[:20] if isinstance(value, str | int) else str(len(value)),
)
def test_a_file_that_is_no_such_file_is_refused(
    tmp_path: Path, content: bytes, token_bytes: int, reason: str
) -> None:
    path = written(tmp_path / "ids.bin", content)
    with pytest.raises(ConfigurationError, match=reason):
        prepare(path, tmp_path / "data", vocab_size=300, sequence_length=8, token_bytes=token_bytes)
    assert not (tmp_path / "data").exists()


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"gone\.bin: No such file"):
        open_ids(tmp_path / "gone.bin", 300)


def test_a_large_file_is_never_in_memory(tmp_path: Path) -> None:
    """64 MiB of ids, of which a few MiB are in memory at a time."""
    ids = np.random.default_rng(0).integers(0, 50_000, 1 << 25)
    path = write_ids(tmp_path / "ids.bin", ids)
    assert path.stat().st_size == 1 << 26
    del ids
    tracemalloc.start()
    try:
        manifest = prepare(path, tmp_path / "data", vocab_size=50_000, sequence_length=1024)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert manifest.num_samples + sum(info.num_samples for info in manifest.held_out) == 1 << 15
    assert peak < 1 << 24
