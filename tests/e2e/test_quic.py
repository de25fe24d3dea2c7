"""QUIC between real hosts: bytes both ways, slow readers, idle times, ends, peers that are not who they should be.

Long, and one file: all of it stands on the same hosts, floods and foreign peers that are made at its top.
"""

from __future__ import annotations

import gc
import hashlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from multiaddr import Multiaddr

from neurogrid.errors import ConfigurationError, PeerUnreachableError, StreamBrokenError
from neurogrid.p2p import Host, Identity, Protocol, Stream, open_host
from neurogrid.p2p import libp2p_host as libp2p_host_module
from neurogrid.p2p.libp2p_host import Libp2pHost
from neurogrid.p2p.quic import QuicLimits
from neurogrid.p2p.quic.core import Configurations, Core

KIB = 1024
MIB = 1024 * KIB
DEADLINE = 120.0
ECHO = "/test/echo/1"
SINK = "/test/sink/1"

QUIC = "/ip4/127.0.0.1/udp/0/quic-v1"
TCP = "/ip4/127.0.0.1/tcp/0"


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(DEADLINE):
            await scenario()

    trio.run(bounded)


def limits_of_hosts(monkeypatch: pytest.MonkeyPatch, limits: QuicLimits) -> None:
    """Let every host that is opened from now on go by `limits`."""
    monkeypatch.setattr(libp2p_host_module, "quic_limits", lambda keep_alive: limits)


@asynccontextmanager
async def two_hosts() -> AsyncIterator[tuple[Libp2pHost, Libp2pHost]]:
    """A host that has dialled another over QUIC."""
    async with open_host(listen=[QUIC]) as one, open_host(listen=[QUIC]) as other:
        await one.connect(other.addresses[0])
        await until(lambda: one.peer_id in other.connected_peers)
        yield one, other


@asynccontextmanager
async def stream_pair(one: Host, other: Host) -> AsyncIterator[tuple[Stream, Stream]]:
    """Both ends of a new stream that `one` opened; they are closed at the end."""
    protocol_id = f"/test/pair/{secrets.token_hex(4)}"
    accepted: list[Stream] = []

    async def accept(stream: Stream) -> None:
        accepted.append(stream)

    other.set_stream_handler(protocol_id, accept)
    near = await one.open_stream(other.peer_id, [protocol_id])
    await until(lambda: bool(accepted))
    yield near, accepted[0]
    await near.aclose()
    await accepted[0].aclose()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.01)


async def send_without_end(stream: Stream) -> None:
    while True:
        await stream.send_all(bytes(KIB))
        await trio.sleep(0.01)


async def echo(stream: Stream) -> None:
    while data := await stream.receive_some():
        await stream.send_all(data)
    await stream.aclose()


async def receive_all(stream: Stream) -> bytes:
    received = bytearray()
    while data := await stream.receive_some():
        received += data
    return bytes(received)


def digest(data: bytes) -> tuple[int, str]:
    return len(data), hashlib.sha256(data).hexdigest()


async def check_echo(one: Host, other: Host, num_bytes: int = 1000) -> None:
    stream = await one.open_stream(other.peer_id, [ECHO])
    data = secrets.token_bytes(num_bytes)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def send() -> None:
            await stream.send_all(data)
            await stream.send_eof()

        assert digest(await receive_all(stream)) == digest(data)
    await stream.aclose()


def endpoint_of(host: Libp2pHost) -> Any:
    """The socket that a host listens on."""
    network: Any = host.libp2p.get_network()
    (listener,) = network.listeners.values()
    return listener._endpoint


def core_of(host: Libp2pHost, peer: Host) -> Any:
    """The state machine of a connection."""
    network: Any = host.libp2p.get_network()
    (connection,) = network.connections[ID.from_base58(peer.peer_id)]
    return connection.muxed_conn.core


# Addresses


def test_a_host_listens_and_is_dialled_at_its_quic_address() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other):
            assert "/udp/" in other.addresses[0]
            assert "/quic-v1/p2p/" in other.addresses[0]
            assert one.connected_peers == {other.peer_id}
            one.set_stream_handler(ECHO, echo)
            other.set_stream_handler(ECHO, echo)
            await check_echo(one, other)
            await check_echo(other, one)

    run(scenario)


