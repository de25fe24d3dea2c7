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
from typing import Any, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from neurogrid.errors import LocalProtocolError, RemoteProtocolError
from neurogrid.p2p.trust.limits import (
    MAX_CERTIFICATE_BYTES,
    MAX_PEER_ID_CHARS,
    MAX_REVOCATION_BYTES,
    MAX_REVOKED,
    MAX_ROLE_CHARS,
    MAX_TIME,
    MAX_TOKEN_BYTES,
    MAX_TOKEN_USES,
)
from neurogrid.p2p.trust.refusal import Refusal, RefusedError
from neurogrid.p2p.wire.forms import Form, Map, array, optional, text, uint
from neurogrid.p2p.wire.maps import MAX_U64, Fields

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
        forms: of the entries of its body, `v` not among them.
    """

    def __init__(
        self,
        name: str,
        *,
        max_bytes: int,
        reason: Refusal,
        forms: Mapping[str, Form],
    ) -> None:
        self.name = name
        self.reason = reason
        self._max_bytes = max_bytes
        self._body = Map(f"the {name}", forms, max_bytes=max_bytes, version=VERSION)

    def sign(self, key: Ed25519PrivateKey, *values: object) -> bytes:
        """The signed form of a body with these values, one for each of the forms.

        Raises:
            LocalProtocolError: it would be longer than may be read.
        """
        body = self._body.encode(values)
        if SIGNATURE_BYTES + len(body) > self._max_bytes:
            raise LocalProtocolError(f"a {self.name} of {len(body)} B is too long to be read")
        return key.sign(self._signed(body)) + body

    def read(self, data: bytes, public_key: bytes) -> list[Any]:
        """The values in a signed form, and behind them the form itself.

        Raises:
            RefusedError: too long, not signed by this key, of another version, or not what its forms say.
        """
        if not SIGNATURE_BYTES < len(data) <= self._max_bytes:
            raise self.refused(f"of {len(data)} B, which is no length of one")
        signature, body = data[:SIGNATURE_BYTES], data[SIGNATURE_BYTES:]
        try:
            Ed25519PublicKey.from_public_bytes(public_key).verify(signature, self._signed(body))
        except (InvalidSignature, ValueError) as exc:
            raise self.refused("not signed by the cluster's key") from exc
        try:
            return [*self._body.decode(body), bytes(data)]
        except RemoteProtocolError as exc:
            raise RefusedError(self.reason, str(exc)) from exc

    def peek(self, data: bytes) -> Fields:
        """The entries of a form whose signature nobody has checked: to say what is wrong with it.

        Raises:
            RemoteProtocolError: too long, of another version, or no map.
        """
        return self._body.find(data[SIGNATURE_BYTES:])

    def refused(self, what: str) -> RefusedError:
        """The error for a form that is `what`."""
        return RefusedError(self.reason, f"the {self.name} is {what}")

    def _signed(self, body: bytes) -> bytes:
        return f"neurogrid/trust/1/{self.name}\0".encode() + body


_CLUSTER: Final = text(32)

CERTIFICATE: Final = SignedKind(
    "certificate",
    max_bytes=MAX_CERTIFICATE_BYTES,
    reason=Refusal.CERTIFICATE_INVALID,
    forms={
        "cluster": _CLUSTER,
        "peer": text(MAX_PEER_ID_CHARS),
        "role": text(MAX_ROLE_CHARS),
        "serial": uint(MAX_U64),
        "from": uint(MAX_TIME),
        "until": uint(MAX_TIME),
    },
)
JOIN_TOKEN: Final = SignedKind(
    "join token",
    max_bytes=MAX_TOKEN_BYTES,
    reason=Refusal.TOKEN_INVALID,
    forms={
        "role": text(MAX_ROLE_CHARS),
        "serial": uint(MAX_U64),
        "until": uint(MAX_TIME),
        "uses": uint(MAX_TOKEN_USES),
        "list": optional(uint(MAX_U64)),
    },
)
REVOCATIONS: Final = SignedKind(
    "revocation list",
    max_bytes=MAX_REVOCATION_BYTES,
    reason=Refusal.MALFORMED,
    forms={
        "cluster": _CLUSTER,
        "version": uint(MAX_U64, smallest=1),
        "peers": array(text(MAX_PEER_ID_CHARS), MAX_REVOKED),
        "serials": array(uint(MAX_U64), MAX_REVOKED),
        "tokens": optional(uint(MAX_U64)),
    },
)
