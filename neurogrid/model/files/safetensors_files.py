"""The tensors of a checkpoint directory: safetensors, found by their headers and mapped into memory.

Safetensors only: a pickle is code. Matrices that a quantised checkpoint has as several tensors are given as one.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.files.blob import CodedMatrix, LayerContents, StoredMatrix
from neurogrid.model.files.checkpoint_files import (
    INDEX_FILE,
    SINGLE_FILE,
    read_json,
    weight_files,
    with_text_config,
)
from neurogrid.model.files.foreign.codes import ForeignFormat
from neurogrid.model.files.foreign.formats import foreign_format
from neurogrid.model.files.safetensors_header import (
    FILE_DTYPES,
    FLOAT8,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    TensorEntry,
    header_length,
    parse_header,
)
from neurogrid.model.files.tensor_names import (
    is_end_tensor,
    is_image_tensor,
    layer_of,
    name_in_text_model,
)
from neurogrid.model.kernels import E4M3
from neurogrid.model.unused_memory import let_go_pages

__all__ = ["SafetensorsFiles"]

T = TypeVar("T")

# In what what sees images may be.
_PLAIN_DTYPES = frozenset({"F32", "F16", "BF16", "F64"})
# Tensors in one file; DeepSeek-V3 has 91,000 in all of its 163.
_MAX_TENSORS = 1_000_000
# Matrices in one tensor; the bound that a config has (sanitize.py).
_MAX_EXPERTS = 2**15


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a tensor: its file, its entry in the header of that, and its name there."""

    file: Path
    entry: TensorEntry
    name: str


@dataclass(frozen=True, slots=True)
class _Parts:
    """The tensors that make a quantised matrix.

    Attributes:
        names: by suffix.
        number: which of the matrices that they have it is; None where they have only that one.
    """

    names: Mapping[str, str]
    number: int | None = None


@dataclass(frozen=True, slots=True)
class _Mapped:
    """The data part of one file, mapped. The mapping lives as long as a view of it does."""

    data: memoryview

    @classmethod
    def open(cls, file: Path) -> _Mapped:
        with file.open("rb") as handle:
            view = memoryview(mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ))
        length = int.from_bytes(view[:LENGTH_BYTES], "little")
        return cls(view[LENGTH_BYTES + length :])


