"""Tensors in files that are read one at a time: the same as all at once, and nothing is made of a damaged file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from neurogrid.errors import CheckpointError
from neurogrid.training.stages.stage_learner import StageLearner
from neurogrid.training.stages.weight_files import WeightFiles
from tests.unit.training.test_stage_learner import (
    Chain,
    batch_of,
    same,
    settings_of,
    tensors_of,
)

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.arange(5, dtype=torch.int8),
    "c": torch.ones(3, dtype=torch.bfloat16),
    "d": torch.tensor(2.5),
    "none": torch.zeros(0, 4),
}


def written(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: each.contiguous() for name, each in tensors.items()}, path)
    return path


def test_tensors_are_those_of_the_files(tmp_path: Path) -> None:
    first = written(tmp_path / "first", TENSORS)
    last = written(tmp_path / "last", {"d": torch.tensor(3.5), "e": torch.ones(2)})
    files = WeightFiles([first, last])
    assert list(files) == [*sorted(TENSORS, key=list(files).index), "e"]
    assert len(files) == 6
    for name, tensor in TENSORS.items():
        if name != "d":
            assert torch.equal(files[name], tensor)
            assert files[name].dtype == tensor.dtype
    assert float(files["d"]) == 3.5
    files["a"].zero_()
    assert torch.equal(files["a"], TENSORS["a"])
    with pytest.raises(KeyError):
        files["f"]


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone: cannot be read: No such file"):
        WeightFiles([tmp_path / "gone"])
    short = written(tmp_path / "short", TENSORS)
    files = WeightFiles([short])
    whole = short.read_bytes()
    short.write_bytes(whole[:-30])
    with pytest.raises(CheckpointError, match="truncated"):
        WeightFiles([short])
    with pytest.raises(CheckpointError, match="has become shorter while it was read"):
        dict(files)
    short.unlink()
    with pytest.raises(CheckpointError, match="short: cannot be read"):
        files["a"]
    (tmp_path / "none").write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        WeightFiles([tmp_path / "none"])


def test_a_learner_takes_over_what_is_read(tmp_path: Path) -> None:
    """The same bits as of tensors that it copies, and each is read once."""
    tensors = tensors_of("tied")
    read: list[str] = []

    class Read(WeightFiles):
        def __getitem__(self, name: str) -> Tensor:
            read.append(name)
            return super().__getitem__(name)

    files = Read([written(tmp_path / "all", tensors)])
    expected = Chain("tied")
    got = Chain("tied")
    got.stages = [StageLearner(settings_of("tied"), files, takes_over=True)]
    assert sorted(read) == sorted(tensors)
    for step in range(2):
        assert got.compute(step, batch_of(step)) == expected.compute(step, batch_of(step))
        got.apply(step)
        expected.apply(step)
    assert same(got.weights(), expected.weights())


def test_a_learner_reads_what_it_has_alone(tmp_path: Path) -> None:
    read: list[str] = []

    class Read(WeightFiles):
        def __getitem__(self, name: str) -> Tensor:
            read.append(name)
            return super().__getitem__(name)

    StageLearner(settings_of("tied", 1, 3), Read([written(tmp_path / "all", tensors_of("tied"))]))
    assert {name.split(".")[2] for name in read} == {"1", "2"}
