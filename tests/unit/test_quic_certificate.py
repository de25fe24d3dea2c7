"""Certificates of libp2p: ours, and those that hostile peers may think of."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import NameOID, ObjectIdentifier
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.rsa import create_new_key_pair as create_rsa
from libp2p.crypto.secp256k1 import create_new_key_pair as create_secp256k1
from libp2p.peer.id import ID
from libp2p.security.tls.certificate import (
    create_cert_template,
    encode_signed_key,
    generate_certificate,
)

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p import Identity
from neurogrid.p2p.quic.certificate import decode_signed_key, make_certificate, peer_id_of

# What hostile certificates have in their numbers and names; it is refused or harmless.
pytestmark = pytest.mark.filterwarnings("ignore::cryptography.utils.CryptographyDeprecationWarning")

OID = ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
IDENTITY = Identity.generate().key_pair
NOW = datetime.now(UTC)
DAY = timedelta(days=1)


def der_of(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER)


def spki_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def forged(
    *,
    extension: Callable[[bytes], bytes | None] | None = None,
    since: datetime = NOW - DAY,
    until: datetime = NOW + DAY,
    signer: ec.EllipticCurvePrivateKey | None = None,
    critical: x509.ExtensionType | None = None,
) -> bytes:
    """A certificate (DER) with one thing wrong. `extension` is given what the peer's key has to sign."""
    key = ec.generate_private_key(ec.SECP256R1())
    signed = b"libp2p-tls-handshake:" + spki_of(key)
    value = (
        encode_signed_key(IDENTITY.public_key.serialize(), IDENTITY.private_key.sign(signed))
        if extension is None
        else extension(signed)
    )
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    builder = (
        x509.CertificateBuilder()
        .serial_number(1)
        .subject_name(name)
        .issuer_name(name)
        .not_valid_before(since)
        .not_valid_after(until)
        .public_key(key.public_key())
    )
    if value is not None:
        builder = builder.add_extension(x509.UnrecognizedExtension(OID, value), critical=False)
    if critical is not None:
        builder = builder.add_extension(critical, critical=True)
    return builder.sign(signer or key, hashes.SHA256()).public_bytes(Encoding.DER)


@pytest.mark.parametrize(
    "make", [lambda: IDENTITY, create_rsa, create_secp256k1], ids=["ed25519", "rsa", "secp256k1"]
)
def test_ours_are_verified(make: Callable[[], KeyPair]) -> None:
    identity = make()
    certificate, _ = make_certificate(identity)
    assert peer_id_of(der_of(certificate)) == ID.from_pubkey(identity.public_key)


def test_the_extension_comes_first_in_ours() -> None:
    certificate = x509.load_pem_x509_certificate(make_certificate(IDENTITY)[0])
    assert [extension.oid for extension in certificate.extensions] == [OID]


def test_those_of_py_libp2p_are_verified() -> None:
    pem, _ = generate_certificate(IDENTITY.private_key, create_cert_template())
    assert peer_id_of(der_of(pem.encode())) == ID.from_pubkey(IDENTITY.public_key)


def test_what_is_forged_here_is_good_when_nothing_is_wrong() -> None:
    assert peer_id_of(forged()) == ID.from_pubkey(IDENTITY.public_key)
    harmless = x509.BasicConstraints(ca=False, path_length=None)
    assert peer_id_of(forged(critical=harmless)) == ID.from_pubkey(IDENTITY.public_key)


@pytest.mark.parametrize(
    ("der", "reason"),
    [
        (forged(since=NOW - 2 * DAY, until=NOW - DAY), "not valid at this time"),
        (forged(since=NOW + DAY, until=NOW + 2 * DAY), "not valid at this time"),
        (forged(signer=ec.generate_private_key(ec.SECP256R1())), "no certificate of libp2p"),
        (forged(extension=lambda _: None), "names no peer"),
        (forged(extension=lambda _: b""), "not a key and a signature"),
        (
            forged(critical=x509.UnrecognizedExtension(ObjectIdentifier("1.2.3"), b"")),
            "critical extension 1.2.3",
        ),
        (
            forged(
                extension=lambda _: encode_signed_key(
                    IDENTITY.public_key.serialize(), IDENTITY.private_key.sign(b"another")
                )
            ),
            "does not vouch",
        ),
        (
            forged(
                extension=lambda signed: encode_signed_key(
                    Identity.generate().key_pair.public_key.serialize(),
                    IDENTITY.private_key.sign(signed),
                )
            ),
            "does not vouch",
        ),
        (
            forged(
                extension=lambda _: encode_signed_key(IDENTITY.public_key.serialize(), b"short")
            ),
            "signature",
        ),
        (forged(extension=lambda _: encode_signed_key(b"\x08\x63\x12\x00", b"x")), "no key"),
        (forged(extension=lambda _: encode_signed_key(b"\xff" * 30, b"x")), "no key"),
        (
            forged(extension=lambda _: encode_signed_key(b"\x08\x01\x12\x04abcd", b"x" * 64)),
            "no key",
        ),
        (b"", "no certificate"),
        (b"\x30\x03\x02\x01\x01", "no certificate"),
        (bytes(17 * 1024), "too large"),
    ],
    ids=[
        "expired",
        "not yet valid",
        "signed by another",
        "no extension",
        "empty extension",
        "critical extension",
        "vouches for another certificate",
        "another peer's key",
        "short signature",
        "unknown kind of key",
        "no protobuf",
        "short key",
        "empty",
        "another sequence",
        "too large",
    ],
)
def test_what_is_wrong_is_refused(der: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        peer_id_of(der)


@settings(deadline=None)
@given(st.data())
def test_a_changed_byte_is_never_another_peer(data: st.DataObject) -> None:
    der = bytearray(GOOD)
    at = data.draw(st.integers(0, len(der) - 1))
    der[at] ^= data.draw(st.integers(1, 255))
    try:
        peer_id = peer_id_of(bytes(der))
    except RemoteProtocolError:
        return
    assert peer_id == ID.from_pubkey(IDENTITY.public_key)


@settings(deadline=None)
@given(st.integers(0, 600))
def test_a_prefix_is_refused(length: int) -> None:
    with pytest.raises(RemoteProtocolError):
        peer_id_of(GOOD[: min(length, len(GOOD) - 1)])


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=600), st.binary(min_size=1, max_size=600))
def test_the_extension_is_read_as_it_was_written(key: bytes, signature: bytes) -> None:
    assert decode_signed_key(encode_signed_key(key, signature)) == (key, signature)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_an_extension_or_refused(der: bytes) -> None:
    try:
        key, signature = decode_signed_key(der)
    except RemoteProtocolError:
        return
    assert encode_signed_key(key, signature) == der


@pytest.mark.parametrize(
    "der",
    [
        b"\x30\x06\x04\x01a\x04\x01b!",
        b"\x30\x07\x04\x01a\x04\x01b!",
        b"\x30\x81\x06\x04\x01a\x04\x01b",
        b"\x30\x80\x04\x01a\x04\x01b\x00\x00",
        b"\x30\x84\xff\xff\xff\xff",
        b"\x30\x06\x05\x01a\x04\x01b",
        b"\x30\x05\x04\x00\x04\x01b",
    ],
    ids=[
        "bytes after the end",
        "bytes in the end",
        "long form",
        "no length",
        "huge length",
        "tag",
        "empty key",
    ],
)
def test_other_forms_of_the_extension_are_refused(der: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_signed_key(der)


GOOD = forged()