class SafetensorsFiles:
    """The safetensors of a directory. Made by `open`; a `TensorFiles`."""

    def __init__(
        self,
        folder: Path,
        *,
        num_layers: int,
        places: Mapping[str, _Place],
        absent: Mapping[str, str],
        stored: ForeignFormat | None,
        image_places: Mapping[str, _Place],
        image_absent: Mapping[str, str],
    ) -> None:
        self._folder = folder
        self._num_layers = num_layers
        self._places = dict(places)
        self._absent = dict(absent)
        self._image_places = dict(image_places)
        self._image_absent = dict(image_absent)
        self._stored = stored
        self._mapped: dict[Path, _Mapped] = {}
        self.present_layers = frozenset(self._layer_names) - {
            layer_of(name, num_layers) for name in absent
        }

    @classmethod
    def open(
        cls,
        folder: Path,
        config: Mapping[str, object],
        num_layers: int,
        *,
        partial: bool,
        takes_images: bool = False,
    ) -> SafetensorsFiles:
        """Read the headers of the files in `folder`, and check them.

        Args:
            config: its config.json.
            num_layers: decoder layers by that.
            partial: accept that shards which the index names are not here.
            takes_images: the tensors of its model of text are called as in a checkpoint of that alone, and those of its
                images are kept apart (`image_tensors`).

        Raises:
            CheckpointError: a file is missing, truncated, corrupt or of another format.
            UnsupportedModelError: weights quantised in a way that is not read.
        """
        stored = _stored_format(config)
        places, absent = _find_tensors(folder, partial=partial)
        if stored is None or not stored.are_floats:
            _check_scaled(places)
        image_places: dict[str, _Place] = {}
        image_absent: dict[str, str] = {}
        if takes_images:
            image_places = {n: place for n, place in places.items() if is_image_tensor(n)}
            image_absent = {n: shard for n, shard in absent.items() if is_image_tensor(n)}
            places = _of_text(places)
            absent = _of_text(absent)
        if stored is None:
            _check_numbers(
                {
                    name: place
                    for name, place in places.items()
                    if is_end_tensor(name) or layer_of(name, num_layers) is not None
                }
            )
        return cls(
            folder,
            num_layers=num_layers,
            places=places,
            absent=absent,
            stored=stored,
            image_places=image_places,
            image_absent=image_absent,
        )

    @property
    def files(self) -> frozenset[Path]:
        """The files that the tensors which are here lie in."""
        return frozenset(place.file for place in self._places.values())

    @property
    def quantised_as(self) -> str | None:
        """Name of the format of the layers' quantised matrices; None if there are none."""
        return None if self._stored is None else self._stored.name

    @property
    def has_codes(self) -> bool:
        """Whether they are."""
        return self._stored is not None

    def layer(self, layer_id: int) -> LayerContents:
        """Tensors of a layer; errors as of `StoredMatrix`."""
        names = self._layer_names.get(layer_id, ())
        groups = self._stored_parts(names)
        matrices = {}
        for name, parts in groups.items():
            matrix = self._stored_matrix(name, parts)
            matrices[name] = CodedMatrix(matrix.shape, matrix.form, matrix.codes)
        used = {part for parts in groups.values() for part in parts.names.values()}
        tensors = {name: self._bytes_of(name) for name in names if name not in used}
        plain = {name: self._places[name] for name in tensors}
        _check_scaled(plain)
        _check_numbers(plain)
        return LayerContents(tensors, matrices=matrices)

    def let_go(self, layer_id: int) -> None:
        """See `TensorFiles`."""
        for file in self.layer_files(layer_id):
            if file in self._mapped:
                let_go_pages(self._mapped[file].data)

    def layer_files(self, layer_id: int) -> frozenset[Path]:
        """Return the files of one layer."""
        return frozenset(self._places[name].file for name in self._layer_names.get(layer_id, ()))

    def end_tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """See `TensorFiles`; mapped, where they are not made."""
        self._require({name: s for name, s in self._absent.items() if is_end_tensor(name)})
        tensors = _read({name: p for name, p in self._places.items() if is_end_tensor(name)})
        for name, parts in self._stored_parts(tensors).items():
            dense = self._stored_matrix(name, parts).codes().dense(dtype)
            for part in parts.names.values():
                tensors.pop(part, None)
            tensors[name] = dense
        _check_scaled(
            {name: self._places[name] for name, each in tensors.items() if each.dtype == E4M3}
        )
        _check_numbers(
            {n: self._places[n] for n, each in tensors.items() if not each.is_floating_point()}
        )
        return tensors

    def image_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors that make embeddings of images, named as in the whole model's checkpoint; on the CPU, mapped.

        Raises:
            CheckpointError: a file of them is not here, or cannot be read.
            UnsupportedModelError: they are quantised.
        """
        self._require(self._image_absent)
        for name, place in self._image_places.items():
            if place.entry.dtype not in _PLAIN_DTYPES:
                raise UnsupportedModelError(
                    f"{place.file}: {name[:80]!r} is {place.entry.dtype}: what sees images is quantised, which is not "
                    "read; use the float16, bfloat16 or float32 checkpoint"
                )
        return _read(self._image_places)

    def _require(self, absent: Mapping[str, str]) -> None:
        for name, shard in absent.items():
            raise CheckpointError(f"{self._folder / shard}: missing, and it holds {name}")

    def _bytes_of(self, name: str) -> tuple[TensorEntry, memoryview]:
        """Entry and bytes of a tensor, mapped."""
        place = self._places[name]
        if place.file not in self._mapped:
            self._mapped[place.file] = _Mapped.open(place.file)
        data = self._mapped[place.file].data
        return place.entry, data[place.entry.start : place.entry.stop]

    def _stored_parts(self, names: Iterable[str]) -> dict[str, _Parts]:
        """Tensors that make each quantised matrix, by the name of the matrix."""
        stored = self._stored
        if stored is None:
            return {}
        here = set(names)
        found: dict[str, _Parts] = {}
        for name in names:
            if not name.endswith(stored.marker):
                continue
            prefix = name.removesuffix(stored.marker)
            parts = {
                suffix: prefix + suffix for suffix in stored.suffixes if prefix + suffix in here
            }
            if stored.is_stacked:
                for number in range(self._num_stacked(parts.values())):
                    found[f"{prefix}.{number}.weight"] = _Parts(parts, number)
            else:
                found[f"{prefix}.weight"] = _Parts(parts)
        return found

    def _num_stacked(self, names: Collection[str]) -> int:
        """Number of experts' matrices that each of these tensors stacks; CheckpointError where they differ."""
        counts = {self._places[name].entry.shape[:1] for name in names}
        (count,) = max(counts) or (0,)
        if len(counts) > 1 or not 0 < count <= _MAX_EXPERTS:
            raise CheckpointError(
                f"{self._folder}: {min(names)[:80]} and what belongs to it have no number of experts in common"
            )
        return count

    def _stored_matrix(self, name: str, parts: _Parts) -> StoredMatrix:
        assert self._stored is not None
        tensors = {suffix: self._bytes_of(part) for suffix, part in parts.names.items()}
        if parts.number is not None:
            tensors = {
                suffix: _one_of(entry, data, parts.number)
                for suffix, (entry, data) in tensors.items()
            }
        return StoredMatrix(name, self._stored, tensors)

    @cached_property
    def _layer_names(self) -> dict[int, tuple[str, ...]]:
        names: dict[int, list[str]] = defaultdict(list)
        for name in self._places:
            layer_id = layer_of(name, self._num_layers)
            if layer_id is not None:
                names[layer_id].append(name)
        return {layer_id: tuple(sorted(found)) for layer_id, found in names.items()}


