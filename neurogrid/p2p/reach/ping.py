"""libp2p's ping: is the peer alive, and how far away is it? For connections whose link does not ask by itself.

Source: https://github.com/libp2p/specs/blob/master/ping/ping.md
"""

from __future__ import annotations

import os
from typing import Final

import trio

from neurogrid.errors import StreamBrokenError
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.streams.stream import receive_exactly

__all__ = ["PING_PROTOCOL", "ping"]

PING_PROTOCOL: Final = "/ipfs/ping/1.0.0"
PING_BYTES: Final = 32


async def ping(host: Host, peer_id: str) -> float:
    """Return the round trip to a connected peer in seconds. The caller sets the deadline.

    Raises:
        PeerUnreachableError: not connected, or the peer does not speak ping.
        StreamBrokenError: the connection ended, or something else than the ping came back.
    """
    stream = await host.open_stream(peer_id, [PING_PROTOCOL])
    try:
        payload = os.urandom(PING_BYTES)
        started_at = trio.current_time()
        await stream.send_all(payload)
        if await receive_exactly(stream, PING_BYTES) != payload:
            raise StreamBrokenError(f"{peer_id} answers a ping with other bytes")
        return trio.current_time() - started_at
    finally:
        await stream.reset()
