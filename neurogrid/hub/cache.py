"""The cache of huggingface_hub on this machine, which other programs share: HF_HOME or HF_HUB_CACHE say where.

Nothing here goes to the network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

from neurogrid.errors import ConfigurationError
from neurogrid.hub.names import ModelName
from neurogrid.hub.needed import (
    CONFIG_FILE,
    INDEX_FILE,
    MAX_INDEX_BYTES,
    model_path,
    needed_files,
    shards,
)

__all__ = ["cache_directory", "cached_snapshot", "read_index"]


_TOKENIZERS: Final = ("tokenizer", "vocab", "tekken")
_SHARD: Final = re.compile(r"-\d{5}-of-(\d{5})\.gguf", re.ASCII)


def cache_directory() -> Path:
    """Directory in which the snapshots of all models lie."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_snapshot(name: ModelName) -> Path | None:
    """The directory, or file in GGUF, of a model that is whole in the cache; None where something of it is not there.

    What is whole is told by the listing of its repository, where whoever fetched it left one, and by the index of its
    weights.

    Raises:
        ConfigurationError: the cache cannot be read.
    """
    try:
        return _find(name)
    except OSError as exc:
        raise ConfigurationError(
            f"the cache {cache_directory()} cannot be read: {exc.strerror or exc}"
        ) from exc


def _find(name: ModelName) -> Path | None:
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                name.repository,
                revision=name.revision,
                local_files_only=True,
                allow_patterns=CONFIG_FILE,
            )
        )
        listing = get_cached_repo_tree(name.repository, revision=name.revision)
    except LocalEntryNotFoundError:
        return None
    except CachedRepoTreeNotFoundError:
        sizes = _sizes(folder)
        is_whole = any(path.startswith(_TOKENIZERS) or path.endswith(".gguf") for path in sizes)
    else:
        sizes, is_whole = {file.path: file.size for file in listing}, True
    return _whole(name, folder, sizes) if is_whole else None


def read_index(model: str, file: Path) -> Mapping[str, object]:
    """The table in an index of safetensors.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_INDEX_BYTES + 1)
        index = json.loads(data) if len(data) <= MAX_INDEX_BYTES else None
    except (ValueError, RecursionError):
        index = None
    if not isinstance(index, dict):
        raise ConfigurationError(f"{model}: its {INDEX_FILE} is no table in JSON")
    return index


def _sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of the files in a snapshot, in bytes by path."""
    found = (*folder.glob("*"), *folder.glob("additional_chat_templates/*"))
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in found if path.is_file()
    }


def _whole(name: ModelName, folder: Path, sizes: Mapping[str, int]) -> Path | None:
    """The model in a snapshot that has what is needed of the files of these sizes; None where it has not."""
    try:
        needed = needed_files(name, sizes)
        if INDEX_FILE in needed and (folder / INDEX_FILE).is_file():
            needed += shards(str(name), read_index(str(name), folder / INDEX_FILE), sizes)
    except ConfigurationError:
        return None
    if _lacks_shards(needed):  # where there is no listing, they alone tell how many they are
        return None
    files = {path: folder / path for path in needed}
    is_there = all(
        file.is_file() and file.stat().st_size == sizes[path] for path, file in files.items()
    )
    return model_path(folder, needed) if is_there else None


def _lacks_shards(paths: Collection[str]) -> bool:
    """Whether shards of a model in GGUF are more by their names than there are."""
    counts = [int(found[1]) for path in paths if (found := _SHARD.search(path))]
    return len(counts) < max(counts, default=0)