def _of_text(named: Mapping[str, T]) -> dict[str, T]:
    """Entries of text in a model that takes images, under the names of a checkpoint of its text model alone."""
    return {
        name_in_text_model(name): each for name, each in named.items() if not is_image_tensor(name)
    }


def _read(places: Mapping[str, _Place]) -> dict[str, torch.Tensor]:
    by_file: dict[Path, dict[str, str]] = defaultdict(dict)
    for name, place in places.items():
        by_file[place.file][name] = place.name
    tensors: dict[str, torch.Tensor] = {}
    for file, names in by_file.items():
        try:
            with safe_open(file, framework="pt") as opened:
                tensors.update((name, opened.get_tensor(there)) for name, there in names.items())
        except (SafetensorError, OSError) as exc:
            raise CheckpointError(f"{file}: cannot be read: {exc}") from exc
    return tensors


def _check_scaled(plain: Mapping[str, _Place]) -> None:
    """Refuse plain tensors that are floats of 8 bits: without a scale they are no weights."""
    for name, place in plain.items():
        if place.entry.dtype == FLOAT8:
            raise UnsupportedModelError(
                f"{place.file}: {name[:80]!r} is {FLOAT8}: quantised, and config.json tells no scale of it; use the "
                "float16, bfloat16 or float32 checkpoint"
            )


def _check_numbers(plain: Mapping[str, _Place]) -> None:
    """Refuse plain weights that are no floats: they are codes without a scale, which loading would take for weights."""
    for name, place in plain.items():
        dtype = place.entry.dtype
        if name.endswith(".weight") and not FILE_DTYPES[dtype].is_floating_point:
            raise UnsupportedModelError(
                f"{place.file}: {name[:80]!r} is {dtype}: quantised, and there is no scale of it as config.json tells "
                "them; use the float16, bfloat16 or float32 checkpoint"
            )


