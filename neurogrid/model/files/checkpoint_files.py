"""A checkpoint, judged without torch: whether it is one, what its config says, which files hold its weights.

An error is one line that names the file and what to do. No weight is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neurogrid.errors import CheckpointError, ConfigurationError
from neurogrid.model.files.gguf.model_files import gguf_files, open_model

__all__ = [
    "INDEX_FILE",
    "SINGLE_FILE",
    "judge_checkpoint",
    "model_name_of",
    "read_json",
    "read_model_config",
    "weight_files",
    "with_text_config",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_ADAPTER = "adapter_model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
# Mistral ships its weights twice, this file in a layout of its own.
_OTHER_LAYOUT = "consolidated"
_SHARD_OF = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")

# Bytes of a JSON file of the directory: the index of a model of 100,000 tensors has 10 MB.
_MAX_JSON_BYTES = 64 * 1024 * 1024
# What a model is called at a hub, and what the cache of huggingface_hub calls its directory.
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/[0-9a-f]{40}")


def judge_checkpoint(path: Path) -> int | None:
    """Refuse what cannot be a checkpoint, in a moment; the layers that it has at most, where its config says so.

    Raises:
        ConfigurationError: there is no such directory or file, or there are several models in it.
        CheckpointError: a file is missing or of another format.
        UnsupportedModelError: a model in GGUF that is not read.
    """
    if in_gguf := gguf_files(path):
        return open_model(in_gguf).num_layers
    config = read_model_config(path)
    weight_files(path)
    counts = [part.get("num_hidden_layers") for part in with_text_config(config)]
    return max((count for count in counts if type(count) is int and count > 0), default=None)


def model_name_of(path: Path) -> str:
    """Name of a checkpoint: that of its directory or file, or its name at the hub where it lies in the hub's cache."""
    is_file = path.suffix == ".gguf"
    # Not of the file itself, which the cache has by its digest elsewhere.
    folder = path.parent.resolve() if is_file else path.resolve()
    snapshot = _SNAPSHOT.fullmatch("/".join(folder.parts[-3:]))
    if snapshot:
        return f"{snapshot[1]}/{snapshot[2]}"
    return path.stem if is_file else folder.name


def read_model_config(folder: Path) -> dict[str, Any]:
    """config.json of a directory.

    Raises:
        ConfigurationError: there is no such directory.
        CheckpointError: it has no config.json, or one that is no JSON object; or it has an adapter alone.
    """
    try:
        is_folder, exists = folder.is_dir(), folder.exists()
    except OSError as exc:  # a directory above it may not be entered
        raise ConfigurationError(
            f"the model directory {folder} cannot be read: {exc.strerror}"
        ) from exc
    if not is_folder:
        fault = "is a file, not a directory" if exists else "does not exist"
        hint = ""
        if not exists and _HUB_NAME.fullmatch(str(folder)):
            hint = f"; neurogrid download {folder} fetches a model of that name, and prints its directory"
        raise ConfigurationError(
            f"the model directory {folder} {fault}; give the directory that has config.json, or a file NAME.gguf{hint}"
        )
    if (folder / _ADAPTER_CONFIG).exists() and not (folder / "config.json").exists():
        raise _without_model(folder)
    return read_json(folder / "config.json", "it describes the model")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a directory: the index, where they are listed there.

    Raises:
        CheckpointError: there are none, or not all.
    """
    for name in (SINGLE_FILE, INDEX_FILE):
        if (folder / name).exists():
            return [folder / name]
    files = sorted(folder.glob("*.safetensors"))
    weights = [file for file in files if file.name != _ADAPTER]
    if len(weights) > 1:
        weights = [file for file in weights if not file.name.startswith(_OTHER_LAYOUT)]
    if weights:
        _refuse_incomplete_shards(folder, weights)
        return weights
    if files:
        raise _without_model(folder)
    for pattern in _OTHER_WEIGHTS:
        for file in sorted(folder.glob(pattern)):
            raise CheckpointError(
                f"{file}: only safetensors and GGUF are read; convert it with transformers: "
                "from_pretrained(...).save_pretrained(...)"
            )
    raise CheckpointError(
        f"{folder}: no weights; {SINGLE_FILE} (or {INDEX_FILE} and its shards) must be there"
    )


def _without_model(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} has an adapter without its model: name the model, and --adapter {folder}; or merge them into one, "
        f"with neurogrid train export {folder} OUT"
    )


def with_text_config(config: Mapping[str, object]) -> tuple[Mapping[str, object], ...]:
    """The config, and the one of the text model within it, where there is one."""
    text_config = config.get("text_config")
    return (config, text_config) if isinstance(text_config, dict) else (config,)


def _refuse_incomplete_shards(folder: Path, files: list[Path]) -> None:
    found = [match for file in files if (match := _SHARD_OF.search(file.name))]
    total = max((int(match[2]) for match in found), default=0)
    if len(found) < total:
        raise CheckpointError(
            f"{folder}: {len(found)} of {total} shards are here and {INDEX_FILE} is not, so nobody can "
            "say which layers are whole; fetch the index"
        )


def read_json(file: Path, purpose: str) -> dict[str, Any]:
    try:
        with file.open("rb") as handle:
            data = handle.read(_MAX_JSON_BYTES + 1)
    except FileNotFoundError as exc:
        because = f" ({purpose})" if purpose else ""
        raise CheckpointError(
            f"{file}: missing{because}; is {file.parent} the directory of a model?"
        ) from exc
    except OSError as exc:
        raise CheckpointError(f"{file}: cannot be read: {exc.strerror}") from exc
    if len(data) > _MAX_JSON_BYTES:
        raise CheckpointError(f"{file}: longer than {_MAX_JSON_BYTES} bytes")
    try:
        table = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{file}: not valid JSON; fetch the file again") from exc
    if not isinstance(table, dict):
        raise CheckpointError(f"{file}: not a JSON object; fetch the file again")
    return table
