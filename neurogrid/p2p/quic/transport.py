"""QUIC as a transport of py-libp2p: dials and listens at `/ip4/.../udp/.../quic-v1`.

Its connections bring their own security and streams, and the swarm takes them as they are.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import cast

import trio
from libp2p.abc import IListener, IRawConnection, ITransport
from libp2p.custom_types import THandler
from libp2p.peer.id import ID
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr

from neurogrid.p2p.hosts.host import ip_place
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.quic.core import Configurations
from neurogrid.p2p.quic.endpoint import Acceptor, UdpEndpoint
from neurogrid.p2p.quic.limits import QuicLimits, WindowPool
from neurogrid.p2p.quic.udp import UdpSocket

__all__ = ["QuicTransport"]


class QuicTransport(ITransport):
    """The QUIC connections of one host. The swarm gives it a nursery before it listens or dials."""

    provides_native_muxing = True

    def __init__(self, identity: Identity, limits: QuicLimits | None = None) -> None:
        limits = limits or QuicLimits()
        self._configurations = Configurations(identity.key_pair, limits)
        self._pool = WindowPool(limits)
        self._nursery: trio.Nursery | None = None

    def set_background_nursery(self, nursery: trio.Nursery) -> None:
        """Take the nursery in which sockets run; for the swarm to call."""
        self._nursery = nursery

    def protocols(self) -> list[str]:
        """Return the protocols that this transport can be asked for; for the swarm."""
        return ["quic-v1"]

    def can_dial(self, maddr: Multiaddr) -> bool:
        """Whether an address is one of ours."""
        return _place(maddr) is not None

    def can_listen(self, maddr: Multiaddr) -> bool:
        """Whether an address is one of ours."""
        return _place(maddr) is not None

    async def dial(self, maddr: Multiaddr) -> IRawConnection:
        """Connect to the peer that `maddr` names, and nobody else.

        Raises:
            OpenConnectionError: nobody answers there, or somebody else does.
        """
        place = _place(maddr)
        peer_id = maddr.value_for_protocol("p2p")
        if place is None or peer_id is None:
            raise OpenConnectionError(f"{maddr} is no address of QUIC, or names no peer")
        udp = _open_socket(place, UdpSocket.connect, f"cannot dial {maddr}")
        endpoint = UdpEndpoint(udp, self._configurations, self._pool)
        await self._run(endpoint)
        try:
            connection = endpoint.dial(udp.peer_address, ID.from_base58(str(peer_id)))
            await connection.handshake_over.wait()
        except BaseException:  # also cancelled: nobody else has the endpoint
            endpoint.close()
            raise
        if not connection.is_established:
            endpoint.close()
            raise OpenConnectionError(connection.end_reason)
        # The swarm recognises a muxed connection, and takes it as it is.
        return cast(IRawConnection, connection)

    def create_listener(self, handler_function: THandler) -> IListener:
        """A listener that hands its connections to `handler_function`."""
        return _QuicListener(self, handler_function)

    async def listen(self, maddr: Multiaddr, handler: THandler) -> UdpEndpoint:
        """An endpoint that lets peers in, and runs.

        Raises:
            OpenConnectionError: the address is none of QUIC's, or cannot be had.
        """
        place = _place(maddr)
        if place is None:
            raise OpenConnectionError(f"{maddr} is no address of QUIC")
        udp = _open_socket(place, UdpSocket.bind, f"cannot listen on {place}")
        # The swarm takes a muxed connection where its type says a raw one.
        endpoint = UdpEndpoint(udp, self._configurations, self._pool, cast(Acceptor, handler))
        await self._run(endpoint)
        return endpoint

    async def _run(self, endpoint: UdpEndpoint) -> None:
        if self._nursery is None:
            raise OpenConnectionError("the host does not run")
        await self._nursery.start(endpoint.run)


class _QuicListener(IListener):
    def __init__(self, transport: QuicTransport, handler: THandler) -> None:
        self._transport = transport
        self._handler = handler
        self._endpoint: UdpEndpoint | None = None
        self._addresses: tuple[Multiaddr, ...] = ()

    async def listen(self, maddr: Multiaddr) -> None:
        self._endpoint = await self._transport.listen(maddr, self._handler)
        host, port = self._endpoint.socket.address[:2]
        family = "ip6" if ":" in host else "ip4"
        self._addresses = (Multiaddr(f"/{family}/{host}/udp/{port}/quic-v1"),)

    def get_addrs(self) -> tuple[Multiaddr, ...]:
        return self._addresses

    async def close(self) -> None:
        if self._endpoint is not None:
            self._endpoint.close()


def _open_socket(
    place: tuple[str, int], use: Callable[[UdpSocket, tuple[str, int]], None], failure: str
) -> UdpSocket:
    try:
        udp = UdpSocket(socket.AF_INET6 if ":" in place[0] else socket.AF_INET)
    except OSError as exc:  # no IPv6 here, or too many files are open
        raise OpenConnectionError(f"{failure}: {exc.strerror}") from exc
    try:
        use(udp, place)
    except OSError as exc:
        udp.close()
        raise OpenConnectionError(f"{failure}: {exc.strerror}") from exc
    return udp


def _place(maddr: Multiaddr) -> tuple[str, int] | None:
    """The host and port of `/ip4/.../udp/.../quic-v1`, whatever peer it names; None for any other address."""
    place = ip_place(maddr)
    return (str(place.ip), place.port) if place is not None and place.is_quic else None
