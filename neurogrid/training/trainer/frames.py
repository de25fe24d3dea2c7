"""Frames between the two processes of a trainer: maps in msgpack, each behind its length, over pipes.

Neither side unpacks anything but plain data, and none that is longer than a bound.
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


def pack(told: Mapping[str, Any]) -> bytes:
    """A frame.

    Raises:
        ValueError: it is longer than a frame may be.
    """
    data: bytes = msgpack.packb(dict(told))
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(data)} bytes at once for a trainer: at most {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(data)) + data


def parse_length(prefix: bytes | bytearray) -> int:
    """The number of bytes that follow the first `LENGTH_BYTES` of a frame.

    Raises:
        ValueError: more than a frame may have.
    """
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return int(length)


def unpack(data: bytes | bytearray) -> dict[str, Any]:
    """Unpack a frame.

    Raises:
        ValueError: it is none.
    """
    try:
        told = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as exc:
        raise ValueError("a frame that is no msgpack") from exc
    if not isinstance(told, dict):
        raise ValueError("a frame that is no map")
    return told
