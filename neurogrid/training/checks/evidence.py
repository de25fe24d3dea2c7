"""Evidence: what a member signed, beside what shows that it is false. Pure: who judges it computes elsewhere.

Findings are what auditors sign, of claims that hold as well: whoever signs one says of a certain claim what came of
computing it again. A finding is about one claim, by the digest of it, so that it is none about another; and evidence is
read only after all in it was found to be signed by those that it names.

Source: protocol_spec/training/checks.md, "Evidence".
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.trust.limits import MAX_PEER_ID_CHARS
from neurogrid.training.checks.band import ACCUSED_FROM, CONFIRMED_FROM
from neurogrid.training.checks.claims import CLAIM_BYTES, DIGEST_BYTES, Claim, open_claim
from neurogrid.training.checks.ledger import Conflict, conflict_of
from neurogrid.training.checks.signed import VERSION, Purpose, malformed

__all__ = [
    "FINDING_BYTES",
    "MAX_EVIDENCE_BYTES",
    "Evidence",
    "Finding",
    "Kind",
    "Named",
    "judge",
    "liars",
    "open_evidence",
    "open_finding",
    "pack_conflict",
    "pack_evidence",
    "sign_finding",
]

# Version, the claim's digest, three digests of what the auditor has, and how many bands the claim is off.
_BODY: Final = struct.Struct("<B32s32s32s32sd")
_PURPOSE: Final = Purpose("finding", _BODY.size)
FINDING_BYTES: Final = _PURPOSE.num_bytes
"""Bytes of a signed finding."""

MAX_EVIDENCE_BYTES: Final = (
    2 + 2 * (1 + MAX_PEER_ID_CHARS) + CLAIM_BYTES + max(CLAIM_BYTES, FINDING_BYTES)
)
"""Bytes of evidence at most."""

MAX_EXCESS: Final = 1e9
"""Bands that anything is off at most; what is farther, or no number, is written as this."""


class Kind(IntEnum):
    """Kind of evidence, by what it shows."""

    CONFLICT = 1
    """Two claims of one member, of which one is false."""
    RESULT = 2
    """A claim, and what an auditor has found instead."""


class Named(StrEnum):
    """The side that evidence is against, once a judge has looked at it."""

    ACCUSED = "accused"
    ACCUSER = "accuser"


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of an auditor: what came of computing a claim again.

    Attributes:
        claim: the digest of the claim.
        kept, sent, result: what the auditor has, as of `Claim`.
        excess: bands that the claim is off; 0 where all bits are the same.
    """

    claim: bytes
    kept: bytes
    sent: bytes
    result: bytes
    excess: float

    def __post_init__(self) -> None:
        if any(
            len(each) != DIGEST_BYTES for each in (self.claim, self.kept, self.sent, self.result)
        ):
            raise ValueError(f"a digest is {DIGEST_BYTES} bytes")
        if not 0 <= self.excess <= MAX_EXCESS:
            raise ValueError(
                f"what a claim is off is from 0 to {MAX_EXCESS:g} bands, not {self.excess}"
            )

    @property
    def holds(self) -> bool:
        """Whether the auditor says that honest members may be so far apart."""
        return self.excess <= CONFIRMED_FROM

    @property
    def accuses(self) -> bool:
        """Whether the auditor says that the claim is false. Between the two it says nothing."""
        return self.excess > ACCUSED_FROM


@dataclass(frozen=True, slots=True)
class Evidence:
    """A claim, and what stands against it.

    Attributes:
        kind: what it shows.
        accused: the peer id that signed the claim.
        accuser: the peer id that signed the finding; empty where there is none.
        claim: of the accused.
        other: another claim of the accused, in a conflict.
        finding: of the accuser, of a result.
    """

    kind: Kind
    accused: str
    accuser: str
    claim: Claim
    other: Claim | None = None
    finding: Finding | None = None

    @property
    def conflict(self) -> Conflict | None:
        """Conflict of the two claims; None where there is but one, or both may be true."""
        return None if self.other is None else conflict_of(self.claim, self.other)


def bounded_excess(excess: float) -> float:
    """The same as it can be written."""
    return MAX_EXCESS if math.isnan(excess) else min(MAX_EXCESS, excess)


def sign_finding(finding: Finding, identity: Identity) -> bytes:
    """The signed form of a finding, `FINDING_BYTES` long."""
    body = _BODY.pack(
        VERSION, finding.claim, finding.kept, finding.sent, finding.result, finding.excess
    )
    return _PURPOSE.sign(body, identity)


