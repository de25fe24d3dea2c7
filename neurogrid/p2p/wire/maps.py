"""The msgpack maps of 1.1.0, read strictly and within bounds (`protocol_spec/messages.md`).

Strategy: the reader walks the map itself and lets msgpack build scalars only. A container comes to
be only where a known key asks for one, after its length was checked; the value of an unknown key is
skipped without being built, up to a depth and a number of values. So a few bytes that claim deep or
wide containers cost nothing. Which keys a map has is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgpack

from neurogrid.errors import LocalProtocolError
from neurogrid.p2p.wire.faults import over_limit, violation
from neurogrid.p2p.wire.limits import MAX_DEPTH, MAX_SKIPPED_VALUES
from neurogrid.p2p.wire.messages import Data

__all__ = [
    "Fields",
    "check_span",
    "decode_map",
    "encode_map",
    "printable_line",
    "MAX_SCALAR_BYTES",
    "MAX_U32",
    "MAX_U64",
]

MAX_U32: Final = 2**32 - 1
MAX_U64: Final = 2**64 - 1

# Entries of one map: today's largest has ten.
_MAX_ENTRIES: Final = 64
# Characters of a key: today's longest has twelve.
_MAX_KEY_CHARS: Final = 64
# Bytes of one string under a known key, and of a byte string unless the payload says otherwise:
# 1,024 characters of four bytes.
MAX_SCALAR_BYTES: Final = 4096

_NIL: Final = b"\xc0"
# What maps and arrays begin with.
_MAPS: Final = frozenset({*range(0x80, 0x90), 0xDE, 0xDF})
_ARRAYS: Final = frozenset({*range(0x90, 0xA0), 0xDC, 0xDD})

# One for all: to make one takes longer than to write a small map. It runs without letting other threads in.
_PACKER: Final = msgpack.Packer(use_bin_type=True)

Value = int | float | str | bytes | bool | None | list[int | float | str | bytes | bool | None]


def encode_map(entries: dict[str, object]) -> bytes:
    """The map in the order given, each value in its smallest form.

    Raises:
        LocalProtocolError: a value has no msgpack form (an integer past 64 bits, another type).
    """
    try:
        packed: bytes = _PACKER.pack(entries)
    except (ValueError, TypeError, OverflowError) as error:
        raise LocalProtocolError(f"not to be written as msgpack: {error}") from error
    return packed


def decode_map(
    data: Data,
    *,
    what: str,
    max_bytes: int,
    arrays: Mapping[str, int],
    known: frozenset[str],
    max_binary: int = MAX_SCALAR_BYTES,
) -> tuple[Fields, int]:
    """Read the map at the start of `data`.

    Args:
        data: the map and what follows it.
        what: the name of the payload, for the error's text.
        max_bytes: the largest map.
        arrays: the known keys that hold an array, with the largest number of items of each.
        known: all known keys; others are skipped.
        max_binary: the longest byte string under a known key, in bytes.

    Returns:
        The known entries, and how many bytes the map took.

    Raises:
        RemoteProtocolError: not msgpack, cut, no map, a key twice or no string
            (PROTOCOL_VIOLATION), or over a bound (LIMIT_EXCEEDED).
    """
    head = memoryview(data)[:max_bytes]
    unpacker = msgpack.Unpacker(
        raw=False,
        max_buffer_size=max(len(head), 1),
        max_str_len=MAX_SCALAR_BYTES,
        max_bin_len=max_binary,
        max_array_len=0,
        max_map_len=0,
        max_ext_len=0,
    )
    values: dict[str, Value] = {}
    seen: set[str] = set()
    skipped = 0
    try:
        unpacker.feed(head)
        num_entries = unpacker.read_map_header()
        if num_entries > _MAX_ENTRIES:
            raise over_limit(f"{what} has {num_entries} entries; the limit is {_MAX_ENTRIES}")
        for _ in range(num_entries):
            key = unpacker.unpack()
            if not isinstance(key, str) or len(key) > _MAX_KEY_CHARS or key in seen:
                raise violation(f"{what} has a key that is no short string, or has it twice")
            seen.add(key)
            if key not in known:
                skipped += _skip(unpacker, head, MAX_SKIPPED_VALUES - skipped, what)
            elif key in arrays and bytes(head[unpacker.tell() :][:1]) != _NIL:
                values[key] = _read_array(unpacker, f"{key} of {what}", arrays[key])
            else:
                values[key] = unpacker.unpack()
        return Fields(what, values), unpacker.tell()
    except msgpack.OutOfData as error:
        if len(data) > max_bytes:
            raise over_limit(f"{what} is longer than its limit of {max_bytes} bytes") from error
        raise violation(f"{what} is cut short") from error
    except (ValueError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        raise violation(f"{what} is not a well-formed map: {reason}") from error


def _skip(unpacker: msgpack.Unpacker, head: memoryview, max_values: int, what: str) -> int:
    """Pass over one value and what is in it; returns how many values that were."""
    num_values = 0
    left = [1]  # of the value itself, then of each container that it is in
    while left:
        if not left[-1]:
            left.pop()
            continue
        left[-1] -= 1
        num_values += 1
        if num_values > max_values:
            raise over_limit(
                f"{what} has more than {MAX_SKIPPED_VALUES} values under keys that are not known"
            )
        at = unpacker.tell()
        first = head[at] if at < len(head) else None
        if first in _MAPS:
            left.append(2 * unpacker.read_map_header())
        elif first in _ARRAYS:
            left.append(unpacker.read_array_header())
        else:
            unpacker.skip()
        if len(left) > MAX_DEPTH + 1:
            raise over_limit(f"{what} is nested deeper than {MAX_DEPTH} levels")
    return num_values


def _read_array(unpacker: msgpack.Unpacker, what: str, max_items: int) -> Value:
    num_items = unpacker.read_array_header()
    if num_items > max_items:
        raise over_limit(f"{what} has {num_items} items; the limit is {max_items}")
    return [unpacker.unpack() for _ in range(num_items)]


class Fields:
    """The entries of a decoded map, and typed access to some of them.

    Each getter raises RemoteProtocolError (PROTOCOL_VIOLATION) when the entry is absent, of another
    type or out of its range. `forms` has more.

    Attributes:
        what: the name of the map, for the error's text.
    """

    def __init__(self, what: str, values: Mapping[str, Value]) -> None:
        self.what = what
        self._values = values

    def has(self, key: str) -> bool:
        """Whether the entry is there, and not nil."""
        return self._values.get(key) is not None

    def get(self, key: str) -> Value:
        """The entry, whatever it is."""
        if key not in self._values:
            raise violation(f"{self.what} has no {key}")
        return self._values[key]

    def uint(self, key: str, largest: int) -> int:
        """An integer from 0 to `largest`."""
        return self._check_uint(key, self.get(key), largest)

    def uints(self, key: str, largest: int) -> tuple[int, ...]:
        """An array of integers from 0 to `largest`."""
        value = self.get(key)
        if not isinstance(value, list):
            raise violation(f"{key} of {self.what} must be an array")
        return tuple(self._check_uint(key, item, largest) for item in value)

    def optional_uints(self, key: str, largest: int) -> tuple[int, ...]:
        """The same; empty where the entry is absent, nil or empty."""
        return self.uints(key, largest) if self.has(key) else ()

    def text(self, key: str, max_chars: int) -> str:
        """A string of at most `max_chars` characters."""
        value = self.get(key)
        if not isinstance(value, str) or len(value) > max_chars:
            raise violation(
                f"{key} of {self.what} must be a string of at most {max_chars} characters"
            )
        return value

    def span(self, start_key: str, stop_key: str, max_stop: int) -> tuple[int, int]:
        """Two integers with 0 <= start < stop <= max_stop."""
        start, stop = self.uint(start_key, max_stop), self.uint(stop_key, max_stop)
        check_span(self.what, start, stop)
        return start, stop

    def _check_uint(self, key: str, value: Value, largest: int) -> int:
        # A boolean is an int in Python, and not on the wire.
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
            raise violation(f"{key} of {self.what} must be an integer from 0 to {largest}")
        return value


def check_span(what: str, start: int, stop: int) -> None:
    """Check that layers [start, stop) are any.

    Raises:
        RemoteProtocolError: they are not (PROTOCOL_VIOLATION).
    """
    if start >= stop:
        raise violation(f"{what} names layers {start} to {stop}, which is no range")


def printable_line(text: str) -> str:
    """The text as one line that is safe to print.

    White space becomes a space, and what a terminal would act on U+FFFD. The number
    of characters stays the same.
    """
    return "".join(
        c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text
    )
