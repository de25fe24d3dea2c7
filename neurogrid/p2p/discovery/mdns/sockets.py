"""Sockets of multicast DNS: one for each interface and IP version, which hears and speaks on that interface alone.

It is bound to the group's own address, so that nothing sent to the machine itself comes in; and Linux is told to
deliver only what came in on the interface that this socket joined the group on, not on any that some program did.
The port is shared with other programs on this machine that speak mDNS, if they share it too.
"""

from __future__ import annotations

import errno
import socket
import struct

import trio

from neurogrid.p2p.discovery.mdns.interfaces import Interface
from neurogrid.p2p.discovery.mdns.limits import MAX_PACKET_BYTES

__all__ = ["GroupSocket", "open_group_socket", "versions_of"]

PORT = 5353
GROUPS = {4: "224.0.0.251", 6: "ff02::fb"}
HOPS = 255  # RFC 6762, section 11: routers lower it, if they let it pass at all
# Of Linux (ip(7), ipv6(7)); the socket module has no names for them.
_IP_MULTICAST_ALL, _IPV6_MULTICAST_ALL = 49, 29


class GroupSocket:
    """A socket in the group. Made by `open_group_socket`."""

    def __init__(self, inner: trio.socket.SocketType, version: int) -> None:
        self._inner = inner
        self._version = version

    async def send(self, data: bytes) -> None:
        """Multicast a packet.

        Raises:
            OSError: the interface is down, or has gone.
        """
        await self._inner.sendto(data, (GROUPS[self._version], PORT))

    async def receive(self) -> tuple[bytes, str]:
        """The next packet, and the IP address that it came from. What is longer than mDNS allows is cut.

        Raises:
            OSError: the interface has gone.
        """
        data, source = await self._inner.recvfrom(MAX_PACKET_BYTES + 1)
        return data, str(source[0]).partition("%")[0]

    def close(self) -> None:
        """Leave the group."""
        self._inner.close()


def versions_of(interface: Interface, addresses: tuple[str, ...]) -> tuple[int, ...]:
    """The IP versions to speak on an interface: those that an address is announced of, and 4 where there is one.

    Libp2p's peers in other languages use IPv4 alone.
    """
    has_ipv6 = any(address.startswith("/ip6/") for address in addresses)
    return ((4,) if interface.ipv4 else ()) + ((6,) if has_ipv6 else ())


async def open_group_socket(interface: Interface, version: int) -> GroupSocket:
    """Join the group on an interface.

    Raises:
        OSError: the interface has gone, or the port is taken by a program that does not share it; the text says so.
    """
    family = socket.AF_INET if version == 4 else socket.AF_INET6
    inner = trio.socket.socket(family, socket.SOCK_DGRAM)
    try:
        # Not SO_REUSEPORT: Linux gives a packet to one of the sockets that have it, on whichever interface it is.
        inner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if version == 4:
            await _join_ipv4(inner, interface)
        else:
            await _join_ipv6(inner, interface)
    except OSError as exc:
        inner.close()
        if exc.errno == errno.EADDRINUSE:
            raise OSError(
                exc.errno, f"UDP port {PORT} is taken by a program that does not share it"
            ) from exc
        raise
    return GroupSocket(inner, version)


async def _join_ipv4(inner: trio.socket.SocketType, interface: Interface) -> None:
    group = socket.inet_aton(GROUPS[4])
    own = interface.ipv4.packed if interface.ipv4 else bytes(4)
    request = struct.pack("=4s4si", group, own, interface.index)  # struct ip_mreqn
    await inner.bind((GROUPS[4], PORT))
    inner.setsockopt(socket.IPPROTO_IP, _IP_MULTICAST_ALL, 0)
    inner.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, request)
    inner.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, request)
    inner.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, HOPS)
    # Other hosts on this machine are to hear us too.
    inner.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)


async def _join_ipv6(inner: trio.socket.SocketType, interface: Interface) -> None:
    group = socket.inet_pton(socket.AF_INET6, GROUPS[6])
    request = struct.pack("=16si", group, interface.index)  # struct ipv6_mreq
    inner.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    await inner.bind((GROUPS[6], PORT, 0, interface.index))
    inner.setsockopt(socket.IPPROTO_IPV6, _IPV6_MULTICAST_ALL, 0)
    inner.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, request)
    inner.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, interface.index)
    inner.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, HOPS)
    inner.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
