"""One peer with several addresses, some of which lead nowhere, over real sockets."""

from __future__ import annotations

import gc
import socket
from contextlib import AsyncExitStack, suppress
from functools import partial

import pytest
import trio
from multiaddr import Multiaddr

from neurogrid.errors import ConfigurationError, PeerUnreachableError
from neurogrid.p2p import open_host
from neurogrid.p2p.hosts.host import Host
from neurogrid.p2p.libp2p.tcp import TcpTransport
from tests.conformance.cancellation import attempts
from tests.e2e.support import DEADLINE
from tests.ports import free_port


def test_the_address_that_answers_is_used() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE), socket.create_server(("127.0.0.1", 0)) as silent:
            async with open_host() as server, open_host() as client:
                place, peer = server.addresses[0].split("/p2p/")
                nowhere = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{peer}"
                no_answer = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{peer}"
                addresses = [no_answer, nowhere, f"{place}/p2p/{peer}"]
                assert await client.connect_any(addresses) == peer
                assert client.connected_peers == {peer}

    trio.run(main)


def test_a_host_that_ends_takes_nobody_back_whom_it_tells_so() -> None:
    async def main() -> None:
        again: list[str] = []
        ended: list[str] = []

        def dial_again(client: Host, address: str) -> None:
            async def dial() -> None:
                with suppress(PeerUnreachableError):
                    again.append(await client.connect(address))

            ended.append(client.peer_id)
            client.start_soon(dial)

        with trio.fail_after(DEADLINE):
            async with AsyncExitStack() as stack:
                clients = [await stack.enter_async_context(open_host()) for _ in range(40)]
                async with open_host() as server:
                    address = server.addresses[0]
                    for client in clients:
                        await client.connect(address)
                        client.on_disconnected(partial(lambda c, _: dial_again(c, address), client))
                for client in clients:
                    await client.wait_disconnected(server.peer_id)
        assert sorted(ended) == sorted(client.peer_id for client in clients)
        assert again == []

    trio.run(main)


def test_a_dial_that_is_given_up_closes_its_socket_at_once() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE), socket.create_server(("127.0.0.1", 0)) as silent:
            silent.settimeout(DEADLINE)
            async with open_host() as server, open_host() as client, trio.open_nursery() as nursery:
                place = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}"
                nursery.start_soon(client.connect, f"{place}/p2p/{server.peer_id}")
                accepted, _ = await trio.to_thread.run_sync(silent.accept)
                nursery.cancel_scope.cancel()
            # Not when the garbage is collected: the peer sees the end now.
            with accepted:
                accepted.settimeout(DEADLINE)
                while await trio.to_thread.run_sync(accepted.recv, 4096):
                    pass

    gc.disable()
    try:
        trio.run(main)
    finally:
        gc.enable()


def test_a_dial_from_a_port_of_ours_leaves_no_socket_wherever_it_is_given_up() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_host() as server:
                place = Multiaddr(server.addresses[0].partition("/p2p/")[0])

                async def dial() -> None:
                    raw = await TcpTransport().dial_with_source(place, ("127.0.0.1", 0))
                    await raw.close()

                for attempt in attempts():
                    await attempt.run(dial)

    trio.run(main)


def test_when_none_answers_each_is_named() -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_host() as server, open_host() as client:
                ports = free_port(), free_port()
                peer = server.peer_id
                addresses = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}" for port in ports]
                with pytest.raises(PeerUnreachableError) as caught:
                    await client.connect_any(addresses)
                assert all(f"/tcp/{port}/" in str(caught.value) for port in ports)

    trio.run(main)


def test_addresses_of_two_peers_are_the_callers_mistake() -> None:
    async def main() -> None:
        async with open_host() as one, open_host() as other, open_host() as client:
            with pytest.raises(ConfigurationError, match="2 peers"):
                await client.connect_any([one.addresses[0], other.addresses[0]])

    trio.run(main)
