"""Hosts in memory with the blocking face, for the unit tests of it: two that are connected, or one alone."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass

from neurogrid.p2p.blocking import Host, Protocol, in_thread
from neurogrid.p2p.blocking.handler_threads import HandlerThreads
from neurogrid.p2p.blocking.trio_thread import TrioThread
from neurogrid.p2p.memory import MemoryHost, open_memory_network

__all__ = ["DEADLINE", "Pair", "connected_pair", "open_lonely_host", "open_two"]

DEADLINE = 60.0  # seconds, for what takes none


@asynccontextmanager
async def open_two() -> AsyncIterator[tuple[MemoryHost, MemoryHost]]:
    """A client and a server, not connected yet."""
    async with (
        open_memory_network() as network,
        network.open_host() as client,
        network.open_host() as server,
    ):
        yield client, server


@dataclass
class Pair:
    """A client and a server in memory, connected, in one loop."""

    client: Protocol
    server: Protocol
    peer_id: str  # the server's


@contextmanager
def connected_pair(max_threads: int = 8) -> Iterator[Pair]:
    with TrioThread(open_two, name="network in memory") as thread:
        hosts = [
            Host(thread, inner, HandlerThreads(max_threads=max_threads))
            for inner in thread.resource
        ]
        client, server = (Protocol(host) for host in hosts)
        peer_id = client.host.connect(server.host.addresses[0])
        yield Pair(client, server, peer_id)
        for host_ in hosts:
            assert host_._handlers.stop(DEADLINE) == []


@asynccontextmanager
async def open_one() -> AsyncIterator[MemoryHost]:
    async with open_memory_network() as network, network.open_host() as one:
        yield one


def open_lonely_host() -> AbstractContextManager[Host]:
    """A host that talks to itself."""
    return in_thread(open_one)()
