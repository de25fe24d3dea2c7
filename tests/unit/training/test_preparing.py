"""Data directories of text, token ids and images: what is in them, that they come out the same, what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoTokenizer

from neurogrid.errors import ConfigurationError
from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.data.preparing import prepare
from neurogrid.training.data.preparing.documents import PIECE_BYTES, read_pieces
from neurogrid.training.data.preparing.token_file import TokenFile
from neurogrid.training.data.slices import open_slice, read_manifest, slice_path
from tests.unit.full_disk import full_disk

WORDS = ["the", "leader", "deals", "samples", "and", "members", "train", "on", "each", "once"]


def text_of(number: int, num_words: int = 60) -> str:
    words = [WORDS[(number * 7 + index * index) % len(WORDS)] for index in range(num_words)]
    return f"document {number}: " + " ".join(words) + "."


TEXTS = [text_of(number) for number in range(40)]


def tensors(
    directory: Path, manifest: Manifest, infos: Sequence[SliceInfo], name: str
) -> torch.Tensor:
    return torch.cat(
        [open_slice(slice_path(directory, info), manifest, info)[name] for info in infos]
    )


def all_text(directory: Path, infos: Sequence[SliceInfo]) -> str:
    """The text of samples, one after the other."""
    manifest = read_manifest(directory)
    ids = tensors(directory, manifest, infos, "input_ids")
    tokenizer = AutoTokenizer.from_pretrained(directory / "tokenizer")
    return "\n".join(tokenizer.batch_decode(ids))


def write_folder(folder: Path) -> Path:
    folder.mkdir()
    for number, text in enumerate(TEXTS):
        suffix = (".txt", ".py", ".rst", ".md")[number % 4]
        (folder / f"{number:02}{suffix}").write_text(text)
    (folder / ".hidden.txt").write_text("never")
    (folder / "notes.csv").write_text("never")
    return folder


def write_jsonl(path: Path) -> Path:
    path.write_text("\n".join(json.dumps({"text": text, "id": 3}) for text in TEXTS) + "\n\n")
    return path


def write_parquet(path: Path) -> Path:
    table = pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    pyarrow.parquet.write_table(table, path, row_group_size=7)
    return path


def test_a_data_directory(tmp_path: Path) -> None:
    source = tmp_path / "corpus.txt"
    source.write_text("\n".join(TEXTS))
    out = tmp_path / "data"
    manifest = prepare(
        source, out, vocab_size=300, sequence_length=16, seed=3, held_out=0.1, licence="CC0"
    )
    assert read_manifest(out) == manifest
    assert (manifest.kind, manifest.source, manifest.licence) == ("text", "corpus.txt", "CC0")
    assert manifest.vocab_size <= 300
    assert manifest.tokenizer.startswith("sha256:")
    assert len(manifest.slices) >= 8
    names = {path.name for path in (out / "slices").iterdir()}
    infos = (*manifest.slices, *manifest.held_out)
    assert names == {f"{info.blob_id.hex()}.safetensors" for info in infos}
    assert {path.name for path in out.iterdir()} == {"manifest.json", "slices", "tokenizer"}
    assert list(tmp_path.iterdir()) in ([source, out], [out, source])
    held = sum(info.num_samples for info in manifest.held_out)
    assert held == round(0.1 * (held + manifest.num_samples))


def test_every_kind_of_text_gives_the_same_samples(tmp_path: Path) -> None:
    sources = [
        write_folder(tmp_path / "folder"),
        write_jsonl(tmp_path / "lines.jsonl"),
        write_parquet(tmp_path / "rows.parquet"),
    ]
    made = [
        prepare(source, tmp_path / f"{source.name}-data", vocab_size=300, sequence_length=16)
        for source in sources
    ]
    assert made[0].slices == made[1].slices == made[2].slices
    assert made[0].held_out == made[1].held_out == made[2].held_out
    assert made[0].held_out


def test_what_is_held_out_is_trained_on_nowhere(tmp_path: Path) -> None:
    """Whole documents of a folder; the end of the text where there is but one."""
    folder = write_folder(tmp_path / "folder")
    out = tmp_path / "data"
    manifest = prepare(folder, out, vocab_size=300, sequence_length=16, held_out=0.1)
    training, held = (all_text(out, infos) for infos in (manifest.slices, manifest.held_out))

    def named(text: str) -> set[str]:
        return {word for word in WORDS_OF_DOCUMENTS if f"document {word}:" in text}

    assert named(held)
    assert not named(training) & named(held)
    assert len(named(training) | named(held)) >= 15  # samples cut many names in two
    one = tmp_path / "one.txt"
    one.write_text("\n".join(TEXTS))
    out = tmp_path / "one-data"
    manifest = prepare(one, out, vocab_size=300, sequence_length=16, held_out=0.1)
    training, held = (all_text(out, infos) for infos in (manifest.slices, manifest.held_out))
    assert named(held) <= {str(number) for number in range(34, 40)}
    assert not named(training) & named(held)


WORDS_OF_DOCUMENTS = [str(number) for number in range(40)]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    held_out=st.sampled_from([0.0, 0.02, 0.3, 0.5, 0.9]),
    length=st.integers(2, 9),
    seed=st.integers(0, 5),
    cut=st.integers(1, 9),
)
def test_tokens_are_in_one_sample_at_most(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    held_out: float,
    length: int,
    seed: int,
    cut: int,
) -> None:
    """Documents in pieces of any length; each token has a number of its own."""
    pieces, start = [], 0
    for each in lengths:
        ids = np.arange(start, start + each, dtype=np.int32)
        start += each
        parts = [ids[at : at + cut] for at in range(0, max(1, each), cut)]
        pieces += [(part, part is parts[-1]) for part in parts]
    directory = tmp_path_factory.mktemp("ids")
    try:
        file = TokenFile(directory, pieces, held_out=held_out, length=length, seed=seed)
    except ConfigurationError:
        assert start < 2 * length
        return
    training, held = file.training.ravel().tolist(), file.held_out.ravel().tolist()
    assert len({*training, *held}) == len(training) + len(held)
    assert training == sorted(training)
    assert len(training) >= length
    assert bool(held) == bool(held_out)
    # What ends of streams drop.
    assert start - len(training) - len(held) < 2 * length
    if held_out:
        wanted = max(1, min(round(held_out * (start // length)), start // length - 1)) * length
        assert wanted <= len(held) <= 2 * wanted


def test_the_same_again_is_the_same_and_another_seed_another_order(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "lines.jsonl")
    again = [prepare(source, tmp_path / f"{i}", vocab_size=300, sequence_length=16) for i in (1, 2)]
    assert again[0] == again[1]
    assert again[0].encode() == (tmp_path / "2" / "manifest.json").read_bytes()
    program = (
        "import sys, pathlib, hashlib\n"
        "from neurogrid.training.data.preparing import prepare\n"
        "source, out = map(pathlib.Path, sys.argv[1:])\n"
        "prepare(source, out, vocab_size=300, sequence_length=16)\n"
    )
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "3")]
    subprocess.run(command, check=True)
    assert read_manifest(tmp_path / "3") == again[0]
    other = prepare(source, tmp_path / "4", vocab_size=300, sequence_length=16, seed=1)
    assert not set(other.slices) & set(again[0].slices)
    assert other.tokenizer == again[0].tokenizer


def test_samples_are_shuffled_and_each_is_there_once(tmp_path: Path) -> None:
    path = tmp_path / "ids.bin"
    np.arange(1000, dtype="<u2").tofile(path)
    out = tmp_path / "data"
    manifest = prepare(
        path, out, vocab_size=1000, sequence_length=10, slice_samples=7, held_out=0.1
    )
    rows = tensors(out, manifest, manifest.slices, "input_ids")
    held = tensors(out, manifest, manifest.held_out, "input_ids")
    assert manifest.sizes == (7,) * 12 + (6,)
    assert rows[:, 0].tolist() != sorted(rows[:, 0].tolist())
    assert sorted(rows.ravel().tolist()) == list(range(900))
    assert sorted(held.ravel().tolist()) == list(range(900, 1000))
    assert (manifest.tokenizer, manifest.vocab_size) == ("", 1000)


def test_ids_of_four_bytes(tmp_path: Path) -> None:
    path = tmp_path / "ids.bin"
    ids = np.arange(100, dtype="<u4") + 70_000
    ids.tofile(path)
    manifest = prepare(path, tmp_path / "a", vocab_size=80_000, sequence_length=10, held_out=0)
    assert manifest.held_out == ()
    rows = tensors(tmp_path / "a", manifest, manifest.slices, "input_ids")
    assert sorted(rows.ravel().tolist()) == ids.tolist()
    (ids - 70_000).astype("<u4").tofile(path)
    with pytest.raises(ConfigurationError, match="seem to have 4 B"):
        prepare(path, tmp_path / "b", vocab_size=500, sequence_length=10)
    prepare(path, tmp_path / "b", vocab_size=500, sequence_length=10, token_bytes=4)


def test_the_tokenizer_of_a_directory_is_taken_and_copied(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "lines.jsonl")
    first = prepare(source, tmp_path / "a", vocab_size=280, sequence_length=8)
    second = prepare(
        source, tmp_path / "b", tokenizer=tmp_path / "a" / "tokenizer", sequence_length=8
    )
    assert second == first
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copied = (tmp_path / "b" / "tokenizer" / name).read_bytes()
        assert copied == (tmp_path / "a" / "tokenizer" / name).read_bytes()


def test_the_reference_of_python_is_prepared(tmp_path: Path) -> None:
    """With what is the default; text and tokens say the same, but for the ends of documents."""
    source = tmp_path / "reference.txt"
    source.write_text("\n\n".join(topics[name] for name in sorted(topics)))
    manifest = prepare(source, tmp_path / "data")
    assert manifest.vocab_size == 4096
    assert manifest.sequence_length == 256
    assert manifest.num_samples > 200
    assert manifest.held_out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "data" / "tokenizer")
    text = "naïve 日本 \N{GRINNING FACE} x = 3"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_pieces_are_the_text(tmp_path: Path) -> None:
    """Lines that are longer than a piece, and characters that lie across its end, too."""
    text = "".join(f"{'ü' * (number % 97)}\n" for number in range(9000)) + "日" * PIECE_BYTES
    path = tmp_path / "long.txt"
    path.write_text("\N{BYTE ORDER MARK}" + text)
    pieces = list(read_pieces(path))
    assert "".join(piece.text for piece in pieces) == text
    assert len(pieces) > 5
    assert [piece.is_last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(piece.text.encode()) <= PIECE_BYTES + 3 for piece in pieces)


# Images


def write_images(folder: Path, *, mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> Path:
    for label, name in enumerate(("cat", "dog", "émeu")):
        (folder / name).mkdir(parents=True)
        for number in range(4):
            colour = 40 * label + number
            image = Image.new(mode, size, colour if mode == "L" else (colour, 200, 7))
            image.save(folder / name / f"{number}.png")
    return folder


def test_a_folder_of_images(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "animals")
    manifest = prepare(folder, tmp_path / "data", held_out=0.2, slice_samples=4, seed=5)
    assert (manifest.kind, manifest.shape, manifest.num_classes) == ("images", (3, 4, 6), 3)
    assert (manifest.sizes, len(manifest.held_out)) == ((4, 4, 2), 1)
    assert json.loads((tmp_path / "data" / "classes.json").read_text()) == ["cat", "dog", "émeu"]
    everything = (*manifest.slices, *manifest.held_out)
    pixels = tensors(tmp_path / "data", manifest, everything, "pixel_values")
    labels = tensors(tmp_path / "data", manifest, everything, "labels")
    assert pixels.dtype == torch.uint8
    # Each image once, with the label of its folder.
    reds = pixels[:, 0, 0, 0].tolist()
    assert sorted(reds) == sorted(40 * label + number for label in range(3) for number in range(4))
    assert labels.tolist() == [red // 40 for red in reds]
    assert prepare(folder, tmp_path / "again", held_out=0.2, slice_samples=4, seed=5) == manifest


def test_images_without_colour_have_one_channel_and_sizes_can_be_given(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "grey", mode="L")
    assert prepare(folder, tmp_path / "a").shape == (1, 4, 6)
    Image.new("RGB", (9, 9)).save(folder / "dog" / "9.png")
    with pytest.raises(ConfigurationError, match=r"dog/9\.png is 9 x 9, and those before it 6 x 4"):
        prepare(folder, tmp_path / "b")
    assert prepare(folder, tmp_path / "b", image_size=5).shape == (3, 5, 5)


def test_what_is_no_image_is_named(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "animals")
    (folder / "dog" / "x.jpg").write_bytes(b"no image")
    with pytest.raises(ConfigurationError, match=r"dog/x\.jpg is no image"):
        prepare(folder, tmp_path / "data")
    (folder / "dog" / "x.jpg").unlink()
    whole = (folder / "cat" / "0.png").read_bytes()
    (folder / "cat" / "0.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigurationError, match=r"cat/0\.png is"):
        prepare(folder, tmp_path / "data")
    (folder / "cat" / "0.png").write_bytes(whole)
    (folder / "ox").mkdir()
    with pytest.raises(ConfigurationError, match="ox is a class without images"):
        prepare(folder, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_images_are_of_two_classes_at_least(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "animals")
    for name in ("cat", "dog"):
        shutil.rmtree(folder / name)
    with pytest.raises(ConfigurationError, match="animals has 1 directories of images: there is"):
        prepare(folder, tmp_path / "data")
    (folder / "émeu" / "0.png").rename(folder / "0.png")
    shutil.rmtree(folder / "émeu")
    with pytest.raises(ConfigurationError, match="animals has 0 directories of images"):
        prepare(folder, tmp_path / "data")


# What is refused, with file and line


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.txt", b"one\ntwo\nth\xffree\n", r"a\.txt:3: this is not UTF-8"),
        ("a.txt", b"one\ntwo \xe2\x82", r"a\.txt:2: this is not UTF-8"),
        ("a.txt", b"", r"a\.txt is empty"),
        ("a.txt", b"\n", r"tokens: a sample to train on .* take more text"),
        ("a.jsonl", b'{"text": "a"}\n\nnothing\n', r"a\.jsonl:3: this is no JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "a"}\n', r'a\.jsonl:2: .*string called "text"'),
        ("a.jsonl", b'{"text": 7}\n', r'a\.jsonl:1: .*string called "text"'),
        ("a.jsonl", b'["text"]\n', r"a\.jsonl:1: "),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl:1: half of a surrogate"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: this is not UTF-8"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: this is no JSON"),
        ("a.parquet", b"PAR1 but not really", r"a\.parquet: after row 0: "),
        ("a.bin", b"\1\0\2", r"a\.bin has 3 B"),
        ("a.bin", b"\1\0\2\0\0\3" * 20, r"a\.bin: id number 2 is 768, and the vocabulary has 300"),
        ("a.csv", b"text\n", r"a\.csv: neither text \(.*\.parquet.*\), token ids"),
    ],
)
def test_a_source_that_is_wrong_is_named_with_its_line(
    tmp_path: Path, name: str, data: bytes, reason: str
) -> None:
    source = tmp_path / name
    source.write_bytes(data)
    with pytest.raises(ConfigurationError, match=reason):
        prepare(source, tmp_path / "data", vocab_size=300, sequence_length=8)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"body": ["a"], "id": [1]}, 'a column called "text" is wanted, not body, id'),
        ({"text": ["a", None, "b"]}, 'row 2: "text" is NoneType'),
        ({"text": [1, 2]}, 'row 1: "text" is int'),
    ],
)
def test_rows_that_are_wrong_are_named(
    tmp_path: Path, table: dict[str, list[object]], reason: str
) -> None:
    source = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table(table), source)
    with pytest.raises(ConfigurationError, match=r"rows\.parquet: " + reason):
        prepare(source, tmp_path / "data", vocab_size=300, sequence_length=8)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"vocab_size": 100}, "at least 258 tokens"),
        ({"vocab_size": 0}, "vocab_size is 1 to"),
        ({"sequence_length": 1}, "sequence_length is 2 to"),
        ({"sequence_length": 100_000}, "a sample to train on and one to hold out of 100000"),
        ({"slice_samples": 0}, "slice_samples is at least 1"),
        ({"held_out": 1.0}, "held_out is a share"),
        ({"held_out": -0.1}, "held_out is a share"),
        ({"held_out": float("nan")}, "held_out is a share"),
        ({"seed": -1}, "seed is a number"),
        ({"licence": "x" * 5000}, "licence is at most"),
        ({"token_bytes": 3}, "token_bytes is 2 or 4"),
        ({"image_size": -1}, "image_size is at least"),
    ],
)
def test_arguments_that_are_wrong_are_named(
    tmp_path: Path, arguments: dict[str, object], reason: str
) -> None:
    source = write_jsonl(tmp_path / "lines.jsonl")
    with pytest.raises(ConfigurationError, match=reason):
        prepare(source, tmp_path / "data", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "data").exists()


def test_a_tokenizer_that_is_none_is_named(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "lines.jsonl")
    folder = tmp_path / "tokenizer"
    folder.mkdir()

    def refused(reason: str) -> None:
        with pytest.raises(ConfigurationError, match=reason):
            prepare(source, tmp_path / "data", tokenizer=folder)

    refused(r"tokenizer\.json: No such file")
    (folder / "tokenizer.json").write_text("{}")
    refused(r"tokenizer\.json is no tokenizer")
    prepare(source, tmp_path / "good", vocab_size=300, sequence_length=8)
    good = (tmp_path / "good" / "tokenizer" / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(good)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    refused("eos_token '<end>' is no token")
    (folder / "tokenizer_config.json").write_text("[]")
    refused(r"tokenizer_config\.json cannot be read")


def test_sources_and_directories_that_cannot_be_used(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "lines.jsonl")
    with pytest.raises(ConfigurationError, match="there is no such file or folder"):
        prepare(tmp_path / "nowhere", tmp_path / "data")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="empty: neither text"):
        prepare(tmp_path / "empty", tmp_path / "data")
    prepare(source, tmp_path / "empty", vocab_size=300, sequence_length=8)
    with pytest.raises(ConfigurationError, match="has data already"):
        prepare(source, tmp_path / "empty", vocab_size=300, sequence_length=8)
    with pytest.raises(ConfigurationError, match="is not empty"):
        prepare(source, tmp_path, vocab_size=300, sequence_length=8)
    path = tmp_path / "ids.bin"
    path.write_bytes(bytes(100))
    with pytest.raises(ConfigurationError, match="give their tokenizer, or vocab_size"):
        prepare(path, tmp_path / "data")


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "lines.jsonl")
    with full_disk(), pytest.raises(ConfigurationError, match=r"data cannot be made: .*too large"):
        prepare(source, tmp_path / "data", vocab_size=300, sequence_length=8)
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]


@pytest.mark.parametrize(("module", "package"), [("pyarrow", "pyarrow"), ("PIL", "pillow")])
def test_what_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    parquet, images = write_parquet(tmp_path / "a.parquet"), write_images(tmp_path / "images")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError, match=f"pip install {package}"):
        prepare(parquet if module == "pyarrow" else images, tmp_path / "data")
