"""A result as bytes: which coefficients of a gradient a member sends, and their signs or values. Needs numpy.

Source: protocol_spec/training/witnessed.md, "Results".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

__all__ = ["ResultPlan"]

_MAX_COEFFICIENTS: Final = 2**32 - 1
_HEADER: Final = struct.Struct("<BBHI")
_VERSION: Final = 2
_ONE_BIT: Final = 1


@dataclass(frozen=True, slots=True)
class ResultPlan:
    """Form of the results of a run, known from model and run file alone.

    Attributes:
        tensors: chunks of each tensor, and coefficients of each of its chunks, in order.
        top_k: coefficients that are sent of a chunk; all of one that has fewer.
        one_bit: whether signs are sent in the place of values.

    Raises:
        ValueError: a value is out of its range, or the coefficients are too many.
    """

    tensors: tuple[tuple[int, int], ...]
    top_k: int
    one_bit: bool

    def __post_init__(self) -> None:
        if self.top_k < 1 or any(min(each) < 1 for each in self.tensors):
            raise ValueError("top_k, chunks and coefficients are at least 1")
        if self.num_coefficients > _MAX_COEFFICIENTS:
            raise ValueError(f"a result has at most {_MAX_COEFFICIENTS} coefficients")

    @property
    def num_coefficients(self) -> int:
        """Coefficients of each result."""
        return sum(chunks * min(self.top_k, size) for chunks, size in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of each result."""
        places = sum(
            (chunks * min(self.top_k, size) * _width(self.top_k, size) + 7) // 8
            for chunks, size in self.tensors
        )
        number = self.num_coefficients
        if not self.one_bit:
            return _HEADER.size + places + 4 * number
        return _HEADER.size + places + (number + 7) // 8 + (self._num_chunks + 7) // 8

    @property
    def _num_chunks(self) -> int:
        return sum(chunks for chunks, _ in self.tensors)

    @property
    def _num_sent(self) -> Any:
        """Coefficients of each chunk that are sent: int64 [chunks]."""
        sent = [min(self.top_k, size) for _, size in self.tensors]
        return np.repeat(np.array(sent, np.int64), [chunks for chunks, _ in self.tensors])

    def encode(self, positions: Any, values: Any) -> bytes:
        """A result as bytes.

        Args:
            positions: int64 [num_coefficients], places among all coefficients of all tensors, ascending.
            values: float32 [num_coefficients], finite; in one bit 1 or -1, or all 0 in a chunk of which nothing is
                sent, whose places are its first.

        Raises:
            ValueError: they are not what this plan has.
        """
        places = np.ascontiguousarray(positions, dtype=np.int64)
        numbers = np.ascontiguousarray(values, dtype=np.float32)
        shape = (self.num_coefficients,)
        if places.shape != shape or numbers.shape != shape:
            raise ValueError(f"a result of this plan has {shape[0]} coefficients")
        if not np.isfinite(numbers).all():
            raise ValueError("a value is infinite or no number")
        parts = [_HEADER.pack(_VERSION, _ONE_BIT if self.one_bit else 0, 0, shape[0])]
        taken = start = 0
        for chunks, size in self.tensors:
            k = min(self.top_k, size)
            first = start + np.arange(chunks, dtype=np.int64)[:, None] * size
            offsets = places[taken : taken + chunks * k].reshape(chunks, k) - first
            _check_offsets(offsets, size)
            if width := _width(self.top_k, size):
                parts.append(_pack(offsets.ravel(), width))
            taken, start = taken + chunks * k, start + chunks * size
        if self.one_bit:
            is_empty = self._empty(places, numbers)
            parts.append(np.packbits(numbers < 0, bitorder="little").tobytes())
            parts.append(np.packbits(is_empty, bitorder="little").tobytes())
        else:
            parts.append(numbers.astype("<f4").tobytes())
        return b"".join(parts)

    def decode(self, data: bytes) -> tuple[Any, Any]:
        """Positions, int64, and values, float32, of a result: [num_coefficients] each, as `encode` takes them.

        Raises:
            ValueError: it is no result of this plan, and why.
        """
        if len(data) != self.num_bytes:
            raise ValueError(f"a result of this plan has {self.num_bytes} bytes, not {len(data)}")
        number = self.num_coefficients
        wanted = _VERSION, _ONE_BIT if self.one_bit else 0, 0, number
        if _HEADER.unpack_from(data) != wanted:
            raise ValueError("the header is of another version, form or number of coefficients")
        at, start, found = _HEADER.size, 0, []
        for chunks, size in self.tensors:
            k, width = min(self.top_k, size), _width(self.top_k, size)
            num_bytes = (chunks * k * width + 7) // 8
            if width:
                offsets = _unpack(data[at : at + num_bytes], chunks * k, width).reshape(chunks, k)
            else:
                offsets = np.broadcast_to(np.arange(k, dtype=np.int64), (chunks, k))
            _check_offsets(offsets, size)
            first = start + np.arange(chunks, dtype=np.int64)[:, None] * size
            found.append((offsets + first).ravel())
            at, start = at + num_bytes, start + chunks * size
        if self.one_bit:
            stop = at + (number + 7) // 8
            values = 1 - 2 * _unpack(data[at:stop], number, 1).astype(np.float32)
            is_empty = np.repeat(_unpack(data[stop:], self._num_chunks, 1) == 1, self._num_sent)
            if (values[is_empty] < 0).any():
                raise ValueError("a chunk of which nothing is sent has a sign")
            values[is_empty] = 0
            self._empty(np.concatenate(found) if found else np.empty(0, np.int64), values)
        else:
            values = np.frombuffer(data, dtype="<f4", offset=at).astype(np.float32)
        if not np.isfinite(values).all():
            raise ValueError("a value is infinite or no number")
        return np.concatenate(found) if found else np.empty(0, np.int64), values

    def _empty(self, places: Any, values: Any) -> Any:
        """Chunks of which nothing is sent, in one bit: bool [chunks].

        Raises:
            ValueError: a value is no sign, or such a chunk names others than its first.
        """
        num_sent = self._num_sent
        ends = np.cumsum(num_sent)
        is_empty = (
            np.add.reduceat(np.abs(values), ends - num_sent) == 0 if len(ends) else num_sent > 0
        )
        of_each = np.repeat(is_empty, num_sent)
        if not (np.abs(values[~of_each]) == 1).all():
            raise ValueError("a value in one bit is neither 1 nor -1")
        sizes = np.concatenate(
            [np.full(chunks, size, np.int64) for chunks, size in self.tensors] or [num_sent]
        )
        firsts = np.repeat(np.cumsum(sizes) - sizes, num_sent)
        ranks = np.arange(len(places)) - np.repeat(ends - num_sent, num_sent)
        if (places[of_each] != (firsts + ranks)[of_each]).any():
            raise ValueError("a chunk of which nothing is sent names others than its first")
        return is_empty


