"""The cache of huggingface_hub, looked into without a network: what is whole there, and what is not."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import pytest

from neurogrid.hub.cache import cached_snapshot
from neurogrid.hub.names import ModelName
from neurogrid.hub.needed import INDEX_FILE

COMMIT = "b968826d9c46dd6066d109eabc6255188de91218"
NAME = ModelName("org/model")
SINGLE = {"config.json": 20, "tokenizer.json": 30, "model.safetensors": 400}
SHARDS = {"config.json": 20, "tokenizer.json": 30, "a.safetensors": 4, "b.safetensors": 5}
INDEX = json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def put(cache: Path, files: dict[str, int], *, listed: dict[str, int] | None = None) -> Path:
    """A snapshot with files of these sizes, as the library keeps it, and the listing of what it should have."""
    home = cache / "models--org--model"
    folder = home / "snapshots" / COMMIT
    (home / "blobs").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "trees").mkdir()
    folder.mkdir(parents=True)
    (home / "refs" / "main").write_text(COMMIT)
    for number, (path, size) in enumerate(files.items()):
        blob = home / "blobs" / f"{number}"
        blob.write_bytes(INDEX.encode() if path == INDEX_FILE else bytes(size))
        (folder / path).symlink_to(blob)
    if listed is not None:
        told = {path: {"size": size, "blob_id": path} for path, size in listed.items()}
        tree = {"format_version": 1, "files": told}
        (home / "trees" / f"{COMMIT}.json").write_text(json.dumps(tree))
    return folder


def test_what_was_never_fetched(cache: Path) -> None:
    assert cached_snapshot(NAME) is None


@pytest.mark.parametrize("is_listed", [True, False])
def test_what_is_whole_under_its_revision_and_its_commit(cache: Path, is_listed: bool) -> None:
    more = {"README.md": 9, "pytorch_model.bin": 10**9}  # which are not needed
    folder = put(cache, SINGLE, listed={**SINGLE, **more} if is_listed else None)
    for revision in ("main", COMMIT):
        assert cached_snapshot(ModelName("org/model", revision)) == folder
    assert cached_snapshot(ModelName("org/model", "v2")) is None
    assert cached_snapshot(ModelName("org/other")) is None


@pytest.mark.parametrize(
    "change",
    [{"model.safetensors": 399}, *({path: None} for path in SINGLE)],
    ids=lambda change: next(iter(change)),
)
def test_what_lacks_something_or_is_cut_short(cache: Path, change: dict[str, int | None]) -> None:
    sizes = {path: size for path, size in {**SINGLE, **change}.items() if size is not None}
    put(cache, sizes, listed=SINGLE)
    assert cached_snapshot(NAME) is None


@pytest.mark.parametrize("lacking", ["config.json", "tokenizer.json", "model.safetensors"])
def test_without_a_listing_what_a_model_must_have(cache: Path, lacking: str) -> None:
    put(cache, {path: size for path, size in SINGLE.items() if path != lacking})
    assert cached_snapshot(NAME) is None


@pytest.mark.parametrize("is_listed", [True, False])
def test_one_of_several_models_in_gguf(cache: Path, is_listed: bool) -> None:
    files = {"x-Q4_0.gguf": 40, "x-Q8_0.gguf": 80}
    folder = put(cache, {"x-Q4_0.gguf": 40}, listed=files if is_listed else None)
    assert cached_snapshot(ModelName("org/model", quant="Q4_0")) == folder / "x-Q4_0.gguf"
    assert cached_snapshot(ModelName("org/model", quant="Q8_0")) is None
    # Which is meant is not known where there may be another.
    assert cached_snapshot(NAME) == (None if is_listed else folder / "x-Q4_0.gguf")


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("lacking", [None, 1, 3])
def test_shards_of_a_model_in_gguf(cache: Path, lacking: int | None, is_listed: bool) -> None:
    """Another program's download that was broken off between two of them leaves no listing."""
    names = {number: f"x-Q8_0-{number:05}-of-00003.gguf" for number in (1, 2, 3)}
    files = {name: 40 for number, name in names.items() if number != lacking}
    folder = put(cache, files, listed=dict.fromkeys(names.values(), 40) if is_listed else None)
    found = cached_snapshot(ModelName("org/model", quant="Q8_0"))
    assert found == (folder / names[1] if lacking is None else None)


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("lacking", [None, "a.safetensors", "b.safetensors", INDEX_FILE])
def test_shards(cache: Path, lacking: str | None, is_listed: bool) -> None:
    all_files = {**SHARDS, INDEX_FILE: len(INDEX)}
    files = {path: size for path, size in all_files.items() if path != lacking}
    folder = put(cache, files, listed=all_files if is_listed else None)
    # Without the listing and without the index nobody can know that there was one; reading the model tells.
    is_whole = lacking is None or (lacking == INDEX_FILE and not is_listed)
    assert cached_snapshot(NAME) == (folder if is_whole else None)
