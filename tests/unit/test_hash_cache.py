"""Hashes of a checkpoint that are kept: used while the files are the same, and not a moment longer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.hash_cache import HashCache
from tests.unit.full_disk import full_disk

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 16,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for layer in range(2):
        name, file = f"model.layers.{layer}.w", f"model-{layer}.safetensors"
        save_file({name: torch.full((4,), float(layer))}, path / file)
        weight_map[name] = file
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The files are seconds old, and a file's time of change cannot be set.
    monkeypatch.setattr("neurogrid.model.files.hash_cache._TICK_NS", -1)
    path = tmp_path / "hashes"
    path.mkdir()
    return path


def open_both(kept: Path, model: Path) -> tuple[HashCache, Checkpoint]:
    checkpoint = Checkpoint.open(model)
    return HashCache.open(kept, checkpoint), checkpoint


def hash_all(kept: Path, model: Path) -> list[bytes]:
    cache, checkpoint = open_both(kept, model)
    ids = [checkpoint.layer_blob(layer).blob_id() for layer in range(2)]
    cache.save()
    return ids


def is_hashed(checkpoint: Checkpoint) -> list[bool]:
    return [checkpoint.layer_blob(layer).is_hashed for layer in range(2)]


def test_the_second_start_hashes_nothing(kept: Path, model: Path) -> None:
    ids = hash_all(kept, model)
    cache, checkpoint = open_both(kept, model)
    assert cache.num_known == 2
    assert is_hashed(checkpoint) == [True, True]
    assert [checkpoint.layer_blob(layer).blob_id() for layer in range(2)] == ids
    written = {file: file.stat().st_mtime_ns for file in kept.iterdir()}
    cache.save()
    assert {file: file.stat().st_mtime_ns for file in kept.iterdir()} == written


def test_only_what_is_hashed_is_kept(kept: Path, model: Path) -> None:
    cache, checkpoint = open_both(kept, model)
    checkpoint.layer_blob(1).digests()
    cache.save()
    assert is_hashed(open_both(kept, model)[1]) == [False, True]


def rewrite(file: Path) -> None:
    save_file({"model.layers.1.w": torch.full((4,), 7.0)}, file)


def rewrite_in_place_with_the_old_time(file: Path) -> None:
    status = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    with file.open("r+b") as writing:
        writing.write(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace_with_the_old_time(file: Path) -> None:
    status = file.stat()
    other = file.with_suffix(".new")
    rewrite(other)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(file)


@pytest.mark.parametrize(
    "change", [rewrite, rewrite_in_place_with_the_old_time, replace_with_the_old_time]
)
def test_a_file_that_changed_is_hashed_anew_and_no_other(
    kept: Path, model: Path, change: Callable[[Path], None]
) -> None:
    ids = hash_all(kept, model)
    change(model / "model-1.safetensors")
    _, checkpoint = open_both(kept, model)
    assert is_hashed(checkpoint) == [True, False]
    assert checkpoint.layer_blob(1).blob_id() != ids[1]


def test_a_file_that_changes_while_it_is_hashed_is_not_kept(kept: Path, model: Path) -> None:
    cache, checkpoint = open_both(kept, model)
    for layer in range(2):
        checkpoint.layer_blob(layer).digests()
    replace_with_the_old_time(model / "model-1.safetensors")
    cache.save()
    assert is_hashed(open_both(kept, model)[1]) == [True, False]


def test_a_file_that_was_just_written_is_not_kept(
    kept: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neurogrid.model.files.hash_cache._TICK_NS", 3_600_000_000_000)
    hash_all(kept, model)
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 2}', '{"version": 2, "files": {}, "layers": {"0": 5}}']
)
def test_a_damaged_file_is_said_and_written_anew(
    kept: Path, model: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    hash_all(kept, model)
    (file,) = kept.iterdir()
    file.write_text(text)
    hash_all(kept, model)
    assert "is of no use" in caplog.text
    assert is_hashed(open_both(kept, model)[1]) == [True, True]


def test_a_full_disk_is_said_and_leaves_nothing(
    kept: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, checkpoint = open_both(kept, model)
    for layer in range(2):
        checkpoint.layer_blob(layer).digests()
    with full_disk():
        cache.save()
    assert "the hashes of the model cannot be kept" in caplog.text
    assert list(kept.iterdir()) == []
    cache.save()
    assert is_hashed(open_both(kept, model)[1]) == [True, True]


def test_forgotten(kept: Path, model: Path) -> None:
    hash_all(kept, model)
    open_both(kept, model)[0].forget()
    assert is_hashed(open_both(kept, model)[1]) == [False, False]


def test_two_models_do_not_meet(kept: Path, model: Path, tmp_path: Path) -> None:
    hash_all(kept, model)
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert is_hashed(open_both(kept, other)[1]) == [False, False]
