"""The payloads by which members of a witnessed run say what came of computing others' claims again.

Source: protocol_spec/training/witnessed.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from neurogrid.p2p.wire.control import ControlPayload
from neurogrid.p2p.wire.faults import violation
from neurogrid.p2p.wire.forms import Map, array, binary, optional, uint
from neurogrid.p2p.wire.maps import MAX_U32
from neurogrid.training.wire.forms import number as real
from neurogrid.training.wire.runs.forms import RUN

__all__ = [
    "CLAIM_FORM_BYTES",
    "FINDING_FORM_BYTES",
    "MAX_MEASURED_LOSS",
    "RoundEvidence",
    "RoundFinding",
    "RoundMeasure",
]

CLAIM_FORM_BYTES: Final = 333
"""Bytes of a signed claim (protocol_spec/training/checks.md)."""

FINDING_FORM_BYTES: Final = 201
"""Bytes of a signed finding."""

MAX_MEASURED_LOSS: Final = 1e9
"""A loss that is larger, or no number, is told as this."""

_NUM_LOSSES: Final = 4
# Two peer ids of 128 characters, and two signed claims, with the bytes before them.
_MAX_EVIDENCE_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class RoundFinding(ControlPayload):
    """Finding: what came of computing a claim again, or that it could not be, since its member gave nothing.

    Attributes:
        run: the id of the run.
        seat: u32, the sender's.
        epoch, round: u32, of the claim.
        about: u32, the seat that claimed.
        claim: the signed claim, as the sender has it; empty where it has none.
        finding: the signed finding; empty where the member gave nothing.
    """

    run: bytes
    seat: int
    epoch: int
    round: int
    about: int
    claim: bytes = b""
    finding: bytes = b""

    _map = Map(
        "Finding",
        {
            "run": RUN,
            "seat": uint(MAX_U32),
            "epoch": optional(uint(MAX_U32)),
            "round": uint(MAX_U32, smallest=1),
            "about": uint(MAX_U32),
            "claim": optional(binary(CLAIM_FORM_BYTES)),
            "finding": optional(binary(FINDING_FORM_BYTES)),
        },
    )

    def _check(self) -> None:
        if self.about == self.seat:
            raise violation("Finding is about its own sender")
        if len(self.claim) not in (0, CLAIM_FORM_BYTES):
            raise violation(f"claim of Finding must have {CLAIM_FORM_BYTES} bytes")
        if len(self.finding) not in (0, FINDING_FORM_BYTES):
            raise violation(f"finding of Finding must have {FINDING_FORM_BYTES} bytes")
        if self.finding and not self.claim:
            raise violation("Finding has a finding without the claim that it is about")


@dataclass(frozen=True, slots=True)
class RoundEvidence(ControlPayload):
    """A claim is to be judged; or, from a member to the leader, a conflict of two claims.

    Attributes:
        run: the id of the run.
        epoch, round: u32, of the claim.
        about: u32, the seat that claimed.
        auditor: u32, the seat that accuses, or was given nothing.
        evidence: as of checks.md; empty where the auditor was given nothing.
    """

    run: bytes
    epoch: int
    round: int
    about: int
    auditor: int
    evidence: bytes = b""

    _map = Map(
        "Evidence",
        {
            "run": RUN,
            "epoch": optional(uint(MAX_U32)),
            "round": uint(MAX_U32, smallest=1),
            "about": uint(MAX_U32),
            "auditor": uint(MAX_U32),
            "evidence": optional(binary(_MAX_EVIDENCE_BYTES)),
        },
    )


@dataclass(frozen=True, slots=True)
class RoundMeasure(ControlPayload):
    """Worth of a result, as a member that was drawn for it has measured it.

    Attributes:
        run: the id of the run.
        seat: u32, the sender's.
        epoch, round: u32, of the result.
        about: u32, the seat whose result it is.
        losses: before and after that result alone, on what that seat was given; then the same on what the sender was
            given itself.
    """

    run: bytes
    seat: int
    epoch: int
    round: int
    about: int
    losses: tuple[float, ...]

    _map = Map(
        "Measure",
        {
            "run": RUN,
            "seat": uint(MAX_U32),
            "epoch": optional(uint(MAX_U32)),
            "round": uint(MAX_U32, smallest=1),
            "about": uint(MAX_U32),
            "losses": replace(
                array(real(0.0, MAX_MEASURED_LOSS), _NUM_LOSSES),
                read=lambda items: tuple(map(float, items)),
                write=lambda items: [float(each) for each in items],
            ),
        },
    )

    def _check(self) -> None:
        if self.about == self.seat:
            raise violation("Measure is about its own sender")
        if len(self.losses) != _NUM_LOSSES:
            raise violation(f"Measure has {len(self.losses)} losses, not {_NUM_LOSSES}")
