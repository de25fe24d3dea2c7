"""Forms that several messages of a run have, and their bounds.

Source: protocol_spec/training/runs.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from neurogrid.p2p.wire.blob_id import BLOB_ID_BYTES
from neurogrid.p2p.wire.forms import Form, array, fixed, optional, uint
from neurogrid.p2p.wire.limits import MAX_ADDRESS_CHARS
from neurogrid.p2p.wire.maps import MAX_U64
from neurogrid.training.wire.forms import number

__all__ = [
    "ADDRESS",
    "ADDRESSES",
    "BLOB",
    "COUNT",
    "LEASE",
    "MAX_CONFIG_BYTES",
    "MAX_GPU_CHARS",
    "MAX_LEASE_SECONDS",
    "MAX_OWN_ADDRESSES",
    "MAX_RUN_FILE_BYTES",
    "PRICE",
    "RUN",
    "RUN_ID_BYTES",
    "UNTIL",
    "long_text",
    "visible",
]

RUN_ID_BYTES: Final = 16
"""Bytes of the id of a run, drawn at random by its leader."""

MAX_OWN_ADDRESSES: Final = 16
"""Addresses of one peer: some interfaces, each over TCP and QUIC, and relays."""

MAX_GPU_CHARS: Final = 64
"""Characters of the name of a GPU."""

MAX_LEASE_SECONDS: Final = 3600.0
"""Seconds of a lease: what a dead leader may keep a worker from others."""

MAX_RUN_FILE_BYTES: Final = 64 * 1024
"""Bytes of a run file: one with every key has two or three thousand."""

MAX_CONFIG_BYTES: Final = 1024 * 1024
"""Bytes of a model's config: the largest in circulation has less."""

_MAX_PRICE: Final = 1e12


def long_text(max_bytes: int, *, smallest: int = 0) -> Form:
    """A text of `smallest` to `max_bytes` bytes of UTF-8, in a byte string: strings of a map are shorter."""
    return Form(
        f"{smallest} to {max_bytes} bytes of UTF-8",
        lambda value: (
            isinstance(value, bytes) and smallest <= len(value) <= max_bytes and _is_utf8(value)
        ),
        max_bytes=max_bytes,
        absent="",
        read=lambda value: value.decode(),
        write=lambda value: value.encode("utf-8", "surrogatepass"),
    )


def visible(max_chars: int) -> Form:
    """A string of 1 to `max_chars` visible ASCII characters: of others, as many may not fit a message."""
    return Form(
        f"a string of 1 to {max_chars} visible ASCII characters",
        lambda value: (
            isinstance(value, str)
            and 1 <= len(value) <= max_chars
            and all("!" <= char <= "~" for char in value)
        ),
        absent="",
    )


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


RUN: Final = fixed(RUN_ID_BYTES)
LEASE: Final = uint(MAX_U64, smallest=1)
COUNT: Final = optional(uint(MAX_U64))
BLOB: Final = fixed(BLOB_ID_BYTES)
ADDRESS: Final = visible(MAX_ADDRESS_CHARS)
ADDRESSES: Final = optional(array(ADDRESS, MAX_OWN_ADDRESSES))
PRICE: Final = number(0.0, _MAX_PRICE)
UNTIL: Final = replace(
    number(0.0, MAX_LEASE_SECONDS),
    must=f"above 0 and at most {MAX_LEASE_SECONDS:g} seconds",
    fits=lambda value: type(value) in (int, float) and 0 < value <= MAX_LEASE_SECONDS,
)
