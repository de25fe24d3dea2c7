"""Files of a model in GGUF: found, mapped, and their headers checked together; without torch."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.model.files.gguf.architectures import (
    Architecture,
    architecture_of,
    check_tensors,
)
from neurogrid.model.files.gguf.header import Header, TensorInfo, parse_header
from neurogrid.model.files.gguf.metadata import Metadata
from neurogrid.p2p.wire.limits import MAX_LAYERS

__all__ = ["GgufModel", "gguf_files", "open_model"]

SUFFIX: Final = ".gguf"
_SHARD: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_MAX_SHARDS: Final = 1000
# Names of what lies beside models: that which makes their images tokens, and the importance of their weights.
_NO_MODEL: Final = re.compile(r".*mmproj.*|imatrix.*|.*imatrix")


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model in GGUF, by its headers.

    Attributes:
        metadata: of the first file.
        architecture: of the model.
        num_layers: decoder layers.
        tensors: by name.
        data: of each tensor the file that it lies in, mapped.
        files: of each tensor the same, by path.
    """

    metadata: Metadata
    architecture: Architecture
    num_layers: int
    tensors: Mapping[str, TensorInfo]
    data: Mapping[str, memoryview]
    files: Mapping[str, Path]


def gguf_files(path: Path) -> list[Path]:
    """The files of the model in GGUF at `path`, shards in order; none if there is no such, or safetensors beside it.

    Raises:
        ConfigurationError: there are several.
        CheckpointError: a shard is missing.
    """
    try:
        if path.is_file():
            return _with_shards(path) if path.suffix == SUFFIX else []
        if not path.is_dir() or any(path.glob("*.safetensors")):
            return []
        in_gguf = sorted(path.glob(f"*{SUFFIX}"))
    except OSError as exc:
        raise ConfigurationError(f"{path} cannot be read: {exc.strerror}") from exc
    # One that is alone is opened, and says what it is.
    found = [file for file in in_gguf if not _NO_MODEL.fullmatch(file.stem.lower())] or in_gguf
    models = {_model_name(file): file for file in found}
    if len(models) > 1:
        names = ", ".join(file.name for file in list(models.values())[:4])
        raise ConfigurationError(
            f"{path} holds {len(models)} models in GGUF ({names}): give the file of one"
        )
    return _with_shards(next(iter(models.values()))) if models else []


def _model_name(file: Path) -> str:
    shard = _SHARD.fullmatch(file.name)
    return f"{shard[1]}/{shard[3]}" if shard else file.name


def _with_shards(file: Path) -> list[Path]:
    shard = _SHARD.fullmatch(file.name)
    if shard is None:
        return [file]
    count = int(shard[3])
    if not 0 < count <= _MAX_SHARDS:
        raise CheckpointError(f"{file}: of {count} shards; {_MAX_SHARDS} is the limit")
    shards = [
        file.with_name(f"{shard[1]}-{number:05}-of-{count:05}{SUFFIX}")
        for number in range(1, count + 1)
    ]
    if missing := [each for each in shards if not each.is_file()]:
        raise CheckpointError(
            f"{missing[0]}: missing ({len(missing)} of {count} shards are not there); fetch it"
        )
    return shards


def open_model(files: list[Path]) -> GgufModel:
    """Map the files and check their headers.

    Raises:
        CheckpointError: a file is truncated or corrupt, or they do not belong together.
        UnsupportedModelError: an architecture, or a type of tensors, that is not read.
    """
    mapped = [_map(file) for file in files]
    headers = [parse_header(data, str(file)) for file, data in zip(files, mapped, strict=True)]
    where = str(files[0])
    _check_shards(files, headers)
    metadata = Metadata(headers[0].values, where)
    architecture = architecture_of(metadata.architecture, where)
    tensors: dict[str, TensorInfo] = {}
    placed: dict[str, memoryview] = {}
    paths: dict[str, Path] = {}
    for file, data, header in zip(files, mapped, headers, strict=True):
        for name, info in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{file}: {name!r} is in {paths[name].name} too")
            tensors[name], placed[name], paths[name] = info, data, file
    num_layers = metadata.size(".block_count")
    if num_layers > MAX_LAYERS:
        raise UnsupportedModelError(f"{where}: {num_layers} layers; {MAX_LAYERS} is the limit")
    check_tensors(architecture, tensors, num_layers, where)
    return GgufModel(metadata, architecture, num_layers, tensors, placed, paths)


def _map(file: Path) -> memoryview:
    try:
        with file.open("rb") as handle:
            return memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as exc:
        raise CheckpointError(f"{file}: cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise CheckpointError(f"{file}: empty; fetch the file again") from exc


def _check_shards(files: list[Path], headers: list[Header]) -> None:
    num_tensors = sum(len(header.tensors) for header in headers)
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        # 0 in a file that shards were merged into.
        count = header.values.get("split.count", 1) or 1
        if count != len(files):
            raise CheckpointError(
                f"{file}: one of {count} shards by its header, and there is 1 file: give its shards the names that "
                f"they had (NAME-00001-of-0000N{SUFFIX})"
                if len(files) == 1
                else f"{file}: one of {count} shards by its header, and {len(files)} by its name"
            )
        if len(files) == 1:
            continue
        if header.values.get("split.no") != number:
            raise CheckpointError(f"{file}: another shard by its header than by its name")
        if header.values.get("split.tensors.count", num_tensors) != num_tensors:
            raise CheckpointError(
                f"{file}: the shards have {num_tensors} tensors, and not as many as its header says"
            )
