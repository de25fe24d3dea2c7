"""Cancellation of every call of hosts and streams, at each of its awaits.

Afterwards the connection is usable, or clearly closed and can be made again; no task is left over.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from neurogrid.errors import PeerUnreachableError, StreamBrokenError
from neurogrid.p2p import Host, Stream
from tests.conformance.cancellation import attempts, num_tasks, settled_tasks
from tests.conformance.networks import Network, two_hosts, until
from tests.conformance.streams import (
    ECHO,
    check_echo,
    digest,
    receive_all,
    receive_into,
    serve_echo,
    stream_pair,
)

KIB = 1024
MIB = 1024 * KIB


class Hosts:
    """Two hosts that were connected, and what must hold of them after each cancelled call."""

    def __init__(self, network: Network, one: Host, other: Host, baseline: int) -> None:
        self.network, self.one, self.other = network, one, other
        self._baseline = baseline

    async def check(self) -> None:
        """The connection carries streams, or is closed for both and can be made again. No task too many."""
        try:
            await check_echo(self.one, self.other, 100 * KIB)
        except (PeerUnreachableError, StreamBrokenError):
            # Closed, then; both sides get to know it.
            await self.one.wait_disconnected(self.other.peer_id)
            await self.other.wait_disconnected(self.one.peer_id)
            await self.network.connect(self.one, self.other)
            await check_echo(self.one, self.other, 100 * KIB)
        await until(lambda: num_tasks() <= self._baseline)


@asynccontextmanager
async def open_hosts(network: Network) -> AsyncIterator[Hosts]:
    async with two_hosts(network) as (one, other):
        serve_echo(one)
        serve_echo(other)
        await check_echo(one, other)
        yield Hosts(network, one, other, await settled_tasks())


async def test_opening_and_closing(network: Network) -> None:
    """Also of its sockets nothing is left over: they would be found when the test is over."""

    async def live() -> None:
        async with network.open_host() as host:
            assert host.addresses

    baseline = await settled_tasks()
    for attempt in attempts():
        await attempt.run(live)
        await until(lambda: num_tasks() <= baseline)


async def test_connect(network: Network) -> None:
    async with open_hosts(network) as hosts:
        address = await network.address_of(hosts.other)
        for attempt in attempts():
            await hosts.one.disconnect(hosts.other.peer_id)
            await hosts.other.wait_disconnected(hosts.one.peer_id)
            await attempt.run(hosts.one.connect, address)
            if attempt.is_through:
                assert hosts.other.peer_id in hosts.one.connected_peers
            await network.connect(hosts.one, hosts.other)
            await hosts.check()


async def test_disconnect(network: Network) -> None:
    async with open_hosts(network) as hosts:
        for attempt in attempts():
            await attempt.run(hosts.one.disconnect, hosts.other.peer_id)
            if attempt.is_through:
                assert hosts.other.peer_id not in hosts.one.connected_peers
                await hosts.other.wait_disconnected(hosts.one.peer_id)
                await network.connect(hosts.one, hosts.other)
            await hosts.check()


async def test_wait_disconnected(network: Network) -> None:
    async with open_hosts(network) as hosts:
        with trio.move_on_after(0.05) as scope:
            await hosts.one.wait_disconnected(hosts.other.peer_id)
        assert scope.cancelled_caught
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hosts.one.wait_disconnected, hosts.other.peer_id)
            await hosts.other.disconnect(hosts.one.peer_id)


@pytest.mark.parametrize("protocols", [[ECHO], ["/unknown", ECHO]])
async def test_open_stream(network: Network, protocols: list[str]) -> None:
    async with open_hosts(network) as hosts:
        opened: list[Stream] = []

        async def open_stream() -> None:
            opened.append(await hosts.one.open_stream(hosts.other.peer_id, protocols))

        for attempt in attempts():
            await attempt.run(open_stream)
            assert attempt.is_through == bool(opened)
            while opened:
                stream = opened.pop()
                await stream.send_all(b"x")
                await stream.send_eof()
                assert await receive_all(stream) == b"x"
                await stream.aclose()
            await hosts.check()  # the handler of a stream that nobody has is gone too


@pytest.mark.parametrize("into_buffer", [False, True])
async def test_receiving_loses_nothing(network: Network, into_buffer: bool) -> None:
    async with open_hosts(network) as hosts:
        data = secrets.token_bytes(4 * MIB)
        received = bytearray()
        memory = bytearray(50_000)

        async def receive(stream: Stream) -> None:
            if into_buffer:
                # What comes while nobody waits must not go to the memory of a call that is over.
                memory[:] = bytes(len(memory))
                num_bytes = await stream.receive_into(memoryview(memory))
                received.extend(memory[:num_bytes])
                assert num_bytes or len(received) == len(data)
            else:
                some = await stream.receive_some(50_000)
                received.extend(some)
                assert some or len(received) == len(data)

        async with stream_pair(hosts.one, hosts.other) as (near, far):

            async def send() -> None:
                await near.send_all(data)
                await near.send_eof()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                while len(received) < len(data):
                    for attempt in attempts(at_least=0):
                        await attempt.run(receive, far)
                await receive_into(received, far)
        assert digest(bytes(received)) == digest(data)
        await hosts.check()


async def test_a_reader_that_waits_can_be_cancelled(network: Network) -> None:
    async with (
        open_hosts(network) as hosts,
        stream_pair(hosts.one, hosts.other) as (near, far),
    ):
        for number in range(20):
            with trio.move_on_after(0.001 * number) as scope:
                await far.receive_some()
            assert scope.cancelled_caught
        await near.send_all(b"x")
        assert await far.receive_some() == b"x"


@pytest.mark.parametrize("num_bytes", [1, 100 * KIB, 3 * MIB])
async def test_a_cancelled_write_has_sent_a_beginning(network: Network, num_bytes: int) -> None:
    async with open_hosts(network) as hosts:
        data = secrets.token_bytes(num_bytes)
        for attempt in attempts(at_least=0):
            async with stream_pair(hosts.one, hosts.other) as (near, far):
                received = bytearray()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(receive_into, received, far)
                    await attempt.run(near.send_all, data)
                    await near.send_all(b"and so on")
                    await near.send_eof()
                assert received.endswith(b"and so on")
                sent = bytes(received.removesuffix(b"and so on"))
                assert data.startswith(sent)
                if attempt.is_through:
                    assert len(sent) == len(data)
            await hosts.check()


async def test_a_write_that_waits_for_its_reader_can_be_cancelled(network: Network) -> None:
    async with (
        open_hosts(network) as hosts,
        stream_pair(hosts.one, hosts.other) as (near, far),
    ):
        data = secrets.token_bytes(32 * MIB)
        with trio.move_on_after(0.5) as scope:
            await near.send_all(data)
        assert scope.cancelled_caught
        await check_echo(hosts.one, hosts.other)
        received = bytearray()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_into, received, far)
            await near.send_all(b"and so on")
            await near.send_eof()
        assert 0 < len(received) < len(data)
        assert data.startswith(bytes(received.removesuffix(b"and so on")))


@pytest.mark.parametrize("how", ["send_eof", "aclose", "reset"])
async def test_ends_are_told_all_the_same(network: Network, how: str) -> None:
    async with open_hosts(network) as hosts:
        for attempt in attempts(at_least=0):
            async with stream_pair(hosts.one, hosts.other) as (near, far):
                await near.send_all(b"x")
                await attempt.run(getattr(near, how))
                if how == "reset":
                    with pytest.raises(StreamBrokenError):
                        await receive_all(far)
                else:
                    assert await receive_all(far) == b"x"
            await hosts.check()


@pytest.mark.parametrize("how", ["send_eof", "aclose", "reset"])
async def test_ends_are_told_from_where_all_is_cancelled(network: Network, how: str) -> None:
    async with (
        open_hosts(network) as hosts,
        stream_pair(hosts.one, hosts.other) as (near, far),
    ):
        with trio.CancelScope() as scope:
            scope.cancel()
            await getattr(near, how)()
        if how == "reset":
            with pytest.raises(StreamBrokenError):
                await receive_all(far)
        else:
            assert await receive_all(far) == b""
