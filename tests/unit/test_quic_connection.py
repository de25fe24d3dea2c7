"""The driver of a connection, with a peer that is a state machine alone and sends what it likes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import trio
from qh3 import tls
from qh3.quic.connection import QuicReceiveContext

from neurogrid.p2p import Identity
from neurogrid.p2p.quic.connection import QuicMuxedConn
from neurogrid.p2p.quic.core import Configurations, Core, Datagram
from neurogrid.p2p.quic.endpoint import UdpEndpoint
from neurogrid.p2p.quic.limits import QuicLimits, WindowPool
from tests.unit.quic_pair import CLIENT, SERVER

KIB = 1024
STREAM, RESET_STREAM = 0x0E, 0x04  # the former with an offset and a length
NEW_CONNECTION_ID = 0x18


class Carrier:
    """In place of an endpoint: keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Datagram] = []
        self.is_blocked = False

    def send(self, datagrams: list[Datagram]) -> None:
        self.sent += datagrams

    def wait_sendable(self, _: object) -> bool:
        return self.is_blocked

    def call_by(self, cid: bytes, connection: object) -> None: ...

    def forget(self, cid: bytes) -> None: ...


class Served:
    """A connection that was accepted, once its handshake is over."""

    def __init__(self, limits: QuicLimits) -> None:
        near, far = Identity.generate(), Identity.generate()
        self.client = Core(
            Configurations(near.key_pair, limits).get(is_client=True, address="127.0.0.1"),
            limits,
            forget=lambda _: None,
        )
        self.carrier = Carrier()
        self.connection = QuicMuxedConn(
            cast(UdpEndpoint, self.carrier),
            Configurations(far.key_pair, limits).get(is_client=False, address="127.0.0.1"),
            WindowPool(limits),
            CLIENT,
            original_cid=self.client.original_destination_connection_id,
        )
        self.client.connect(SERVER, trio.current_time())
        for _ in range(10):
            self.connection.take(
                [data for data, _ in self.client.produce(trio.current_time())], CLIENT
            )
            self.connection.flush()
            sent, self.carrier.sent = self.carrier.sent, []
            self.client.take([data for data, _ in sent], SERVER, trio.current_time())
            list(self.client.events())
        assert self.connection.is_established

    def take(self, *frames: bytes) -> None:
        """Take a packet with these frames, and wait for more before it is looked at."""
        core: Any = self.connection.core
        context = QuicReceiveContext(
            epoch=tls.Epoch.ONE_RTT,
            host_cid=core.host_cid,
            network_path=core._network_paths[0],
            quic_logger_frames=None,
            time=trio.current_time(),
            version=1,
        )
        core._payload_received(context, b"".join(frames))


def number(value: int) -> bytes:
    """As QUIC writes it, in four bytes."""
    return (0x8000_0000 | value).to_bytes(4, "big")


def data_frame(stream_id: int, offset: int, data: bytes) -> bytes:
    return bytes([STREAM]) + number(stream_id) + number(offset) + number(len(data)) + data


def reset_frame(stream_id: int, final_size: int) -> bytes:
    return bytes([RESET_STREAM]) + number(stream_id) + number(0) + number(final_size)


def cid_frame(sequence: int, retire_prior_to: int) -> bytes:
    cid = sequence.to_bytes(8, "big")
    return (
        bytes([NEW_CONNECTION_ID])
        + number(sequence)
        + number(retire_prior_to)
        + b"\x08"
        + cid
        + bytes(16)
    )


async def test_however_much_comes_at_once_for_streams_that_nobody_reads_is_dropped() -> None:
    limits = replace(QuicLimits(), max_unaccepted=0, first_stream_window=KIB)
    served = Served(limits)
    stream_ids = [4 * index for index in range(limits.max_streams)]
    served.take(*(data_frame(stream_id, 0, b"x") for stream_id in stream_ids))
    served.connection.flush()
    # Each of these is to be answered with credit.
    served.take(*(data_frame(stream_id, 1, bytes(600)) for stream_id in stream_ids))
    served.connection.flush()
    assert served.connection.is_established
    assert served.carrier.sent


async def test_a_reset_that_is_repeated_gives_no_more_credit() -> None:
    limits = replace(QuicLimits(), first_stream_window=64 * KIB, first_window=128 * KIB)
    served = Served(limits)
    allowed = served.connection.core.allowed_bytes
    served.take(data_frame(0, 0, b"x"), reset_frame(0, 60 * KIB))
    served.connection.flush()
    for _ in range(20):
        served.take(reset_frame(0, 60 * KIB))
        served.connection.flush()
    assert served.connection.is_established
    assert allowed.value <= 60 * KIB + limits.first_window


async def test_what_comes_behind_a_reset_is_dropped_and_counts_once() -> None:
    limits = replace(QuicLimits(), first_stream_window=64 * KIB, first_window=128 * KIB)
    served = Served(limits)
    allowed = served.connection.core.allowed_bytes
    for index in range(20):
        served.take(data_frame(4 * index, 0, b"x"), reset_frame(4 * index, 60 * KIB))
        served.connection.flush()
        served.take(data_frame(4 * index, 1, bytes(60 * KIB - 1)))
        served.connection.flush()
    assert served.connection.is_established
    unread = sum(stream.inbox.size for stream in served.connection._backlog)
    assert unread <= 20
    assert allowed.value <= 20 * 60 * KIB + limits.first_window


async def test_a_stream_that_the_peer_has_reset_can_be_closed_and_finished() -> None:
    served = Served(QuicLimits())
    for index in range(2):
        served.take(data_frame(4 * index, 0, b"x"))
    served.connection.flush()
    first = await served.connection.accept_stream()
    second = await served.connection.accept_stream()
    served.take(reset_frame(first.stream_id, 10), reset_frame(second.stream_id, 10))
    served.connection.flush()
    await first.close()
    await second.close_write()
    assert first.reset_by_peer
    assert served.connection.is_established


async def test_time_is_kept_without_haste_while_the_system_takes_no_datagrams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is due stays due until it can be sent: an acknowledgement, here."""
    served = Served(QuicLimits())
    connection, carrier = served.connection, served.carrier
    num_looks = 0
    fire = connection.core.fire

    def count(now: float) -> None:
        nonlocal num_looks
        num_looks += 1
        fire(now)

    monkeypatch.setattr(connection.core, "fire", count)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection.drive)
        carrier.is_blocked = True
        served.client.send_ping(1)
        pings = [data for data, _ in served.client.produce(trio.current_time())]
        assert pings
        carrier.sent.clear()
        connection.take(pings, CLIENT)
        connection.flush()
        await trio.sleep(0.5)
        assert not carrier.sent
        assert num_looks <= 20
        carrier.is_blocked = False
        connection.flush()
        assert carrier.sent
        nursery.cancel_scope.cancel()


async def test_a_peer_that_changes_its_numbers_for_ever_takes_no_more_room() -> None:
    served = Served(QuicLimits())
    core: Any = served.connection.core
    for sequence in range(100, 2100):
        served.take(cid_frame(sequence, sequence))
        served.connection.flush()
        served.take(cid_frame(sequence, sequence))  # which it may repeat
        served.take(cid_frame(sequence - 1, 0))
        core._retire_connection_ids.clear()  # as when all are sent, and acknowledged
    assert served.connection.is_established
    assert core._peer_cid.sequence_number == 2099
    assert not core._peer_cid_available
    assert len(core._peer_cid_sequence_numbers) <= 8
