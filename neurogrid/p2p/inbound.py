"""Inbound connections of a stock swarm, without its leak.

py-libp2p 0.8.1 counts inbound connections by a limiter whose tokens are held by the task that accepted each,
and that task waits for the end of the whole host, not of its connection. So after `max_connections` peers
have come and gone, nobody can connect any more, and every one of those tasks is still there (seen: the 257th
connection to a worker is refused, and all that come later).

Here the task of an accepted connection ends when the connection does.
"""

from __future__ import annotations

from typing import Any

import trio
from libp2p.network.exceptions import SwarmException

__all__ = ["end_inbound_tasks"]

# Between the decision to close a connection and its end: what is being written may still go out. Seconds.
CLOSE_TIMEOUT = 3.0


def end_inbound_tasks(swarm: Any) -> None:
    """Let a swarm's tasks of inbound connections end with them. Before it listens."""
    upgrade = swarm.upgrade_inbound_raw_conn

    async def upgrade_and_stay(raw_conn: Any, maddr: Any) -> None:
        muxed = await upgrade(raw_conn, maddr)
        await muxed.event_shutting_down.wait()
        with trio.move_on_after(CLOSE_TIMEOUT):
            await muxed.event_closed.wait()
        # The caller takes an exception for the end of this connection, and a return for nothing.
        raise SwarmException("the connection has ended")

    swarm.upgrade_inbound_raw_conn = upgrade_and_stay