@pytest.mark.parametrize("listen", ["/ip4/0.0.0.0/udp/0/quic-v1", "/ip6/::1/udp/0/quic-v1"])
def test_other_interfaces_are_listened_on(listen: str) -> None:
    async def scenario() -> None:
        async with open_host(listen=[QUIC]) as one, open_host(listen=[listen]) as other:
            assert all("/quic-v1/p2p/" in address for address in other.addresses)
            (port,) = {address.split("/")[4] for address in other.addresses}
            host = "ip6/::1" if "ip6" in listen else "ip4/127.0.0.1"
            await one.connect(f"/{host}/udp/{port}/quic-v1/p2p/{other.peer_id}")
            other.set_stream_handler(ECHO, echo)
            await check_echo(one, other)

    run(scenario)


@pytest.mark.parametrize(
    "address",
    ["/ip4/127.0.0.1/udp/0", "/ip4/127.0.0.1/udp/0/quic", "/ip4/127.0.0.1/tcp/0/quic-v1"],
)
def test_no_other_form_is_listened_on(address: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigurationError):
            async with open_host(listen=[address]):
                pass

    run(scenario)


def test_a_port_that_is_taken_is_reported() -> None:
    async def scenario() -> None:
        async with open_host(listen=[QUIC]) as host:
            with pytest.raises(ConfigurationError, match="in use"):
                async with open_host(listen=[host.addresses[0].partition("/p2p/")[0]]):
                    pass

    run(scenario)


def test_tcp_is_dialled_when_both_are_known() -> None:
    async def scenario() -> None:
        async with open_host(listen=[TCP, QUIC]) as one, open_host(listen=[TCP, QUIC]) as other:
            assert len(other.addresses) == 2
            swarm: Any = one.libp2p.get_network()
            remote = ID.from_base58(other.peer_id)
            swarm.peerstore.add_addrs(remote, other.libp2p.get_addrs(), 600)
            (connection,) = await swarm.dial_peer(remote)
            assert "/tcp/" in str(connection.get_transport_addresses()[0])
            other.set_stream_handler(ECHO, echo)
            await check_echo(one, other)

    run(scenario)


def test_quic_is_dialled_when_tcp_does_not_get_through() -> None:
    async def scenario() -> None:
        async with open_host(listen=[QUIC]) as one, open_host(listen=[TCP, QUIC]) as other:
            swarm: Any = one.libp2p.get_network()
            remote = ID.from_base58(other.peer_id)
            async with open_host(listen=[TCP]) as gone:
                nobody = gone.libp2p.get_transport_addrs()
            quic = [a for a in other.libp2p.get_transport_addrs() if "quic-v1" in str(a)]
            swarm.peerstore.add_addrs(remote, [*nobody, *quic], 600)
            (connection,) = await swarm.dial_peer(remote)
            assert "/quic-v1" in str(connection.get_transport_addresses()[0])

    run(scenario)


def test_quic_is_dialled_when_it_is_asked_for() -> None:
    async def scenario() -> None:
        async with open_host(listen=[TCP, QUIC]) as one, open_host(listen=[TCP, QUIC]) as other:
            (quic,) = (address for address in other.addresses if "quic-v1" in address)
            await one.connect(quic)
            assert core_of(one, other).peer_id == ID.from_base58(other.peer_id)

    run(scenario)


# Who is there


def test_another_peer_than_the_one_dialled_is_refused() -> None:
    async def scenario() -> None:
        async with open_host(listen=[QUIC]) as one, open_host(listen=[QUIC]) as other:
            place = other.addresses[0].partition("/p2p/")[0]
            wrong = Identity.generate().peer_id
            with pytest.raises(PeerUnreachableError, match="another peer lives there"):
                await one.connect(f"{place}/p2p/{wrong}")
            assert not one.connected_peers
            assert not other.connected_peers

    run(scenario)


def test_nobody_there_is_told_at_once() -> None:
    async def scenario() -> None:
        async with open_host(listen=[QUIC]) as one:
            async with open_host(listen=[QUIC]) as gone:
                address = gone.addresses[0]
            with pytest.raises(PeerUnreachableError, match="refused"):
                await one.connect(address)

    run(scenario)


def test_who_must_prove_its_address_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    limits_of_hosts(monkeypatch, replace(QuicLimits(), free_handshakes=0))

    async def scenario() -> None:
        async with two_hosts() as (one, other):
            assert core_of(one, other)._retry_count == 1
            other.set_stream_handler(ECHO, echo)
            await check_echo(one, other)

    run(scenario)


