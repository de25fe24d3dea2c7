"""Maps as tables of their entries: what is written and what is read of each is said once.

A form says what an entry may be, a `Map` which entries there are, as the tables of the specification do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.limits import DEFAULT_LIMITS
from neurogrid.p2p.wire.maps import (
    MAX_SCALAR_BYTES,
    MAX_U32,
    Fields,
    decode_map,
    encode_map,
    printable_line,
)
from neurogrid.p2p.wire.messages import Data

__all__ = [
    "BOOLEAN",
    "Form",
    "Map",
    "array",
    "binary",
    "fixed",
    "line",
    "nullable",
    "one_of",
    "optional",
    "seconds",
    "text",
    "uint",
]

# Characters of a name that is one of a few.
_MAX_NAME_CHARS: Final = 16


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an entry.

    Attributes:
        must: the same in words, for the text of an error.
        fits: whether a value is that; of an array, each item.
        names: the strings that it may be; None for all.
        max_items: of an array; None where it is one value.
        max_bytes: of a byte string.
        is_optional: whether it may be absent, or nil.
        absent: what it is then.
        is_written: whether that is written all the same.
        read: what becomes of it when it is read.
        write: what becomes of it when it is written.
    """

    must: str
    fits: Callable[[Any], bool]
    names: frozenset[str] | None = None
    max_items: int | None = None
    max_bytes: int = 0
    is_optional: bool = False
    absent: object = None
    is_written: bool = False
    read: Callable[[Any], Any] = _same
    write: Callable[[Any], Any] = _same

    def take(self, fields: Fields, key: str) -> Any:
        """The entry of a map.

        Raises:
            RemoteProtocolError: it is absent, or not what it must be (PROTOCOL_VIOLATION).
        """
        if self.is_optional and not fields.has(key):
            return self.absent
        value = fields.get(key)
        if self.max_items is None:
            self._check(value, fields.what, key)
            return self.read(value)
        if not isinstance(value, list):
            raise violation(f"{key} of {fields.what} must be an array")
        for item in value:
            self._check(item, fields.what, key)
        return self.read(tuple(value))

    def _check(self, value: object, what: str, key: str) -> None:
        if not self.fits(value):
            raise violation(f"{key} of {what} must be {self.must}")
        if self.names is not None and value not in self.names:
            raise violation(f"unknown {key} {value!r} in {what}")


BOOLEAN: Final = Form("a boolean", lambda value: isinstance(value, bool), absent=False)


def uint(largest: int, *, smallest: int = 0) -> Form:
    """An integer from `smallest` to `largest`."""
    # A boolean is an int in Python, and not on the wire.
    return Form(
        f"an integer from {smallest} to {largest}",
        lambda value: type(value) is int and smallest <= value <= largest,
        absent=0,
    )


def seconds(largest: float) -> Form:
    """A finite number of seconds from 0 to `largest`."""
    return Form(
        f"from 0 to {largest} seconds",
        lambda value: type(value) in (int, float) and 0 <= value <= largest,
        read=float,
        write=float,
    )


def text(max_chars: int, *, smallest: int = 0) -> Form:
    """A string of `smallest` to `max_chars` characters."""
    return Form(
        f"a string of {_between(smallest, max_chars)} characters",
        lambda value: isinstance(value, str) and smallest <= len(value) <= max_chars,
        absent="",
    )


def line(max_chars: int, *, smallest: int = 0) -> Form:
    """The same, read as one line that is safe to print."""
    return replace(text(max_chars, smallest=smallest), read=printable_line)


def one_of(names: Iterable[str]) -> Form:
    """One of a few strings."""
    return replace(text(_MAX_NAME_CHARS), names=frozenset(names))


def binary(largest: int, *, smallest: int = 0) -> Form:
    """A byte string of `smallest` to `largest` bytes."""
    return Form(
        f"{_between(smallest, largest)} bytes",
        lambda value: isinstance(value, bytes) and smallest <= len(value) <= largest,
        max_bytes=largest,
        absent=b"",
    )


def fixed(num_bytes: int) -> Form:
    """A byte string of so many bytes."""
    return binary(num_bytes, smallest=num_bytes)


def array(form: Form, max_items: int) -> Form:
    """An array of at most `max_items` values; a tuple here."""
    return replace(form, max_items=max_items, absent=(), write=list)


def optional(form: Form, *, is_written: bool = False) -> Form:
    """The same, or nothing: zero, or empty; that is written if `is_written`."""
    return replace(form, is_optional=True, is_written=is_written)


def nullable(form: Form) -> Form:
    """The same, or None."""
    return replace(form, is_optional=True, absent=None)


def _between(smallest: int, largest: int) -> str:
    if smallest == largest:
        return str(largest)
    return f"{smallest} to {largest}" if smallest else f"at most {largest}"


class Map:
    """The table of one kind of map.

    Args:
        what: its name, for the text of errors.
        forms: of its entries, by key, in the order in which they are written; other keys are skipped.
        max_bytes: the largest map.
        version: what stands under the key `v`, before all others; None for no such key.
    """

    def __init__(
        self,
        what: str,
        forms: Mapping[str, Form],
        *,
        max_bytes: int = DEFAULT_LIMITS.control,
        version: int | None = None,
    ) -> None:
        self.what = what
        self._forms = forms
        self._max_bytes = max_bytes
        self._version = version
        self._known = frozenset(forms) if version is None else frozenset(forms) | {"v"}
        self._arrays = {key: f.max_items for key, f in forms.items() if f.max_items is not None}
        self._max_binary = max(MAX_SCALAR_BYTES, *(form.max_bytes for form in forms.values()))

    def encode(self, values: Iterable[object]) -> bytes:
        """The map with these values, one for each form.

        Raises:
            LocalProtocolError: a value has no msgpack form. Whether each is what it must be, `decode` says.
        """
        entries: dict[str, object] = {} if self._version is None else {"v": self._version}
        for (key, form), value in zip(self._forms.items(), values, strict=True):
            if not form.is_optional or form.is_written or value != form.absent:
                entries[key] = form.write(value)
        return encode_map(entries)

    def decode(self, data: Data) -> list[Any]:
        """The values of a map, one for each form.

        Raises:
            RemoteProtocolError: as `find`, or an entry is absent, or not what it must be (PROTOCOL_VIOLATION).
        """
        fields = self.find(data)
        return [form.take(fields, key) for key, form in self._forms.items()]

    def find(self, data: Data) -> Fields:
        """The entries of a map, which must fill `data`.

        Raises:
            RemoteProtocolError: as `decode_map`, or bytes follow, or it is of another version (PROTOCOL_VIOLATION).
        """
        fields, taken = decode_map(
            data,
            what=self.what,
            max_bytes=self._max_bytes,
            arrays=self._arrays,
            known=self._known,
            max_binary=self._max_binary,
        )
        if taken != len(data):
            raise violation(f"{len(data) - taken} bytes follow {self.what}")
        if self._version is not None:
            version = fields.uint("v", MAX_U32)
            if version != self._version:
                raise violation(
                    f"{self.what} is of version {version}; this program reads version {self._version}"
                )
        return fields
