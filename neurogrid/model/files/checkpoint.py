"""A checkpoint directory: opened, checked, and read layer by layer without reading it whole.

Safetensors only: a pickle is code. What is wrong with a directory is said when it is opened, by the
headers alone, in one line that names the file and what to do. Weights stay in the files, which are
mapped into memory; nothing here makes a model or knows where the bytes go.
"""

from __future__ import annotations

import mmap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from neurogrid.errors import CheckpointError, ConfigurationError, UnsupportedModelError
from neurogrid.model.files.blob import (
    CodedBlob,
    CodedMatrix,
    LayerBlob,
    RecentLayers,
    StoredMatrix,
    quantized,
)
from neurogrid.model.files.checkpoint_files import (
    INDEX_FILE,
    SINGLE_FILE,
    read_json,
    read_model_config,
    weight_files,
    with_text_config,
)
from neurogrid.model.files.config import build_config
from neurogrid.model.files.foreign_codes import ForeignFormat
from neurogrid.model.files.foreign_config import foreign_format
from neurogrid.model.files.quantization import (
    AS_STORED,
    CodesForm,
    Linears,
    Quantization,
    choose_quantization,
    record_of_stored,
)
from neurogrid.model.files.safetensors_header import (
    FILE_DTYPES,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    TensorEntry,
    header_length,
    parse_header,
)
from neurogrid.model.files.tensor_names import is_end_tensor, layer_of

__all__ = ["Checkpoint"]

