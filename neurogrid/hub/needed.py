"""Which files of a repository a model is made of: config, safetensors, tokenizer, chat template, and no other.

Pure. Names of files come from a stranger: only those that are known here are taken, without a directory in them, so
that none leads out of the place where it is put. No code is among them, and no pickle.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Final

from neurogrid.errors import ConfigurationError

__all__ = ["CONFIG_FILE", "INDEX_FILE", "MAX_INDEX_BYTES", "companions", "shards", "weights"]

CONFIG_FILE: Final = "config.json"
SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
# As much as is read of it where it lies on disk.
MAX_INDEX_BYTES: Final = 64 * 1024 * 1024

_SAFETENSORS: Final = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
_ADAPTER: Final = "adapter_model.safetensors"
# Mistral's weights once more, in a layout of its own.
_OTHER_LAYOUT: Final = "consolidated"
_COMPANIONS: Final = re.compile(
    r"""
    (?:generation_)?config\.json
    | (?:quantize|hf_quant)_config\.json
    | tokenizer(?:_config)?\.json | special_tokens_map\.json | added_tokens\.json
    | vocab\.(?:json|txt) | merges\.txt | tekken\.json
    | \w[\w.-]*\.(?:model|tiktoken)
    | chat_template\.(?:jinja|json)
    | additional_chat_templates/\w[\w.-]*\.jinja
    """,
    re.ASCII | re.VERBOSE,
)
_OTHER_WEIGHTS: Final = (
    ("GGUF", (".gguf",)),
    ("pickles", (".bin", ".pt", ".pth", ".ckpt")),
    ("another format", (".h5", ".msgpack", ".onnx")),
)


def companions(paths: Collection[str]) -> list[str]:
    """What stands beside the weights."""
    return sorted(path for path in paths if _COMPANIONS.fullmatch(path))


def weights(model: str, paths: Collection[str]) -> list[str]:
    """The safetensors; the index alone where it says which (`shards`).

    Args:
        model: what it is called, for errors.

    Raises:
        ConfigurationError: the repository has no model that can be read.
    """
    if CONFIG_FILE not in paths:
        raise ConfigurationError(
            f"{model} is no model that can be served: it has no {CONFIG_FILE}{_instead(paths)}"
        )
    for name in (SINGLE_FILE, INDEX_FILE):
        if name in paths:
            return [name]
    files = sorted(path for path in paths if _SAFETENSORS.fullmatch(path))
    found = [path for path in files if path != _ADAPTER]
    if len(found) > 1:
        found = [path for path in found if not path.startswith(_OTHER_LAYOUT)]
    if found:
        return found
    if files:
        raise ConfigurationError(
            f"{model} is an adapter without its model: name the model that it was merged into"
        )
    raise ConfigurationError(
        f"{model} has no safetensors{_instead(paths)}: nothing else is read, and nothing was downloaded"
    )


def shards(model: str, index: Mapping[str, object], paths: Collection[str]) -> list[str]:
    """The safetensors that an index names.

    Raises:
        ConfigurationError: it is no index, or names what is not there.
    """
    table = index.get("weight_map")
    named = set(table.values()) if isinstance(table, dict) and _are_texts(table) else set()
    if not named:
        raise ConfigurationError(f"{model}: its {INDEX_FILE} names no files")
    for name in sorted(named):
        if not _SAFETENSORS.fullmatch(name) or name not in paths:
            raise ConfigurationError(
                f"{model}: its {INDEX_FILE} names {name[:100]!r}, which is not there"
            )
    return sorted(named)


def _are_texts(table: Mapping[object, object]) -> bool:
    return all(isinstance(value, str) for value in table.values())


def _instead(paths: Collection[str]) -> str:
    """What its weights are, where they are no safetensors."""
    for kind, endings in _OTHER_WEIGHTS:
        for path in sorted(paths):
            if path.endswith(endings):
                return f", but {kind} ({path[:100]})"
    return ""
