"""Objects of JSON, read key by key: each asked for once, and none besides. Pure."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, Final, TypeVar

__all__ = ["MAX_ITEMS", "Fields", "time_json", "time_of"]

_Item = TypeVar("_Item")

# Of an array: more than members and those that wait come to.
MAX_ITEMS: Final = 65_536


def time_json(value: float) -> str:
    """A time as the 16 hexadecimal digits of its binary64, which read as the same bits everywhere."""
    return struct.pack(">d", value).hex()


def time_of(value: object) -> float:
    """Read a time that `time_json` wrote.

    Raises:
        ValueError: it is none, or not finite.
    """
    if not isinstance(value, str) or len(value) != 16:
        raise ValueError("a time is 16 hexadecimal digits")
    data = bytes.fromhex(value)
    if len(data) != struct.calcsize(">d"):  # spaces between digits are none
        raise ValueError("a time is 16 hexadecimal digits")
    (found,) = struct.unpack(">d", data)
    if not math.isfinite(found):
        raise ValueError("a time is not finite")
    return float(found)


class Fields:
    """Fields of an object of JSON.

    Raises:
        ValueError: from each method, where the value is not there or not what it must be.
    """

    def __init__(self, value: object) -> None:
        if not isinstance(value, dict):
            raise ValueError("it is no object")
        self._value: dict[str, Any] = dict(value)

    def end(self) -> None:
        """Check that no field is left that nobody asked for."""
        if self._value:
            raise ValueError(f"it has {str(min(map(str, self._value)))[:40]!r}, which is not known")

    def has(self, key: str) -> bool:
        """Whether something stands under a key that may be missing."""
        return key in self._value

    def take(self, key: str) -> Any:
        """Take the value under a key, whatever it is."""
        if key not in self._value:
            raise ValueError(f"it has no {key}")
        return self._value.pop(key)

    def number(self, key: str, largest: int = 2**64 - 1) -> int:
        """An integer from 0."""
        value = self.take(key)
        if type(value) is not int or not 0 <= value <= largest:
            raise ValueError(f"{key} is no integer from 0 to {largest}")
        return value

    def text(self, key: str, most: int = 1024) -> str:
        """Characters."""
        value = self.take(key)
        if not isinstance(value, str) or len(value) > most:
            raise ValueError(f"{key} is no text of at most {most} characters")
        return value

    def binary(self, key: str, smallest: int, most: int | None = None) -> bytes:
        """Bytes, in hex: so many, or from so many to so many."""
        most = smallest if most is None else most
        value = self.text(key, 2 * most)
        try:
            found = bytes.fromhex(value)
        except ValueError:
            raise ValueError(f"{key} is not in hex") from None
        if len(found) < smallest or found.hex() != value:
            raise ValueError(f"{key} is not {smallest} to {most} bytes in hex")
        return found

    def time(self, key: str) -> float:
        """Seconds, as `time_json` writes them."""
        return time_of(self.take(key))

    def array(self, key: str, read: Callable[[Any], _Item]) -> tuple[_Item, ...]:
        """Each of an array, read."""
        value = self.take(key)
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            raise ValueError(f"{key} is no array of at most {MAX_ITEMS}")
        return tuple(read(item) for item in value)
