"""Handshakes that secure the connections of a libp2p host: Noise first, TLS 1.3 second, nothing else.

Noise is libp2p's, and before it the same with AES-GCM, where this processor is quicker with that: two NeuroGrid peers
on such processors choose it. To any other peer it is a protocol that it does not know.

A stock py-libp2p 0.8.1 host also takes plaintext, over which anybody may claim any peer id, and SECIO, which
libp2p has given up: both are left out here, so a peer id is always proven. The rest works around what stock TLS does:

- its certificates carry the libp2p extension last, and js-libp2p looks for it first. Ours carry no other.
- it writes the private key to a temporary file for each connection. Here once, for each direction.
- it fails by whatever exception comes along. A handshake that fails is a `HandshakeFailure`, to be told from a bug.

Source: the Noise and TLS handshake specifications of libp2p; protocol_spec/security.md, "AES-GCM".
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from google.protobuf.message import DecodeError
from libp2p.abc import IRawConnection, ISecureConn, ISecureTransport
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.noise.patterns import PatternXX
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.security.tls.exceptions import TLSHandshakeFailure
from libp2p.security.tls.transport import PROTOCOL_ID as TLS
from libp2p.security.tls.transport import IdentityConfig, TLSTransport

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.link.ciphers import is_aes_quicker
from neurogrid.p2p.quic.certificate_template import certificate_template

__all__ = ["AES_NOISE", "security_options"]

AES_NOISE: Final = TProtocol("/neurogrid/noise-aesgcm/1.0.0")


def security_options(identity: Identity) -> dict[TProtocol, ISecureTransport]:
    """Return the handshakes that a host offers and accepts, preferred first (`sec_opt` of `libp2p.new_host`)."""
    key_pair, noise_key = identity.key_pair, create_noise_key_pair().private_key
    options: dict[TProtocol, ISecureTransport] = {}
    if is_aes_quicker():
        options[AES_NOISE] = _AESNoiseTransport(key_pair, noise_privkey=noise_key)
    options[NOISE] = NoiseTransport(key_pair, noise_privkey=noise_key)
    options[TLS] = _TLSTransport(key_pair)
    return options


class _AESNoiseTransport(NoiseTransport):
    """libp2p's Noise handshake, with AES-GCM in the place of ChaCha20-Poly1305."""

    def get_pattern(self) -> PatternXX:
        pattern = PatternXX(self.local_peer, self.libp2p_privkey, self.noise_privkey)
        pattern.protocol_name = b"Noise_XX_25519_AESGCM_SHA256"
        return pattern


class _TLSTransport(TLSTransport):
    """Stock TLS, with certificates that every libp2p accepts."""

    def __init__(self, key_pair: KeyPair) -> None:
        # The libp2p extension is put in last: after nothing else, it is the first one.
        template = certificate_template()
        super().__init__(key_pair, identity_config=IdentityConfig(cert_template=template))
        self._contexts: dict[bool, ssl.SSLContext] = {}

    def create_ssl_context(self, server_side: bool = False) -> ssl.SSLContext:
        context = self._contexts.get(server_side)
        if context is None:
            context = super().create_ssl_context(server_side)
            if server_side:
                # No libp2p resumes sessions; with tickets, a connection could skip the certificates.
                context.num_tickets = 0
            self._contexts[server_side] = context
        return context

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        with _map_exceptions():
            return await super().secure_inbound(conn)

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        with _map_exceptions():
            return await super().secure_outbound(conn, peer_id)


@contextmanager
def _map_exceptions() -> Iterator[None]:
    """Raise a handshake failure for each error that a peer's bytes and certificate cause in the stock handshake."""
    try:
        yield
    except HandshakeFailure:
        raise
    except (
        BaseLibp2pError,
        DecodeError,
        InvalidSignature,
        OSError,  # ssl.SSLError is one
        RuntimeError,
        UnsupportedAlgorithm,
        ValueError,
        x509.DuplicateExtension,
    ) as exc:
        raise TLSHandshakeFailure(f"the TLS handshake failed: {exc}") from exc
