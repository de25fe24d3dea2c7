"""Connections: who can dial whom, who is told what, and what errors say."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from neurogrid.errors import (
    ConfigurationError,
    LocalProtocolError,
    PeerUnreachableError,
    StreamBrokenError,
)
from neurogrid.p2p import Host, Identity, Stream
from tests.conformance.networks import Network, two_hosts, until
from tests.conformance.streams import ECHO, check_echo, serve_echo


class Events:
    """What a host was told of its connections, in order."""

    def __init__(self, host: Host) -> None:
        self.seen: list[tuple[str, str]] = []
        host.on_connected(lambda peer_id: self.seen.append(("connected", peer_id)))
        host.on_disconnected(lambda peer_id: self.seen.append(("disconnected", peer_id)))


async def test_both_sides_know_of_a_connection(network: Network) -> None:
    async with network.open_host() as one, network.open_host() as other:
        assert one.peer_id != other.peer_id
        assert (one.connected_peers, other.connected_peers) == (frozenset(), frozenset())
        assert not one.is_connected(other.peer_id)
        ours, theirs = Events(one), Events(other)
        await network.connect(one, other)
        assert one.connected_peers == {other.peer_id}
        assert other.connected_peers == {one.peer_id}
        assert one.is_connected(other.peer_id)
        assert not one.is_connected(one.peer_id)
        assert not one.is_connected("no peer id, though it ends in 0OIl")
        await until(lambda: bool(ours.seen and theirs.seen))
        assert ours.seen == [("connected", other.peer_id)]
        assert theirs.seen == [("connected", one.peer_id)]


async def test_a_connection_that_is_there_is_used_again(network: Network) -> None:
    async with network.open_host() as one, network.open_host() as other:
        serve_echo(other)
        ours, theirs = Events(one), Events(other)
        await network.connect(one, other)
        await network.connect(one, other)
        await network.connect(other, one)
        await check_echo(one, other)
        assert ours.seen == [("connected", other.peer_id)]
        assert theirs.seen == [("connected", one.peer_id)]


async def test_two_hosts_that_dial_each_other_at_once_are_connected(network: Network) -> None:
    async with network.open_host() as one, network.open_host() as other:
        serve_echo(one)
        serve_echo(other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(network.connect, one, other)
            nursery.start_soon(network.connect, other, one)
        await check_echo(one, other)
        await check_echo(other, one)


async def test_one_host_has_many_peers(network: Network) -> None:
    async with network.open_host() as server:
        serve_echo(server)

        async def visit() -> None:
            async with network.open_host() as client:
                await network.connect(client, server)
                await check_echo(client, server)

        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(visit)
        await until(lambda: not server.connected_peers)


async def test_nobody_dials_itself(network: Network) -> None:
    async with network.open_host() as host:
        with pytest.raises(ConfigurationError, match="own address"):
            await host.connect(host.addresses[0])


async def test_where_nobody_is_nobody_answers(network: Network) -> None:
    async with network.open_host() as host:
        events = Events(host)
        with pytest.raises(PeerUnreachableError, match="cannot connect to /"):
            await host.connect(network.address_of_nobody())
        assert host.connected_peers == frozenset()
        assert events.seen == []


async def test_somebody_else_lives_there(network: Network) -> None:
    async with network.open_host() as one, network.open_host() as other:
        address = await network.address_of(other)
        wrong = address.replace(other.peer_id, Identity.generate().peer_id)
        with pytest.raises(PeerUnreachableError, match="another peer lives there"):
            await one.connect(wrong)
        assert one.connected_peers == frozenset()
        await until(lambda: not other.connected_peers)
        await network.connect(one, other)  # the right one can still be reached


@pytest.mark.parametrize(
    "address",
    [
        "",
        "nonsense",
        "/ip4/127.0.0.1/tcp/4001",
        "/p2p/{id}",
        "/ip4/127.0.0.1/p2p/{id}",
        "/tcp/x/p2p/{id}",
    ],
)
async def test_what_is_no_address_is_the_callers_mistake(network: Network, address: str) -> None:
    async with network.open_host() as host:
        with pytest.raises(ConfigurationError, match="expected /ip4/"):
            await host.connect(address.format(id=Identity.generate().peer_id))


@pytest.mark.parametrize("place", ["/memory/1", "/ip4/127.0.0.1/tcp/1"], ids=["process", "tcp"])
async def test_an_address_of_another_network_is_unreachable(network: Network, place: str) -> None:
    async with network.open_host() as host:
        with pytest.raises(PeerUnreachableError):
            await host.connect(f"{place}/p2p/{Identity.generate().peer_id}")


async def test_streams_need_a_connection(network: Network) -> None:
    async with network.open_host() as one, network.open_host() as other:
        serve_echo(other)
        with pytest.raises(PeerUnreachableError, match="no connection"):
            await one.open_stream(other.peer_id, [ECHO])


async def test_a_protocol_has_one_handler(network: Network) -> None:
    async with network.open_host() as host:
        serve_echo(host)
        with pytest.raises(LocalProtocolError, match=ECHO):
            serve_echo(host)


async def disconnect(network: Network, one: Host, other: Host) -> None:
    await one.disconnect(other.peer_id)
    assert other.peer_id not in one.connected_peers


async def disconnect_from_the_other_side(network: Network, one: Host, other: Host) -> None:
    await other.disconnect(one.peer_id)


async def cut(network: Network, one: Host, other: Host) -> None:
    network.cut(one, other)


ENDS = [disconnect, disconnect_from_the_other_side, cut]
End = Callable[[Network, Host, Host], Awaitable[None]]


@pytest.mark.parametrize("end", ENDS)
async def test_both_sides_are_told_once_of_the_end(network: Network, end: End) -> None:
    async with two_hosts(network) as (one, other):
        ours, theirs = Events(one), Events(other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.wait_disconnected, other.peer_id)
            nursery.start_soon(one.wait_disconnected, other.peer_id)
            nursery.start_soon(other.wait_disconnected, one.peer_id)
            await end(network, one, other)
        assert (one.connected_peers, other.connected_peers) == (frozenset(), frozenset())
        assert ours.seen == [("disconnected", other.peer_id)]
        assert theirs.seen == [("disconnected", one.peer_id)]
        await one.wait_disconnected(other.peer_id)  # returns at once


async def test_who_comes_to_wait_late_finds_the_end_told_all_the_same(network: Network) -> None:
    """A host may have forgotten a connection, and be about to say so."""
    async with two_hosts(network) as (one, other):
        theirs = Events(other)
        await one.disconnect(other.peer_id)
        await until(lambda: not other.connected_peers)
        await other.wait_disconnected(one.peer_id)
        assert theirs.seen == [("disconnected", one.peer_id)]


@pytest.mark.parametrize("end", ENDS)
async def test_streams_break_with_their_connection(network: Network, end: End) -> None:
    async with two_hosts(network) as (one, other):
        broken: dict[str, Stream] = {}
        is_read = trio.Event()

        async def read(stream: Stream) -> None:
            assert await stream.receive_some() == b"first"
            is_read.set()
            with pytest.raises(StreamBrokenError):
                await stream.receive_some()
            broken["theirs"] = stream

        other.set_stream_handler("/test/1", read)
        stream = await one.open_stream(other.peer_id, ["/test/1"])
        await stream.send_all(b"first")
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def read_ours() -> None:
                with pytest.raises(StreamBrokenError):
                    await stream.receive_some()
                broken["ours"] = stream

            await is_read.wait()
            await end(network, one, other)
        await until(lambda: len(broken) == 2)
        for side in broken.values():
            with pytest.raises(StreamBrokenError):
                await side.send_all(b"x")
            with pytest.raises(StreamBrokenError):
                await side.send_eof()
            with pytest.raises(StreamBrokenError):
                await side.receive_some()
            await side.reset()
            await side.aclose()
        with pytest.raises(PeerUnreachableError):
            await one.open_stream(other.peer_id, ["/test/1"])


@pytest.mark.parametrize("end", ENDS)
async def test_peers_can_connect_again(network: Network, end: End) -> None:
    async with two_hosts(network) as (one, other):
        serve_echo(one)
        serve_echo(other)
        for _ in range(3):
            await end(network, one, other)
            await one.wait_disconnected(other.peer_id)
            await other.wait_disconnected(one.peer_id)
            await network.connect(other, one)
            await check_echo(one, other)
            await check_echo(other, one)


async def test_the_end_of_a_host_is_seen(network: Network) -> None:
    async with network.open_host() as one:
        async with network.open_host() as other:
            await network.connect(one, other)
            peer_id = other.peer_id
        await one.wait_disconnected(peer_id)
        assert one.connected_peers == frozenset()


async def test_disconnecting_from_nobody_does_nothing(network: Network) -> None:
    async with network.open_host() as host:
        await host.disconnect(Identity.generate().peer_id)


async def test_tasks_of_a_host_end_with_it(network: Network) -> None:
    ends: list[str] = []

    async def wait() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ends.append("cancelled")

    async with network.open_host() as host:
        host.start_soon(wait)
        await trio.sleep(0.01)
    assert ends == ["cancelled"]