def test_handshakes_that_nobody_completes_are_bounded_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = replace(
        QuicLimits(), free_handshakes=4, max_handshakes=4, max_connections=8, handshake_timeout=2.0
    )
    limits_of_hosts(monkeypatch, limits)

    async def scenario() -> None:
        async with open_host(listen=[QUIC]) as one, open_host(listen=[QUIC]) as other:
            host, port = other.addresses[0].split("/")[2], int(other.addresses[0].split("/")[4])
            configurations = Configurations(Identity.generate().key_pair, limits)
            with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as flood:
                for _ in range(50):
                    core = Core(
                        configurations.get(is_client=True, address=host),
                        limits,
                        forget=lambda number: None,
                    )
                    core.connect((host, port), 0.0)
                    for datagram, _ in core.produce(0.0):
                        await flood.sendto(datagram, (host, port))
                await trio.sleep(0.5)
                assert len(endpoint_of(other)._connections) == 4
                await until(lambda: not endpoint_of(other)._connections)
                assert not endpoint_of(other)._by_cid
                await one.connect(other.addresses[0])

    run(scenario)


def test_noise_is_ignored_without_an_answer() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other):
            host, port = other.addresses[0].split("/")[2], int(other.addresses[0].split("/")[4])
            with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as stranger:
                for length in (0, 1, 5, 8, 9, 20, 1199, 1200, 1472):
                    for first in (0x00, 0x40, 0xC0, 0xFF):
                        noise = bytes([first]) + secrets.token_bytes(length)
                        await stranger.sendto(noise[:length], (host, port))
                        version_1 = bytes([first]) + b"\0\0\0\x01\x08" + noise + bytes(1200)
                        await stranger.sendto(version_1[:1400], (host, port))
                other.set_stream_handler(ECHO, echo)
                await check_echo(one, other)
                with trio.move_on_after(0.5):
                    await stranger.recvfrom(2000)
                    raise AssertionError("noise was answered")

    run(scenario)


# Bytes


def test_sixteen_mebibytes_both_ways() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as streams:
            data = [secrets.token_bytes(16 * MIB) for _ in streams]
            received: dict[int, bytes] = {}

            async def send(side: int) -> None:
                await streams[side].send_all(data[side])
                await streams[side].send_eof()

            async def receive(side: int) -> None:
                received[side] = await receive_all(streams[side])

            async with trio.open_nursery() as nursery:
                for side in range(2):
                    nursery.start_soon(send, side)
                    nursery.start_soon(receive, side)
            assert digest(received[1]) == digest(data[0])
            assert digest(received[0]) == digest(data[1])

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


def test_a_peer_that_falls_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    limits_of_hosts(monkeypatch, replace(QuicLimits(), idle_timeout=1.0))

    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as (near, _):
            monkeypatch.setattr(core_of(other, one), "datagrams_to_send", lambda now: [])
            with pytest.raises(StreamBrokenError):
                await near.receive_some()
            await one.wait_disconnected(other.peer_id)

    run(scenario)


def test_a_peer_that_is_dialled_and_says_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits_of_hosts(monkeypatch, replace(QuicLimits(), handshake_timeout=1.0))

    async def scenario() -> None:
        with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as mute:
            await mute.bind(("127.0.0.1", 0))
            port = mute.getsockname()[1]
            async with open_host(listen=[QUIC]) as one:
                with pytest.raises(PeerUnreachableError, match="too long"):
                    await one.connect(
                        f"/ip4/127.0.0.1/udp/{port}/quic-v1/p2p/{Identity.generate().peer_id}"
                    )

    run(scenario)


# Ends


def test_a_side_that_has_finished_can_still_receive() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as (near, far):
            await near.send_all(b"question")
            await near.send_eof()
            assert await receive_all(far) == b"question"
            with pytest.raises(StreamBrokenError):
                await near.send_all(b"more")
            await far.send_all(b"answer")
            await far.send_eof()
            assert await receive_all(near) == b"answer"

    run(scenario)


def test_what_was_sent_before_a_close_still_arrives() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as (near, far):
            data = secrets.token_bytes(300 * KIB)
            await near.send_all(data)
            await near.aclose()
            assert digest(await receive_all(far)) == digest(data)

    run(scenario)


