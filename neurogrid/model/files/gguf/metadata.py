"""The keys of a GGUF file, read by type and within bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, TypeVar

from neurogrid.errors import CheckpointError
from neurogrid.model.files.gguf.header import Value

__all__ = ["Metadata"]

_T = TypeVar("_T")
# A size, or a token's id, which is the largest where there is none in older files.
_MAX_COUNT: Final = 2**32 - 1


class Metadata:
    """The values of a file's header.

    A key that begins with a full stop is one of the architecture: `.block_count` is `llama.block_count` in a Llama.

    Args:
        values: by key.
        where: what to call the file in an error.

    Attributes:
        where: as given.
        architecture: the name of the model's.

    Raises:
        CheckpointError: no architecture is named. So do all methods where a value is there, and no such thing.
    """

    def __init__(self, values: Mapping[str, Value], where: str) -> None:
        self._values = values
        self._asked: set[str] = set()
        self.where = where
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return self._name(key) in self._values

    def unread(self) -> dict[str, Value]:
        """Values of the architecture that nothing has asked for, by key as the other methods take it."""
        prefix = f"{self.architecture}."
        return {
            key.removeprefix(self.architecture): value
            for key, value in self._values.items()
            if key.startswith(prefix) and key not in self._asked
        }

    def count(self, key: str, default: int | None = None) -> int:
        """A size or a token's id, from 0 on; of an array whose elements are equal, one of those."""
        value = self._value(key, default)
        if isinstance(value, tuple) and value and all(each == value[0] for each in value):
            value = value[0]
        if isinstance(value, tuple):
            raise self._fault(key, "differs between layers, which is not read")
        if type(value) is not int or not 0 <= value <= _MAX_COUNT:
            raise self._fault(key, "is no size")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A count from 1 on."""
        value = self.count(key, default)
        if not value:
            raise self._fault(key, "is 0")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._value(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise self._fault(key, "is no finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._fault(key, "is neither true nor false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._fault(key, "is no text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """An array of texts; empty where there is none."""
        return self._array(key, str)

    def counts(self, key: str) -> tuple[int, ...]:
        """An array of integers; empty where there is none."""
        return self._array(key, int)

    def numbers(self, key: str) -> tuple[float, ...]:
        """An array of floats, finite or not; empty where there is none."""
        return self._array(key, float)

    def _array(self, key: str, of: type[_T]) -> tuple[_T, ...]:
        value = self._value(key, ())
        if not isinstance(value, tuple):
            raise self._fault(key, "is no array of these")
        found = tuple(each for each in value if type(each) is of)
        if len(found) < len(value):
            raise self._fault(key, f"has an element that is no {of.__name__}")
        return found

    def _name(self, key: str) -> str:
        return self.architecture + key if key.startswith(".") else key

    def _value(self, key: str, default: Value | None) -> Value:
        self._asked.add(self._name(key))
        value = self._values.get(self._name(key), default)
        if value is None:
            raise CheckpointError(f"{self.where}: lacks {self._name(key)}")
        return value

    def _fault(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self._name(key)} {what}")
