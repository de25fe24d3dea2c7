"""What `dht_kademlia` mends in py-libp2p's server, over real sockets; on the stock one each test fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import trio
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT

from neurogrid.errors import StreamBrokenError
from neurogrid.p2p import open_host
from neurogrid.p2p.discovery.dht_kademlia import Kademlia, KademliaNetwork
from neurogrid.p2p.discovery.dht_requests import ask, find_node
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost

DEADLINE = 120.0
PROTOCOL = "/ipfs/kad/1.0.0"
Served = Callable[[], AbstractAsyncContextManager[tuple[Libp2pHost, KadDHT]]]


@asynccontextmanager
async def ours() -> AsyncIterator[tuple[Libp2pHost, KadDHT]]:
    async with open_host() as host:
        network = KademliaNetwork(
            host.libp2p, protocol_id=PROTOCOL, addresses=lambda: host.addresses
        )
        kademlia = Kademlia(network, on_asked=lambda peer: None)
        await kademlia.switch_mode(DHTMode.SERVER)
        yield host, kademlia


@asynccontextmanager
async def stock() -> AsyncIterator[tuple[Libp2pHost, KadDHT]]:
    async with open_host() as host:
        yield host, KadDHT(host.libp2p, DHTMode.SERVER)


both = pytest.mark.parametrize(
    "served", [ours, pytest.param(stock, marks=pytest.mark.xfail(strict=True))]
)


@both
def test_streams_that_are_kept_open_shut_nobody_out(served: Served) -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with (
                served() as (server, _),
                open_host() as first,
                open_host() as second,
                open_host() as asker,
            ):
                for keeper in (first, second):
                    await keeper.connect(server.addresses[0])
                    for _ in range(7):  # each has asked, and keeps its stream for the next question
                        await keeper.open_stream(server.peer_id, [PROTOCOL])
                await asker.connect(server.addresses[0])
                question = find_node(server.libp2p.get_id().to_bytes())
                for _ in range(20):  # until the server has got to see all of the streams
                    await ask(asker, server.peer_id, PROTOCOL, question)
                    await trio.sleep(0.01)

    trio.run(main)


@both
def test_a_client_that_asks_is_not_taken_for_a_server(served: Served) -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with served() as (server, dht), open_host() as client:
                await client.connect(server.addresses[0])
                question = find_node(server.libp2p.get_id().to_bytes())
                peer = client.libp2p.get_id()
                # As soon as the server knows where the client is, which it learns from the client itself.
                while peer not in server.libp2p.get_peerstore().peers_with_addrs():
                    await trio.sleep(0.01)
                await ask(client, server.peer_id, PROTOCOL, question)
                assert not dht.routing_table.peer_in_table(peer)

    trio.run(main)


def test_one_peer_has_its_share_of_streams_and_no_more() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with ours() as (server, _), open_host() as greedy, open_host() as other:
                await greedy.connect(server.addresses[0])
                await other.connect(server.addresses[0])
                question = find_node(server.libp2p.get_id().to_bytes())
                for _ in range(8):
                    await greedy.open_stream(server.peer_id, [PROTOCOL])
                # It takes a moment until the server has got to see all of them.
                is_refused = False
                while not is_refused:
                    try:
                        await ask(greedy, server.peer_id, PROTOCOL, question)
                    except StreamBrokenError:
                        is_refused = True
                await ask(other, server.peer_id, PROTOCOL, question)

    trio.run(main)
