"""TLS 1.3 as libp2p wants it, over qh3's: both sides show a certificate, and both are verified by peer id.

qh3's TLS answers a request for a certificate, but as a server it never asks for one. Here the server's first flight
carries a CertificateRequest, and Certificate and CertificateVerify are taken before Finished. And it does what we
never need as little as possible: one key exchange, no resumption, no compressed certificates.

What it relies on in qh3 is held by tests/unit/test_quic_qh3.py.

Source: RFC 8446; the TLS handshake specification of libp2p.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any, Final

from libp2p.peer.id import ID
from qh3 import tls
from qh3._hazmat import Buffer, CryptoError, SignatureError, verify_with_public_key
from qh3._hazmat import Certificate as ParsedCertificate

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.quic.certificate import peer_id_of

__all__ = ["ALPN", "SIGNATURE_ALGORITHMS", "MutualTLS", "mutual_tls"]

ALPN: Final = "libp2p"

# What keys of certificates sign with: P-256 in Go, Rust, JavaScript and here; the others may be met all the same.
SIGNATURE_ALGORITHMS: Final = [
    tls.SignatureAlgorithm.ECDSA_SECP256R1_SHA256,
    tls.SignatureAlgorithm.ED25519,
    tls.SignatureAlgorithm.ECDSA_SECP384R1_SHA384,
    tls.SignatureAlgorithm.RSA_PSS_RSAE_SHA256,
]
# A message of a handshake. A certificate may take 16 KiB; all else is far below.
_MAX_MESSAGE: Final = 32 * 1024
_HEADER: Final = 4


class MutualTLS(tls.Context):
    """One side of a handshake.

    Attributes:
        peer_id: the peer id that the peer has shown; None until then.
    """

    peer_id: ID | None
    _expected: ID | None
    _message_buffer: bytes
    _awaited: list[tls.HandshakeType]  # of a client

    def handle_message(
        self, input_data: bytes, output_buf: dict[tls.Epoch, Buffer], epoch: int = -1
    ) -> None:
        """Take bytes of the peer's handshake, and write ours to the buffers of their epochs.

        Raises:
            qh3.tls.Alert: the peer broke the protocol, or is not the one that was expected.
        """
        if self.state is tls.State.CLIENT_HANDSHAKE_START:
            super().handle_message(input_data, output_buf, epoch)
            return
        self._message_buffer += input_data
        while len(self._message_buffer) >= _HEADER:
            length = _HEADER + int.from_bytes(self._message_buffer[1:_HEADER], "big")
            if length > _MAX_MESSAGE:
                raise tls.AlertDecodeError(f"a message of {length} B is too long")
            if len(self._message_buffer) < length:
                break
            message = self._message_buffer[:length]
            self._message_buffer = self._message_buffer[length:]
            self._take_message(message, output_buf, epoch)

    def _take_message(
        self, message: bytes, output_buf: dict[tls.Epoch, Buffer], epoch: int
    ) -> None:
        kind = message[0]
        if kind == tls.HandshakeType.COMPRESSED_CERTIFICATE:
            raise tls.AlertUnexpectedMessage("we offered no compression")
        if self.state is not tls.State.SERVER_EXPECT_FINISHED:
            super().handle_message(message, output_buf, epoch)
            return
        if epoch != tls.Epoch.HANDSHAKE:
            raise tls.AlertUnexpectedMessage("a message at the wrong level")
        if kind != self._awaited[0]:
            raise tls.AlertUnexpectedMessage(f"message {kind} in place of {int(self._awaited[0])}")
        if kind == tls.HandshakeType.FINISHED:
            super().handle_message(message, output_buf, epoch)
            return
        buffer = Buffer(data=message)
        if kind == tls.HandshakeType.CERTIFICATE:
            self._process_certificate(tls.pull_certificate(buffer))
        else:
            self._verify_proof(tls.pull_certificate_verify(buffer))
        if not buffer.eof():
            raise tls.AlertDecodeError("bytes after the end of a message")
        del self._awaited[0]
        assert self.key_schedule is not None
        self.key_schedule.update_hash(message)

    # ------------------------------------------------------------------ the server's flight

    def _server_handle_hello(
        self,
        input_buf: Buffer,
        initial_buf: Buffer,
        handshake_buf: Buffer,
        onertt_buf: Buffer,
    ) -> None:
        self._handshake_buf = handshake_buf
        # With this, qh3 takes the transcript of the client's Finished when it comes, not before: other messages
        # come in between, as with the extension that the attribute is for.
        self._alps_negotiated = True
        super()._server_handle_hello(input_buf, initial_buf, handshake_buf, onertt_buf)

    def _setup_traffic_protection(
        self, direction: tls.Direction, epoch: tls.Epoch, label: bytes
    ) -> None:
        super()._setup_traffic_protection(direction, epoch, label)
        is_before_extensions = (
            self.state is tls.State.SERVER_EXPECT_CLIENT_HELLO
            and direction == tls.Direction.DECRYPT
            and epoch == tls.Epoch.HANDSHAKE
        )
        if is_before_extensions:
            self._ask_after_extensions()

    def _ask_after_extensions(self) -> None:
        """Let a CertificateRequest follow the message that is hashed next, which is EncryptedExtensions."""
        schedule: Any = self.key_schedule
        update_hash: Callable[[bytes], None] = schedule.update_hash

        def update_and_ask(data: bytes) -> None:
            update_hash(data)
            schedule.update_hash = update_hash
            with tls.push_message(schedule, self._handshake_buf):
                _push_certificate_request(self._handshake_buf)

        schedule.update_hash = update_and_ask

    # ------------------------------------------------------------------ the peer's certificate

    def _process_certificate(self, certificate: tls.Certificate) -> None:
        if len(certificate.certificates) != 1:
            raise tls.AlertBadCertificate(
                f"the peer shows {len(certificate.certificates)} certificates, not one"
            )
        der = certificate.certificates[0][0]
        try:
            peer_id = peer_id_of(der)
            self._peer_certificate = ParsedCertificate(der)
        except (RemoteProtocolError, CryptoError, ValueError) as exc:
            raise tls.AlertBadCertificate(str(exc)) from exc
        if self._expected is not None and peer_id != self._expected:
            raise tls.AlertBadCertificate(
                f"the pubkey there is that of peer id {peer_id}, not of {self._expected}"
            )
        self.peer_id = peer_id

    def _verify_proof(self, proof: tls.CertificateVerify) -> None:
        """Verify that the client holds the key of its certificate."""
        if proof.algorithm not in SIGNATURE_ALGORITHMS:
            raise tls.AlertDecryptError("a signature of a kind that we did not ask for")
        assert self._peer_certificate is not None
        assert self.key_schedule is not None
        try:
            verify_with_public_key(
                self._peer_certificate.public_key(),
                proof.algorithm,
                self.key_schedule.certificate_verify_data(b"TLS 1.3, client CertificateVerify"),
                proof.signature,
            )
        except (SignatureError, ValueError) as exc:
            raise tls.AlertDecryptError(f"the client's signature is wrong: {exc}") from exc


def mutual_tls(stock: tls.Context, expected: ID | None) -> MutualTLS:
    """Take over from a context of qh3's before its first message.

    Args:
        expected: the peer that we dialled; None lets any peer in that proves its peer id.
    """
    context = MutualTLS.__new__(MutualTLS)
    context.__dict__.update(stock.__dict__)
    context.peer_id = None
    context._expected = expected
    context._message_buffer = b""
    context._awaited = [
        tls.HandshakeType.CERTIFICATE,
        tls.HandshakeType.CERTIFICATE_VERIFY,
        tls.HandshakeType.FINISHED,
    ]
    # Peers are verified by `_process_certificate`, not by authorities and names.
    context._verify_mode = ssl.CERT_NONE
    # A hello with one share fits one datagram.
    context._supported_groups = [tls.Group.X25519]
    context._compress_certificate_algorithms = None
    return context


def _push_certificate_request(buffer: Buffer) -> None:
    buffer.push_uint8(tls.HandshakeType.CERTIFICATE_REQUEST)
    with tls.push_block(buffer, 3):
        tls.push_opaque(buffer, 1, b"")  # of use only after a handshake
        with (
            tls.push_block(buffer, 2),
            tls.push_extension(buffer, tls.ExtensionType.SIGNATURE_ALGORITHMS),
        ):
            tls.push_list(buffer, 2, buffer.push_uint16, SIGNATURE_ALGORITHMS)
