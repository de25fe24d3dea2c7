"""Tensors in files of safetensors, each read when it is asked for: what a stage is made of is never there as a whole.

Read, not mapped: pages of a mapped file count as the process's own, and all of a file at once against what it may have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from neurogrid.errors import CheckpointError
from neurogrid.model.files.safetensors_header import (
    FILE_DTYPES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    TensorEntry,
    header_length,
    parse_header,
)
from neurogrid.model.files.tensors import tensor_to_bytes

__all__ = ["WeightFiles"]

# In one file: a layer with hundreds of experts has some thousands.
_MAX_TENSORS: Final = 1_000_000


class _Place(NamedTuple):
    """Place of a tensor: its file, and its bytes in that."""

    path: Path
    entry: TensorEntry
    offset: int


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of some files, by name. Each time that one is asked for it is read, into memory of its own.

    Args:
        paths: of the files. Of a name that several have, the last counts.

    Raises:
        CheckpointError: a file is missing, or none of safetensors; so does what reads a tensor.
        UnsupportedModelError: a dtype of quantised weights that is not read.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._places: dict[str, _Place] = {}
        for path in paths:
            self._places |= _places_in(path)

    def __getitem__(self, name: str) -> Tensor:
        path, entry, offset = self._places[name]
        # As torch aligns memory: what multiplies goes by that.
        tensor = torch.empty(entry.shape, dtype=FILE_DTYPES[entry.dtype])
        if not entry.num_bytes:
            return tensor
        into = tensor_to_bytes(tensor)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(offset + entry.start)
                while into and (num := file.readinto(into)):
                    into = into[num:]
        except OSError as exc:
            raise _unreadable(path, exc) from exc
        if into:
            raise CheckpointError(f"{path}: has become shorter while it was read")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _places_in(path: Path) -> dict[str, _Place]:
    where = str(path)
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = header_length(
                file.read(LENGTH_BYTES),
                num_file_bytes=num_bytes,
                where=where,
                limit=MAX_HEADER_BYTES,
            )
            header = file.read(length)
    except OSError as exc:
        raise _unreadable(path, exc) from exc
    offset = LENGTH_BYTES + length
    entries = parse_header(
        header, num_data_bytes=num_bytes - offset, where=where, max_tensors=_MAX_TENSORS
    )
    return {name: _Place(path, entry, offset) for name, entry in entries.items()}


def _unreadable(path: Path, exc: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: cannot be read: {exc.strerror or exc}")
