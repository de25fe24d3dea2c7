"""Bloom filters: what a witness has, in 1,024 bits. Pure.

A filter says of what is in it that it is, always; and of something else that it is, now and then. Each witness has a
salt of its own for each round, so that filters of several witnesses are not wrong about the same thing.

Source: protocol_spec/training/witnessed.md, "Filters".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

__all__ = ["FILTER_BYTES", "NUM_HASHES", "BloomFilter"]

FILTER_BYTES: Final = 128
NUM_HASHES: Final = 8
_DOMAIN: Final = b"neurogrid filter 1\0"
_NUM_BITS: Final = 8 * FILTER_BYTES


class BloomFilter:
    """1,024 bits, of which each item sets at most 8.

    Args:
        salt: the same for who fills a filter and who reads it.
        data: 128 bytes that another filter gave; none for an empty one.

    Attributes:
        salt: as given.

    Raises:
        ValueError: data has another length.
    """

    def __init__(self, salt: bytes, data: bytes = bytes(FILTER_BYTES)) -> None:
        if len(data) != FILTER_BYTES:
            raise ValueError(f"a filter has {FILTER_BYTES} bytes, not {len(data)}")
        self.salt = salt
        self._start = hashlib.sha256(_DOMAIN + salt + b"\0")
        self._bits = int.from_bytes(data, "little")

    @classmethod
    def of(cls, salt: bytes, items: Iterable[bytes]) -> BloomFilter:
        """A filter with these items and no others."""
        found = cls(salt)
        for item in items:
            found.add(item)
        return found

    def add(self, item: bytes) -> None:
        """Put an item in."""
        self._bits |= self._mask(item)

    def __contains__(self, item: bytes) -> bool:
        mask = self._mask(item)
        return self._bits & mask == mask

    def __bytes__(self) -> bytes:
        return self._bits.to_bytes(FILTER_BYTES, "little")

    @property
    def num_set(self) -> int:
        """Bits that are set."""
        return self._bits.bit_count()

    def _mask(self, item: bytes) -> int:
        found = self._start.copy()
        found.update(item)
        words = int.from_bytes(found.digest()[: 2 * NUM_HASHES], "little")
        mask = 0
        for place in range(NUM_HASHES):
            mask |= 1 << ((words >> 16 * place) % _NUM_BITS)
        return mask
