"""What cannot be a checkpoint is refused before torch is imported, and says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from neurogrid.errors import CheckpointError, ConfigurationError
from neurogrid.model.embedded import embedded_model_path
from neurogrid.model.files.checkpoint_files import judge_checkpoint


def test_a_checkpoint_passes() -> None:
    judge_checkpoint(embedded_model_path())


@pytest.mark.parametrize(
    ("files", "error", "says"),
    [
        ({}, CheckpointError, "config.json: missing"),
        ({"config.json": "{"}, CheckpointError, "not valid JSON"),
        ({"config.json": "{}"}, CheckpointError, "no weights; model.safetensors"),
        ({"config.json": "{}", "m.pt": ""}, CheckpointError, "only safetensors and GGUF are read"),
        ({"config.json": "{}", "m.gguf": ""}, CheckpointError, "m.gguf: empty; fetch the file"),
        ({"config.json": "{}", "adapter_model.safetensors": ""}, CheckpointError, "an adapter"),
        (
            {"config.json": "{}", "model-00001-of-00002.safetensors": ""},
            CheckpointError,
            "1 of 2 shards are here",
        ),
    ],
)
def test_what_is_none(
    files: dict[str, str], error: type[Exception], says: str, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(error) as told:
        judge_checkpoint(tmp_path)
    assert says in str(told.value)


def test_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    for path, says in {
        tmp_path / "nowhere": "does not exist; give the directory that has config.json, or a file",
        tmp_path / "model.bin": "is a file, not a directory; give the directory",
        Path("Org/Model-8B"): "neurogrid download Org/Model-8B fetches",
    }.items():
        with pytest.raises(ConfigurationError) as told:
            judge_checkpoint(path)
        assert says in str(told.value)
