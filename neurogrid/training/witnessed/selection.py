"""Trainers, auditors and witnesses of a round: chosen by its seed, alike by everybody. Pure.

Source: protocol_spec/training/witnessed.md, "Selection".
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Final

__all__ = ["committee", "order", "quorum", "witnesses"]

_DOMAIN: Final = b"neurogrid order 1\0"
_COMMITTEE: Final = "committee"
_WITNESSES: Final = "witnesses"


def order(seed: bytes, salt: str, seats: Iterable[int]) -> tuple[int, ...]:
    """Seats in an order that nobody could know before the seed was drawn.

    Args:
        seed: of the round, 32 bytes.
        salt: what the order is for: another salt gives another order.
        seats: u32 each, in any order, none twice.
    """
    start = hashlib.sha256(_DOMAIN + salt.encode() + b"\0" + seed)

    def key(seat: int) -> tuple[bytes, int]:
        found = start.copy()
        found.update(struct.pack("<I", seat))
        return found.digest(), seat

    return tuple(sorted(seats, key=key))


def committee(
    seed: bytes, seats: Iterable[int], auditors: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Trainers and auditors of a round, each in the committee's order. One trains, however many are to audit."""
    ordered = order(seed, _COMMITTEE, seats)
    num_trainers = max(len(ordered) - auditors, min(1, len(ordered)))
    return ordered[:num_trainers], ordered[num_trainers:]


def witnesses(seed: bytes, seats: Iterable[int], number: int) -> tuple[int, ...]:
    """The witnesses of a round, in their order: so many, or all where that is 0 or more than there are."""
    ordered = order(seed, _WITNESSES, seats)
    return ordered[:number] if number else ordered


def quorum(number: int) -> int:
    """Witnesses, of so many, that must say a thing for it to count: 1 of 1, 2 of 2, 2 of 3, then two thirds,
    rounded down."""
    return min(number, 2) if number < 3 else 2 * number // 3
