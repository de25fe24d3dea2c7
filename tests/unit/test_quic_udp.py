"""Sockets of QUIC: no datagram ends one, and trains of datagrams arrive as what they were."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest
import trio
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr

from neurogrid.p2p import Identity
from neurogrid.p2p.quic import QuicTransport
from neurogrid.p2p.quic.endpoint import UdpEndpoint
from neurogrid.p2p.quic.limits import WindowPool
from neurogrid.p2p.quic.udp import Address, UdpSocket
from tests.unit.quic_pair import LIMITS, Pair

# A stranger may claim to be at port 0, where nobody can be sent to.
NOWHERE = ("127.0.0.1", 0)


@pytest.fixture
def sockets() -> Iterator[tuple[UdpSocket, UdpSocket]]:
    pair = UdpSocket(socket.AF_INET), UdpSocket(socket.AF_INET)
    for one in pair:
        one.bind(("127.0.0.1", 0))
    yield pair
    for one in pair:
        one.close()


async def received(udp: UdpSocket, count: int) -> list[bytes]:
    datagrams: list[bytes] = []
    with trio.fail_after(10):
        while len(datagrams) < count:
            taken = udp.receive()
            if taken is None:
                await udp.wait_readable()
            else:
                datagrams += taken[0]
    return datagrams


@pytest.mark.parametrize("num_lost", [1, 2])
async def test_what_cannot_be_sent_is_lost_and_nothing_else(
    sockets: tuple[UdpSocket, UdpSocket], num_lost: int
) -> None:
    here, there = sockets
    here.send([(b"lost", NOWHERE)] * num_lost + [(b"arrives", there.address)])
    assert not here.is_blocked
    assert await received(there, 1) == [b"arrives"]


@pytest.mark.parametrize(
    "number",
    [errno.EINVAL, errno.EACCES, errno.ENETDOWN, errno.ENOBUFS, errno.EPROTO, errno.ENOPROTOOPT],
)
def test_an_error_that_a_datagram_has_caused_ends_nothing(
    sockets: tuple[UdpSocket, UdpSocket], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    here, there = sockets

    class Failing:
        def sendmsg(self, *_: object) -> int:
            raise OSError(number, "it cannot")

        recvmsg = recvfrom = sendmsg

    with monkeypatch.context() as patch:
        patch.setattr(here, "_socket", Failing())
        here.send([(b"lost", there.address)])
        assert here.receive() == ([], ())
    assert not here.is_blocked


def test_a_socket_that_was_closed_says_so(sockets: tuple[UdpSocket, UdpSocket]) -> None:
    here, there = sockets
    address: Address = there.address
    here.close()
    with pytest.raises(OSError, match=r"[Bb]ad file descriptor"):
        here.send([(b"x", address)])
    with pytest.raises(OSError, match=r"[Bb]ad file descriptor"):
        here.receive()


async def test_trains_are_taken_where_they_cannot_be_sent(
    sockets: tuple[UdpSocket, UdpSocket], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = sockets
    send = here._send_train

    def send_one(train: list[bytes], address: Address) -> None:
        if len(train) > 1:
            raise OSError(errno.EIO, "the network card cannot")
        send(train, address)

    monkeypatch.setattr(here, "_send_train", send_one)
    train = [bytes([number]) * 1200 for number in range(5)]
    here.send([(datagram, there.address) for datagram in train])
    assert await received(there, 5) == train
    there.send([(datagram, here.address) for datagram in train])
    assert await received(here, 5) == train


async def test_a_stranger_that_cannot_be_answered_begins_no_handshake(
    sockets: tuple[UdpSocket, UdpSocket],
) -> None:
    async def accept(_: object) -> None:
        raise AssertionError("nobody was to be let in")

    pair = Pair()
    endpoint = UdpEndpoint(sockets[0], pair.far_configurations, WindowPool(LIMITS), accept)
    ((first, _),) = pair.client.produce(pair.now)
    async with trio.open_nursery() as nursery:
        await nursery.start(endpoint.run)
        endpoint._dispatch([first], NOWHERE)
        assert not endpoint._connections
        endpoint._dispatch([first], sockets[1].address)
        assert len(endpoint._connections) == 1
        endpoint.close()


async def test_an_address_that_no_socket_can_be_had_for_is_one_that_cannot_be_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refused(UdpSocket):
        def __init__(self, family: int) -> None:
            raise OSError(errno.EAFNOSUPPORT, "there is no IPv6")

    monkeypatch.setattr("neurogrid.p2p.quic.transport.UdpSocket", Refused)
    identity = Identity.generate()
    with pytest.raises(OpenConnectionError, match="there is no IPv6"):
        await QuicTransport(identity).dial(
            Multiaddr(f"/ip6/2001:db8::1/udp/4001/quic-v1/p2p/{identity.peer_id}")
        )
