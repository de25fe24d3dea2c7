"""Connections of a stock swarm that never became one: closed at once, whatever ended their making.

py-libp2p 0.8.1 closes the socket of a connection that it could not secure only if the handshake failed by itself. One
that was given up, since its deadline passed or its host closed, keeps its socket until the garbage collector finds it,
and its place among the connections that the resource manager counts for ever: as many peers that accept and then say
nothing as there are places, and nobody can be dialled any more.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import trio
from libp2p.exceptions import BaseLibp2pError

__all__ = ["close_failed_upgrades"]


def close_failed_upgrades(swarm: Any) -> None:
    """Let a swarm close what it could not make a connection of. Before it listens or dials."""
    upgrade_outbound, upgrade_inbound = (
        swarm.upgrade_outbound_raw_conn,
        swarm.upgrade_inbound_raw_conn,
    )

    async def outbound_or_close(raw_conn: Any, peer_id: Any, pre_scope: Any = None) -> Any:
        try:
            return await upgrade_outbound(raw_conn, peer_id, pre_scope)
        except BaseException:  # also cancelled: nobody else has the connection
            if pre_scope is not None:
                pre_scope.close()
            await _close(raw_conn)
            raise

    async def inbound_or_close(raw_conn: Any, maddr: Any) -> Any:
        try:
            return await upgrade_inbound(raw_conn, maddr)
        except BaseException:  # as above
            await _close(raw_conn)
            raise

    swarm.upgrade_outbound_raw_conn = outbound_or_close
    swarm.upgrade_inbound_raw_conn = inbound_or_close


async def _close(raw_conn: Any) -> None:
    # It may be gone already.
    with trio.CancelScope(shield=True), suppress(BaseLibp2pError, OSError):
        await raw_conn.close()
