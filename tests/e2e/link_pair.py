"""Two ends of our link over a TCP connection on loopback, after a real handshake, without a swarm."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio
from libp2p.abc import ISecureConn
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.transport import Transport

from neurogrid.p2p.link import LinkLimits, LinkStream
from neurogrid.p2p.link.connection import LinkConnection
from neurogrid.p2p.link.limits import BufferPool
from neurogrid.p2p.link.session import NoiseTransport


@dataclass
class Pair:
    """The dialler and the listener, and the socket of the listener's side."""

    one: LinkConnection
    other: LinkConnection
    nursery: trio.Nursery

    async def streams(self) -> tuple[LinkStream, LinkStream]:
        """Both ends of a new stream."""
        near = await self.one.open_stream()
        return near, await self.other.accept_stream()


async def sockets() -> tuple[trio.SocketStream, trio.SocketStream]:
    """A TCP connection: the dialler's end and the listener's."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener:
        near = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
        return near, await listener.accept()


async def sessions() -> tuple[ISecureConn, ISecureConn]:
    """The same connection after a handshake."""
    near, far = await sockets()
    keys = create_new_key_pair(), create_new_key_pair()
    transports = [
        NoiseTransport(Transport(key, noise_privkey=create_noise_key_pair().private_key))
        for key in keys
    ]
    secured: dict[int, ISecureConn] = {}

    async def dial() -> None:
        raw = RawConnection(TrioTCPStream(near), True)
        secured[0] = await transports[0].secure_outbound(raw, ID.from_pubkey(keys[1].public_key))

    async def answer() -> None:
        secured[1] = await transports[1].secure_inbound(RawConnection(TrioTCPStream(far), False))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        nursery.start_soon(answer)
    return secured[0], secured[1]


@asynccontextmanager
async def link_pair(limits: LinkLimits | None = None) -> AsyncIterator[Pair]:
    """Two connected ends that run until the block is left."""
    near, far = await sessions()
    one, other = (
        LinkConnection(conn, conn.get_remote_peer(), pool=BufferPool(limits or LinkLimits()))
        for conn in (near, far)
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.start)
        nursery.start_soon(other.start)
        await one.event_started.wait()
        await other.event_started.wait()
        yield Pair(one, other, nursery)
        nursery.cancel_scope.cancel()


async def receive_all(stream: LinkStream) -> bytes:
    """Everything until the peer has finished."""
    received = bytearray()
    while data := await stream.receive_some():
        received += data
    return bytes(received)