# Tensors in one file; DeepSeek-V3 has 91,000 in all of its 163.
_MAX_TENSORS = 1_000_000
# Forms of which blobs, and with them their digests, are kept.
_MAX_FORMS = 4


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies: its file, and its entry in the header of that."""

    file: Path
    entry: TensorEntry


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


class Checkpoint:
    """A directory with `config.json` and safetensors, as transformers saves it. Made by `open`.

    Attributes:
        path: the directory.
        config: config.json as it is, not sanitised.
        generation_config: generation_config.json, empty where there is none.
        num_layers: decoder layers by the config.
        present_layers: the layers all of whose tensors are here.
        stored: how its matrices are quantised; None for not at all.
    """

    def __init__(
        self,
        path: Path,
        *,
        config: dict[str, object],
        generation_config: dict[str, object],
        num_layers: int,
        places: Mapping[str, _Place],
        absent: Mapping[str, str],
        stored: ForeignFormat | None,
    ) -> None:
        self.path = path
        self.stored = stored
        self.config = config
        self.generation_config = generation_config
        self.num_layers = num_layers
        self._places = dict(places)
        self._absent = dict(absent)
        self._mapped: dict[Path, _Mapped] = {}
        self._blobs: dict[Quantization | str | None, dict[int, LayerBlob]] = {}
        self._recent = RecentLayers()
        self.present_layers = frozenset(self._layer_names) - {
            layer_of(name, num_layers) for name in absent
        }

    @classmethod
    def open(cls, path: str | Path, *, partial: bool = False) -> Checkpoint:
        """Read the headers of the checkpoint in the directory `path`, and check them.

        Args:
            partial: accept that shards which the index names, and layers, are not here.

        Raises:
            ConfigurationError: there is no such directory.
            CheckpointError: a file is missing, truncated, corrupt or of another format.
            UnsupportedModelError: weights quantised in a way that is not read, or a config that `build_config` refuses.
        """
        folder = Path(path)
        config = read_model_config(folder)
        stored = _stored_format(config)
        num_layers: int = build_config(config).num_hidden_layers
        generation_config: dict[str, object] = {}
        if (folder / "generation_config.json").exists():
            generation_config = read_json(folder / "generation_config.json", "")
        places, absent = _find_tensors(folder, partial=partial)
        checkpoint = cls(
            folder,
            config=config,
            generation_config=generation_config,
            num_layers=num_layers,
            places=places,
            absent=absent,
            stored=stored,
        )
        missing = sorted(set(range(num_layers)) - checkpoint.present_layers)
        if missing and not partial:
            raise CheckpointError(
                f"{folder}: no tensors for layer {missing[0]} ({len(missing)} of {num_layers} "
                "layers have none); config.json and the weights do not belong together"
            )
        return checkpoint

    def layer_blob(self, layer_id: int, quantization: Quantization | None = None) -> LayerBlob:
        """The bytes of one layer; the same object each time, so that its id is computed once.

        Args:
            quantization: what becomes codes; None for the bytes of the files.

        Raises:
            CheckpointError: the layer is not in `present_layers`, or cannot be had in this form.
        """
        if layer_id not in self.present_layers:
            raise CheckpointError(f"{self.path}: layer {layer_id} is not in this checkpoint")
        if not self.has_form(quantization):
            raise CheckpointError(
                f"{self.path}: layer {layer_id} was asked for in another form than it has here"
            )
        # The codes of the files are what they are, whatever a peer's record has.
        key = quantization if quantization is None or not quantization.is_stored else AS_STORED
        blobs = self._blobs.get(key)
        if blobs is None:
            # Peers name forms, as many as they like.
            while len(self._blobs) >= _MAX_FORMS:
                del self._blobs[next(iter(self._blobs))]
            blobs = self._blobs[key] = {}
        if layer_id not in blobs:
            tensors = {name: self._bytes_of(name) for name in self._layer_names[layer_id]}
            if quantization is None:
                blobs[layer_id] = LayerBlob(tensors)
            elif quantization.is_stored:
                matrices, plain = self._stored_matrices(tensors)
                blobs[layer_id] = CodedBlob(plain, matrices, self._recent)
            else:
                matrices = {
                    name: quantized(name, entry, data, quantization.method)
                    for name, (entry, data) in tensors.items()
                    if FILE_DTYPES[entry.dtype].is_floating_point
                    and quantization.makes_of(name, entry.shape)
                }
                plain = {name: each for name, each in tensors.items() if name not in matrices}
                blobs[layer_id] = CodedBlob(plain, matrices, self._recent)
        return blobs[layer_id]

    def has_form(self, quantization: Quantization | None) -> bool:
        """Whether its layers can be had so: quantised ones as they are, others as they are or by `--quantize`."""
        return (self.stored is not None) == (quantization is not None and quantization.is_stored)

    def layer_shapes(self, layer_id: int) -> dict[str, tuple[int, ...]]:
        """The shapes of one layer's tensors, by name."""
        return {
            name: self._places[name].entry.shape for name in self._layer_names.get(layer_id, ())
        }

    def _bytes_of(self, name: str) -> tuple[TensorEntry, memoryview]:
        """Entry and bytes of a tensor, mapped."""
        place = self._places[name]
        if place.file not in self._mapped:
            self._mapped[place.file] = _Mapped.open(place.file)
        data = self._mapped[place.file].data
        return place.entry, data[place.entry.start : place.entry.stop]

    def _stored_parts(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """The tensors that make each quantised matrix, by the name of the matrix and by suffix."""
        stored = self.stored
        if stored is None:
            return {}
        here = set(names)
        prefixes = [
            name.removesuffix(stored.marker) for name in names if name.endswith(stored.marker)
        ]
        return {
            f"{prefix}.weight": {
                suffix: prefix + suffix for suffix in stored.suffixes if prefix + suffix in here
            }
            for prefix in prefixes
        }

    def _stored_matrix(self, name: str, parts: Mapping[str, str]) -> StoredMatrix:
        assert self.stored is not None
        tensors = {suffix: self._bytes_of(part) for suffix, part in parts.items()}
        return StoredMatrix(name, self.stored, tensors)

    def _stored_matrices(
        self, tensors: Mapping[str, tuple[TensorEntry, memoryview]]
    ) -> tuple[dict[str, CodedMatrix], dict[str, tuple[TensorEntry, memoryview]]]:
        """The matrices among these tensors that are quantised, by name; and the tensors that make none."""
        groups = self._stored_parts(tensors)
        matrices = {}
        for name, parts in groups.items():
            matrix = self._stored_matrix(name, parts)
            matrices[name] = CodedMatrix(matrix.shape, matrix.form, matrix.codes)
        used = {part for parts in groups.values() for part in parts.values()}
        return matrices, {name: each for name, each in tensors.items() if name not in used}

    def quantization(self, method: str | None, model: Linears) -> Quantization | None:
        """What of the layers is codes: what this checkpoint has as such, or what is made of it by `method`.

        Raises:
            ConfigurationError: something is to be made of what is quantised already.
            CheckpointError, UnsupportedModelError: a matrix cannot be codes.
        """
        if self.stored is None:
            if method is None:
                return None
            shapes = map(self.layer_shapes, range(self.num_layers))
            return choose_quantization(method, shapes, model)
        if method is not None:
            raise ConfigurationError(
                f"{self.path} is quantised already ({self.stored.name}): leave out --quantize"
            )
        layers = {layer: self._stored_forms(layer) for layer in sorted(self.present_layers)}
        if not any(layers.values()):
            raise UnsupportedModelError(
                f"{self.path}: its config says that it is quantised, and no matrix in its layers is"
            )
        return record_of_stored(layers, model, self.num_layers)

    def _stored_forms(self, layer_id: int) -> dict[str, tuple[tuple[int, int], CodesForm]]:
        """The shapes and forms of a layer's quantised matrices, by name.

        Raises:
            CheckpointError, UnsupportedModelError: one is not what its format says.
        """
        matrices = {
            name: self._stored_matrix(name, parts)
            for name, parts in self._stored_parts(self._layer_names[layer_id]).items()
        }
        return {name: (matrix.shape, matrix.form) for name, matrix in matrices.items()}

    @property
    def files(self) -> frozenset[Path]:
        """The files that the tensors which are here lie in."""
        return frozenset(place.file for place in self._places.values())

    def layer_files(self, layer_id: int) -> frozenset[Path]:
        """Return the files of one layer."""
        return frozenset(self._places[name].file for name in self._layer_names.get(layer_id, ()))

    def end_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors outside the layers (embedding, final norm, head), mapped, on the CPU.

        Raises CheckpointError if the file of one of them is not here.
        """
        for name, shard in self._absent.items():
            if is_end_tensor(name):
                raise CheckpointError(f"{self.path / shard}: missing, and it holds {name}")
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name, place in self._places.items():
            if is_end_tensor(name):
                by_file[place.file].append(name)
        tensors: dict[str, torch.Tensor] = {}
        for file, names in by_file.items():
            try:
                with safe_open(file, framework="pt") as opened:
                    tensors.update((name, opened.get_tensor(name)) for name in names)
            except (SafetensorError, OSError) as exc:
                raise CheckpointError(f"{file}: cannot be read: {exc}") from exc
        for name, parts in self._stored_parts(tensors).items():
            dense = self._stored_matrix(name, parts).codes().dense(torch.float32)
            for part in parts.values():
                del tensors[part]
            tensors[name] = dense
        return tensors

    @cached_property
    def _layer_names(self) -> dict[int, tuple[str, ...]]:
        names: dict[int, list[str]] = defaultdict(list)
        for name in self._places:
            layer_id = layer_of(name, self.num_layers)
            if layer_id is not None:
                names[layer_id].append(name)
        return {layer_id: tuple(sorted(found)) for layer_id, found in names.items()}


def _stored_format(config: Mapping[str, object]) -> ForeignFormat | None:
    """How the matrices of a checkpoint are quantised, by its config.json; None for not at all.

    Raises:
        UnsupportedModelError: in a way that is not read, or not exactly; says why.
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
            places[name] = _Place(file, entry)
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