def test_what_was_sent_before_a_disconnect_still_arrives() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as (near, far):
            data = secrets.token_bytes(300 * KIB)
            await near.send_all(data)
            await near.send_eof()
            await one.disconnect(other.peer_id)
            assert digest(await receive_all(far)) == digest(data)
            await other.wait_disconnected(one.peer_id)

    run(scenario)


def test_a_reset_ends_both_directions_on_both_sides() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other):
            async with stream_pair(one, other) as (near, far):
                await near.send_all(b"begun")
                assert await far.receive_some() == b"begun"
                await near.reset()
                for stream in (near, far):
                    with pytest.raises(StreamBrokenError):
                        await stream.receive_some()
                with pytest.raises(StreamBrokenError):
                    await send_without_end(far)
            other.set_stream_handler(ECHO, echo)
            await check_echo(one, other)

    run(scenario)


def test_a_reset_in_the_middle_of_a_write_ends_it() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as (near, far):
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def write() -> None:
                    with pytest.raises(StreamBrokenError):
                        await near.send_all(bytes(32 * MIB))

                await far.receive_some()
                await far.reset()
            other.set_stream_handler(ECHO, echo)
            await check_echo(one, other)

    run(scenario)


def test_unread_bytes_of_ended_streams_leave_their_room_to_others() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other):
            other.set_stream_handler(ECHO, echo)
            limits = QuicLimits()
            for number in range(2 * limits.first_window // limits.first_stream_window):
                async with stream_pair(one, other) as (near, far):
                    with trio.move_on_after(0.2):
                        await near.send_all(bytes(MIB))
                    if number % 2:
                        await far.reset()
                    else:
                        await near.reset()
            await check_echo(one, other, 4 * MIB)

    run(scenario)


# Cancellation


def test_cancelled_writes_leave_prefixes_and_harm_nobody() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other):
            other.set_stream_handler(ECHO, echo)
            for _ in range(20):
                async with stream_pair(one, other) as (near, far):
                    data = secrets.token_bytes(2 * MIB)
                    with trio.move_on_after(secrets.randbelow(50) / 1000):
                        await near.send_all(data)
                    await near.send_eof()
                    received = await receive_all(far)
                    assert data.startswith(received)
            await check_echo(one, other, MIB)

    run(scenario)


def test_cancelled_reads_lose_nothing() -> None:
    async def scenario() -> None:
        async with two_hosts() as (one, other), stream_pair(one, other) as (near, far):
            data = secrets.token_bytes(2 * MIB)
            received = bytearray()
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def write() -> None:
                    for at in range(0, len(data), 16 * KIB):
                        await near.send_all(data[at : at + 16 * KIB])
                        await trio.sleep(0.001)
                    await near.send_eof()

                while True:
                    with trio.move_on_after(0.002):
                        if not (piece := await far.receive_some()):
                            break
                        received += piece
            assert digest(bytes(received)) == digest(data)

    run(scenario)


def test_a_cancelled_dial_leaves_nothing() -> None:
    async def scenario() -> None:
        async with open_host(listen=[QUIC]) as one, open_host(listen=[QUIC]) as other:
            for delay in (0, 0.001, 0.005, 0.02):
                with trio.move_on_after(delay):
                    await one.connect(other.addresses[0])
            await one.connect(other.addresses[0])
            other.set_stream_handler(ECHO, echo)
            await check_echo(one, other)

    run(scenario)


# The host's own end


def test_a_host_that_closes_is_seen_to_go() -> None:
    async def scenario() -> None:
        async with open_host(listen=[QUIC]) as one:
            async with open_host(listen=[QUIC]) as other:
                await one.connect(other.addresses[0])
                stream: Stream
                async with stream_pair(one, other) as (stream, _):
                    pass
            with trio.fail_after(10):
                await one.wait_disconnected(other.peer_id)
            with suppress(StreamBrokenError):
                assert not await stream.receive_some()

    run(scenario)


def test_peers_come_and_go_more_often_than_may_be_there_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libp2p_host_module, "MAX_CONNECTIONS", 4)

    async def scenario() -> None:
        async with open_host(listen=[QUIC]) as one, open_host(listen=[QUIC]) as other:
            other.set_stream_handler(ECHO, echo)
            for _ in range(10):
                await one.connect(other.addresses[0])
                await check_echo(one, other)
                await one.disconnect(other.peer_id)
                await other.wait_disconnected(one.peer_id)

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
