"""Frames between the two processes of a trainer: maps in msgpack, each behind its length, over pipes.

What is long of a map, as a tensor, follows it as it lies in memory, and is read into memory of its own: it is copied
nowhere on the way. Neither side unpacks anything but plain data, and none that is longer than a bound.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

import msgpack

__all__ = ["LENGTH_BYTES", "MAX_FRAME_BYTES", "pack", "parse_length", "unpack"]

MAX_FRAME_BYTES: Final = 320 * 1024**2
"""A hidden state, as large as it may be on the network; a round's batches, or a layout, are far less."""

_LENGTH = struct.Struct("!I")
LENGTH_BYTES: Final = _LENGTH.size
# Bytes from which on a value follows its map; the code of what stands for it there, with its length.
_LONG: Final = 4096
_FOLLOWS: Final = 1


def pack(told: Mapping[str, Any]) -> list[bytes | memoryview]:
    """A frame, in pieces that go out one behind the other; those behind the first are the memory of what is told.

    Raises:
        ValueError: it is longer than a frame may be.
    """
    long: list[memoryview] = []
    head: bytes = msgpack.packb(_without_long(told, long))
    total = len(head) + sum(map(len, long))
    if total > MAX_FRAME_BYTES:
        raise ValueError(f"{total} bytes at once for a trainer: at most {MAX_FRAME_BYTES}")
    return [_LENGTH.pack(len(head)) + head, *long]


def _without_long(value: Any, long: list[memoryview]) -> Any:
    """Return a value of maps with a mark for each of its values that is long; those go to the end of `long`."""
    if isinstance(value, Mapping):
        return {key: _without_long(each, long) for key, each in value.items()}
    if not isinstance(value, (bytes, bytearray, memoryview)):
        return value
    data = memoryview(value).cast("B")
    if len(data) < _LONG:
        return value
    long.append(data)
    return msgpack.ExtType(_FOLLOWS, _LENGTH.pack(len(data)))


def parse_length(prefix: bytes | bytearray) -> int:
    """The number of bytes of a frame's map, which follows the first `LENGTH_BYTES`.

    Raises:
        ValueError: more than a frame may have.
    """
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return int(length)


def unpack(data: bytes | bytearray) -> tuple[dict[str, Any], list[bytearray]]:
    """Unpack a frame's map.

    Returns:
        It, and those of its values that are long, each as many zeros: they follow, and are to be read into them.

    Raises:
        ValueError: it is none, or too much would follow.
    """
    long: list[bytearray] = []

    def make_room(code: int, length: bytes) -> bytearray:
        (size,) = _LENGTH.unpack(length)
        if code != _FOLLOWS or len(data) + sum(map(len, long)) + size > MAX_FRAME_BYTES:
            raise ValueError(f"{size} more bytes in a frame")
        long.append(bytearray(size))
        return long[-1]

    try:
        told = msgpack.unpackb(data, ext_hook=make_room)
    except (ValueError, struct.error, msgpack.UnpackException) as exc:
        raise ValueError("a frame that is no msgpack") from exc
    if not isinstance(told, dict):
        raise ValueError("a frame that is no map")
    return told, long
