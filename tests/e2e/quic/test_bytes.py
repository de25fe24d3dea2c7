"""What is sent arrives, whoever is slow or idle; also with stock py-libp2p, and under the protocol."""

from __future__ import annotations

import gc
import hashlib
import secrets
from dataclasses import replace

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from neurogrid.p2p import Protocol, open_host
from neurogrid.p2p.quic import QuicLimits
from tests.conformance.networks import until
from tests.conformance.streams import (
    ECHO,
    check_both_ways,
    check_echo,
    digest,
    echo,
    receive_all,
    stream_pair,
)
from tests.e2e.quic.hosts import (
    KIB,
    MIB,
    QUIC,
    core_of,
    limits_of_hosts,
    run,
    two_hosts,
)

# Bytes


def test_sixteen_mebibytes_both_ways() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as streams:
            await check_both_ways(streams, 16 * MIB)

    run(scenario)


def test_a_slow_reader_makes_the_writer_wait_and_loses_nothing() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as (near, far):
            data = secrets.token_bytes(24 * MIB)
            num_sent = 0

            async def send() -> None:
                nonlocal num_sent
                for at in range(0, len(data), 64 * KIB):
                    await near.send_all(data[at : at + 64 * KIB])
                    num_sent += 64 * KIB
                await near.send_eof()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                # Nobody reads: the writer comes to a stand, with a window and its own buffer under way.
                before = -1
                while num_sent != before:
                    before = num_sent
                    await trio.sleep(1)
                limits = QuicLimits()
                bound = limits.first_stream_window + limits.send_buffer + 64 * KIB
                assert 64 * KIB < num_sent <= bound
                # Other streams go on meanwhile.
                other.set_stream_handler(ECHO, echo)
                await check_echo(one, other, MIB)
                assert digest(await receive_all(far)) == digest(data)

    run(scenario)


def test_what_a_fast_reader_earned_stays_bounded() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as (near, far):
            limits = QuicLimits()
            sent = hashlib.sha256()
            num_sent = 0

            async def send() -> None:
                nonlocal num_sent
                for _ in range(640):
                    piece = secrets.token_bytes(64 * KIB)
                    sent.update(piece)
                    await near.send_all(piece)
                    num_sent += len(piece)
                await near.send_eof()

            received = hashlib.sha256()
            num_received = 0
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send)
                while num_received < 20 * MIB:
                    piece = await far.receive_some()
                    received.update(piece)
                    num_received += len(piece)
                before = -1
                while num_sent != before:
                    before = num_sent
                    await trio.sleep(1)
                assert (
                    num_sent - num_received
                    <= limits.max_stream_window + limits.send_buffer + 64 * KIB
                )
                while piece := await far.receive_some():
                    received.update(piece)
            assert received.digest() == sent.digest()

    run(scenario)


def test_many_streams_one_after_the_other_and_at_once() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other):
            one.set_stream_handler(ECHO, echo)
            other.set_stream_handler(ECHO, echo)
            limits = QuicLimits()
            async with trio.open_nursery() as nursery:
                for number in range(50):
                    nursery.start_soon(check_echo, one, other, 1000 * number)
                    nursery.start_soon(check_echo, other, one, 1000 * number)
            core = core_of(one, other)
            for _ in range(limits.max_streams):  # with those before, more than may be open
                await check_echo(one, other, 10)
            await until(lambda: len(core._streams) < 10)
            assert len(core._streams_finished._ranges[0]) < 10

    run(scenario)


# Time


def test_an_idle_connection_and_its_streams_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    limits_of_hosts(monkeypatch, replace(QuicLimits(), idle_timeout=1.0))

    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as (near, far):
            await near.send_all(b"before")
            assert await far.receive_some() == b"before"
            await trio.sleep(4)
            await near.send_all(b"after")
            assert await far.receive_some() == b"after"
            assert one.connected_peers == {other.peer_id}

    run(scenario)


# Stock py-libp2p


# Stock QUIC leaves the socket that it dialled with to the garbage collector, which is let in before the next test.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("dialler", ["we", "they"])
def test_stock_py_libp2p_speaks_quic_with_us(dialler: str) -> None:
    """A mebibyte each way, below what makes stock QUIC lose bytes."""

    async def scenario() -> None:
        stock = new_host(
            key_pair=create_new_key_pair(), enable_quic=True, listen_addrs=[Multiaddr(QUIC)]
        )
        async with stock.run(listen_addrs=[Multiaddr(QUIC)]), open_host(listen=[QUIC]) as ours:
            if dialler == "we":
                await ours.connect(str(stock.get_addrs()[0]))
            else:
                await stock.connect(info_from_p2p_addr(Multiaddr(ours.addresses[0])))
            ours.set_stream_handler(ECHO, echo)
            data = secrets.token_bytes(MIB)
            there = await stock.new_stream(ID.from_base58(ours.peer_id), [TProtocol(ECHO)])
            received = bytearray()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(there.write, data)
                while len(received) < len(data):
                    received += await there.read(64 * KIB)
            assert digest(bytes(received)) == digest(data)
            await there.close()

    run(scenario)
    gc.collect()


# The protocol on top


def test_requests_and_transfers_of_the_protocol() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other):
            near, far = Protocol(one), Protocol(other)
            weights = secrets.token_bytes(5 * MIB + 1)
            received = bytearray()

            def on_weights(layer_id: int, chunk_index: int, total_chunks: int, data: bytes) -> None:
                received.extend(data)

            far.on_activation_received(lambda message: bytes(message.data)[::-1])
            far.on_weights_received(on_weights)
            answer = await near.request_activation(other.peer_id, 1, 2, b"abc" * 1000, timeout=60)
            assert bytes(answer.data) == b"cba" * 1000
            await near.send_weights(other.peer_id, 3, weights)
            await until(lambda: len(received) == len(weights))
            assert digest(bytes(received)) == digest(weights)

    run(scenario)
