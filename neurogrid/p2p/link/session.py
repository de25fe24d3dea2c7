"""Noise connections of py-libp2p, from the end of the handshake on.

The handshake is py-libp2p's own. Then `NoiseTransport` takes the two cipher states out of the session that it made,
and everything that follows goes through `Sealer` and `Opener`. Until the muxer takes over, which is for one
multistream negotiation, a `NoiseSession` reads and writes as any secure connection of py-libp2p does.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidTag
from libp2p.abc import IRawConnection, ISecureConn, ISecureTransport
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.base_session import BaseSession
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.noise.io import NoiseTransportReadWriter
from libp2p.security.noise.transport import Transport
from libp2p.security.secure_session import SecureSession

from neurogrid.errors import LocalProtocolError
from neurogrid.p2p.link.ciphers import CIPHERS, CipherState
from neurogrid.p2p.link.noise import MAX_PLAINTEXT, Opener, Sealer

if TYPE_CHECKING:
    from libp2p.connection_types import ConnectionType
    from multiaddr import Multiaddr

__all__ = ["NoiseSession", "NoiseTransport"]


class NoiseTransport(ISecureTransport):
    """Secures connections with the handshake of `stock` and a data path of ours."""

    def __init__(self, stock: Transport) -> None:
        self._stock = stock

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        """Answer a handshake on an accepted connection."""
        with _failing_as_handshake():
            return NoiseSession(await self._stock.secure_inbound(conn), conn)

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        """Begin a handshake on a connection to `peer_id`."""
        with _failing_as_handshake():
            return NoiseSession(await self._stock.secure_outbound(conn, peer_id), conn)


@contextmanager
def _failing_as_handshake() -> Iterator[None]:
    """Raise a handshake failure for bytes that the peer has not sealed: the stock handshake lets the cipher's error
    out, which its callers take for a bug, and which ends the host."""
    try:
        yield
    except InvalidTag as exc:
        raise HandshakeFailure("a message of the Noise handshake failed authentication") from exc


class NoiseSession(BaseSession):
    """A connection whose Noise handshake is done.

    Attributes:
        sealer: our direction.
        opener: the peer's.
    """

    def __init__(self, session: ISecureConn, raw_conn: IRawConnection) -> None:
        if not isinstance(session, SecureSession) or not isinstance(
            session.conn, NoiseTransportReadWriter
        ):
            raise LocalProtocolError("py-libp2p makes its Noise sessions in another way now")
        super().__init__(
            local_peer=session.local_peer,
            local_private_key=session.local_private_key,
            remote_peer=session.remote_peer,
            remote_permanent_pubkey=session.remote_permanent_pubkey,
            is_initiator=session.is_initiator,
        )
        protocol = session.conn.noise_state.noise_protocol
        ours, theirs = protocol.cipher_state_encrypt, protocol.cipher_state_decrypt
        # Noise_<pattern>_<curve>_<cipher>_<hash>
        cipher = CIPHERS[protocol.name.decode().split("_")[3]]
        self.sealer = Sealer(CipherState(cipher, ours.k, ours.n))
        self.opener = Opener(CipherState(cipher, theirs.k, theirs.n))
        self._raw_conn = raw_conn
        self._plaintext = b""  # opened, and more than was asked for

    async def read(self, n: int | None = None) -> bytes:
        """Return between 1 and `n` bytes, or what one message holds; `b""` at the end.

        Raises:
            RemoteProtocolError: what came was not sealed by the peer.
        """
        while not self._plaintext:
            if self.opener.next_length() is not None:
                self._plaintext = self.opener.open()
                continue
            # A little at a time: this is for a negotiation, and stays in Python's small objects.
            data = await self._raw_conn.read(min(4096, len(self.opener.space)))
            if not data:
                return b""
            self.opener.space[: len(data)] = data
            self.opener.received(len(data))
        if n is None:
            n = len(self._plaintext)
        data, self._plaintext = self._plaintext[:n], self._plaintext[n:]
        return data

    async def write(self, data: bytes) -> None:
        """Seal and send all of `data`. Once cancelled, the connection cannot be used any more."""
        view = memoryview(data)
        for at in range(0, len(view), MAX_PLAINTEXT):
            self.sealer.seal(view[at : at + MAX_PLAINTEXT])
            pending = bytes(self.sealer.pending)
            self.sealer.sent(len(pending))
            await self._raw_conn.write(pending)

    async def close(self) -> None:
        """Close the connection underneath, unless its socket was detached."""
        await self._raw_conn.close()

    def take_plaintext(self) -> bytes:
        """Take the bytes that were opened and not read: they come before all that the opener gives."""
        data, self._plaintext = self._plaintext, b""
        return data

    def detach_socket(self) -> socket.socket | None:
        """Take the socket out of the connection; None when there is something else than TCP below.

        A private network, a relay or a web socket stand below others: such connections are read and written through
        `read` and `write`. Afterwards the caller closes the socket; `close` does not.
        """
        raw_conn: Any = self._raw_conn
        if type(raw_conn) is not RawConnection or type(raw_conn.stream) is not TrioTCPStream:
            return None
        raw_conn.get_remote_address()  # remembered from now on
        return socket.socket(fileno=raw_conn.stream.stream.socket.detach())

    def get_remote_address(self) -> tuple[str, int] | None:
        """The peer's host and port."""
        return self._raw_conn.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        """The addresses that the connection goes over."""
        return self._raw_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        """Direct or relayed."""
        return self._raw_conn.get_connection_type()
