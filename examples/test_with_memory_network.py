"""Tests of a program that uses the library, over a network in memory: no sockets, and no waiting for delays.

    pytest examples/test_with_memory_network.py

Write your program against `Host`, as `ask_twice` is, and the same code runs over libp2p and over this network.
"""

from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from neurogrid.errors import PeerUnreachableError, ResponseTimeout, StreamBrokenError
from neurogrid.p2p import Host, Protocol
from neurogrid.p2p.memory import Link, open_memory_network


async def ask_twice(host: Host, address: str) -> bytes:
    """The program under test: it asks again when there is no answer within ten seconds."""
    protocol = Protocol(host)
    peer_id = await host.connect(address)
    try:
        answer = await protocol.request_activation(peer_id, 0, 0, b"abc", timeout=10)
    except ResponseTimeout:
        answer = await protocol.request_activation(peer_id, 0, 0, b"abc", timeout=10)
    return bytes(answer.data)


@asynccontextmanager
async def hosts(link=None):
    async with (
        open_memory_network(link) as network,
        network.open_host() as server,
        network.open_host() as client,
    ):
        yield network, server, client


def run(scenario):
    # This clock jumps whenever all tasks wait: seconds of delay take no time.
    trio.run(scenario, clock=trio.testing.MockClock(autojump_threshold=0))


def test_an_answer_comes_over_a_slow_link():
    async def scenario():
        async with hosts(Link(delay=2.0)) as (_, server, client):
            Protocol(server).on_activation_received(lambda message: bytes(message.data)[::-1])
            assert await ask_twice(client, server.addresses[0]) == b"cba"

    run(scenario)


def test_it_asks_again():
    async def scenario():
        async with hosts() as (_, server, client):
            asked_at = []

            def answer_the_second(message):
                asked_at.append(trio.current_time())
                return b"late" if len(asked_at) == 2 else None

            Protocol(server).on_activation_received(answer_the_second)
            assert await ask_twice(client, server.addresses[0]) == b"late"
            assert asked_at[1] - asked_at[0] >= 10

    run(scenario)


def test_a_lost_connection_is_told_at_once():
    async def scenario():
        async with hosts() as (network, server, client):
            Protocol(server).on_activation_received(lambda _: network.cut(server, client))
            with pytest.raises(StreamBrokenError):
                await ask_twice(client, server.addresses[0])

    run(scenario)


def test_a_server_that_is_off_is_told_at_once():
    async def scenario():
        async with hosts(Link(is_reachable=False)) as (_, server, client):
            with pytest.raises(PeerUnreachableError, match="refused"):
                await ask_twice(client, server.addresses[0])

    run(scenario)