def _width(top_k: int, size: int) -> int:
    """Bits of an offset in a chunk; none where all of it is sent."""
    return 0 if top_k >= size else (size - 1).bit_length()


def _check_offsets(offsets: Any, size: int) -> None:
    if (offsets < 0).any() or (offsets >= size).any():
        raise ValueError("a coefficient lies outside its chunk")
    if (np.diff(offsets, axis=1) <= 0).any():
        raise ValueError("the coefficients of a chunk must ascend, each once")


def _pack(numbers: Any, width: int) -> bytes:
    """Numbers of so many bits each, the lowest first, one after the other; the last byte is filled with 0 bits."""
    whole = numbers.astype("<u4").view(np.uint8).reshape(-1, 4)
    bits = np.unpackbits(whole, axis=1, count=width, bitorder="little")
    return np.packbits(bits.ravel(), bitorder="little").tobytes()


def _unpack(data: bytes, number: int, width: int) -> Any:
    """Unpack the numbers that `_pack` was given: int64 [number]."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if bits[number * width :].any():
        raise ValueError("bits that belong to no coefficient are not 0")
    # Of 16 bits where that is enough: it takes half the memory.
    size = 16 if width <= 16 else 32
    whole = np.zeros((number, size), np.uint8)
    whole[:, :width] = bits[: number * width].reshape(number, width)
    packed = np.packbits(whole.ravel(), bitorder="little")
    return packed.view(f"<u{size // 8}").astype(np.int64)
