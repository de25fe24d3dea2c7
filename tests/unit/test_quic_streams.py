"""What of qh3's state machine is ours: credit by what was read, ends that arrive, resets that stay silent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qh3.quic.events import StopSendingReceived, StreamDataReceived, StreamReset

from neurogrid.p2p.quic.credit import FinishedStreams
from neurogrid.p2p.quic.limits import QuicLimits, WindowPool
from neurogrid.p2p.quic.window import ConnectionWindow, StreamWindow
from tests.unit.quic_pair import Pair

KIB = 1024
SMALL = replace(
    QuicLimits(),
    first_stream_window=64 * KIB,
    max_stream_window=256 * KIB,
    first_window=128 * KIB,
    max_window=512 * KIB,
)


def connected(limits: QuicLimits = SMALL) -> Pair:
    pair = Pair(limits=limits)
    pair.run(20)
    assert pair.server.is_confirmed
    return pair


def received(pair: Pair, side: str = "server") -> int:
    return sum(len(e.data) for e in pair.events[side] if isinstance(e, StreamDataReceived))


def window_of(pair: Pair, stream_id: int) -> tuple[StreamWindow, WindowPool]:
    pool = WindowPool(SMALL)
    return ConnectionWindow(pair.server, pool).open(stream_id), pool


def test_what_is_not_read_is_not_sent() -> None:
    pair = connected()
    stream_id = pair.client.open()
    pair.client.send_stream_data(stream_id, bytes(400 * KIB))
    pair.run(2000)
    assert received(pair) == 64 * KIB
    assert not pair.server.is_over


def test_what_was_read_is_followed_by_as_much_and_windows_grow_to_their_bound() -> None:
    pair = connected()
    stream_id = pair.client.open()
    pair.client.send_stream_data(stream_id, bytes(8000 * KIB))
    pair.run(500)
    window, pool = window_of(pair, stream_id)
    read = 0
    for _ in range(20):
        arrived = received(pair)
        window.consume(arrived - read)
        read = arrived
        pair.run(300)
        assert received(pair) - read <= 256 * KIB
    assert received(pair) - read == 256 * KIB
    assert pool.granted == 192 * KIB
    window.close()
    assert pool.granted == 0


def test_many_unread_streams_are_held_by_the_connections_window() -> None:
    pair = connected()
    for _ in range(4):
        pair.client.send_stream_data(pair.client.open(), bytes(100 * KIB))
    pair.run(2000)
    assert received(pair) == 128 * KIB
    assert not pair.server.is_over


def test_a_peer_that_complains_gets_no_credit_for_it() -> None:
    pair = connected()
    stream_id = pair.client.open()
    pair.client.send_stream_data(stream_id, bytes(400 * KIB))
    pair.run(500)
    before = pair.server.find(stream_id).max_stream_data_local
    frame = bytes([0x15, stream_id, 0x80, 0x01, 0x00, 0x00])  # STREAM_DATA_BLOCKED at 64 KiB
    pair.server._payload_received(_context(pair), frame)
    pair.run(500)
    assert pair.server.find(stream_id).max_stream_data_local == before == 64 * KIB
    assert received(pair) == 64 * KIB


def _context(pair: Pair) -> object:
    from qh3 import tls
    from qh3.quic.connection import QuicReceiveContext

    return QuicReceiveContext(
        epoch=tls.Epoch.ONE_RTT,
        host_cid=pair.server.host_cid,
        network_path=pair.server._network_paths[0],
        quic_logger_frames=None,
        time=pair.now,
        version=1,
    )


def test_a_peer_that_sends_beyond_its_credit_is_cut_off() -> None:
    pair = connected()
    stream_id = pair.client.open()
    pair.client.find(stream_id).max_stream_data_remote = 1 << 30
    pair.client._remote_max_data = 1 << 30
    pair.client.send_stream_data(stream_id, bytes(400 * KIB))
    pair.run(500)
    assert pair.server.is_over
    assert received(pair) <= 64 * KIB


def test_streams_beyond_the_bound_wait_and_ended_ones_make_room() -> None:
    pair = connected(replace(SMALL, max_streams=2))
    first, second, third = (pair.client.open() for _ in range(3))
    for stream_id in (first, second, third):
        pair.client.send_stream_data(stream_id, b"x", end_stream=True)
    pair.run(100)
    assert received(pair) == 2
    pair.server.send_stream_data(first, b"", end_stream=True)
    pair.run(100)
    assert pair.over["server"] == [first]
    allowed = pair.server.allowed_streams
    allowed.raise_to(allowed.value + 1)
    pair.run(100)
    assert received(pair) == 3


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=10), st.integers(1, 3000))
def test_an_end_arrives_whatever_is_lost(losses: list[bool], num_bytes: int) -> None:
    """An end right behind bytes that were not acknowledged yet: alone qh3 forgets it."""
    pair = connected()
    remaining = iter(losses)
    pair.lose = lambda datagram: next(remaining, False)
    stream_id = pair.client.open()
    pair.client.send_stream_data(stream_id, bytes(num_bytes))
    pair.step()
    pair.client.send_stream_data(stream_id, b"", end_stream=True)
    for _ in range(300):
        pair.run(30)
        data = [e for e in pair.events["server"] if isinstance(e, StreamDataReceived)]
        if data and data[-1].end_stream:
            break
    assert data[-1].end_stream
    assert received(pair) == num_bytes


def test_an_end_is_sent_though_all_before_it_was_acknowledged_first() -> None:
    pair = connected()
    stream_id = pair.client.open()
    pair.client.send_stream_data(stream_id, b"all")
    pair.client.produce(pair.now)  # lost to the test; the acknowledgement is made up
    sender = pair.client.find(stream_id).sender
    pair.client.send_stream_data(stream_id, b"", end_stream=True)
    sender.on_data_delivery(0, 0, 3)
    assert not sender.is_finished
    frame = sender.prepare_stream_frame(1000, 1000)
    assert frame[1] & 1
    sender.on_data_delivery(0, 3, 3)
    assert sender.is_finished


def test_nothing_follows_a_reset() -> None:
    pair = connected()
    stream_id = pair.client.open()
    pair.client.send_stream_data(stream_id, bytes(400 * KIB))
    pair.run(3)
    pair.client.give_up(stream_id)
    pair.run(1000)
    assert not pair.server.is_over
    assert [e for e in pair.events["server"] if isinstance(e, StreamReset)]
    assert pair.client.is_drained
    assert received(pair) < 400 * KIB


@pytest.mark.parametrize("num_bytes", [*range(900, 1500, 7), 100 * KIB])
def test_a_reset_is_sent_though_the_packet_is_full_when_its_turn_comes(num_bytes: int) -> None:
    pair = connected()
    bulk, given_up = pair.client.open(), pair.client.open()
    for stream_id in (bulk, given_up):
        pair.client.send_stream_data(stream_id, b"x")
    pair.run(20)
    pair.client.send_stream_data(bulk, bytes(num_bytes))
    pair.client.give_up(given_up)
    for _ in range(100):
        pair.run(10)
        told = {
            type(event)
            for event in pair.events["server"]
            if getattr(event, "stream_id", None) == given_up
        }
        if {StreamReset, StopSendingReceived} <= told:
            return
    raise AssertionError(f"told: {told}")


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), unique=True))
def test_streams_that_are_over_are_known(numbers: list[int]) -> None:
    told: list[int] = []
    finished = FinishedStreams(told.append)
    for number in numbers:
        assert number not in finished
        finished.add(number)
    assert told == numbers
    assert {n for n in range(204) if n in finished} == set(numbers)
