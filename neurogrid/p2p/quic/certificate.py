"""The certificates of libp2p: a key of the connection's own, vouched for by the key that the peer id stands for.

A certificate signs itself and proves nothing but that its holder has its key. The peer id is in an extension: the
peer's public key, and its signature over the certificate's. With both, and the handshake, verified, the peer is known.

Parsing here is strict and bounded, since anybody may send anything: what is not understood in full is refused.

Source: the TLS handshake specification of libp2p.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtensionOID
from libp2p.crypto.keys import KeyPair, PublicKey
from libp2p.crypto.serialization import deserialize_public_key
from libp2p.peer.id import ID
from libp2p.security.tls import certificate as stock

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.quic.certificate_template import certificate_template

__all__ = ["make_certificate", "peer_id_of"]

# Critical extensions that change nothing here: the certificate certifies itself alone, for one connection.
_HARMLESS: Final = frozenset(
    {ExtensionOID.BASIC_CONSTRAINTS, ExtensionOID.KEY_USAGE, ExtensionOID.EXTENDED_KEY_USAGE}
)
# Ours takes 400 B; with an RSA key of 8192 bits as the identity it would be 3 KiB.
_MAX_CERTIFICATE: Final = 16 * 1024


def make_certificate(identity: KeyPair) -> tuple[bytes, bytes]:
    """Make a certificate for a new P-256 key, vouched for by `identity`; return it and its private key as PEM."""
    certificate, key = stock.generate_certificate(identity.private_key, certificate_template())
    return certificate.encode(), key.encode()


def peer_id_of(der: bytes) -> ID:
    """Verify a certificate (DER) and return whose it is.

    That its holder has the private key is for the handshake to verify.

    Raises:
        RemoteProtocolError: it is no certificate of libp2p, is not valid now, or a signature is wrong.
    """
    if len(der) > _MAX_CERTIFICATE:
        raise RemoteProtocolError(f"a certificate of {len(der)} B is too large")
    try:
        certificate = x509.load_der_x509_certificate(der)
        if (
            not certificate.not_valid_before_utc
            <= datetime.now(UTC)
            <= certificate.not_valid_after_utc
        ):
            raise RemoteProtocolError("the certificate is not valid at this time")
        encoded_key, signature = decode_signed_key(_libp2p_extension(certificate))
        certificate.verify_directly_issued_by(certificate)
        spki = certificate.public_key().public_bytes(
            Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        )
    except (
        InvalidSignature,
        UnsupportedAlgorithm,
        TypeError,
        ValueError,
        x509.InvalidVersion,
    ) as exc:
        raise RemoteProtocolError(f"it is no certificate of libp2p: {exc}") from exc
    except x509.DuplicateExtension as exc:
        raise RemoteProtocolError("the certificate has an extension twice") from exc
    key = _public_key(encoded_key)
    if not _verifies(key, stock.LIBP2P_CERT_PREFIX + spki, signature):
        raise RemoteProtocolError("the peer's key does not vouch for the certificate")
    return ID.from_pubkey(key)


def _libp2p_extension(certificate: x509.Certificate) -> bytes:
    found: bytes | None = None
    for extension in certificate.extensions:
        if extension.oid == stock.LIBP2P_EXTENSION_OID and isinstance(
            extension.value, x509.UnrecognizedExtension
        ):
            found = extension.value.value
        elif extension.critical and extension.oid not in _HARMLESS:
            raise RemoteProtocolError(
                f"the certificate has a critical extension {extension.oid.dotted_string}"
            )
    if found is None:
        raise RemoteProtocolError("the certificate names no peer")
    return found


def _public_key(encoded: bytes) -> PublicKey:
    try:
        return deserialize_public_key(encoded)
    # libp2p raises whatever its protobuf and key libraries raise; the peer's bytes are the only cause.
    except Exception as exc:
        raise RemoteProtocolError("the certificate's peer has no key that we can read") from exc


def _verifies(key: PublicKey, data: bytes, signature: bytes) -> bool:
    try:
        return bool(key.verify(data, signature))
    # As above: each kind of key has exceptions of its own for a signature of a wrong form.
    except Exception as exc:
        raise RemoteProtocolError("the certificate's signature is malformed") from exc


def decode_signed_key(der: bytes) -> tuple[bytes, bytes]:
    """The key and the signature in the value of the extension.

    Raises:
        RemoteProtocolError: it is not that form, to the byte.
    """
    try:
        read = stock.decode_signed_key(der)
        # It is read leniently: DER has one form, which writing it again gives.
        if stock.encode_signed_key(read.public_key_bytes, read.signature) != der:
            raise ValueError("it is in another form, or has bytes after its end")
    except ValueError as exc:
        raise RemoteProtocolError(f"the extension is not a key and a signature: {exc}") from exc
    return read.public_key_bytes, read.signature
