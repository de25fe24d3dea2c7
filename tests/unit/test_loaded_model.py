"""How long a session may be, and how much of it goes to a stage at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from stage_families import FAMILIES, Checkpoint

from neurogrid.errors import ConfigurationError
from neurogrid.inference.generation import loaded_model
from neurogrid.inference.generation.loaded_model import LoadedModel
from neurogrid.inference.pipeline import prefill


def load(family: str, path: Path) -> LoadedModel:
    Checkpoint(FAMILIES[family](), path)
    return LoadedModel.load(path, name=None, max_seq_len=100, dtype="float32")


def test_what_can_be_cut_is_sent_in_pieces_of_some_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loaded_model, "MAX_WHOLE_BYTES", 1)
    model = load("llama", tmp_path)
    monkeypatch.setattr(prefill, "MAX_PIECE_BYTES", 4 * model.ends.hidden_size * 30 + 1)
    assert model.max_piece == 30
    assert model.max_seq_len == 100
    assert not caplog.records


def test_a_session_that_cannot_be_cut_is_no_longer_than_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hidden_size = FAMILIES["llama-dynamic"]().hidden_size
    monkeypatch.setattr(loaded_model, "MAX_WHOLE_BYTES", 4 * hidden_size * 10 + 1)
    model = load("llama-dynamic", tmp_path)
    assert model.max_piece is None
    assert model.max_seq_len == 10
    assert "sessions have at most 10 tokens, not 16" in caplog.text
    model.check_prompt([3] * 9)
    with pytest.raises(ConfigurationError, match="at most 10"):
        model.check_prompt([3] * 10)
