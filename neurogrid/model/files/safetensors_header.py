"""The header of a safetensors file: parsed with every claim checked, and written canonically.

The `safetensors` package gives tensors but not where their bytes lie, and streaming a layer out of
a memory-mapped file needs that. Format: length of the header as u64 little-endian, the header as a
JSON object of `name: {dtype, shape, data_offsets}`, then the data
(https://github.com/huggingface/safetensors#format).

This module knows bytes and offsets, no files and no models. Whatever is wrong with the input is a
CheckpointError, and nothing is allocated on the word of the input beyond the header itself.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.files.tensors import TORCH_DTYPES

__all__ = [
    "ALIGNMENT",
    "MAX_HEADER_BYTES",
    "MAX_NAME_LENGTH",
    "FILE_DTYPES",
    "FLOAT8",
    "TensorEntry",
    "encode_header",
    "header_length",
    "parse_header",
]

LENGTH_BYTES = 8
# Bytes; what PyTorch's CPU allocator gives, and what kernels choose their order of summation by.
ALIGNMENT = 64
# The bound of the format's own reader (safetensors 0.5, MAX_HEADER_SIZE).
MAX_HEADER_BYTES = 100_000_000
# Names are module paths; the longest on the hub are below 150 characters.
MAX_NAME_LENGTH = 512
# torch itself takes 64 dimensions; no weight has more than 5.
MAX_DIMENSIONS = 16
# The data of one file: above any real shard (tens of GB), and exact in every JSON reader (2^53).
MAX_OFFSET = 2**53

FLOAT8: Final = "F8_E4M3"
"""The dtype that is read, and is no weight without its scale."""
FILE_DTYPES: Mapping[str, torch.dtype] = {
    **TORCH_DTYPES,
    "C64": torch.complex64,
    FLOAT8: torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a header.

    Attributes:
        dtype: the format's name of the dtype, a key of FILE_DTYPES.
        shape: sizes, none negative; empty for a scalar.
        start, stop: bytes from the end of the header, `start <= stop`.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def header_length(prefix: bytes, *, num_file_bytes: int, where: str, limit: int) -> int:
    """The length of the header in bytes, from the first 8 bytes of the file.

    Args:
        prefix: the first bytes of the file, at least 8 where the file has them.
        num_file_bytes: the size of the whole file.
        where: what to call the file in an error.
        limit: the longest header that is accepted, in bytes.

    Raises:
        CheckpointError: the file is shorter than its header says, or the header above the limit.
    """
    if num_file_bytes < LENGTH_BYTES or len(prefix) < LENGTH_BYTES:
        raise CheckpointError(
            f"{where}: {num_file_bytes} bytes is too short for a safetensors file; "
            "fetch the file again"
        )
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > limit:
        raise CheckpointError(
            f"{where}: not a safetensors file (a header of {length} bytes; {limit} is the limit)"
        )
    if length > num_file_bytes - LENGTH_BYTES:
        raise CheckpointError(
            f"{where}: truncated inside the header ({num_file_bytes} bytes, the header alone ends "
            f"at {LENGTH_BYTES + length}); fetch the file again"
        )
    return length


def parse_header(
    header: bytes | bytearray | memoryview, *, num_data_bytes: int, where: str, max_tensors: int
) -> dict[str, TensorEntry]:
    """The tensors that a header names, in the order of their bytes.

    Args:
        header: the JSON, without the 8 bytes of its length.
        num_data_bytes: how many bytes follow the header; the tensors must cover them exactly.
        where: what to call the file in an error.
        max_tensors: the most tensors that are accepted.

    Raises:
        CheckpointError: anything that the format forbids: malformed JSON, a name twice, offsets
            that overlap, leave a hole or end elsewhere than the file, a length that is not that of
            shape and dtype, a dtype that nobody defined.
        UnsupportedModelError: a dtype of quantised weights that is not read (another FP8, FP4 and the like).
    """
    entries: dict[str, TensorEntry] = {}
    for name, value in _load_json_object(header, where).items():
        if name == "__metadata__":
            continue  # upstream's place for free text; nothing of ours is in it
        if len(entries) == max_tensors:
            raise CheckpointError(f"{where}: more than {max_tensors} tensors")
        if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
            raise CheckpointError(f"{where}: a tensor's name is empty, too long or unprintable")
        entries[name] = _parse_entry(name, value, where)
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_cover(ordered, num_data_bytes, where)
    return ordered


def encode_header(
    entries: Mapping[str, TensorEntry], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The length and the header of a file with `entries`, byte for byte the same for the same
    entries: sorted keys, no spaces, padded with spaces so that the tensors begin at a multiple of
    64 bytes. There they can be computed with where they lie, if the file does.

    Args:
        metadata: free text by name, for other programs; a blob has none.
    """
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    table |= {
        name: {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.stop],
        }
        for name, entry in entries.items()
    }
    header = json.dumps(table, sort_keys=True, separators=(",", ":")).encode("ascii")
    header += b" " * (-(LENGTH_BYTES + len(header)) % ALIGNMENT)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header