def _one_of(entry: TensorEntry, data: memoryview, number: int) -> tuple[TensorEntry, memoryview]:
    """One of the tensors that are in one, along its first dimension."""
    size = data.nbytes // entry.shape[0]
    return (
        TensorEntry(entry.dtype, entry.shape[1:], 0, size),
        data[number * size : (number + 1) * size],
    )


def _stored_format(config: Mapping[str, object]) -> ForeignFormat | None:
    """Format of a checkpoint's quantised matrices, by its config.json; None if it has none.

    Raises:
        UnsupportedModelError: the format is not read, or not exactly; says why.
    """
    for part in with_text_config(config):
        for key in ("quantization_config", "compression_config"):
            entry = part.get(key)
            if not isinstance(entry, dict) or not entry:
                continue
            # bitsandbytes writes its entry also where it quantises nothing.
            if entry.get("load_in_4bit") is False and entry.get("load_in_8bit") is False:
                continue
            try:
                return foreign_format(entry)
            except UnsupportedModelError as exc:
                raise UnsupportedModelError(
                    f"{exc}; use the float16, bfloat16 or float32 checkpoint, with --quantize perhaps"
                ) from exc
    return None


def _find_tensors(folder: Path, *, partial: bool) -> tuple[dict[str, _Place], dict[str, str]]:
    """Every tensor that is here, and for every one that is not the name of its file."""
    if (folder / INDEX_FILE).exists() and not (folder / SINGLE_FILE).exists():
        return _read_indexed(folder, partial=partial)
    return _read_files(weight_files(folder)), {}


def _read_indexed(folder: Path, *, partial: bool) -> tuple[dict[str, _Place], dict[str, str]]:
    index = folder / INDEX_FILE
    weight_map = read_json(index, "").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map; fetch the file again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard != Path(shard).name or shard in ("", "..", "."):
            raise CheckpointError(f"{index}: {name[:80]!r} is in no file of this directory")
    shards = sorted(set(weight_map.values()))
    here = [folder / shard for shard in shards if (folder / shard).exists()]
    if len(here) < len(shards) and not partial:
        lost = next(shard for shard in shards if not (folder / shard).exists())
        raise CheckpointError(
            f"{folder / lost}: missing, and {INDEX_FILE} names it ({len(shards) - len(here)} of "
            f"{len(shards)} shards are missing); fetch it"
        )
    places = _read_files(here)
    absent: dict[str, str] = {}
    for name, shard in weight_map.items():
        if name not in places:
            if (folder / shard).exists():
                raise CheckpointError(
                    f"{folder / shard}: lacks {name[:80]!r}, which {INDEX_FILE} places there; "
                    "fetch both again"
                )
            absent[name] = shard
    return places, absent


def _read_files(files: list[Path]) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    for file in files:
        for name, entry in _read_header(file).items():
            if name in places:
                raise CheckpointError(
                    f"{file}: {name[:80]!r} is in {places[name].file.name} too; remove the file "
                    "that does not belong to this model"
                )
            places[name] = _Place(file, entry, name)
    return places


def _read_header(file: Path) -> dict[str, TensorEntry]:
    try:
        num_bytes = file.stat().st_size
        with file.open("rb") as handle:
            prefix = handle.read(LENGTH_BYTES)
            length = header_length(
                prefix, num_file_bytes=num_bytes, where=str(file), limit=MAX_HEADER_BYTES
            )
            header = handle.read(length)
    except OSError as exc:
        raise CheckpointError(f"{file}: cannot be read: {exc.strerror}") from exc
    return parse_header(
        header,
        num_data_bytes=num_bytes - LENGTH_BYTES - length,
        where=str(file),
        max_tensors=_MAX_TENSORS,
    )
