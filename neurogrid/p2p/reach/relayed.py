"""A stream to a relay, as the raw connection of a libp2p swarm: our Noise and our Yamux run over it.

The relay sees sealed bytes. What is known of the way: no address of the peer, only `/p2p/RELAY/p2p-circuit`.
"""

from __future__ import annotations

from typing import Any, cast

import trio
from libp2p.abc import IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.network.connection.exceptions import RawConnError
from multiaddr import Multiaddr

from neurogrid.errors import StreamBrokenError
from neurogrid.p2p.libp2p.libp2p_stream import Libp2pStream
from neurogrid.p2p.streams.stream import Stream

__all__ = ["RelayedConnection", "connection_of"]

# A longer read than this is no ping of the muxer (12 B of Yamux, 16 of Noise, 2 of length), but somebody's data.
_PING_BYTES = 64
_READ_BYTES = 64 * 1024


class RelayedConnection(IRawConnection):
    """Bytes to a peer through a relay.

    Args:
        stream: to the relay, which has joined it to one of the peer's.
        peer_id: who is to be at the other end; Noise proves it.
        is_initiator: whether we asked for it.

    Attributes:
        used_at: when more than a ping came or went last (`trio.current_time`).
    """

    def __init__(self, stream: Stream, peer_id: str, *, is_initiator: bool) -> None:
        self.is_initiator = is_initiator
        self.relay_id = stream.peer_id
        self.peer_id = peer_id
        self.used_at = trio.current_time()
        self._stream = stream
        self.address = Multiaddr(f"/p2p/{self.relay_id}/p2p-circuit/p2p/{peer_id}")

    async def read(self, n: int | None = None) -> bytes:
        """Return between 1 and `n` bytes, `b""` at the end."""
        try:
            data = await self._stream.receive_some(n or _READ_BYTES)
        except StreamBrokenError as exc:
            raise RawConnError(str(exc)) from exc
        self._note(len(data))
        return data

    async def write(self, data: bytes) -> None:
        """Send all of `data`."""
        try:
            await self._stream.send_all(data)
        except StreamBrokenError as exc:
            raise RawConnError(str(exc)) from exc
        self._note(len(data))

    async def close(self) -> None:
        """Close the stream to the relay; what was written before still arrives."""
        await self._stream.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        """None: what is at the other end of the socket is the relay."""
        return None

    def get_transport_addresses(self) -> list[Multiaddr]:
        """The way through the relay."""
        return [self.address]

    def get_connection_type(self) -> ConnectionType:
        """Relayed."""
        return ConnectionType.RELAYED

    def _note(self, num_bytes: int) -> None:
        if num_bytes > _PING_BYTES:
            self.used_at = trio.current_time()


def connection_of(stream: Stream) -> Any:
    """The muxed connection under a stream of a libp2p host."""
    return cast(Libp2pStream, stream)._net_stream.muxed_conn