def _load_json_object(header: bytes | bytearray | memoryview, where: str) -> dict[str, object]:
    def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        table = dict(pairs)
        if len(table) != len(pairs):
            ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise CheckpointError(f"{where}: {_shown(twice)} is in the header twice")
        return table

    try:
        table = json.loads(bytes(header), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as exc:  # UnicodeDecodeError is a ValueError
        raise CheckpointError(
            f"{where}: the safetensors header is corrupt (not JSON); fetch the file again"
        ) from exc
    if not isinstance(table, dict):
        raise CheckpointError(f"{where}: the safetensors header is not a JSON object")
    return table


def _parse_entry(name: str, value: object, where: str) -> TensorEntry:
    shown = _shown(name)
    if not isinstance(value, dict) or not value.keys() >= {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: {shown} lacks dtype, shape or data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise CheckpointError(f"{where}: {shown} has a dtype that is not text")
    if dtype not in FILE_DTYPES:
        if dtype.startswith(("F8", "F6", "F4")):
            raise UnsupportedModelError(
                f"{where}: {shown} is {dtype[:16]}: quantised checkpoints are not supported yet; "
                "use the float16, bfloat16 or float32 checkpoint"
            )
        raise CheckpointError(f"{where}: {shown} has the unknown dtype {_shown(dtype)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not _are_sizes(shape):
        raise CheckpointError(f"{where}: {shown} has a malformed shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not _are_sizes(offsets):
        raise CheckpointError(f"{where}: {shown} has malformed data_offsets")
    start, stop = offsets
    num_bytes = math.prod(shape) * FILE_DTYPES[dtype].itemsize
    if stop - start != num_bytes:
        raise CheckpointError(
            f"{where}: {shown} has {stop - start} bytes where {dtype} {shape} takes {num_bytes}"
        )
    return TensorEntry(dtype, tuple(shape), start, stop)


def _are_sizes(values: list[object]) -> bool:
    return all(type(value) is int and 0 <= value <= MAX_OFFSET for value in values)


def _check_cover(entries: Mapping[str, TensorEntry], num_data_bytes: int, where: str) -> None:
    end = 0
    for name, entry in entries.items():
        if entry.start != end:
            fault = "overlaps" if entry.start < end else "leaves a hole behind"
            raise CheckpointError(f"{where}: {_shown(name)} {fault} the tensor before it")
        end = entry.stop
    if end > num_data_bytes:
        raise CheckpointError(
            f"{where}: truncated ({num_data_bytes} bytes of tensors, the header promises {end}); "
            "fetch the file again"
        )
    if end < num_data_bytes:
        raise CheckpointError(
            f"{where}: {num_data_bytes - end} bytes after the last tensor belong to none; "
            "fetch the file again"
        )


def _shown(text: str) -> str:
    """`text` of unknown origin, quoted, printable and short enough for one line."""
    return repr(text if len(text) <= 80 else text[:77] + "...")
