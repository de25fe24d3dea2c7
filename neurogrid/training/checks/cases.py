"""Cases: accusations, the members that judge them, and the verdicts that they come to. Pure.

An auditor accuses, and all that were members in that round compute the claim themselves, but the accused. Only what
more than half of these have found names anybody, and never what one has found alone. The same way goes an auditor's
word that a member does not give what it is to give; nobody is ejected for that.

    accused + accuser + thirds -> votes -> Verdict

Source: protocol_spec/training/witnessed.md, "Audits".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from neurogrid.training.checks.evidence import Finding

__all__ = ["Case", "Verdict", "Vote", "vote_of"]

_LEAST_JUDGES = 2


class Vote(StrEnum):
    """Vote of a judge, by what it has found."""

    CONFIRMS = "confirms"
    HOLDS = "holds"
    MISSING = "missing"
    """The judge was not given what is needed."""


class Verdict(StrEnum):
    """Verdict of a case; OPEN while there is none."""

    OPEN = "open"
    ACCUSED = "accused"
    """The claim is false: who made it is ejected."""
    ACCUSER = "accuser"
    """The claim holds: who accused is ejected."""
    SILENT = "silent"
    """The member gives nobody what it is to give: it is dropped."""
    NOBODY = "nobody"
    """Not enough have found the same."""


def vote_of(finding: Finding | None) -> Vote:
    """The vote of a judge with this finding; None is that of a judge which was not given what is needed."""
    if finding is None:
        return Vote.MISSING
    return Vote.HOLDS if finding.holds else Vote.CONFIRMS


@dataclass
class Case:
    """An accusation.

    Attributes:
        accused, accuser: seats.
        judges: seats that were members in the round of the claim and are healthy, without the accused.
        until: the time at which it ends.
        votes: by seat, that of the accuser among them.
    """

    accused: int
    accuser: int
    judges: frozenset[int]
    until: float
    votes: dict[int, Vote] = field(default_factory=dict)

    @property
    def can_be_judged(self) -> bool:
        """Whether there is anybody beside accused and accuser."""
        return len(self.judges) >= _LEAST_JUDGES and self.accuser in self.judges

    def vote(self, seat: int, vote: Vote) -> bool:
        """Take the vote of a seat; return whether it counts: each judge's first does."""
        if seat not in self.judges or seat in self.votes:
            return False
        self.votes[seat] = vote
        return True

    def verdict(self, now: float) -> Verdict:
        """The verdict at this time, in seconds."""
        if not self.can_be_judged:
            return Verdict.NOBODY
        found = list(self.votes.values())
        for vote, verdict in (
            (Vote.CONFIRMS, Verdict.ACCUSED),
            (Vote.MISSING, Verdict.SILENT),
        ):
            if self._is_most(found.count(vote)):
                return verdict
        has_accused = self.votes.get(self.accuser) is Vote.CONFIRMS
        if has_accused and self._is_most(found.count(Vote.HOLDS)):
            return Verdict.ACCUSER
        is_over = now >= self.until or self.judges <= self.votes.keys()
        return Verdict.NOBODY if is_over else Verdict.OPEN

    def _is_most(self, count: int) -> bool:
        # Of two judges one is no majority, so that this is never the word of one.
        return 2 * count > len(self.judges)
