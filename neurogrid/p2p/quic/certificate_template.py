"""The part of a libp2p certificate that is the same for every peer, and says nothing of it."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.x509.oid import NameOID

__all__ = ["certificate_template"]

# The certificate lives as long as its process, and a peer's clock may be wrong either way.
_CLOCK_SKEW = timedelta(days=1)
_VALIDITY = timedelta(days=36_500)


def certificate_template() -> x509.CertificateBuilder:
    """All of a certificate but its key and its extensions."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "libp2p")])
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .serial_number(secrets.randbits(63) + 1)
        .subject_name(name)
        .issuer_name(name)
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALIDITY)
    )
