"""Names of models: a directory, or the name of a repository at a hub."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["DEFAULT_REVISION", "ModelName", "model_place", "parse_name"]

DEFAULT_REVISION: Final = "main"
# What stands before a path, and never before a name.
_PATH_STARTS: Final = ("/", ".", "~")
_PART: Final = r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?"
# A revision is a branch, a tag, a commit, or the reference of a pull request: refs/pr/4.
_NAME: Final = re.compile(
    rf"({_PART}/{_PART})(?::(\w[\w.-]{{0,63}}))?(?:@([\w][\w./-]*))?", re.ASCII
)
# Bounds and forbidden pairs are those of the hub, which uses -- for / where it makes a directory of a name.
_MAX_CHARS: Final = 96
_FORBIDDEN: Final = ("--", "..")


@dataclass(frozen=True)
class ModelName:
    """A model at a hub.

    Attributes:
        repository: owner and name, `Qwen/Qwen3-8B`.
        revision: a branch, a tag or a commit.
        quant: which of its models in GGUF, by the end of its file's name, `Q4_K_M`; empty where that is not said.
    """

    repository: str
    revision: str = DEFAULT_REVISION
    quant: str = ""

    def __str__(self) -> str:
        quant = f":{self.quant}" if self.quant else ""
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{self.repository}{quant}{revision}"


def parse_name(text: str) -> ModelName | None:
    """The name that `text` is, OWNER/NAME[:QUANT][@REVISION], whatever exists on this machine; None for no name."""
    found = None if text.startswith(_PATH_STARTS) else _NAME.fullmatch(text)
    if found is None:
        return None
    repository, revision = found[1], found[3] or DEFAULT_REVISION
    if len(repository) > _MAX_CHARS or repository.endswith(".git"):
        return None
    if any(pair in repository for pair in _FORBIDDEN) or ".." in revision:
        return None
    return ModelName(repository, revision, found[2] or "")


def model_place(text: str, folder: str = "") -> Path | ModelName:
    """The model that `text` says: what exists here, or is written as a path, is a path; a name is what is left.

    Text that is neither gives a path, of which whoever reads it says that there is nothing.

    Args:
        folder: that relative paths begin at.
    """
    name, path = parse_name(text), Path(folder) / text
    if name is None or os.path.lexists(path):
        return path
    return name
