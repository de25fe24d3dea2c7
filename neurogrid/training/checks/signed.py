"""Bytes of one purpose, signed by a peer's identity key: 64 B of Ed25519 signature and then a body of fixed length.

What is signed is the name of the purpose and the body, so that a signature over a claim is none over a finding. The
body is read only after its signature was found good.

Source: protocol_spec/training/checks.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cryptography.exceptions import InvalidSignature

from neurogrid.errors import ConfigurationError, RemoteProtocolError
from neurogrid.p2p.hosts.identity import Identity, signing_key
from neurogrid.p2p.wire import ErrorCode

__all__ = ["SIGNATURE_BYTES", "VERSION", "Purpose", "malformed"]

SIGNATURE_BYTES: Final = 64
VERSION: Final = 1


def malformed(text: str) -> RemoteProtocolError:
    """The error for bytes that are not what they must be."""
    return RemoteProtocolError(text, code=ErrorCode.PROTOCOL_VIOLATION)


@dataclass(frozen=True, slots=True)
class Purpose:
    """Purpose that bodies of one kind are signed for.

    Attributes:
        name: the kind, in the signature and in errors.
        body_bytes: of each body.
    """

    name: str
    body_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the signed form."""
        return SIGNATURE_BYTES + self.body_bytes

    def sign(self, body: bytes, identity: Identity) -> bytes:
        """The signed form of a body."""
        assert len(body) == self.body_bytes
        return identity.key_pair.private_key.sign(self._domain + body) + body

    def open(self, data: bytes, signer: str) -> bytes:
        """The body of a signed form.

        Args:
            signer: the peer id whose key must have signed it.

        Raises:
            RemoteProtocolError: it has another length (PROTOCOL_VIOLATION), or was not signed by that key
                (UNAUTHORIZED).
        """
        if len(data) != self.num_bytes:
            raise malformed(
                f"a signed {self.name} has {self.num_bytes} B, and this one {len(data)}"
            )
        signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
        try:
            signing_key(signer).verify(signature, self._domain + body)
        except (InvalidSignature, ConfigurationError) as exc:
            raise RemoteProtocolError(
                f"the {self.name} was not signed by {signer}", code=ErrorCode.UNAUTHORIZED
            ) from exc
        return body

    @property
    def _domain(self) -> bytes:
        return f"neurogrid/checks/1/{self.name}\0".encode()
