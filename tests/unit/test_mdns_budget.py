"""How much of what is multicast on a link a host reads in a second."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from neurogrid.p2p.discovery.mdns.limits import MAX_PACKET_BYTES, PACKET_BURST, PACKET_RATE
from neurogrid.p2p.discovery.mdns.service import _Budget


@pytest.mark.parametrize(
    ("num_bytes", "num_frames"), [(60, 1.0), (1500, 1.0), (MAX_PACKET_BYTES, 5.98)]
)
async def test_a_long_packet_counts_as_the_frames_that_it_takes(
    autojump_clock: MockClock, num_bytes: int, num_frames: float
) -> None:
    budget, num_packets, began = _Budget(), 1000, trio.current_time()
    for _ in range(num_packets):
        await budget.spend(num_bytes)
    expected = (num_packets * num_frames - PACKET_BURST) / PACKET_RATE
    assert trio.current_time() - began == pytest.approx(expected, rel=0.01)
