"""TCP for py-libp2p: the stock transport, whose sockets are closed also if what they are for is given up.

Where the stock transport (0.8.1) binds a socket, of a listener or to dial from a port, it waits once, though nothing
has to be waited for. Cancelled there, it leaves the socket to the garbage collector.
"""

from __future__ import annotations

import socket

import trio
from libp2p.abc import IRawConnection
from libp2p.custom_types import THandler
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP, TCPListener
from multiaddr import Multiaddr

__all__ = ["TcpTransport"]


class TcpTransport(TCP):
    """Stock TCP that leaves no socket behind."""

    def create_listener(self, handler_function: THandler) -> TCPListener:
        """Make a listener that calls `handler_function` with each connection."""
        return _Listener(handler_function)

    async def dial_with_source(self, maddr: Multiaddr, source: tuple[str, int]) -> IRawConnection:
        """Dial an IP address from an address and a port of this machine; from any port if that cannot be had.

        Raises:
            OpenConnectionError: nobody answers there, or the addresses are of two families.
        """
        version = maddr.protocols()[0].name
        if version not in ("ip4", "ip6") or (version == "ip6") != (":" in source[0]):
            raise OpenConnectionError(f"cannot dial {maddr} from {source[0]}")
        target = maddr.value_for_protocol(version), int(str(maddr.value_for_protocol("tcp")))
        bound = _bind(source)
        if bound is None:
            return await self.dial(maddr)
        dialling = trio.socket.from_stdlib_socket(bound)
        try:
            await dialling.connect(target)
        except OSError as exc:
            dialling.close()
            raise OpenConnectionError(f"cannot dial {maddr} from {source}: {exc}") from exc
        except BaseException:  # cancelled: nobody else has the socket
            dialling.close()
            raise
        return RawConnection(TrioTCPStream(trio.SocketStream(dialling)), True)


class _Listener(TCPListener):
    async def listen(self, maddr: Multiaddr) -> None:
        """Listen, or never begin to."""
        with trio.CancelScope(shield=True):
            await super().listen(maddr)
        await trio.lowlevel.checkpoint_if_cancelled()


def _bind(source: tuple[str, int]) -> socket.socket | None:
    """A socket at this place, which a listener of ours may have, too; None if it cannot be had."""
    family = socket.AF_INET6 if ":" in source[0] else socket.AF_INET
    dialling = socket.socket(family, socket.SOCK_STREAM)
    try:
        dialling.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        dialling.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        dialling.bind(source)
    except (AttributeError, OSError):  # no such option, or no such place, on this system
        dialling.close()
        return None
    dialling.setblocking(False)
    return dialling
