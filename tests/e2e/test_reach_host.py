"""What `Reach` adds to a host: addresses of its own, and a way to those of others that lead through relays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from neurogrid.errors import ConfigurationError, LocalProtocolError, PeerUnreachableError
from neurogrid.p2p.discovery import Discovery, PeerFound
from neurogrid.p2p.discovery.sighting import Sighting
from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost, open_host
from neurogrid.p2p.reach.reach import Reach, ReachOptions
from neurogrid.p2p.reach.relay_service import RelayLimits
from neurogrid.p2p.trust import COORDINATOR, WORKER, AllowList

DEADLINE = 120.0


def play(
    scene: Callable[[Libp2pHost, Libp2pHost, Libp2pHost], Awaitable[None]], *, slots: int = 8
) -> None:
    """A relay, a server that has a slot there, and a client."""

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_host() as relay, open_host() as server, open_host() as client:
                Reach(relay, ReachOptions(relay_service=RelayLimits(max_reservations=slots)))
                Reach(server, ReachOptions(relays=[relay.addresses[0]], hole_punching=False))
                while len(server.addresses) == 1 and slots:
                    await trio.sleep(0.02)
                await scene(relay, server, client)

    trio.run(main)


def test_a_host_with_a_slot_says_so_and_is_dialled_there() -> None:
    async def scene(relay: Libp2pHost, server: Libp2pHost, client: Libp2pHost) -> None:
        listening, relayed = server.addresses
        assert (listening,) == server.listen_addresses
        assert relayed == f"{relay.addresses[0]}/p2p-circuit/p2p/{server.peer_id}"
        with pytest.raises(PeerUnreachableError, match="Reach"):
            await client.connect(relayed)
        Reach(client)
        assert await client.connect(relayed) == server.peer_id
        assert client.connected_peers == {relay.peer_id, server.peer_id}

    play(scene)


def test_discovery_dials_through_relays_by_itself() -> None:
    async def scene(relay: Libp2pHost, server: Libp2pHost, client: Libp2pHost) -> None:
        Reach(client)
        gone = f"/ip4/127.0.0.1/tcp/1/p2p/{server.peer_id}"
        async with Discovery(client) as discovery:
            discovery.report(Sighting(server.peer_id, (gone, server.addresses[1]), "dht"))
            found = await anext(aiter(discovery.peers()))
            assert isinstance(found, PeerFound)
            assert await client.connect_any(found.addresses) == server.peer_id
            await client.disconnect(server.peer_id)
            await client.wait_disconnected(server.peer_id)
            await discovery.connect(server.addresses[1])
            (line,) = [row for row in str(discovery.explain()).splitlines() if "circuit" in row]
            assert line.endswith("connected")

    play(scene)


def test_several_addresses_of_one_relay_make_one_connection() -> None:
    async def scene(relay: Libp2pHost, server: Libp2pHost, client: Libp2pHost) -> None:
        Reach(client)
        await client.connect(relay.addresses[0])
        again = server.addresses[1].replace("/ip4/127.0.0.1/", "/ip4/127.0.0.2/")
        async with trio.open_nursery() as nursery:
            for address in (server.addresses[1], again):
                nursery.start_soon(client.connect, address)
        assert len(client.libp2p.get_network().get_connections()) == 2  # the relay, the server

    play(scene)


def test_what_is_announced_stands_first() -> None:
    async def scene(relay: Libp2pHost, server: Libp2pHost, client: Libp2pHost) -> None:
        place = "/ip4/203.0.113.7/tcp/4001"
        with pytest.raises(ConfigurationError, match="another peer"):
            Reach(client, ReachOptions(announce=[f"{place}/p2p/{server.peer_id}"]))
        with pytest.raises(ConfigurationError, match="--relay"):
            Reach(client, ReachOptions(announce=[server.addresses[1]]))
        reach = Reach(client, ReachOptions(announce=[place]))
        assert client.addresses == (f"{place}/p2p/{client.peer_id}", *client.listen_addresses)
        assert reach.state().addresses == client.addresses
        with pytest.raises(LocalProtocolError):
            Reach(client)

    play(scene)


def test_a_relay_serves_who_is_admitted_there_and_nobody_else() -> None:
    async def main() -> None:
        ours, member, stranger = (Identity.generate() for _ in range(3))
        admits = AllowList({member.peer_id: WORKER})
        trusts = AllowList({ours.peer_id: COORDINATOR})
        async with (
            open_host(identity=ours, admission=admits) as relay,
            open_host(identity=member, admission=trusts) as first,
            open_host(identity=stranger, admission=trusts) as second,
        ):
            service = Reach(relay, ReachOptions(relay_service=RelayLimits()))
            reaches = [Reach(h, ReachOptions(relays=[relay.addresses[0]])) for h in (first, second)]
            for reach in reaches:
                await reach.wait_relays()
            (given,), (refused,) = (reach.state().relays for reach in reaches)
            assert given.is_reserved
            assert not refused.is_reserved
            assert refused.last_error
            state = service.state().relay_service
            assert state is not None
            assert state.reservations == (member.peer_id,)
            rows = {row[0]: row for row in reaches[1].state().rows()}
            assert rows["relay"][2] == f"not reserved: {refused.last_error}"
            assert not rows["relay"][3]

    async def limited() -> None:
        with trio.fail_after(DEADLINE):
            await main()

    trio.run(limited)
