"""Who listens at which address, who is dialled over QUIC, and who gets in."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import trio
from libp2p.peer.id import ID
from qh3._hazmat import pull_quic_header
from qh3.quic.packet import QuicPacketType

from neurogrid.errors import ConfigurationError, PeerUnreachableError
from neurogrid.p2p import Identity, open_host
from neurogrid.p2p.quic import QuicLimits
from neurogrid.p2p.quic.core import Configurations, Core
from tests.conformance.streams import ECHO, check_echo, echo
from tests.e2e.quic.hosts import (
    QUIC,
    TCP,
    core_of,
    endpoint_of,
    limits_of_hosts,
    run,
    two_hosts,
    udp_address_of,
    udp_socket,
)

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
            host, port = udp_address_of(other)
            configurations = Configurations(Identity.generate().key_pair, limits)
            flood: list[bytes] = []
            for _ in range(50):
                core = Core(
                    configurations.get(is_client=True, address=host),
                    limits,
                    forget=lambda number: None,
                )
                core.connect((host, port), 0.0)
                flood += [datagram for datagram, _ in core.produce(0.0)]
            with udp_socket() as stranger:
                connections = endpoint_of(other)._connections
                most = 0
                for datagram in flood:
                    await stranger.sendto(datagram, (host, port))
                    most = max(most, len(connections))
                while most < 4 or connections:
                    await trio.sleep(0.01)
                    most = max(most, len(connections))
                assert most == 4
                assert not endpoint_of(other)._by_cid
                await one.connect(other.addresses[0])

    run(scenario)


def test_one_address_takes_not_all_handshakes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = replace(
        QuicLimits(), free_handshakes=0, max_handshakes=4, max_handshakes_per_address=2
    )
    limits_of_hosts(monkeypatch, limits)

    async def scenario() -> None:
        async with open_host(listen=[QUIC]) as one, open_host(listen=[QUIC]) as other:
            host, port = udp_address_of(other)
            connections = endpoint_of(other)._connections
            configurations = Configurations(Identity.generate().key_pair, limits)
            # Who proves its address and goes no further, as often as there are places for all.
            with udp_socket() as stranger:
                await stranger.bind(("127.0.0.2", 0))
                for _ in range(limits.max_handshakes):
                    core = Core(
                        configurations.get(is_client=True, address=host),
                        limits,
                        forget=lambda number: None,
                    )
                    core.connect((host, port), 0.0)
                    for datagram, _ in core.produce(0.0):
                        await stranger.sendto(datagram, (host, port))
                    is_retry = False
                    while not is_retry:  # the answers to those before come as well
                        answer, _ = await stranger.recvfrom(2000)
                        is_retry = pull_quic_header(answer, 0, 8)[1] == QuicPacketType.RETRY
                    core.take([answer], (host, port), 0.1)
                    for datagram, _ in core.produce(0.2):
                        await stranger.sendto(datagram, (host, port))
                while len(connections) < 2:
                    await trio.sleep(0.01)
                await one.connect(other.addresses[0])
                assert len(connections) == 3

    run(scenario)


def test_noise_is_ignored_without_an_answer() -> None:
    def datagrams() -> Iterator[bytes]:
        for first in (0x00, 0x40, 0xC0, 0xFF):
            for length in (0, 1, 5, 8, 9, 20, 1199, 1200, 1472):
                yield (bytes([first]) + secrets.token_bytes(length))[:length]
            version_1 = bytes([first]) + b"\0\0\0\x01\x08" + secrets.token_bytes(8)
            for rest in (b"\0\0", b"\x15" + bytes(21), b"\xff", b"\0\x7f\xff"):
                # No token and nothing that can be decrypted; IDs longer than allowed; a token longer than all.
                yield (version_1 + rest + bytes(1200))[:1400]

    async def scenario() -> None:
        async with two_hosts() as (one, other):
            with udp_socket() as stranger:
                for datagram in datagrams():
                    await stranger.sendto(datagram, udp_address_of(other))
                other.set_stream_handler(ECHO, echo)
                await check_echo(one, other)
                with trio.move_on_after(0.5):
                    await stranger.recvfrom(2000)
                    raise AssertionError("noise was answered")

    run(scenario)


def test_a_token_of_another_server_is_answered_with_one_of_ours() -> None:
    async def scenario() -> None:
        async with two_hosts() as (_, other):
            with udp_socket() as stranger:
                source_cid = secrets.token_bytes(8)
                token = bytes([32]) + secrets.token_bytes(32)
                head = b"\xc0\0\0\0\x01\x08" + secrets.token_bytes(8) + b"\x08" + source_cid
                await stranger.sendto(head + token + bytes(1200), udp_address_of(other))
                answer, _ = await stranger.recvfrom(2000)
                assert pull_quic_header(answer, 0, 8)[1] == QuicPacketType.RETRY
                assert answer[6 : 6 + answer[5]] == source_cid
                assert len(answer) < 200  # who claims another's address gets it no flood

    run(scenario)


def test_a_peer_that_is_dialled_and_says_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits_of_hosts(monkeypatch, replace(QuicLimits(), handshake_timeout=1.0))

    async def scenario() -> None:
        with udp_socket() as mute:
            await mute.bind(("127.0.0.1", 0))
            port = mute.getsockname()[1]
            async with open_host(listen=[QUIC]) as one:
                with pytest.raises(PeerUnreachableError, match="too long"):
                    await one.connect(
                        f"/ip4/127.0.0.1/udp/{port}/quic-v1/p2p/{Identity.generate().peer_id}"
                    )

    run(scenario)
