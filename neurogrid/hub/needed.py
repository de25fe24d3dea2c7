"""Files of a repository that a model is made of: config, safetensors, tokenizer, chat template, and no other; or one
model in GGUF, which has all of that in itself.

Pure. Names of files come from a stranger: only those that are known here are taken, without a directory in them, so
that none leads out of the place where it is put. No code is among them, and no pickle.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from neurogrid.errors import ConfigurationError
from neurogrid.hub.names import ModelName

__all__ = [
    "CONFIG_FILE",
    "INDEX_FILE",
    "MAX_INDEX_BYTES",
    "companions",
    "model_path",
    "needed_files",
    "shards",
    "weights",
]

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
    | (?:pre)?processor_config\.json
    | tokenizer(?:_config)?\.json | special_tokens_map\.json | added_tokens\.json
    | vocab\.(?:json|txt) | merges\.txt | tekken\.json
    | \w[\w.-]*\.(?:model|tiktoken)
    | chat_template\.(?:jinja|json)
    | modules\.json | \d{1,2}_Pooling/config\.json
    | additional_chat_templates/\w[\w.-]*\.jinja
    """,
    re.ASCII | re.VERBOSE,
)
# Models in GGUF, whole or in shards; beside them may lie what is none by itself, told by its name as in a directory.
_GGUF: Final = re.compile(r"(\w[\w.-]*?)(?:-\d{5}-of-\d{5})?\.gguf", re.ASCII)
_NO_MODEL: Final = re.compile(r".*mmproj.*|imatrix.*|.*imatrix")
_MAX_NAMED: Final = 12
_OTHER_WEIGHTS: Final = (
    ("GGUF in folders", (".gguf",)),
    ("pickles", (".bin", ".pt", ".pth", ".ckpt")),
    ("another format", (".h5", ".msgpack", ".onnx")),
)


def needed_files(name: ModelName, paths: Collection[str]) -> list[str]:
    """Return the files of a repository that are needed: all shards of a model in GGUF; or the weights, or their index
    (`shards`), and what stands beside them.

    Raises:
        ConfigurationError: the repository has no model that can be read, or several, or not that one.
    """
    has_safetensors = any(path in (SINGLE_FILE, INDEX_FILE) for path in paths) or any(
        _SAFETENSORS.fullmatch(path) for path in paths
    )
    models = _gguf_models(paths)
    if name.quant or (models and not has_safetensors):
        return _gguf(name, models)
    return [*companions(paths), *weights(str(name), paths)]


def model_path(folder: Path, needed: Collection[str]) -> Path:
    """Return the path of a snapshot that is opened: its directory, or of a model in GGUF the first shard."""
    in_gguf = sorted(path for path in needed if path.endswith(".gguf"))
    return folder / in_gguf[0] if in_gguf else folder


def _gguf_models(paths: Collection[str]) -> dict[str, list[str]]:
    """Shards of each model in GGUF, by its file's name without what counts them."""
    models: dict[str, list[str]] = {}
    for path in sorted(paths):
        found = _GGUF.fullmatch(path)
        if found and not _NO_MODEL.fullmatch(found[1].lower()):
            models.setdefault(found[1], []).append(path)
    return models


def _gguf(name: ModelName, models: Mapping[str, list[str]]) -> list[str]:
    quant = name.quant.lower()
    named = [
        model for model in models if re.search(rf"(?:^|[-._]){re.escape(quant)}$", model.lower())
    ]
    found = named if quant else list(models)
    told = _told(found or list(models))
    if len(found) == 1:
        return models[found[0]]
    if not models:
        raise ConfigurationError(f"{name.repository} has no model in GGUF: leave out :{name.quant}")
    if not found:
        raise ConfigurationError(
            f"{name.repository} has no model in GGUF whose name ends with {name.quant}; it has {told}"
        )
    raise ConfigurationError(
        f"{name} has {len(found)} models in GGUF: say which by the end of its name, as in {name.repository}:Q4_K_M; "
        f"it has {told}"
    )


def _told(models: Sequence[str]) -> str:
    more = len(models) - _MAX_NAMED
    names = ", ".join(f"{model[:100]}.gguf" for model in models[:_MAX_NAMED])
    return f"{names} and {more} more" if more > 0 else names


def companions(paths: Collection[str]) -> list[str]:
    """Return those files that stand beside the weights: config, tokenizer and the like."""
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
            f"{model} is an adapter without its model: name the model, and with --adapter a directory that has this"
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
    """Say what the weights are, where they are no safetensors; empty where nothing known is there."""
    for kind, endings in _OTHER_WEIGHTS:
        for path in sorted(paths):
            if path.endswith(endings):
                return f", but {kind} ({path[:100]})"
    return ""
