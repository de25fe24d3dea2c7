"""Standing of a peer in a cluster by its own membership, at a moment: to be shown, not for admission. Pure.

Whether others admit the peer is theirs to say: they may know a newer list of revocations, and have other clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from neurogrid.p2p.trust.membership import Membership

__all__ = ["Standing", "StandingState", "standing_of"]


class StandingState(StrEnum):
    """Whether a membership admits its peer."""

    WISHED = "wished"
    """The peer joins when it meets the coordinator: it has no certificate yet."""
    VALID = "valid"
    NOT_YET_VALID = "not_yet_valid"
    EXPIRED = "expired"
    REVOKED = "revoked"
    OF_ANOTHER_PEER = "of_another_peer"
    """The certificate is for another key than the one that lies beside it."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Standing of a peer in a cluster.

    Attributes:
        cluster_id: which cluster.
        state: by this machine's clock, and the newest list of revocations that it has seen.
        role: that the certificate names; empty where there is none.
        peer_id: whose certificate it is; empty where there is none.
        not_before, not_after: between which it is valid, seconds of the Unix epoch; 0 where there is none.
    """

    cluster_id: str
    state: StandingState
    role: str = ""
    peer_id: str = ""
    not_before: int = 0
    not_after: int = 0


def standing_of(membership: Membership, peer_id: str, *, now: float) -> Standing:
    """Judge a membership.

    Args:
        membership: as it lies on the disk.
        peer_id: of the identity that is used with it (base58).
        now: seconds of the Unix epoch.
    """
    certificate = membership.certificate
    if certificate is None:
        return Standing(membership.cluster_id, StandingState.WISHED)
    revocations = membership.revocations
    if certificate.peer_id != peer_id:
        state = StandingState.OF_ANOTHER_PEER
    elif certificate.peer_id in revocations.peer_ids or certificate.serial in revocations.serials:
        state = StandingState.REVOKED
    elif now < certificate.not_before:
        state = StandingState.NOT_YET_VALID
    elif now >= certificate.not_after:
        state = StandingState.EXPIRED
    else:
        state = StandingState.VALID
    return Standing(
        membership.cluster_id,
        state,
        certificate.role,
        certificate.peer_id,
        certificate.not_before,
        certificate.not_after,
    )
