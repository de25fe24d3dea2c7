"""Drawing of claims to compute again, and of auditors, by a seed unknown when the claims were made. Pure.

The seed is that of the round after the claims': whoever claims cannot know whether, nor by whom, it will be looked at.
Each claim of a round is as likely as any other, and nobody audits itself.

Source: protocol_spec/training/checks.md, "Drawing".
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from neurogrid.training.checks.claims import DIGEST_BYTES

__all__ = [
    "Audit",
    "draw_audits",
    "draw_measures",
    "probability_of_detection",
    "rounds_to_detection",
]

_DOMAIN: Final = b"neurogrid/checks/1/draw\0"
_CLAIM, _SHARE, _AUDITOR, _WATCHED = b"claim", b"share", b"auditor", b"watched"
_WORTH, _MEASURE = b"worth", b"neurogrid/checks/1/measure\0"


@dataclass(frozen=True, slots=True)
class Audit:
    """A member that is to look at another member's claim of the round before.

    Attributes:
        seat: that claimed.
        auditor: the seat that computes it again, or measures what the result is worth.
    """

    seat: int
    auditor: int


def draw_audits(
    seed: bytes,
    claimed: Collection[int],
    auditors: Collection[int],
    share: float,
    *,
    copies: int = 1,
    watched: Sequence[int] = (),
) -> tuple[Audit, ...]:
    """The audits of a round's claims.

    As many claims are looked at as come to the share; what is left of it is drawn for one more. Auditors get as few of
    them as can be.

    Args:
        seed: 32 bytes, of the round after that of the claims.
        claimed: seats whose claims can be looked at.
        auditors: seats that may look at them.
        share: of the claims, from 0 to 1.
        copies: auditors of each claim that is looked at, as far as there are others than who claimed.
        watched: seats that stood out, the oddest first: each of the claims that are looked at is one of these with the
            probability 1/2, as far as there are any.

    Raises:
        ValueError: an argument is out of its range.
    """
    if len(seed) != DIGEST_BYTES:
        raise ValueError(f"a seed is {DIGEST_BYTES} bytes, not {len(seed)}")
    if not 0 <= share <= 1 or copies < 1:
        raise ValueError(
            f"a share of {share:g} in {copies} copies: 0 to 1 in at least one are wanted"
        )
    # Exactly, so that machines agree on the last one: 0.1 of 30 is 3, whatever 0.1 is in binary.
    due = Fraction(repr(float(share))) * len(claimed)
    number = int(due)
    if _number(seed, _SHARE, ()) < (due - number) * 2**64:
        number += 1
    chosen = _chosen(seed, claimed, number, watched)
    given = dict.fromkeys(auditors, 0)
    found = []
    for seat in chosen:
        for auditor in sorted(
            (each for each in given if each != seat),
            key=lambda each: (given[each], _number(seed, _AUDITOR, (seat, each)), each),
        )[:copies]:
            given[auditor] += 1
            found.append(Audit(seat, auditor))
    return tuple(found)


def draw_measures(
    seed: bytes, claimed: Collection[int], auditors: Collection[int], share: float
) -> tuple[Audit, ...]:
    """Draw the members that measure the worth of a round's results: in some rounds of all, each by one other member.

    Args:
        seed, claimed, auditors: as of `draw_audits`.
        share: of the rounds that are measured, from 0 to 1.

    Raises:
        ValueError: an argument is out of its range.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"a share of {share:g} rounds: 0 to 1 is wanted")
    if len(seed) != DIGEST_BYTES:
        raise ValueError(f"a seed is {DIGEST_BYTES} bytes, not {len(seed)}")
    own = hashlib.sha256(_MEASURE + seed).digest()
    every = draw_audits(own, claimed, auditors, 1.0)
    is_measured = _number(seed, _WORTH, ()) < Fraction(repr(float(share))) * 2**64
    return every if is_measured else ()


def _chosen(
    seed: bytes, claimed: Collection[int], number: int, watched: Sequence[int]
) -> list[int]:
    """So many seats whose claims are looked at."""
    by_chance = _order(seed, _CLAIM, claimed)
    odd = [each for each in watched if each in by_chance]
    found: list[int] = []
    while len(found) < min(number, len(by_chance)):
        is_odd = bool(odd) and _number(seed, _WATCHED, (len(found),)) < 2**63
        seat = odd[0] if is_odd else next(each for each in by_chance if each not in found)
        found.append(seat)
        odd = [each for each in odd if each != seat]
    return found


def probability_of_detection(share: float, num_rounds: int, *, honest: float = 1.0) -> float:
    """Probability that a member that cheats in each of some rounds is found by then.

    Args:
        share: of the claims of a round that are looked at.
        num_rounds: in which it cheats.
        honest: share of the auditors that say what they find.
    """
    return float(1 - (1 - share * honest) ** num_rounds)


def rounds_to_detection(share: float, *, honest: float = 1.0) -> float:
    """Mean number of rounds until one that cheats in each is found, the last one counted; infinite for a share of 0."""
    found = share * honest
    return 1 / found if found else float("inf")


def _order(seed: bytes, salt: bytes, seats: Iterable[int]) -> list[int]:
    return sorted(seats, key=lambda seat: (_number(seed, salt, (seat,)), seat))


def _number(seed: bytes, salt: bytes, seats: tuple[int, ...]) -> int:
    """64 bits that follow from the seed."""
    packed = struct.pack(f"<{len(seats)}I", *seats)
    return int.from_bytes(
        hashlib.sha256(_DOMAIN + salt + b"\0" + seed + packed).digest()[:8], "little"
    )
