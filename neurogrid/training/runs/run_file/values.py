"""The kinds of values that a run file has: what is allowed, in words and as a check, and how each is written."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

__all__ = [
    "BOOLEAN",
    "Kind",
    "NotAllowed",
    "Table",
    "array",
    "number",
    "one_number_of",
    "one_of",
    "optional",
    "pattern",
    "shown",
    "size",
    "text",
    "whole",
    "written",
]

MAX_WHOLE: Final = 10**15
"""No number of samples, tokens or bytes in a run file is larger, so that none overflows what it is multiplied into."""

MAX_TEXT_CHARS: Final = 1024
"""Characters of a string: a path may be as long, on the wire and on disk."""

# Characters of a value that an error repeats.
_MAX_SHOWN_CHARS: Final = 60
_UNITS: Final = {
    "": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(("", "k", "M", "G", "T"))},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(("", "Ki", "Mi", "Gi", "Ti"))},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


class NotAllowed(Exception):
    """A value is not of its kind; whoever asked for it says what that is, where this one does not."""


class Table(ABC):
    """A value that is a table."""

    @abstractmethod
    def written(self) -> str:
        """Write it as TOML has it, in one line."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a value: what it may be.

    Attributes:
        says: the same in words, behind "is".
        read: what becomes of a value as TOML has it. Raises: NotAllowed.
    """

    says: str
    read: Callable[[object], Any]


def whole(smallest: int, largest: int = MAX_WHOLE) -> Kind:
    """An integer from `smallest` to `largest`."""

    def read(value: object) -> int:
        # A boolean is an int in Python, and not in TOML.
        if type(value) is not int or not smallest <= value <= largest:
            raise NotAllowed
        return value

    upper = "10^15" if largest == MAX_WHOLE else str(largest)
    return Kind(f"a whole number from {smallest} to {upper}", read)


def number(says: str, fits: Callable[[float], bool]) -> Kind:
    """A finite float, or an integer in its place."""

    def read(value: object) -> float:
        if type(value) not in (int, float):
            raise NotAllowed
        try:
            taken = float(value)  # type: ignore[arg-type]
        except OverflowError as exc:
            raise NotAllowed from exc
        if not math.isfinite(taken) or not fits(taken):
            raise NotAllowed
        return taken

    return Kind(f"a number {says}", read)


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise NotAllowed
    return value


BOOLEAN: Final = Kind("true or false", _boolean)


def text(says: str, *, is_needed: bool = False) -> Kind:
    """A string on one line; `is_needed` refuses the empty one."""

    def read(value: object) -> str:
        if not isinstance(value, str) or not value.isprintable() or len(value) > MAX_TEXT_CHARS:
            raise NotAllowed
        if is_needed and not value:
            raise NotAllowed
        return value

    return Kind(says, read)


def pattern(says: str, expression: str) -> Kind:
    """A string that a regular expression matches as a whole."""
    compiled = re.compile(expression, re.ASCII)

    def read(value: object) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise NotAllowed
        return value

    return Kind(says, read)


def one_of(*names: str) -> Kind:
    """One of a few strings."""

    def read(value: object) -> str:
        if not isinstance(value, str) or value not in names:
            raise NotAllowed
        return value

    return Kind(_listed([f'"{name}"' for name in names]), read)


def one_number_of(*numbers: int) -> Kind:
    """One of a few integers."""

    def read(value: object) -> int:
        if type(value) is not int or value not in numbers:
            raise NotAllowed
        return value

    return Kind(_listed([str(number) for number in numbers]), read)


def size() -> Kind:
    """Bytes: an integer, or a string with a unit, as "8GiB"."""

    def read(value: object) -> int:
        if isinstance(value, str):
            found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([A-Za-z]{0,3})", value)
            if found is None or found[2] not in _UNITS:
                raise NotAllowed
            value = int(float(found[1]) * _UNITS[found[2]])
        if type(value) is not int or not 0 <= value <= MAX_WHOLE:
            raise NotAllowed
        return value

    return Kind('bytes, from 0 to 10^15, or with a unit, as "8GiB"', read)


def array(item: Kind, says: str, *, fits: Callable[[tuple[Any, ...]], bool]) -> Kind:
    """An array of values of one kind, which becomes a tuple."""

    def read(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise NotAllowed
        taken = tuple(item.read(each) for each in value)
        if not fits(taken):
            raise NotAllowed
        return taken

    return Kind(says, read)


def optional(kind: Kind) -> Kind:
    """The same, or None, which is how a key that is not there is had."""
    return replace(kind, read=lambda value: None if value is None else kind.read(value))


def shown(value: object) -> str:
    """A value as TOML has it, in one line; cut off where it is long."""
    told = written(value)
    line = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in told
    )
    if len(line) <= _MAX_SHOWN_CHARS:
        return line
    return f"{line[:_MAX_SHOWN_CHARS]}…"


def written(value: object) -> str:
    """A value as TOML has it; a table, and a number that is longer than any that is allowed, in words."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list | tuple):
        # None that is allowed has arrays in it, and others may have them a thousand deep.
        items = ("[…]" if isinstance(each, list | tuple) else written(each) for each in value)
        return f"[{', '.join(items)}]"
    if isinstance(value, Table):
        return value.written()
    if isinstance(value, dict):
        return "a table"
    if type(value) is int and abs(value) > MAX_WHOLE**4:
        return "a number of so many digits"
    return str(value)


def _listed(names: list[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
