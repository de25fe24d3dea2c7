"""Inbound connections of a stock swarm: without its leak, and few from each peer.

py-libp2p 0.8.1 counts inbound connections by a limiter whose tokens are held by the task that accepted each,
and that task waits for the end of the whole host, not of its connection. So after `max_connections` peers
have come and gone, nobody can connect any more, and every one of those tasks is still there (seen: the 257th
connection to a worker is refused, and all that come later).

Here the task of an accepted connection ends when the connection does.

Its bound for each peer does not hold in a connection's first 20 s, nor for peers that are protected: one peer alone
could take all the places there are. Here it holds from the first on.

It ends its listeners only if it is closed in order and in time: one whose opening was cut short accepts on. Here they
are closed whatever happened. And it closes them after its connections, which it closes one after the other, 0.1 s for
each: a peer that dials again when it loses one gets another to a host that is about to end, and a coordinator of 30
workers runs out of time before all were told. Here no peer comes in any more, and all are told at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from libp2p.network.exceptions import SwarmException

__all__ = [
    "bound_inbound_connections",
    "close_connections",
    "closed_listeners",
    "end_inbound_tasks",
]

# A peer needs one; two while it goes from a relay to a direct way, and as many more as it has lost without our knowing.
MAX_INBOUND_PER_PEER = 8

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


def bound_inbound_connections(swarm: Any, *, max_per_peer: int = MAX_INBOUND_PER_PEER) -> None:
    """Let a swarm refuse an inbound connection of a peer that has so many already. Before it listens."""
    add = swarm.add_conn

    async def add_if_few(muxed: Any, direction: str = "unknown") -> Any:
        if direction == "inbound" and len(swarm.get_connections(muxed.peer_id)) >= max_per_peer:
            await muxed.close()
            raise SwarmException(f"{muxed.peer_id} has {max_per_peer} connections here already")
        return await add(muxed, direction=direction)

    swarm.add_conn = add_if_few


async def close_connections(swarm: Any) -> None:
    """Close the connections of a swarm that is about to end, all at once, and let it have no other."""

    async def refuse_raw(raw_conn: Any, maddr: Any) -> None:
        raise SwarmException("the host is about to end")

    async def refuse(muxed: Any, direction: str = "unknown") -> None:
        await muxed.close()
        raise SwarmException("the host is about to end")

    swarm.upgrade_inbound_raw_conn, swarm.add_conn = refuse_raw, refuse
    async with trio.open_nursery() as nursery:
        for connection in swarm.get_connections():
            nursery.start_soon(connection.close)


@asynccontextmanager
async def closed_listeners(swarm: Any) -> AsyncIterator[None]:
    """See to it that a swarm, which runs within the block, listens nowhere after it."""
    try:
        yield
    finally:
        with trio.move_on_after(CLOSE_TIMEOUT) as scope:
            scope.shield = True
            for listener in list(swarm.listeners.values()):
                await listener.close()
