"""How large a model is, from its config; and configs that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from neurogrid.errors import ConfigurationError
from neurogrid.model.embedded import embedded_model_path
from neurogrid.training.leading.model_numbers import ModelNumbers, model_numbers

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 128,
}


def written(tmp_path: Path, config: object) -> Path:
    file = tmp_path / "config.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    return file


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_counted_is_what_is_trained(tied: bool, tmp_path: Path) -> None:
    table: dict[str, Any] = {**LLAMA, "tie_word_embeddings": tied}
    file = written(tmp_path, table)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**table))
    num_parameters = sum(each.numel() for each in model.parameters())
    told = model_numbers(file, "causal-lm")
    assert told == ModelNumbers(num_parameters, 32, 2, 128, 2048)
    assert model_numbers(tmp_path, "causal-lm") == told


def test_the_embedded_model() -> None:
    assert model_numbers(embedded_model_path(), "causal-lm").num_parameters == 3_640_512


def test_a_classifier_of_images(tmp_path: Path) -> None:
    resnet = {"model_type": "resnet", "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}
    told = model_numbers(written(tmp_path, resnet), "image-classification")
    assert told.num_parameters > 1000
    assert told.hidden_size == told.vocab_size == 0
    assert told.num_labels == 3


@pytest.mark.parametrize(
    ("config", "kind", "told"),
    [
        ("{", "causal-lm", "is no config of a model"),
        ("[1]", "causal-lm", "is no config of a model"),
        ("[" * 10_000, "causal-lm", "is no config of a model"),
        ('"' + "x" * 2_000_000 + '"', "causal-lm", "is no config of a model"),
        ({}, "causal-lm", "has no model of type 'None'"),
        ({"model_type": "lama"}, "causal-lm", "has no model of type 'lama'"),
        ({"model_type": ["llama"]}, "causal-lm", "has no model of type"),
        (LLAMA, "image-classification", "as image-classification: transformers has none for"),
        ({"model_type": "resnet"}, "causal-lm", "as causal-lm: transformers has none for"),
        ({**LLAMA, "hidden_size": "x"}, "causal-lm", "cannot be opened as causal-lm: "),
        ({**LLAMA, "hidden_size": 7}, "causal-lm", "cannot be opened as causal-lm: "),
        ({**LLAMA, "hidden_size": -4}, "causal-lm", "cannot be opened as causal-lm: "),
        ({**LLAMA, "hidden_act": "nope"}, "causal-lm", "cannot be opened as causal-lm: "),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_model(config: object, kind: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=told) as failed:
        model_numbers(written(tmp_path, config), kind)
    assert str(failed.value).isprintable()
    assert len(str(failed.value)) < 600


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    table = {**LLAMA, "auto_map": {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"}}
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    assert model_numbers(written(tmp_path, table), "causal-lm").num_layers == 2
    with pytest.raises(ConfigurationError, match="code that comes with a checkpoint is never run"):
        model_numbers(written(tmp_path, {**table, "model_type": "evil"}), "causal-lm")


def test_there_is_no_config(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(ConfigurationError, match="no config of a model can be read from"):
            model_numbers(place, "causal-lm")
