"""How many connections a host lets one peer have, and how soon it notices that one is dead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import pytest
import trio
from libp2p.peer.id import ID

from neurogrid.errors import ConfigurationError, PeerUnreachableError
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.libp2p.inbound import MAX_INBOUND_PER_PEER
from neurogrid.p2p.libp2p.libp2p_host import open_host

DEADLINE = 120.0
BOTH = ("/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/udp/0/quic-v1")


@pytest.mark.parametrize("way", [0, 1], ids=["tcp", "quic"])
def test_one_peer_takes_few_places(way: int) -> None:
    """Several hosts with one identity are one peer."""

    async def main() -> None:
        identity = Identity.generate()
        peer = ID.from_base58(identity.peer_id)
        async with open_host(listen=BOTH) as host, open_host() as other, AsyncExitStack() as stack:
            network = host.libp2p.get_network()
            for _ in range(2 * MAX_INBOUND_PER_PEER):
                visitor = await stack.enter_async_context(open_host(identity=identity))
                with suppress(PeerUnreachableError):  # refused, and it knows already
                    await visitor.connect(host.addresses[way])
                assert len(network.get_connections(peer)) <= MAX_INBOUND_PER_PEER
            assert len(network.get_connections(peer)) == MAX_INBOUND_PER_PEER
            await other.connect(host.addresses[way])
            assert other.peer_id in host.connected_peers

    with_deadline(main)


def test_a_keep_alive_that_is_too_short() -> None:
    async def main() -> None:
        with pytest.raises(ConfigurationError, match="at least 1 s"):
            async with open_host(keep_alive=0.5):
                pass

    with_deadline(main)


def with_deadline(main: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        with trio.fail_after(DEADLINE):
            await main()

    trio.run(run)