def open_finding(data: bytes, signer: str) -> Finding:
    """Read a signed finding.

    Args:
        signer: the peer id of the auditor.

    Raises:
        RemoteProtocolError: not signed by that peer (UNAUTHORIZED), or malformed.
    """
    version, *values = _BODY.unpack(_PURPOSE.open(data, signer))
    if version != VERSION:
        raise malformed(f"the finding is of version {version}; this program reads {VERSION}")
    try:
        return Finding(*values)
    except ValueError as exc:
        raise malformed(f"the finding is none: {exc}") from exc


def pack_conflict(accused: str, claim: bytes, other: bytes) -> bytes:
    """Evidence of two signed claims, of which one is false. Nobody accuses: it shows by itself."""
    return _packed(Kind.CONFLICT, accused, "", claim, other)


def pack_evidence(accused: str, accuser: str, claim: bytes, finding: bytes) -> bytes:
    """Evidence of a signed claim and a signed finding."""
    return _packed(Kind.RESULT, accused, accuser, claim, finding)


def open_evidence(data: bytes) -> Evidence:
    """Read evidence, and check all signatures in it.

    Whether it is about this run, whether the accused sat on that seat and the accuser was drawn, and whether it is
    true, is asked elsewhere.

    Raises:
        RemoteProtocolError: malformed, or it does not show what it is for (PROTOCOL_VIOLATION), or not signed by those
            that it names (UNAUTHORIZED).
    """
    if len(data) > MAX_EVIDENCE_BYTES:
        raise malformed(f"evidence of {len(data)} B: the limit is {MAX_EVIDENCE_BYTES}")
    if len(data) < 2 or data[0] != VERSION:
        raise malformed(f"evidence is of another version; this program reads {VERSION}")
    try:
        kind = Kind(data[1])
    except ValueError as exc:
        raise malformed(f"no kind of evidence is {data[1]}") from exc
    accused, at = _name(data, 2)
    accuser, at = _name(data, at)
    claim, rest = data[at : at + CLAIM_BYTES], data[at + CLAIM_BYTES :]
    if kind == Kind.CONFLICT:
        if accuser:
            raise malformed("a conflict has no accuser: it shows by itself")
        found = Evidence(
            kind, accused, "", open_claim(claim, accused), other=open_claim(rest, accused)
        )
        if found.conflict is None:
            raise malformed("both of the claims may be true: that is no conflict")
        return found
    finding = open_finding(rest, accuser)
    opened = open_claim(claim, accused)
    if finding.claim != opened.digest():
        raise malformed("the finding is about another claim")
    if not finding.accuses:
        raise malformed(f"the finding is {finding.excess:g} bands off: that accuses nobody")
    if accuser == accused:
        raise malformed("nobody audits itself")
    return Evidence(kind, accused, accuser, opened, finding=finding)


def judge(evidence: Evidence, excess: float | None = None) -> Named:
    """Decide whether evidence is against the accused or the accuser.

    Args:
        evidence: as `open_evidence` gave it.
        excess: bands that the claim is off what the judge has computed itself. A conflict needs none.

    Raises:
        ValueError: a result was not computed.
    """
    if evidence.kind == Kind.CONFLICT:
        return Named.ACCUSED
    if excess is None:
        raise ValueError("a result is judged by computing it")
    return Named.ACCUSER if excess <= CONFIRMED_FROM else Named.ACCUSED


def liars(findings: Mapping[str, Finding], excess: float) -> tuple[str, ...]:
    """Auditors whose findings about one claim no honest auditor can have had.

    Args:
        findings: by peer id, all of the same claim.
        excess: bands that the claim is off what the judge has computed itself.

    Returns:
        Those that accuse where the judge finds a claim that holds, and those that say that it holds where the judge
        would accuse; in order.
    """
    return tuple(
        sorted(
            peer
            for peer, finding in findings.items()
            if (finding.accuses and excess <= CONFIRMED_FROM)
            or (finding.holds and excess > ACCUSED_FROM)
        )
    )


def _packed(kind: Kind, accused: str, accuser: str, claim: bytes, rest: bytes) -> bytes:
    names = b""
    for name in (accused, accuser):
        encoded = name.encode("ascii")
        if len(encoded) > MAX_PEER_ID_CHARS:
            raise ValueError(f"a peer id of {len(encoded)} characters")
        names += bytes((len(encoded),)) + encoded
    return bytes((VERSION, kind)) + names + claim + rest


def _name(data: bytes, at: int) -> tuple[str, int]:
    if at >= len(data):
        raise malformed("evidence is cut short")
    stop = at + 1 + data[at]
    try:
        name = data[at + 1 : stop].decode("ascii")
    except UnicodeDecodeError as exc:
        raise malformed("a peer id in evidence is no ASCII") from exc
    if len(name) != data[at] or len(name) > MAX_PEER_ID_CHARS:
        raise malformed("a peer id in evidence is cut short, or longer than any is")
    return name, stop
