"""Lines of a testnet: when packets arrive, by times that are told."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from neurogrid.training.testnet.links import Star

NUM_PEERS = 3
PEERS = st.integers(0, NUM_PEERS - 1)
# Seconds since the one before, from where, to where, and bytes.
PACKETS = st.lists(st.tuples(st.floats(0, 0.05), PEERS, PEERS, st.integers(20, 1500)), max_size=200)
RATES = st.tuples(*[st.none() | st.floats(1e5, 1e8)] * NUM_PEERS)


def all_of(star: Star) -> list[tuple[float, int, bytes]]:
    """What arrives from now on, and when."""
    found = []
    while (at := star.next_time) is not None:
        found += [(at, to, packet) for to, packet in star.arrived(at)]
    return found


@given(PACKETS, RATES, st.floats(0, 0.2))
def test_packets(
    packets: list[tuple[float, int, int, int]], rates: tuple[float | None, ...], delay: float
) -> None:
    star, now, found = Star(rates, delay), 0.0, []
    sent: dict[bytes, tuple[float, int, int]] = {}
    for number, (after, source, to, size) in enumerate(packets):
        now += after
        while (at := star.next_time) is not None and at <= now:
            found += [(at, *each) for each in star.arrived(at)]
        packet = number.to_bytes(8, "big").ljust(size, b"\0")
        sent[packet] = (now, source, to)
        star.send(now, source, to, packet)
    found += all_of(star)
    # None is there twice, and none is lost without being counted.
    assert len({packet for _, _, packet in found}) == len(found)
    assert len(found) + star.num_lost == len(packets)
    through = [0.0] * NUM_PEERS
    flows: dict[tuple[int, int], bytes] = {}
    for at, to, packet in found:
        began, source, destination = sent[packet]
        assert to == destination
        up, down = rates[source], rates[to]
        bits = len(packet) * 8
        needed = delay + bits / (up or math.inf) + bits / (down or math.inf)
        assert at - began >= needed - 1e-9
        # No line takes more than its rate.
        if down is not None:
            assert at - through[to] >= bits / down - 1e-9
        through[to] = at
        # Those of one peer to another keep their order.
        assert flows.get((source, to), b"") < packet
        flows[source, to] = packet


def test_a_full_queue_loses_what_comes() -> None:
    star = Star((8e6, None), 0.0)
    for number in range(1000):
        star.send(0.0, 0, 1, bytes(1000) + number.to_bytes(2, "big"))
    found = all_of(star)
    # A quarter of a second is 250,000 bytes.
    assert len(found) == 249
    assert star.num_lost == 1000 - 249
    assert [packet[-2:] for _, _, packet in found] == [n.to_bytes(2, "big") for n in range(249)]


def test_lines_without_a_rate_lose_nothing_and_take_the_delay_alone() -> None:
    star = Star((None, None), 0.05)
    for _ in range(1000):
        star.send(1.0, 0, 1, bytes(1500))
    assert star.next_time == 1.05
    assert star.arrived(1.049) == []
    assert len(star.arrived(1.05)) == 1000
    assert star.num_lost == 0
    assert star.next_time is None


def test_nothing_gets_over_a_cut() -> None:
    star = Star((None,) * 4, 0.5)
    star.send(0.0, 0, 2, b"under way")
    star.cut([0, 1], [2])
    for source, destination in ((0, 2), (2, 1), (1, 3), (3, 2)):
        star.send(0.0, source, destination, b"lost")
    star.send(0.0, 0, 1, b"same side")
    assert star.arrived(1.0) == [(2, b"under way"), (1, b"same side")]
    assert star.num_lost == 4
    star.cut()
    star.send(1.0, 0, 2, b"healed")
    assert star.arrived(2.0) == [(2, b"healed")]
