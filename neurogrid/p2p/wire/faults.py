"""Errors of a peer's bytes, each with its code."""

from __future__ import annotations

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.wire.types import ErrorCode

__all__ = ["over_limit", "violation"]


def violation(text: str) -> RemoteProtocolError:
    """The error of what the specification forbids (PROTOCOL_VIOLATION)."""
    return RemoteProtocolError(text, code=ErrorCode.PROTOCOL_VIOLATION)


def over_limit(text: str) -> RemoteProtocolError:
    """The error of more than is accepted (LIMIT_EXCEEDED)."""
    return RemoteProtocolError(text, code=ErrorCode.LIMIT_EXCEEDED)
