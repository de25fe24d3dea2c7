"""Signatures of members of a run, and their verification: the identity keys of members are their peer ids."""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature

from neurogrid.errors import ConfigurationError, RemoteProtocolError
from neurogrid.p2p.hosts.identity import Identity, signing_key
from neurogrid.p2p.wire import ErrorCode

__all__ = ["check_signature", "sign"]


def sign(identity: Identity, data: bytes) -> bytes:
    """Sign bytes that begin with a domain of their own: 64 bytes, of Ed25519."""
    return identity.key_pair.private_key.sign(data)


def check_signature(peer: str, signature: bytes, data: bytes, what: str) -> None:
    """See that a peer has signed something.

    Raises:
        RemoteProtocolError: UNAUTHORIZED: it has not; `what` is in its text.
    """
    try:
        signing_key(peer).verify(signature, data)
    except (InvalidSignature, ConfigurationError) as exc:
        raise RemoteProtocolError(
            f"{what} is not signed by {peer}, whose it is said to be", code=ErrorCode.UNAUTHORIZED
        ) from exc
