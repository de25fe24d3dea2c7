"""Checkpoints of a run: whole or not there, through full disks and processes that end in the middle."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from neurogrid.errors import CheckpointError, ConfigurationError
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.training.checkpoints import (
    CheckpointDraft,
    checkpoints_of,
    export,
    latest_checkpoint,
    new_checkpoint,
    prune,
    read_checkpoint,
)
from tests.unit.full_disk import full_disk

CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=16,
)
STATE = {"round": 3, "step": 60, "tokens": 1000, "dealer": {"epoch": 0}, "seats": [1, 4]}


def write_model(path: Path, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    model.save_pretrained(path)
    return model


def write(folder: Path, step: int, state: Mapping[str, Any] = STATE, seed: int = 0) -> Path:
    """A checkpoint with all that there may be."""
    draft = CheckpointDraft.begin(folder, step)
    write_model(draft.path, seed)
    tokenizer, member = folder.parent / "tokenizer", folder.parent / "member"
    tokenizer.mkdir(exist_ok=True)
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "unrelated").write_text("")
    save_file({"state/exp_avg/a": torch.arange(3.0)}, member)
    draft.add_tokenizer(tokenizer)
    draft.add_training(state, outer={"momentum": torch.arange(5.0)}, members={4: member})
    return draft.commit()


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_what_was_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    path = write(folder, 60)
    assert names(folder) == ["latest", "step-60"]
    assert os.readlink(folder / "latest") == "step-60"
    found = read_checkpoint(folder / "latest")
    assert (found.path, found.step, found.state) == (path, 60, STATE)
    assert torch.equal(found.outer()["momentum"], torch.arange(5.0))
    assert list(found.members) == [4]
    assert load_file(found.members[4])["state/exp_avg/a"].tolist() == [0, 1, 2]
    assert (path / "tokenizer.json").read_text() == "{}"
    assert not (path / "unrelated").exists()
    model = AutoModelForCausalLM.from_pretrained(folder / "latest")
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_what_did_not_change_is_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first, second = write(folder, 1), write(folder, 2, seed=1)

    def is_one(name: str) -> bool:
        return (first / name).samefile(second / name)

    assert is_one("config.json")
    assert is_one("tokenizer.json")
    assert is_one("training/outer.safetensors")
    assert not is_one("model.safetensors")
    prune(folder, 1)
    assert names(folder) == ["latest", "step-2"]
    assert read_checkpoint(second).outer()["momentum"].tolist() == [0, 1, 2, 3, 4]


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=8, unique=True), st.integers(1, 9))
def test_the_newest_are_kept(steps: list[int], keep: int) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        for step in steps:
            (folder / f"step-{step}").mkdir()
        (folder / "step-01").mkdir()
        (folder / "step-x").mkdir()
        latest = min(steps)
        (folder / "latest").symlink_to(f"step-{latest}")
        gone = prune(folder, keep)
        kept = {*sorted(steps)[-keep:], latest}
        assert checkpoints_of(folder) == [folder / f"step-{step}" for step in sorted(kept)]
        assert len(gone) == len(steps) - len(kept)
        assert latest_checkpoint(folder) == folder / f"step-{latest}"


def test_a_disk_that_is_full_leaves_the_one_before(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    before = write(folder, 1)
    draft = CheckpointDraft.begin(folder, 2)
    write_model(draft.path, 1)
    with full_disk(), pytest.raises(CheckpointError, match=r"step-2: cannot be written: .*make"):
        draft.add_training(STATE, outer={"momentum": torch.ones(5)}, members={})
    draft.discard()
    assert names(folder) == ["latest", "step-1"]
    assert latest_checkpoint(folder) == before
    assert read_checkpoint(before).state == STATE
    # There is room again.
    assert write(folder, 2) == latest_checkpoint(folder)


async def test_a_block_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    async def fail() -> None:
        async with new_checkpoint(folder, 1) as draft:
            write_model(draft.path)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        await fail()
    assert names(folder) == []
    with pytest.raises(CheckpointError, match="no model was written"):
        async with new_checkpoint(folder, 1):
            pass
    assert names(folder) == []
    async with new_checkpoint(folder, 1) as draft:
        write_model(draft.path)
    assert names(folder) == ["latest", "step-1"]
    found = read_checkpoint(folder / "step-1")
    assert (found.state, found.outer(), found.members) == ({}, {}, {})
    with pytest.raises(CheckpointError, match="step-1: is there already"):
        async with new_checkpoint(folder, 1):
            pytest.fail("it was begun")


def test_a_process_that_ended_at_any_point(tmp_path: Path) -> None:
    """A draft, a removal, and a checkpoint that `latest` does not name yet are left behind."""
    folder = tmp_path / "checkpoints"
    first = write(folder, 1)
    CheckpointDraft.begin(folder, 2)
    assert latest_checkpoint(folder) == first
    write(folder, 2, seed=1)
    # As between the two renames.
    (folder / "latest").unlink()
    (folder / "latest").symlink_to("step-1")
    assert latest_checkpoint(folder) == first
    assert write(folder, 2, seed=2) == folder / "step-2"
    assert names(folder) == ["latest", "step-1", "step-2"]
    (folder / "latest").unlink()
    assert latest_checkpoint(folder) == folder / "step-2"
    (folder / "latest").symlink_to("/etc")
    assert latest_checkpoint(folder) == folder / "step-2"
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_checkpoints_that_are_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    path = write(folder, 1)
    with pytest.raises(CheckpointError, match="is no checkpoint of a run"):
        read_checkpoint(tmp_path)
    state = path / "training" / "state.json"
    for text in ("", "[]", "{", "\x00"):
        state.write_text(text)
        with pytest.raises(CheckpointError, match=r"state.json: .*take the one before"):
            read_checkpoint(path)
    state.write_text("{}")
    outer = path / "training" / "outer.safetensors"
    outer.write_bytes(outer.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"outer.safetensors: cannot be read"):
        read_checkpoint(path).outer()
    (path / "training" / "members" / "me.safetensors").write_text("")
    with pytest.raises(CheckpointError, match="is not called by a seat"):
        read_checkpoint(path)
    with pytest.raises(ConfigurationError, match="has no tokenizer"):
        CheckpointDraft.begin(folder, 2).add_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_exported_is_a_model_alone(tmp_path: Path, dtype: str) -> None:
    path = write(tmp_path / "checkpoints", 7)
    out = tmp_path / "out"
    assert export(tmp_path, out, dtype=dtype) == path
    assert names(out) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    trained, exported = (load_file(each / "model.safetensors") for each in (path, out))
    for name, tensor in trained.items():
        assert torch.equal(exported[name], tensor.to(getattr(torch, dtype)))
    assert AutoModelForCausalLM.from_pretrained(out).dtype == getattr(torch, dtype)
    assert Checkpoint.open(out).present_layers == {0}
    with pytest.raises(ConfigurationError, match="is there already"):
        export(tmp_path, out)


def test_an_export_that_cannot_be_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has no checkpoint to export yet"):
        export(tmp_path, tmp_path / "out")
    path = write(tmp_path / "checkpoints", 7)
    with pytest.raises(ConfigurationError, match="not 'int8'"):
        export(tmp_path, tmp_path / "out", dtype="int8")
    with full_disk(), pytest.raises(CheckpointError, match="out: cannot be written"):
        export(tmp_path, tmp_path / "out", dtype="bfloat16")
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1e6
    save_file(tensors, tmp_path / "larger", {"format": "pt"})
    (tmp_path / "larger").replace(path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"norm.weight has numbers that torch.float16 has"):
        export(path, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    assert export(path, tmp_path / "out", dtype="bfloat16") == path


def test_shards_are_counted_anew(tmp_path: Path) -> None:
    draft = CheckpointDraft.begin(tmp_path / "checkpoints", 1)
    write_model(tmp_path / "model").save_pretrained(draft.path, max_shard_size=4000)
    draft.commit()
    export(tmp_path, tmp_path / "out", dtype="bfloat16")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert index["metadata"]["total_size"] == 2 * sum(each.numel() for each in model.parameters())
