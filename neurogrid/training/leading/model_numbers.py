"""Size of a model, from its config alone: it is built on the meta device, where tensors have no memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, AutoModelForImageClassification
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from neurogrid.errors import ConfigurationError
from neurogrid.training.runs.run_file.sections import CAUSAL_LM

__all__ = ["ModelNumbers", "model_numbers", "read_config"]

CONFIG_FILE: Final = "config.json"
MAX_CONFIG_BYTES: Final = 1024 * 1024
"""A config has some kilobytes; labels of a classifier some hundred."""

# What configs that are wrong make transformers and torch raise.
_FAULTS: Final = (
    *(ValueError, TypeError, KeyError, AttributeError, RuntimeError, ArithmeticError),
    *(ImportError, StrictDataclassError),
)


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """A model in numbers.

    Attributes:
        num_parameters: that are trained, tied ones once.
        hidden_size, num_layers, vocab_size: of a language model; 0 where the config does not say.
        max_tokens: of a sequence; 0 where it does not say.
        num_labels: classes of a classifier; 0 for a language model.
    """

    num_parameters: int
    hidden_size: int = 0
    num_layers: int = 0
    vocab_size: int = 0
    max_tokens: int = 0
    num_labels: int = 0


def read_config(place: Path) -> dict[str, Any]:
    """The config of a model: config.json of a directory, or a file in JSON.

    Raises:
        ConfigurationError: it is not there, or no table in JSON.
    """
    file = place / CONFIG_FILE if place.is_dir() else place
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as exc:
        raise ConfigurationError(
            f"no config of a model can be read from {file}: {exc.strerror or exc}"
        ) from exc
    try:
        table = json.loads(data) if len(data) <= MAX_CONFIG_BYTES else None
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise ConfigurationError(
            f"{file} is no config of a model: a table in JSON, of {MAX_CONFIG_BYTES} bytes at most, is wanted"
        )
    return table


def model_numbers(place: Path, kind: str) -> ModelNumbers:
    """Count the model at a place, as `kind` of [model] opens it. No code of the checkpoint is run.

    Raises:
        ConfigurationError: there is no config, transformers has no such model, or none of that kind.
    """
    table = read_config(place)
    table.pop("auto_map", None)  # code that comes with the checkpoint
    model_type = table.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ConfigurationError(
            f"{place}: transformers {transformers_version} has no model of type {str(model_type)[:60]!r}; code that "
            "comes with a checkpoint is never run"
        )
    opener: Any = AutoModelForCausalLM if kind == CAUSAL_LM else AutoModelForImageClassification
    try:
        config = CONFIG_MAPPING[model_type].from_dict(table)
        if type(config) not in opener._model_mapping:
            raise ValueError(f"transformers has none for a model of type {model_type}")
        with torch.device("meta"):
            model = opener.from_config(config)
    except _FAULTS as exc:
        told = " ".join(str(exc).split())[:300]
        raise ConfigurationError(f"{place} cannot be opened as {kind}: {told}") from exc
    text = config.get_text_config()
    return ModelNumbers(
        sum(each.numel() for each in model.parameters() if each.requires_grad),
        hidden_size=_number(text, "hidden_size"),
        num_layers=_number(text, "num_hidden_layers"),
        vocab_size=_number(text, "vocab_size"),
        max_tokens=_number(text, "max_position_embeddings"),
        num_labels=0 if kind == CAUSAL_LM else _number(config, "num_labels"),
    )


def _number(config: object, name: str) -> int:
    value = getattr(config, name, 0)
    return value if type(value) is int and value > 0 else 0
