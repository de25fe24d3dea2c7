"""Verdicts by which peers were put out, and proofs by which they were let in, as a journal keeps them. Pure.

Both are what members have signed: claims, and the findings of those that computed them again.

Source: protocol_spec/training/witnessed.md, "Audits".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from neurogrid.p2p.trust.limits import MAX_PEER_ID_CHARS
from neurogrid.training.checks.claims import CLAIM_BYTES, Claim, open_claim
from neurogrid.training.checks.evidence import (
    FINDING_BYTES,
    Evidence,
    Finding,
    open_evidence,
    open_finding,
)
from neurogrid.training.checks.signed import malformed

__all__ = ["open_proof", "open_verdict", "pack_proof", "pack_verdict"]

_LENGTH: Final = struct.Struct("<H")


def pack_verdict(evidence: bytes, findings: Iterable[tuple[str, bytes]] = ()) -> bytes:
    """Pack evidence and signed findings.

    Args:
        evidence: packed.
        findings: of those that judged it: peer id, and signed form.
    """
    parts = [_LENGTH.pack(len(evidence)), evidence]
    for peer, signed in findings:
        name = peer.encode("ascii")
        parts += [bytes((len(name),)), name, signed]
    return b"".join(parts)


def open_verdict(data: bytes) -> tuple[Evidence, dict[str, Finding]]:
    """Read what `pack_verdict` wrote, and check all signatures in it.

    Returns:
        The evidence, and the findings of the same claim, by peer id.

    Raises:
        RemoteProtocolError: malformed, or not signed by those that it names.
    """
    if len(data) < _LENGTH.size:
        raise malformed("a verdict is cut short")
    (length,) = _LENGTH.unpack_from(data)
    at = _LENGTH.size + length
    evidence = open_evidence(data[_LENGTH.size : at])
    return evidence, _findings(data, at, evidence.claim)


def pack_proof(claim: bytes, findings: Iterable[tuple[str, bytes]]) -> bytes:
    """Pack the proof that lets a member on trial in.

    Args:
        claim: its signed form.
        findings: of those that looked at it: peer id, and signed form.
    """
    return claim + pack_verdict(b"", findings)[_LENGTH.size :]


def open_proof(data: bytes, peer: str) -> tuple[Claim, dict[str, Finding]]:
    """Read what `pack_proof` wrote, and check all signatures in it.

    Args:
        peer: whose claim it is.

    Returns:
        The claim, and the findings about it, by peer id: there is one, none is that peer's, and all say that it holds.

    Raises:
        RemoteProtocolError: malformed, not signed by those that it names, or it shows nothing.
    """
    claim = open_claim(data[:CLAIM_BYTES], peer)
    findings = _findings(data, CLAIM_BYTES, claim)
    if not findings or peer in findings or not all(each.holds for each in findings.values()):
        raise malformed(f"the proof of {peer} does not show that others find its claim right")
    return claim, findings


def _findings(data: bytes, at: int, claim: Claim) -> dict[str, Finding]:
    findings: dict[str, Finding] = {}
    while at < len(data):
        stop = at + 1 + data[at]
        name, signed = data[at + 1 : stop], data[stop : stop + FINDING_BYTES]
        if len(name) > MAX_PEER_ID_CHARS or not name.isascii():
            raise malformed("a verdict names somebody who is no peer")
        peer = name.decode("ascii")
        finding = open_finding(signed, peer)
        if finding.claim != claim.digest() or peer in findings:
            raise malformed("a verdict has a finding about another claim, or two of one peer")
        findings[peer] = finding
        at = stop + FINDING_BYTES
    return findings
