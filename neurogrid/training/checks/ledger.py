"""The claims of a run as they come: whether each is one of its round and follows on the last of its member. Pure.

What does not fit what everybody knows is refused. Two claims that cannot both be true, each signed by the same member,
are evidence by themselves: nothing has to be computed for them.

Source: protocol_spec/training/checks.md, "Claims in turn".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from neurogrid.training.checks.claims import Claim

__all__ = ["ClaimError", "Conflict", "Facts", "Ledger", "conflict_of"]


class ClaimError(ValueError):
    """A claim does not fit what everybody knows, and does not count; the text says what."""


class Conflict(StrEnum):
    """Conflict of two claims of one member."""

    TWICE = "twice"
    """One round, or one number, with two different claims."""
    CHAIN = "chain"
    """The later one begins with a momentum that the one before it did not leave."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that everybody knows of a claim before it comes.

    Attributes:
        run, seat, incarnation, round, weights, settings, samples: as of `Claim`.
        start: the blob id of the momentum that a member begins with.
    """

    run: bytes
    seat: int
    incarnation: int
    round: int
    weights: bytes
    settings: bytes
    samples: bytes
    start: bytes

    def check(self, claim: Claim) -> None:
        """See that a claim is of this round.

        Raises:
            ClaimError: it is not.
        """
        for name in ("run", "seat", "incarnation", "round", "weights", "settings", "samples"):
            if getattr(claim, name) != getattr(self, name):
                raise ClaimError(
                    f"the claim of seat {claim.seat} has other {name} than round {self.round} has"
                )
        if claim.number == 1 and claim.before != self.start:
            raise ClaimError(f"the first claim of seat {claim.seat} begins with another momentum")


def conflict_of(one: Claim, other: Claim) -> Conflict | None:
    """Conflict of two claims that the same peer signed; None if both may be true.

    Whether a result was agreed on is not asked: a momentum that is neither of the two is false in any case.
    """
    if (one.run, one.seat, one.incarnation) != (other.run, other.seat, other.incarnation):
        return None
    if one == other:
        return None
    if one.round == other.round or one.number == other.number:
        return Conflict.TWICE
    earlier, later = sorted((one, other), key=lambda claim: claim.number)
    if later.number == earlier.number + 1 and later.before not in earlier.left:
        return Conflict.CHAIN
    return None


class Ledger:
    """The last claim of each member, and what it left as its momentum.

    One that counts takes the place of the one before it. A claim that was late is taken with the facts of its own
    round, before the next one of its member: its result was not agreed on, and the chain goes on.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], tuple[Claim, bool]] = {}

    def take(self, claim: Claim, facts: Facts) -> Claim | None:
        """A claim has come.

        Returns:
            The claim that it cannot stand beside: both together are evidence, and the new one does not count. None if
            it counts, also where it has come before.

        Raises:
            ClaimError: it does not fit, and does not count.
        """
        last, is_agreed = self._last.get((claim.seat, claim.incarnation), (None, False))
        if last is not None and conflict_of(last, claim) is not None:
            return last
        if claim == last:
            return None
        facts.check(claim)
        if claim.number != (1 if last is None else last.number + 1):
            raise ClaimError(
                f"the claim of seat {claim.seat} has the number {claim.number}, and "
                f"{1 if last is None else last.number + 1} is due"
            )
        if last is not None:
            if claim.round <= last.round:
                raise ClaimError(
                    f"the claim of seat {claim.seat} is of a round before its last one"
                )
            if claim.before != last.momentum_after(is_agreed=is_agreed):
                raise ClaimError(
                    f"the claim of seat {claim.seat} begins as if its result of round {last.round} had "
                    f"{'not ' if is_agreed else ''}been agreed on"
                )
        self._last[claim.seat, claim.incarnation] = claim, False
        return None

    def agree(self, seat: int, incarnation: int) -> None:
        """The result of a member's last claim was agreed on.

        Raises:
            KeyError: there is no claim of it.
        """
        claim, _ = self._last[seat, incarnation]
        self._last[seat, incarnation] = claim, True

    def last(self, seat: int, incarnation: int) -> Claim | None:
        """The last claim of a member that counts."""
        found = self._last.get((seat, incarnation))
        return found and found[0]

    def forget(self, seat: int, incarnation: int) -> None:
        """A member is gone for good."""
        self._last.pop((seat, incarnation), None)
