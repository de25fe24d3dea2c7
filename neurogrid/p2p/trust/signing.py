"""Signed forms, by a cluster's key: a body of bytes, for one purpose.

A signed form is 64 B of Ed25519 signature and then the body, a msgpack map. What is signed is the name of the purpose,
a zero byte, and the body as it stands, so that a signature over one kind of body is none over another, and no bit of
the form can be changed. The body is read only after its signature was found good.

Source: RFC 8032; protocol_spec/trust.md.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.trust.limits import (
    MAX_CERTIFICATE_BYTES,
    MAX_REVOCATION_BYTES,
    MAX_REVOKED,
    MAX_TOKEN_BYTES,
)
from neurogrid.p2p.trust.refusal import Refusal, RefusedError
from neurogrid.p2p.wire.maps import Fields, decode_map, encode_map

__all__ = ["CERTIFICATE", "JOIN_TOKEN", "REVOCATIONS", "SignedKind", "cluster_id_of"]

SIGNATURE_BYTES: Final = 64
KEY_BYTES: Final = 32
VERSION: Final = 1


def cluster_id_of(public_key: bytes) -> str:
    """The id of the cluster with this Ed25519 public key (32 B): 32 characters of a-z and 2-7.

    160 bits of SHA-256: nobody can find another key with the same id.
    """
    digest = hashlib.sha256(b"neurogrid/trust/1/cluster\0" + public_key).digest()
    return base64.b32encode(digest[:20]).decode().lower()


class SignedKind:
    """One kind of signed form.

    Args:
        name: what is signed, in the signature and in errors.
        max_bytes: the longest form, signature and all.
        reason: the refusal of a form that is no good.
        keys: the keys of its body, `v` not among them.
        arrays: those that hold an array, with the largest number of items.
    """

    def __init__(
        self,
        name: str,
        *,
        max_bytes: int,
        reason: Refusal,
        keys: frozenset[str],
        arrays: Mapping[str, int] | None = None,
    ) -> None:
        self.name = name
        self.reason = reason
        self._max_bytes = max_bytes
        self._keys = keys | {"v"}
        self._arrays = arrays or {}

    def sign(self, key: Ed25519PrivateKey, entries: Mapping[str, object]) -> bytes:
        """The signed form of a body with these entries.

        Raises:
            LocalProtocolError: it would be longer than may be read.
        """
        body = encode_map({"v": VERSION, **entries})
        if SIGNATURE_BYTES + len(body) > self._max_bytes:
            raise LocalProtocolError(f"a {self.name} of {len(body)} B is too long to be read")
        return key.sign(self._signed(body)) + body

    def read(self, data: bytes, public_key: bytes) -> Fields:
        """The entries of a signed form.

        Raises:
            RefusedError: too long, not signed by this key, of another version, or no map.
        """
        if not SIGNATURE_BYTES < len(data) <= self._max_bytes:
            raise self.refused(f"of {len(data)} B, which is no length of one")
        signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
        try:
            Ed25519PublicKey.from_public_bytes(public_key).verify(signature, self._signed(body))
        except (InvalidSignature, ValueError) as exc:
            raise self.refused("not signed by the cluster's key") from exc
        return self.peek(data)

    def peek(self, data: bytes) -> Fields:
        """The entries of a form whose signature nobody has checked: to say what is wrong with it.

        Raises:
            RefusedError: too long, of another version, or no map.
        """
        body = data[SIGNATURE_BYTES : self._max_bytes]
        try:
            fields, taken = decode_map(
                body,
                what=self.name,
                max_bytes=self._max_bytes,
                arrays=self._arrays,
                known=self._keys,
            )
            if taken != len(data) - SIGNATURE_BYTES:
                raise self.refused("followed by other bytes")
            version = fields.uint("v", 2**32 - 1)
        except RefusedError:
            raise
        except RemoteProtocolError as exc:
            raise self.refused(f"malformed: {exc}") from exc
        if version != VERSION:
            raise self.refused(f"of version {version}; this program reads version {VERSION}")
        return fields

    def refused(self, what: str) -> RefusedError:
        """The error for a form that is `what`."""
        return RefusedError(self.reason, f"the {self.name} is {what}")

    def _signed(self, body: bytes) -> bytes:
        return f"neurogrid/trust/1/{self.name}\0".encode() + body


CERTIFICATE: Final = SignedKind(
    "certificate",
    max_bytes=MAX_CERTIFICATE_BYTES,
    reason=Refusal.CERTIFICATE_INVALID,
    keys=frozenset({"cluster", "peer", "role", "serial", "from", "until"}),
)
JOIN_TOKEN: Final = SignedKind(
    "join token",
    max_bytes=MAX_TOKEN_BYTES,
    reason=Refusal.TOKEN_INVALID,
    keys=frozenset({"role", "serial", "until", "uses", "list"}),
)
REVOCATIONS: Final = SignedKind(
    "revocation list",
    max_bytes=MAX_REVOCATION_BYTES,
    reason=Refusal.MALFORMED,
    keys=frozenset({"cluster", "version", "peers", "serials", "tokens"}),
    arrays={"peers": MAX_REVOKED, "serials": MAX_REVOKED},
)
