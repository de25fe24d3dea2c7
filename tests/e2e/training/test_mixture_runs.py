"""Runs on files of token ids and on mixtures, as the run file or `neurogrid train prepare` makes them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neurogrid.training.data.manifest import Manifest
from neurogrid.training.data.slices import read_manifest
from neurogrid.training.runs.audit import audit
from neurogrid.training.runs.journal import read_journal
from neurogrid.training.runs.run_directory import RunDirectory
from tests.e2e import preloaded
from tests.e2e.training.data_processes import (
    LOOPBACK,
    TRAIN,
    start,
    start_data_node,
    start_leader,
    write_run_file,
)
from tests.e2e.training.test_run_data import damage, web_server

MIXTURE = 'mixture = [{ path = "web", weight = 3 }, { path = "code.bin", weight = 1 }]\nrepeat = 2'
IDS = "sequence_length = 32\nslice_samples = 16\nheld_out = 0.1"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Shards of ids below 400 that rise, of 2 bytes, and one file of 4 bytes of ids that do not, as llm.c writes it."""
    (tmp_path / "web").mkdir()
    for number in range(3):
        (np.arange(number, 4000) % 400).astype("<u2").tofile(tmp_path / "web" / f"{number}.bin")
    ids = np.random.default_rng(0).integers(400, 512, 1600).astype("<u4")
    header = np.zeros(256, "<i4")
    header[:3] = 20240801, 7, len(ids)
    (tmp_path / "code.bin").write_bytes(header.tobytes() + ids.tobytes())
    return tmp_path


def write_mixture(directory: Path, data: str, *, rounds: int) -> None:
    write_run_file(directory, "…", rounds=rounds)
    run = (directory / "run.toml").read_text()
    (directory / "run.toml").write_text(run.replace('path = "…"', data))


def figures_of(directory: Path) -> list[Mapping[str, Any]]:
    return [line for line in RunDirectory(directory / "run").figures() if "eval_loss" in line]


def check_parts(manifest: Manifest) -> None:
    web, code = manifest.parts
    assert (web.name, code.name) == ("web", "code.bin")
    # 45 of 50 samples are trained on, twice; and three times as many of 375, less what is held out.
    assert (code.num_samples, code.num_distinct) == (90, 45)
    assert (web.num_samples, web.num_distinct) == (270, 270)
    assert (manifest.vocab_size, manifest.num_samples) == (512, 360)


def test_a_mixture_that_the_run_file_names(tokens: Path) -> None:
    """Prepared at the start, with the vocabulary of the model; each part is evaluated by itself."""
    write_mixture(tokens, f"{MIXTURE}\n{IDS}", rounds=4)
    with start_leader(tokens, "--local-workers", "2") as leader:
        leader.finish()
    assert "preparing web, code.bin" in leader.log
    assert "61 ids at the end of 2 files are left out: a sample has 32" in leader.log
    assert "web: 270 samples of 360, of " in leader.log
    assert "code.bin: 90 samples of 360, which are 45, each 2 times" in leader.log
    assert re.search(r"held-out loss [\d.]+ \(web [\d.]+, code\.bin [\d.]+\), ", leader.log)
    check_parts(read_manifest(tokens / "run" / "data"))
    found = figures_of(tokens)
    assert len(found) == 2
    assert all({"eval_loss/web", "eval_loss/code.bin"} <= line.keys() for line in found)
    # Ids that rise are learned, those by chance are not.
    assert found[-1]["eval_loss/web"] < found[0]["eval_loss/web"]
    entries = [each.entry for each in read_journal(RunDirectory(tokens / "run").journal)]
    assert audit(entries).is_sound
    # With the same file again it is the same data set.
    other = tokens / "again"
    words = ("prepare", "web", "code.bin", str(other), "--weights", "3,1", "--repeat", "2")
    options = ("--vocab-size", "512", "--sequence-length", "32", "--slice-samples", "16")
    prepared = preloaded.run([*TRAIN, *words, *options, "--held-out", "0.1"], cwd=tokens)
    assert prepared.returncode == 0, prepared.stderr
    assert prepared.stdout == f"{other}\n"
    assert "code.bin: 90 samples of 360" in prepared.stderr
    assert read_manifest(other) == read_manifest(tokens / "run" / "data")


def test_a_mixture_behind_a_web_server_and_with_a_data_node(tokens: Path) -> None:
    """The leader evaluates with what the server has; what is damaged there is refused by its hash, which is said, and
    comes from the node, as what members train on does."""
    command = (*TRAIN, "prepare", "web", "code.bin", "served/data", "--weights", "3,1")
    options = ("--repeat", "2", "--vocab-size", "512", "--sequence-length", "32")
    preloaded.run(
        [*command, *options, "--slice-samples", "16", "--held-out", "0.1"], cwd=tokens, check=True
    )
    manifest = read_manifest(tokens / "served" / "data")
    check_parts(manifest)
    shutil.copytree(tokens / "served" / "data", tokens / "whole")
    damage(tokens / "served" / "data", manifest.held_out[:1])
    with web_server(tokens / "served") as (url, asked):
        write_mixture(tokens, f'path = "{url}/data"', rounds=4)
        with (
            start_leader(tokens, "--local-workers", "2") as leader,
            start_data_node(tokens, tokens / "whole", "node"),
        ):
            leader.finish()
    assert [path for path in asked if path.endswith(".safetensors")]
    assert "is not what its name says" in leader.log
    assert "eval_loss/code.bin" in figures_of(tokens)[-1]


def test_ids_that_are_not_the_models_end_the_run_before_it_begins(tokens: Path) -> None:
    write_mixture(tokens, f'path = "web"\ntoken_bytes = 2\n{IDS}', rounds=2)
    config = json.loads((tokens / "config.json").read_text())
    (tokens / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    with start(tokens, "leader", *TRAIN, "run.toml", "--dir", "run", *LOOPBACK) as leader:
        assert leader.process.wait(60) == 2
    assert "web/0.bin: id number 300 is 300, and the vocabulary has 300" in leader.log
