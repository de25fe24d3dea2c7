"""The header of a GGUF file: parsed with every claim checked.

Format: "GGUF", a version, the number of tensors, the number of keys; the keys with their values; name, dimensions, type
and offset of each tensor; then, aligned, the tensors' bytes. All of it little-endian
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3).

This module knows bytes and offsets, no files and no models. Whatever is wrong with the input is a CheckpointError, and
nothing is allocated on the word of the input: each count is bounded, and compared with the bytes that there are, first.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final, TypeAlias

from neurogrid.errors import CheckpointError, UnsupportedModelError
from neurogrid.model.files.gguf.block_types import BLOCK_TYPES, TYPE_NAMES, BlockType

__all__ = ["Header", "TensorInfo", "Value", "parse_header"]

Value: TypeAlias = "int | float | bool | str | tuple[Value, ...]"
"""Value of a key. An array is a tuple of values of one type."""

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
# Keys of a file: the largest have some 60. Tensors: DeepSeek-V3 has 1,100.
_MAX_KEYS: Final = 4096
_MAX_TENSORS: Final = 65_536
# Bytes of all that stands before the tensors, nearly all of them tokens and merges: 262,144 tokens have 10 MB.
_MAX_HEADER_BYTES: Final = 128 * 1024 * 1024
# Elements of all arrays together: tokens, scores, types and merges of 262,144 tokens are 1.3 million.
_MAX_ELEMENTS: Final = 4 * 1024 * 1024
_MAX_NESTING: Final = 4
# Bytes of a name: the format's own bound of a tensor's is 64, and that of a key more than anybody has.
_MAX_NAME_BYTES: Final = 256
# Bytes of a text that is no token: a chat template has 10,000.
_MAX_TEXT_BYTES: Final = 4 * 1024 * 1024
_MAX_DIMENSIONS: Final = 4
# Elements of one tensor: above any, and exact in every reader (2^53).
_MAX_SIZE: Final = 2**53
_ALIGNMENT_KEY: Final = "general.alignment"
_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 65_536

# Of the types of values that are numbers: what struct calls them.
_NUMBERS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    10: "Q",
    11: "q",
    12: "d",
}
_BOOLEAN: Final = 7
_TEXT: Final = 8
_ARRAY: Final = 9
# Bytes that an element of an array has at least: a text has its length, an array its type and length.
_LEAST_BYTES: Final = {
    **{number: struct.calcsize(f"<{code}") for number, code in _NUMBERS.items()},
    _BOOLEAN: 1,
    _TEXT: 8,
    _ARRAY: 12,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file.

    Attributes:
        type: of its elements.
        shape: sizes, all positive, the one whose elements are neighbours last; empty for a scalar.
        start, stop: bytes from the start of the file.
    """

    type: BlockType
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a GGUF file: metadata, and an entry for each tensor.

    Attributes:
        values: by key.
        tensors: by name, in the order of their bytes.
    """

    values: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]


def parse_header(data: memoryview, where: str) -> Header:
    """The header of a file, whose tensors lie within the file, one behind the other.

    Args:
        data: the whole file, mapped; only its header is read.
        where: what to call the file in an error.

    Raises:
        CheckpointError: anything that the format forbids, or a bound that is exceeded.
        UnsupportedModelError: a version, a byte order or a type of tensors that is not read.
    """
    reader = _Reader(data[:_MAX_HEADER_BYTES], where)
    if bytes(reader.take(4, "its first bytes")) != _MAGIC:
        raise CheckpointError(f"{where}: not a GGUF file; fetch the file again")
    version = reader.number("I", "its version")
    if version not in _VERSIONS:
        if version and not version & 0xFFFF:
            raise UnsupportedModelError(f"{where}: GGUF for big-endian machines, which is not read")
        raise UnsupportedModelError(
            f"{where}: version {version} of GGUF; versions 2 and 3 are read: convert the model anew"
        )
    num_tensors = reader.count("tensors", _MAX_TENSORS, least=8 + 4 + 4 + 8)
    num_keys = reader.count("keys", _MAX_KEYS, least=8 + 4 + 1)
    values: dict[str, Value] = {}
    for _ in range(num_keys):
        key = reader.name("a key")
        if key in values:
            raise CheckpointError(f"{where}: the key {key!r} is in the header twice")
        values[key] = reader.value(reader.number("I", f"the type of {key!r}"), repr(key))
    infos: dict[str, tuple[BlockType, tuple[int, ...], int]] = {}
    for _ in range(num_tensors):
        name = reader.name("a tensor")
        if name in infos:
            raise CheckpointError(f"{where}: {name!r} is in the header twice")
        infos[name] = _tensor_info(reader, name)
    alignment = values.get(_ALIGNMENT_KEY, _ALIGNMENT)
    if (
        type(alignment) is not int
        or not 0 < alignment <= _MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise CheckpointError(f"{where}: {_ALIGNMENT_KEY} is no power of two to {_MAX_ALIGNMENT}")
    start = reader.at + -reader.at % alignment
    return Header(values, _placed(infos, start, alignment, data.nbytes, where))


class _Reader:
    """Goes through the bytes of a header; never past their end."""

    def __init__(self, data: memoryview, where: str) -> None:
        self._data = data
        self.where = where
        self._num_elements = 0
        self.at = 0

    def take(self, num_bytes: int, what: str) -> memoryview:
        """The next bytes."""
        if num_bytes > self._data.nbytes - self.at:
            if self._data.nbytes == _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{self.where}: a header of more than {_MAX_HEADER_BYTES} bytes"
                )
            raise CheckpointError(
                f"{self.where}: truncated inside the header, in {what}; fetch the file again"
            )
        self.at += num_bytes
        return self._data[self.at - num_bytes : self.at]

    def number(self, code: str, what: str) -> int:
        """The next integer, of a type of struct's."""
        (number,) = struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}"), what))
        return int(number)

    def count(self, what: str, limit: int, *, least: int) -> int:
        """Read the number of `what` that follow, at most `limit`, each of at least `least` bytes."""
        number = self.number("Q", f"the number of {what}")
        if number > limit:
            raise CheckpointError(f"{self.where}: {number} {what}; {limit} is the limit")
        self._require(number * least, what)
        return number

    def name(self, what: str) -> str:
        """A name of a key or a tensor."""
        text = self._text(f"the name of {what}", _MAX_NAME_BYTES)
        if not text or not text.isprintable():
            raise CheckpointError(f"{self.where}: the name of {what} is empty or unprintable")
        return text

    def value(self, type_number: int, what: str, depth: int = 0) -> Value:
        """The next value, of a type by its number."""
        if type_number in _NUMBERS:
            return self._numbers(type_number, 1, what)[0]
        if type_number == _BOOLEAN:
            return self._booleans(1, what)[0]
        if type_number == _TEXT:
            return self._text(what, _MAX_TEXT_BYTES)
        if type_number == _ARRAY:
            return self._array(what, depth)
        raise CheckpointError(f"{self.where}: {what} is of the unknown type {type_number}")

    def _array(self, what: str, depth: int) -> tuple[Value, ...]:
        type_number = self.number("I", f"the type of {what}")
        length = self.number("Q", f"the length of {what}")
        if type_number not in _LEAST_BYTES:
            raise CheckpointError(
                f"{self.where}: {what} is an array of the unknown type {type_number}"
            )
        if depth == _MAX_NESTING:
            raise CheckpointError(
                f"{self.where}: {what} has more than {_MAX_NESTING} arrays in one another"
            )
        self._num_elements += length
        if self._num_elements > _MAX_ELEMENTS:
            raise CheckpointError(
                f"{self.where}: {what} and the arrays before it have {self._num_elements} elements; "
                f"{_MAX_ELEMENTS} is the limit"
            )
        self._require(length * _LEAST_BYTES[type_number], what)
        if type_number in _NUMBERS:
            return self._numbers(type_number, length, what)
        if type_number == _BOOLEAN:
            return self._booleans(length, what)
        if type_number == _TEXT:
            return tuple(self._text(what, _MAX_TEXT_BYTES) for _ in range(length))
        return tuple(self._array(what, depth + 1) for _ in range(length))

    def _numbers(self, type_number: int, length: int, what: str) -> tuple[Value, ...]:
        layout = f"<{length}{_NUMBERS[type_number]}"
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))

    def _booleans(self, length: int, what: str) -> tuple[bool, ...]:
        taken = bytes(self.take(length, what))
        if not set(taken) <= {0, 1}:
            raise CheckpointError(f"{self.where}: {what} is neither true nor false")
        return tuple(map(bool, taken))

    def _text(self, what: str, limit: int) -> str:
        length = self.number("Q", f"the length of {what}")
        if length > limit:
            raise CheckpointError(f"{self.where}: {what} has {length} bytes; {limit} is the limit")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError as exc:
            raise CheckpointError(f"{self.where}: {what} is not UTF-8") from exc

    def _require(self, num_bytes: int, what: str) -> None:
        """Look whether there are so many bytes, before anything is made of them."""
        at = self.at
        self.take(num_bytes, what)
        self.at = at


