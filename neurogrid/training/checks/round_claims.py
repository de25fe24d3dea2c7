"""The claims of a witnessed run as they come, and the drawing of their audits. Pure.

    what everybody knows of a round -> Facts -> a signed claim counts, or not -> agreed -> drawn by the next seed

A member whose result is not agreed on has the momentum of before the round again. So it is the results that were agreed
on that make the chain: each claim begins with what the last agreed one of its member left.

Source: protocol_spec/training/witnessed.md, "Audits".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from neurogrid.training.checks.claims import Claim, Samples, Settings, open_claim
from neurogrid.training.checks.drawing import Audit, draw_audits, draw_measures
from neurogrid.training.checks.evidence import pack_conflict
from neurogrid.training.checks.ledger import ClaimError, Facts, conflict_of

__all__ = [
    "ClaimConflictError",
    "ClaimRules",
    "RoundClaims",
    "audits_of",
    "claim_round",
    "measures_of",
]

Member = tuple[int, int]
"""A seat, and the incarnation on it."""


class ClaimConflictError(ClaimError):
    """A member has signed two claims of which one is false.

    Attributes:
        evidence: both of them, packed.
    """

    def __init__(self, message: str, evidence: bytes) -> None:
        super().__init__(message)
        self.evidence = evidence


def claim_round(epoch: int, round_number: int) -> int:
    """The round of a claim: a round that is made again, is so in another epoch."""
    return (epoch << 32) | round_number


@dataclass(frozen=True, slots=True)
class ClaimRules:
    """Rules of claims, which all members of a run know.

    Attributes:
        run: 16 bytes.
        settings: how gradients become results.
        rate: the learning rate by the step.
        seed_of: what is random in a work, by its seat and round.
        start: the blob id of the momentum that members begin with: zeros.
    """

    run: bytes
    settings: Settings
    rate: Callable[[int], float]
    seed_of: Callable[[int, int], int]
    start: bytes

    def facts(
        self,
        member: Member,
        epoch: int,
        round_number: int,
        step: int,
        ranges: Iterable[tuple[int, int, int]],
        weights: bytes,
    ) -> Facts:
        """Facts of the claim of a member with a work.

        Args:
            step: rounds that are in the weights.
            ranges: of its work: slice, start and stop.
            weights: the digest of the common weights.

        Raises:
            ValueError: the ranges are too many.
        """
        seat, incarnation = member
        samples = Samples(tuple(ranges), step, self.seed_of(seat, round_number))
        return Facts(
            self.run,
            seat,
            incarnation,
            claim_round(epoch, round_number),
            weights,
            self.settings.digest(self.rate(step)),
            samples.digest(),
            self.start,
        )


class RoundClaims:
    """The claims of members, in turn.

    Args:
        all_from: the seat from which on all claims are known: of members on lower ones somebody who has come later does
            not know with which momentum they are.
    """

    def __init__(self, all_from: int = 0) -> None:
        self._all_from = all_from
        self._last: dict[Member, tuple[Claim, bytes]] = {}
        # The momentum with which the next claim begins; None where it is not known.
        self._in_force: dict[Member, bytes | None] = {}

    def take(self, signed: bytes, peer: str, facts: Facts, result: bytes) -> Claim:
        """A claim has come.

        Args:
            signed: its signed form.
            peer: who sits on the seat.
            facts: of the round.
            result: the blob that its commitment names.

        Raises:
            RemoteProtocolError: it is not signed by that peer, or malformed.
            ClaimConflictError: another one was signed, and both cannot be true.
            ClaimError: it does not count.
        """
        claim = open_claim(signed, peer)
        member = facts.seat, facts.incarnation
        last = self._last.get(member)
        if last is not None and conflict_of(last[0], claim) is not None:
            raise ClaimConflictError(
                f"seat {claim.seat} has signed two claims of which one is false",
                pack_conflict(peer, last[1], signed),
            )
        facts.check(claim)
        if claim.result != result:
            raise ClaimError(
                f"the claim of seat {claim.seat} is of another result than its commitment"
            )
        if last is not None and claim == last[0]:
            return claim
        if last is not None and (claim.number <= last[0].number or claim.round <= last[0].round):
            raise ClaimError(f"the claim of seat {claim.seat} is of before its last one")
        begins = self.in_force(member, facts.start, claim.number)
        if begins is not None and claim.before != begins:
            raise ClaimError(
                f"the claim of seat {claim.seat} begins with another momentum than its agreed results left"
            )
        self._last[member] = claim, signed
        if self._in_force.get(member) is None:
            self._in_force[member] = claim.before
        return claim

    def in_force(self, member: Member, start: bytes, number: int = 1) -> bytes | None:
        """The momentum that a member's claim of this number begins with; None where anything may be."""
        if member in self._in_force:
            return self._in_force[member]
        return start if number == 1 or member[0] >= self._all_from else None

    def agree(self, results: Mapping[Member, bytes]) -> None:
        """A round's results were agreed on: the blob of each member."""
        for member, result in results.items():
            last = self._last.get(member)
            is_known = last is not None and last[0].result == result
            self._in_force[member] = last[0].sent if last is not None and is_known else None

    def lose_track(self) -> None:
        """Rounds went by without this one: of nobody the momentum is known."""
        self._in_force = dict.fromkeys((*self._in_force, *self._last))

    def keep(self, members: Collection[Member]) -> None:
        """Forget all but these, which are the members from here on."""
        self._last = {each: known for each, known in self._last.items() if each in members}
        self._in_force = {each: known for each, known in self._in_force.items() if each in members}


def audits_of(
    seed: bytes,
    agreed: Collection[int],
    seats_then: Sequence[int],
    seats_now: Sequence[int],
    share: float,
    copies: int,
    tried: Collection[int] = (),
    watched: Sequence[int] = (),
) -> tuple[Audit, ...]:
    """Audits of claims of the last round that was agreed on, as the seed of the next one draws them.

    Args:
        seed: of the next round.
        agreed: seats whose results were agreed on.
        seats_then, seats_now: members when the round of the claims, and the next one, began.
        share, copies: of the run file.
        tried: seats on trial whose results enough witnesses had: each of their claims is looked at, by one more.
        watched: seats that stood out, the oddest first.
    """
    here = set(seats_now)
    claimed = sorted(here.intersection(agreed))
    auditors = sorted(here.intersection(seats_then))
    return (
        *draw_audits(seed, claimed, auditors, share, copies=copies, watched=watched),
        *draw_audits(seed, sorted(tried), auditors, 1.0, copies=copies + 1),
    )


def measures_of(
    seed: bytes,
    agreed: Collection[int],
    seats_then: Sequence[int],
    seats_now: Sequence[int],
    share: float,
) -> tuple[Audit, ...]:
    """Measurements of the worth of results of the last round that was agreed on. Arguments as of `audits_of`.

    Args:
        share: of rounds, of the run file.
    """
    here = set(seats_now)
    claimed, measuring = sorted(here.intersection(agreed)), sorted(here.intersection(seats_then))
    return draw_measures(seed, claimed, measuring, share)
