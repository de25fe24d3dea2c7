"""Bytes that break a handshake: a failure that libp2p's own code knows, and nothing that ends the host."""

from __future__ import annotations

from typing import Any, cast

import libp2p
import pytest
from libp2p.abc import IRawConnection, ISecureConn
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.peer.id import ID
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.noise.transport import Transport
from libp2p.transport.exceptions import MuxerUpgradeFailure

from neurogrid.errors import RemoteProtocolError
from neurogrid.p2p.link import install_link
from neurogrid.p2p.link.session import NoiseTransport

PEER = ID.from_pubkey(create_new_key_pair().public_key)


class Raw:
    """A connection on which these bytes come, whatever is sent."""

    is_initiator = True

    def __init__(self, *messages: bytes) -> None:
        self._bytes = b"".join(len(body).to_bytes(2, "big") + body for body in messages)

    async def read(self, n: int | None = None) -> bytes:
        taken, self._bytes = self._bytes[:n], self._bytes[n:]
        return taken

    async def write(self, data: bytes) -> None: ...

    async def close(self) -> None: ...


def transport() -> NoiseTransport:
    noise_key = create_noise_key_pair().private_key
    return NoiseTransport(Transport(create_new_key_pair(), noise_privkey=noise_key))


@pytest.mark.parametrize("size", [40, 80, 200])
async def test_a_peer_that_is_dialled_and_answers_noise_with_garbage(size: int) -> None:
    raw = cast(IRawConnection, Raw(bytes(range(1, size + 1))))
    with pytest.raises(HandshakeFailure):
        await transport().secure_outbound(raw, PEER)


async def test_a_peer_that_dials_and_ends_noise_with_garbage() -> None:
    raw = cast(IRawConnection, Raw(bytes(range(1, 33)), bytes(range(100))))
    with pytest.raises(HandshakeFailure):
        await transport().secure_inbound(raw)


class Broken(Raw):
    """A secured connection on which comes what its peer has not sealed."""

    async def read(self, n: int | None = None) -> bytes:
        raise RemoteProtocolError("a Noise message failed authentication")


async def test_a_peer_that_sends_garbage_when_the_muxer_is_to_be_chosen() -> None:
    swarm: Any = libp2p.new_host(key_pair=create_new_key_pair()).get_network()
    install_link(swarm)
    with pytest.raises(MuxerUpgradeFailure):
        await swarm.upgrader.upgrade_connection(cast(ISecureConn, Broken()), PEER)
