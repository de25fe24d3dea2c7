"""A data set in a directory, and the tensors of one slice.

    DIR/manifest.json                the manifest, as it is a blob
    DIR/slices/9f86d0...safetensors  the slices, by their blob ids
    DIR/tokenizer/                   what transformers opens as a tokenizer
    DIR/classes.json                 of images, the names of the classes

A slice has `input_ids` int32 [samples, tokens], or `pixel_values` uint8 or float32 [samples, channels, height, width]
and `labels` int64 [samples].
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from neurogrid.errors import ConfigurationError, NeuroGridError, RemoteProtocolError
from neurogrid.training.data.manifest import MAX_MANIFEST_BYTES, Manifest, SliceInfo

__all__ = [
    "MANIFEST_NAME",
    "TOKENIZER_NAME",
    "SliceError",
    "open_slice",
    "read_manifest",
    "slice_path",
]

MANIFEST_NAME: Final = "manifest.json"
SLICES_NAME: Final = "slices"
TOKENIZER_NAME: Final = "tokenizer"


class SliceError(NeuroGridError):
    """The file of a slice is missing, or is not what its manifest says."""


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a data directory.

    Raises:
        ConfigurationError: there is none, or it cannot be read.
    """
    path = directory / MANIFEST_NAME
    try:
        with path.open("rb") as file:
            return Manifest.decode(file.read(MAX_MANIFEST_BYTES + 1))
    except OSError as exc:
        raise ConfigurationError(
            f"{path}: {exc.strerror}; neurogrid train prepare makes a data directory"
        ) from exc
    except RemoteProtocolError as exc:
        raise ConfigurationError(f"{path}: {exc}") from exc


def slice_path(directory: Path, info: SliceInfo) -> Path:
    """Return the path of a slice in a data directory."""
    return directory / SLICES_NAME / f"{info.blob_id.hex()}.safetensors"


def open_slice(path: Path, manifest: Manifest, info: SliceInfo) -> dict[str, torch.Tensor]:
    """The tensors of a slice, from its file wherever that lies.

    They lie in the pages of the file, and must not be written to. The file was verified by its id, or comes from
    oneself; what is checked here is that it has what the manifest says of all slices.

    Raises:
        SliceError: it has not, or cannot be read.
    """
    try:
        if path.stat().st_size != info.num_bytes:
            raise SliceError(f"{path} has {path.stat().st_size} B instead of {info.num_bytes}")
        tensors: dict[str, torch.Tensor] = load_file(path)
    except (OSError, SafetensorError) as exc:
        raise SliceError(f"{path} cannot be read: {exc}") from exc
    if manifest.kind == "text":
        wanted = {"input_ids": ([torch.int32], [info.num_samples, manifest.sequence_length])}
        limits = {"input_ids": manifest.vocab_size}
    else:
        wanted = {
            "pixel_values": ([torch.uint8, torch.float32], [info.num_samples, *manifest.shape]),
            "labels": ([torch.int64], [info.num_samples]),
        }
        limits = {"labels": manifest.num_classes}
    if tensors.keys() != wanted.keys():
        raise SliceError(f"{path} has {sorted(tensors)} instead of {sorted(wanted)}")
    for name, (dtypes, shape) in wanted.items():
        tensor = tensors[name]
        if tensor.dtype not in dtypes or list(tensor.shape) != shape:
            raise SliceError(
                f"{path}: {name} is {tensor.dtype} {list(tensor.shape)} instead of {dtypes[0]} {shape}"
            )
    for name, limit in limits.items():
        least, most = (int(each) for each in torch.aminmax(tensors[name]))
        if least < 0 or most >= limit:
            raise SliceError(f"{path}: {name} are {least} to {most}, and not 0 to {limit - 1}")
    if "pixel_values" in tensors and not _is_finite(tensors["pixel_values"]):
        raise SliceError(f"{path}: pixel_values are not finite")
    return tensors


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are. The least and the largest are NaN where one value is."""
    return all(math.isfinite(each.item()) for each in torch.aminmax(tensor))
