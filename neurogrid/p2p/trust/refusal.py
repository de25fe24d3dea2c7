"""Reasons for which a peer is not admitted, as they travel, and the errors on either side."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from neurogrid.errors import PeerRefusedError, RemoteProtocolError
from neurogrid.p2p.wire import ErrorCode

__all__ = ["SILENCE", "NotAdmittedError", "Refusal", "RefusedError"]


class Refusal(IntEnum):
    """The reasons of a Verdict (`protocol_spec/trust.md`). 0 is none: admitted."""

    CERTIFICATE_REQUIRED = 1
    CERTIFICATE_INVALID = 2
    WRONG_CLUSTER = 3
    WRONG_PEER = 4
    NOT_YET_VALID = 5
    EXPIRED = 6
    REVOKED = 7
    ROLE_NOT_ADMITTED = 8
    NOT_ON_LIST = 9
    TOKEN_INVALID = 10
    TOKEN_EXPIRED = 11
    TOKEN_USED_UP = 12
    NO_ISSUER = 13
    MALFORMED = 14
    NOT_SPOKEN = 15
    TIMED_OUT = 16
    TOO_MANY = 17
    TOKEN_VOID = 18


SILENCE: Final = frozenset({Refusal.NOT_SPOKEN, Refusal.TIMED_OUT})
"""Reasons that rest on nothing that the peer has shown: the next attempt may end otherwise."""


class RefusedError(RemoteProtocolError):
    """A peer is not admitted by what it showed; becomes a Verdict.

    Attributes:
        reason: which of the reasons.
    """

    def __init__(self, reason: Refusal, message: str) -> None:
        super().__init__(message, code=ErrorCode.UNAUTHORIZED)
        self.reason = reason


class NotAdmittedError(PeerRefusedError):
    """A connection was closed because one side does not admit the other.

    Attributes:
        peer_id: the other side.
        reason: the `Refusal`, or a number that a newer peer sent.
        refused_by_peer: whether it was the peer that refused, or this host.
    """

    def __init__(self, peer_id: str, reason: int, text: str, *, refused_by_peer: bool) -> None:
        who = f"{peer_id} refused us" if refused_by_peer else f"refused {peer_id}"
        super().__init__(f"{who}: {text}", code=ErrorCode.UNAUTHORIZED, text=text)
        self.peer_id = peer_id
        self.reason = reason
        self.refused_by_peer = refused_by_peer
