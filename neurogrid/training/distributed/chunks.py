"""The cut of a tensor: into parts, one for each rank, and into chunks, one for each post. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

__all__ = ["CHUNK_BYTES", "Span", "chunks_of", "parts_of"]

CHUNK_BYTES: Final = 1024 * 1024
"""Bytes of a chunk: a multiple of every item size, a fraction of a window, and a millisecond of a fast network."""

Span = tuple[int, int]
"""Bytes [start, stop) of a tensor."""


def chunks_of(start: int, stop: int) -> Sequence[Span]:
    """The chunks of bytes [start, stop) of a tensor, in order; one that is empty where there are no bytes."""
    if start == stop:
        return [(start, stop)]
    return [(at, min(at + CHUNK_BYTES, stop)) for at in range(start, stop, CHUNK_BYTES)]


def parts_of(num_items: int, item_bytes: int, num_parts: int) -> Sequence[Span]:
    """The parts of a tensor: bytes that begin and end between items, and differ by one item at most in length."""
    cuts = [num_items * part // num_parts * item_bytes for part in range(num_parts + 1)]
    return list(pairwise(cuts))
