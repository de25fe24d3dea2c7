"""Why somebody was put out, as a journal keeps it: evidence, and what each that judged it has signed. Pure.

Source: protocol_spec/training/witnessed.md, "Audits".
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from neurogrid.p2p.trust.limits import MAX_PEER_ID_CHARS
from neurogrid.training.checks.evidence import (
    FINDING_BYTES,
    Evidence,
    Finding,
    open_evidence,
    open_finding,
)
from neurogrid.training.checks.signed import malformed

__all__ = ["open_verdict", "pack_verdict"]

_LENGTH: Final = struct.Struct("<H")


def pack_verdict(evidence: bytes, findings: Iterable[tuple[str, bytes]] = ()) -> bytes:
    """Evidence and signed findings.

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
    findings: dict[str, Finding] = {}
    while at < len(data):
        stop = at + 1 + data[at]
        name, signed = data[at + 1 : stop], data[stop : stop + FINDING_BYTES]
        if len(name) > MAX_PEER_ID_CHARS or not name.isascii():
            raise malformed("a verdict names somebody who is no peer")
        peer = name.decode("ascii")
        finding = open_finding(signed, peer)
        if finding.claim != evidence.claim.digest() or peer in findings:
            raise malformed("a verdict has a finding about another claim, or two of one peer")
        findings[peer] = finding
        at = stop + FINDING_BYTES
    return evidence, findings
