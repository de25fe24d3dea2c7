"""A peer whose address changes, as behind a NAT that forgot it: what is sent goes on to the new one."""

from __future__ import annotations

import pytest
from qh3.quic.events import StreamDataReceived

from tests.unit.quic_pair import CLIENT, SERVER, Pair

KIB = 1024
MOVED = (CLIENT[0], 3)


@pytest.mark.parametrize("num_lost", [0, 1, 3])
def test_what_is_under_way_arrives_though_the_first_to_a_new_address_is_lost(num_lost: int) -> None:
    """Until the peer has shown that it is there, no more than three times what comes may be sent: a crawl."""
    pair = Pair()
    pair.run(50)
    stream_id = pair.client.open()
    pair.client.send_stream_data(stream_id, b"x")
    pair.run(50)
    pair.server.send_stream_data(stream_id, bytes(500 * KIB))
    lost = arrived = 0
    for milliseconds in range(4000):
        if milliseconds % 1000 == 0:
            pair.client.send_ping(milliseconds)  # as a host does that hears nothing
        for datagram, _ in pair.client.produce(pair.now):
            pair.server.take([datagram], MOVED, pair.now)
        for datagram, address in pair.server.produce(pair.now):
            if address == MOVED and lost < num_lost:
                lost += 1
            else:
                pair.client.take([datagram], SERVER, pair.now)
        for event in pair.client.events():
            arrived += len(event.data) if isinstance(event, StreamDataReceived) else 0
        pair.now += 0.001
        pair.client.fire(pair.now)
        pair.server.fire(pair.now)
        if arrived == 500 * KIB:
            break
    assert lost == num_lost
    assert arrived == 500 * KIB
