"""Names within a directory of checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

__all__ = [
    "CONFIGS",
    "LATEST",
    "MEMBERS",
    "OUTER",
    "STATE",
    "TEMPORARY",
    "TOKENIZER_FILES",
    "TRAINING",
    "name_of",
    "step_of",
]

CONFIGS: Final = ("config.json", "adapter_config.json")
"""One of these a checkpoint has: of a model, or of an adapter of PEFT."""

LATEST: Final = "latest"
TRAINING: Final = "training"
OUTER: Final = "outer.safetensors"
STATE: Final = "state.json"
MEMBERS: Final = "members"
TEMPORARY: Final = ".unfinished-"
"""Prefix of the names of what is not whole, or about to be removed."""

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
)
"""Files that a tokenizer of transformers consists of."""

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")


def name_of(step: int) -> str:
    """The name of the checkpoint of a step."""
    if step < 0:
        raise ValueError(f"step {step}")
    return f"step-{step}"


def step_of(path: Path) -> int | None:
    """The step whose checkpoint is called so; None for another name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None
