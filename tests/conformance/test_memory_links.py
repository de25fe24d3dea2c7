"""The links of the network in memory: delay, bandwidth, hosts that hang or refuse, cuts at the byte."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import pytest
import trio

from neurogrid.errors import (
    ConfigurationError,
    LocalProtocolError,
    PeerUnreachableError,
    ResponseTimeout,
    StreamBrokenError,
)
from neurogrid.p2p import Host, Identity, Protocol, parse_peer_address
from neurogrid.p2p.memory import Link, MemoryHost, MemoryNetwork, open_memory_network
from tests.conformance.protocols import check_echo, serve_echo
from tests.conformance.streams import ECHO, receive_into, stream_pair
from tests.conformance.streams import check_echo as check_stream
from tests.conformance.streams import serve_echo as serve_streams

pytestmark = pytest.mark.usefixtures("autojump_clock")

Hosts = tuple[MemoryNetwork, MemoryHost, MemoryHost]


@asynccontextmanager
async def hosts_over(link: Link | None = None) -> AsyncIterator[Hosts]:
    async with (
        open_memory_network(link) as network,
        network.open_host() as one,
        network.open_host() as other,
    ):
        yield network, one, other


@pytest.fixture
def hosts() -> AbstractAsyncContextManager[Hosts]:
    return hosts_over()


class Stopwatch:
    def __init__(self) -> None:
        self._since = trio.current_time()

    def lap(self) -> float:
        """Seconds since the last lap, rounded to microseconds."""
        now = trio.current_time()
        lap, self._since = now - self._since, now
        return round(lap, 6)


async def test_addresses_are_multiaddrs(hosts: Hosts) -> None:
    _, one, other = hosts
    for host in (one, other):
        (address,) = host.addresses
        multiaddr, peer_id = parse_peer_address(address)
        assert str(multiaddr) == address
        assert peer_id == host.peer_id == host.identity.peer_id
    assert one.addresses != other.addresses


async def test_a_host_may_bring_its_identity(hosts: Hosts) -> None:
    identity = Identity.generate()
    network, _, _ = hosts
    for _ in range(2):  # one after the other
        async with network.open_host(identity=identity) as host:
            assert host.peer_id == identity.peer_id
            with pytest.raises(ConfigurationError, match="already"):
                async with network.open_host(identity=identity):
                    pass


async def test_hosts_are_in_their_network_alone(hosts: Hosts) -> None:
    _, one, _ = hosts
    async with open_memory_network() as another, another.open_host() as stranger:
        with pytest.raises(PeerUnreachableError):
            await one.connect(stranger.addresses[0])


def test_what_leaves_a_block_is_what_was_raised() -> None:
    async def main() -> None:
        async with open_memory_network() as network, network.open_host():
            raise ConfigurationError("mine")

    with pytest.raises(ConfigurationError, match="mine"):
        trio.run(main)


# Delay and bandwidth


async def test_delay_counts_each_way() -> None:
    async with hosts_over(Link(delay=0.5)) as (_, one, other):
        serve_streams(other)
        watch = Stopwatch()
        await one.connect(other.addresses[0])
        assert watch.lap() == 1.0
        stream = await one.open_stream(other.peer_id, [ECHO])
        assert watch.lap() == 1.0
        await stream.send_all(b"x")
        assert watch.lap() == 0.0
        assert await stream.receive_some() == b"x"
        assert watch.lap() == 1.0
        await one.disconnect(other.peer_id)
        assert watch.lap() == 0.0
        await other.wait_disconnected(one.peer_id)
        assert watch.lap() == 0.5


async def test_a_link_between_two_hosts_is_theirs_alone(hosts: Hosts) -> None:
    network, one, other = hosts
    async with network.open_host() as third:
        network.set_link(Link(delay=2.0), between=(other, one))
        assert network.link(one, other) == Link(delay=2.0)
        assert network.link(one, third) == Link()
        watch = Stopwatch()
        await one.connect(third.addresses[0])
        assert watch.lap() == 0.0
        await one.connect(other.addresses[0])
        assert watch.lap() == 4.0
        network.set_link(Link(delay=0.1))  # all, that one too
        assert network.link(one, other) == Link(delay=0.1)


async def test_a_link_changes_for_what_is_under_way(hosts: Hosts) -> None:
    network, one, other = hosts
    await one.connect(other.addresses[0])
    async with stream_pair(one, other) as (near, far):
        network.set_link(Link(delay=10.0))
        await near.send_all(b"x")
        watch = Stopwatch()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(far.receive_some)
            await trio.sleep(1.0)
            network.set_link(Link(delay=2.0))
        assert watch.lap() == 2.0


async def test_bandwidth_is_shared_by_the_streams_of_a_connection(hosts: Hosts) -> None:
    async def _send(stream, num_bytes) -> None:  # type: ignore[no-untyped-def]
        await stream.send_all(bytes(num_bytes))
        await stream.send_eof()

    network, one, other = hosts
    await one.connect(other.addresses[0])
    network.set_link(Link(bandwidth=1e6))
    watch = Stopwatch()
    async with (
        stream_pair(one, other) as first,
        stream_pair(one, other) as second,
        trio.open_nursery() as nursery,
    ):
        for near, far in (first, second):
            nursery.start_soon(receive_into, bytearray(), far)
            nursery.start_soon(_send, near, 500_000)
    assert watch.lap() == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    "values", [{"delay": -1.0}, {"delay": math.nan}, {"bandwidth": 0.0}, {"bandwidth": -1.0}]
)
def test_links_that_cannot_be(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="link"):
        Link(**values)


# Hosts that hang or refuse


async def test_a_host_that_cannot_be_dialled(hosts: Hosts) -> None:
    network, one, other = hosts
    serve_streams(other)
    network.set_link(Link(is_reachable=False))
    with pytest.raises(PeerUnreachableError, match="refused"):
        await one.connect(other.addresses[0])
    network.set_link(Link())
    await one.connect(other.addresses[0])
    network.set_link(Link(is_reachable=False))
    await check_stream(one, other)  # what is there stays


async def test_a_host_that_hangs_is_given_up(hosts: Hosts) -> None:
    network, one, other = hosts
    server, client = Protocol(other), Protocol(one)
    serve_echo(server)
    network.set_link(Link(delay=math.inf))
    watch = Stopwatch()
    with pytest.raises(PeerUnreachableError, match="no answer"):
        await one.connect(other.addresses[0])
    assert watch.lap() == 10.0
    network.set_link(Link())
    await one.connect(other.addresses[0])
    await check_echo(client, other.peer_id)
    network.set_link(Link(delay=math.inf))
    watch.lap()
    with pytest.raises(ResponseTimeout):
        await client.request_activation(other.peer_id, 1, 2, b"?", timeout=5.0)
    assert watch.lap() == 5.0
    with pytest.raises(StreamBrokenError):
        await client.request_activation(other.peer_id, 1, 2, b"?", timeout=100.0)
    assert watch.lap() == 35.0  # 40 s without a sign of life
    assert (one.connected_peers, other.connected_peers) == (frozenset(), frozenset())


async def test_a_host_that_comes_back_has_lost_nothing(hosts: Hosts) -> None:
    network, one, other = hosts
    server, client = Protocol(other), Protocol(one)
    serve_echo(server)
    await one.connect(other.addresses[0])
    await check_echo(client, other.peer_id)
    for _ in range(3):
        network.set_link(Link(delay=math.inf))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(check_echo, client, other.peer_id)
            await trio.sleep(39.0)
            network.set_link(Link())


# Cuts


@asynccontextmanager
async def reading(one: Host, other: Host) -> AsyncIterator[tuple[bytearray, partial[None]]]:
    received = bytearray()
    async with stream_pair(one, other) as (near, far), trio.open_nursery() as nursery:

        @nursery.start_soon
        async def read() -> None:
            with pytest.raises(StreamBrokenError):
                await receive_into(received, far)

        yield received, partial(near.send_all)


@pytest.mark.parametrize("num_bytes", [0, 1, 999, 100_000, 1_000_000])
async def test_a_cut_falls_behind_the_byte(hosts: Hosts, num_bytes: int) -> None:
    network, one, other = hosts
    await one.connect(other.addresses[0])
    async with reading(one, other) as (received, send):
        network.cut_after(num_bytes, sender=one, receiver=other)
        await send(bytes(num_bytes))  # these still go through
        await trio.testing.wait_all_tasks_blocked()
        assert one.connected_peers
        await send(b"x")
        await one.wait_disconnected(other.peer_id)
    assert received == bytes(num_bytes)


async def test_a_cut_counts_one_way_alone(hosts: Hosts) -> None:
    network, one, other = hosts
    await other.connect(one.addresses[0])
    serve_streams(one)
    network.cut_after(1000, sender=one, receiver=other)
    await check_stream(other, one, 1000)
    assert other.connected_peers
    with pytest.raises(StreamBrokenError):
        await check_stream(other, one, 1)


async def test_what_is_under_way_is_lost_with_the_connection(hosts: Hosts) -> None:
    network, one, other = hosts
    await one.connect(other.addresses[0])
    async with stream_pair(one, other) as (near, far):
        network.set_link(Link(delay=1.0))
        await near.send_all(b"x")
        network.cut(one, other)
        assert (one.connected_peers, other.connected_peers) == (frozenset(), frozenset())
        with pytest.raises(StreamBrokenError):
            await far.receive_some()


async def test_only_connections_can_be_cut(hosts: Hosts) -> None:
    network, one, other = hosts
    with pytest.raises(LocalProtocolError, match="not connected"):
        network.cut(one, other)
    with pytest.raises(LocalProtocolError, match="not connected"):
        network.cut_after(1, sender=one, receiver=other)
    await one.connect(other.addresses[0])
    with pytest.raises(ValueError, match="-1"):
        network.cut_after(-1, sender=one, receiver=other)
    network.cut(other, one)
