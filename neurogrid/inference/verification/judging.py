"""Verdict on workers that computed the same layers and differ. Pure: findings go in, a verdict or a need comes out.

The coordinator has the model, so that its own computation is the authority: another worker that agrees clears a record
at little cost, and one that differs only makes the coordinator compute itself. So no majority is asked, and a worker
is never named by the word of another.

Where several workers handed on to each other, what passed between them is not known. Then each of them is asked again
for its own layers, with what should have come to it. A worker that is wrong at chance, or that answers right when it is
asked alone, is not found by that: then all of them are suspects (`suspicion`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["OWN", "Findings", "Need", "OwnFindings", "Verdict", "judge"]

OWN = ""
"""Stands for the coordinator among verifiers."""


class Need(Enum):
    """Computation that is needed before there is a verdict."""

    OWN = "the coordinator's own computation"
    AGAIN = "each worker's computation, by itself"


@dataclass(frozen=True)
class OwnFindings:
    """Findings of the coordinator's own computation.

    Attributes:
        is_right: whether what was recorded is right.
        verifiers: the same of what each verifier computed, up to the first that is wrong; None where it cannot be said.
    """

    is_right: bool
    verifiers: tuple[bool | None, ...]


@dataclass(frozen=True)
class Findings:
    """Findings about one record.

    Attributes:
        stages: peer ids of the workers that it went through, in order.
        verifiers: who computed each of their stages again: a peer id, or `OWN`.
        agrees: whether the two came to the same in the end.
        own: None as long as the coordinator has not computed it.
        again: whether each worker, asked again with the right input, is right; None for one that did not answer. None
            as long as they were not asked.
    """

    stages: tuple[str, ...]
    verifiers: tuple[str, ...]
    agrees: bool
    own: OwnFindings | None = None
    again: tuple[bool | None, ...] | None = None


@dataclass(frozen=True)
class Verdict:
    """Verdict on a record.

    Attributes:
        wrong: peer ids of the workers that computed wrong: those of the record, or a verifier.
        suspects: those of which one was wrong at least, and nobody knows which.
    """

    wrong: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()


def judge(findings: Findings) -> Verdict | Need:
    """The verdict, or what is needed for one."""
    if findings.agrees:
        return Verdict()
    own = findings.own
    if own is None:
        return Need.OWN
    wrong = {
        peer_id
        for peer_id, is_right in zip(findings.verifiers, own.verifiers, strict=True)
        if is_right is False
    }
    if own.is_right:
        return Verdict(frozenset(wrong))
    if len(findings.stages) == 1:
        return Verdict(frozenset({*wrong, *findings.stages}))
    if findings.again is None:
        return Need.AGAIN
    named = {
        peer_id
        for peer_id, is_right in zip(findings.stages, findings.again, strict=True)
        if is_right is False
    }
    if named:
        return Verdict(frozenset(wrong | named))
    return Verdict(frozenset(wrong), frozenset(findings.stages) - wrong)