def _tensor_info(reader: _Reader, name: str) -> tuple[BlockType, tuple[int, ...], int]:
    """Type, shape and offset of the next tensor."""
    shown, where = repr(name), reader.where
    num_dimensions = reader.number("I", f"the dimensions of {shown}")
    if num_dimensions > _MAX_DIMENSIONS:
        raise CheckpointError(f"{where}: {shown} has {num_dimensions} dimensions")
    sizes = [reader.number("Q", f"the dimensions of {shown}") for _ in range(num_dimensions)]
    if not all(0 < size <= _MAX_SIZE for size in sizes) or prod(sizes) > _MAX_SIZE:
        raise CheckpointError(f"{where}: {shown} is {sizes}: no shape of a tensor")
    number = reader.number("I", f"the type of {shown}")
    if number not in BLOCK_TYPES:
        known = ", ".join(each.name for each in BLOCK_TYPES.values())
        raise UnsupportedModelError(
            f"{where}: {shown} is of the type {TYPE_NAMES.get(number, number)}; read are {known}"
        )
    kind = BLOCK_TYPES[number]
    if (sizes[0] if sizes else 1) % kind.num_elements:
        raise CheckpointError(f"{where}: {shown} has rows of {sizes[0]}, no whole {kind.name}")
    return kind, tuple(reversed(sizes)), reader.number("Q", f"the offset of {shown}")


def _placed(
    infos: Mapping[str, tuple[BlockType, tuple[int, ...], int]],
    start: int,
    alignment: int,
    num_file_bytes: int,
    where: str,
) -> dict[str, TensorInfo]:
    """The tensors by where they lie: in the order of the header, aligned, without overlap or hole, and in the file."""
    placed: dict[str, TensorInfo] = {}
    end = 0
    for name, (kind, shape, offset) in infos.items():
        if offset != end:
            raise CheckpointError(
                f"{where}: {name!r} is at offset {offset} and not {end}, where the tensor before it ends"
            )
        stop = offset + kind.num_bytes(shape)
        if start + stop > num_file_bytes:
            raise CheckpointError(
                f"{where}: truncated ({num_file_bytes} bytes, {name!r} ends at {start + stop}); "
                "fetch the file again"
            )
        placed[name] = TensorInfo(kind, shape, start + offset, start + stop)
        end = stop + -stop % alignment
    return placed
