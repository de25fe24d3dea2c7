"""What is wrong with a run before it begins: said in one line, in time, and with nothing left behind."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from neurogrid.errors import ConfigurationError
from neurogrid.training.data.manifest import Manifest, SliceInfo
from neurogrid.training.leading import model_data
from neurogrid.training.leading.model_data import check_model
from neurogrid.training.leading.model_numbers import ModelNumbers
from neurogrid.training.leading.progress import QuietProgress
from neurogrid.training.runs.run_directory import RunDirectory
from neurogrid.training.runs.run_file import RunFile, parse_run_file
from tests.unit.training.test_model_numbers import LLAMA

TEXTS, PICTURES = SliceInfo(bytes(32), 8, 1100), SliceInfo(bytes(32), 8, 1700)


def run_of(**data: Any) -> RunFile:
    told = "\n".join(f"{key} = {json.dumps(value)}" for key, value in data.items())
    return parse_run_file(
        f'[model]\nconfig = "config.json"\n[data]\n{told}\n[stop]\nrounds = 2\n[inner]\nbatch_tokens = 4096\n'
    )


def refused(run: RunFile, place: Path, config: dict[str, Any] | None = None) -> str:
    """What is said of a run with this model, in `place`."""
    model = place / "config.json"
    model.write_text(json.dumps(config or {**LLAMA, "max_position_embeddings": 64}))
    directory = RunDirectory(place / "run")
    directory.path.mkdir(exist_ok=True)
    with pytest.raises(ConfigurationError) as told:
        trio.run(model_data.first_data, run, directory, model, QuietProgress())
    assert not directory.data.exists()
    assert "\n" not in str(told.value)
    return str(told.value)


def test_a_model_is_judged_before_data_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(path="nowhere.txt")
    told = refused(run, tmp_path, {**LLAMA, "num_attention_heads": 5})
    assert "config.json cannot be opened as causal-lm" in told
    monkeypatch.setattr(model_data, "free_memory", lambda: 50_000)
    told = refused(run, tmp_path)
    assert told.startswith("the leader of a model with ")
    assert "bytes of memory, and 50,000 are free on this machine: lead the run on another" in told


def test_data_that_do_not_go_with_the_model_are_not_left_behind(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(number) for number in range(9000)))
    run = run_of(path=str(text), sequence_length=32, vocab_size=512)
    assert "token ids up to 511" in refused(run, tmp_path)
    run = run_of(path=str(text), sequence_length=128, vocab_size=258)
    told = refused(run, tmp_path, {**LLAMA, "vocab_size": 512, "max_position_embeddings": 64})
    assert told == (
        "[data] sequence_length is 128, and the model's sequences have at most 64 tokens"
    )
    text.write_text("")
    assert refused(run_of(path=str(text)), tmp_path) == f"{text} is empty: there is no text in it"


def test_token_ids_are_those_of_the_model(tmp_path: Path) -> None:
    """Whatever `vocab_size` says, which is of tokenizers that are trained."""
    ids, config = tmp_path / "ids", {**LLAMA, "vocab_size": 9000, "max_position_embeddings": 64}
    ids.mkdir()
    for number in range(2):
        (np.arange(2000) + 7000).astype("<u2").tofile(ids / f"{number}.bin")
    run = run_of(path=str(ids), sequence_length=32)
    directory, model = RunDirectory(tmp_path / "run"), tmp_path / "config.json"
    directory.path.mkdir()
    model.write_text(json.dumps(config))
    data = trio.run(model_data.first_data, run, directory, model, QuietProgress())
    assert (data.manifest.vocab_size, data.manifest.tokenizer) == (9000, "")
    assert data.manifest.num_samples + data.manifest.held_out[0].num_samples == 124
    (np.arange(100) + 8950).astype("<u2").tofile(ids / "2.bin")
    shutil.rmtree(directory.path)
    told = refused(run, tmp_path, config)
    assert told.startswith(f"{ids}/2.bin: id number 50 is 9,000, and the vocabulary has 9,000; ")
    run = run_of(path=str(ids), sequence_length=32, token_bytes=4)
    told = refused(run, tmp_path, config)
    assert "id number 0 is 458,824,536" in told
    assert "were they ids of 2 B, token_bytes=2 would say so" in told


def test_data_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    for name, is_right in ((f"sha256:{digest}", True), ("sha256:00", False)):
        manifest = Manifest("text", (TEXTS,), sequence_length=32, vocab_size=100, tokenizer=name)
        run = run_of(path="d")
        if is_right:
            check_model(run, tmp_path, ModelNumbers(1000), manifest)
            continue
        with pytest.raises(ConfigurationError, match="prepared with another tokenizer than the"):
            check_model(run, tmp_path, ModelNumbers(1000), manifest)


@pytest.mark.parametrize(
    ("kind", "manifest", "told"),
    [
        (
            "image-classification",
            Manifest("text", (TEXTS,), sequence_length=32, vocab_size=100),
            "the data are text, and [model] kind 'image-classification' learns from images",
        ),
        (
            "causal-lm",
            Manifest("images", (PICTURES,), shape=(3, 8, 8), num_classes=2),
            "the data are images, and [model] kind 'causal-lm' learns from text",
        ),
        (
            "image-classification",
            Manifest("images", (PICTURES,), shape=(3, 8, 8), num_classes=7),
            "the data have 7 classes, and the model in config.json knows 3: give its config num_labels = 7",
        ),
    ],
)
def test_data_of_another_kind_are_refused(kind: str, manifest: Manifest, told: str) -> None:
    run = parse_run_file(
        f'[model]\nconfig = "c"\nkind = "{kind}"\n[data]\npath = "d"\n[stop]\nrounds = 2\n'
    )
    with pytest.raises(ConfigurationError) as refused_:
        check_model(run, Path("config.json"), ModelNumbers(1000, num_labels=3), manifest)
    assert str(refused_.value) == told


def test_data_of_a_run_that_did_not_begin_are_taken_by_none_that_has_others(tmp_path: Path) -> None:
    """As where somebody sees that the file is another one, and ends the leader while it prepares that."""
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text(" ".join(str(number) for number in range(9000)))
    other.write_text(" ".join(str(number) for number in range(9000, 18000)))
    model, directory = tmp_path / "config.json", RunDirectory(tmp_path / "run")
    model.write_text(json.dumps({**LLAMA, "vocab_size": 512, "max_position_embeddings": 64}))
    directory.path.mkdir()
    run = run_of(path=str(text), sequence_length=32, vocab_size=258)

    def first(run: RunFile) -> Manifest:
        found = trio.run(model_data.first_data, run, directory, model, QuietProgress())
        manifest: Manifest = found.manifest
        return manifest

    before = first(run)
    assert first(run) == before
    for changed in (
        run_of(path=str(other), sequence_length=32, vocab_size=258),
        run_of(path=str(text), sequence_length=16, vocab_size=258),
        replace(run, seed=run.seed + 1),
    ):
        with pytest.raises(ConfigurationError, match="data of a run that did not begin") as told:
            first(changed)
        assert str(told.value).startswith(f"{directory.data} has ")
    text.write_text("other " + text.read_text())
    with pytest.raises(ConfigurationError, match="did not begin"):
        first(run)
    shutil.rmtree(directory.data)
    assert first(run) != before


def test_data_of_a_directory_whose_files_have_changed_are_taken_by_no_run(tmp_path: Path) -> None:
    """The run itself may lie in it, and what it writes is none of its data."""
    texts = tmp_path / "texts"
    (texts / "more").mkdir(parents=True)
    text = texts / "more" / "text.txt"
    text.write_text(" ".join(str(number) for number in range(9000)))
    model, directory = tmp_path / "config.json", RunDirectory(texts / "run")
    model.write_text(json.dumps({**LLAMA, "vocab_size": 512, "max_position_embeddings": 64}))
    directory.path.mkdir()
    run = run_of(path=str(texts), sequence_length=32, vocab_size=258)

    def first() -> Manifest:
        found = trio.run(model_data.first_data, run, directory, model, QuietProgress())
        manifest: Manifest = found.manifest
        return manifest

    before = first()
    assert first() == before
    text.write_text("other " + text.read_text())
    with pytest.raises(ConfigurationError, match="did not begin"):
        first()
    shutil.rmtree(directory.data)
    assert first() != before
    (texts / "second.txt").write_text(text.read_text())
    with pytest.raises(ConfigurationError, match="did not begin"):
        first()
