"""Traffic is counted by peer, type and direction, in a table that peers cannot grow."""

from __future__ import annotations

from neurogrid.p2p import Direction, MessageType, Traffic, TrafficCounters
from neurogrid.p2p.exchange.counters import OTHERS


def test_sums_by_peer_type_and_direction() -> None:
    counters = TrafficCounters()
    counters.add(Direction.SENT, "a", MessageType.ACTIVATION, 10)
    counters.add(Direction.SENT, "a", MessageType.ACTIVATION, 20)
    counters.add(Direction.SENT, "a", None, 5)
    counters.add(Direction.RECEIVED, "b", MessageType.RESPONSE, 7)
    assert counters.total(Direction.SENT) == Traffic(3, 35)
    assert counters.total(Direction.SENT, peer_id="b") == Traffic()
    assert counters.total(Direction.SENT, msg_type=MessageType.ACTIVATION) == Traffic(2, 30)
    assert counters.snapshot() == {
        "a": {"sent": {"activation": Traffic(2, 30), "legacy": Traffic(1, 5)}},
        "b": {"received": {"response": Traffic(1, 7)}},
    }


def test_a_snapshot_does_not_change() -> None:
    counters = TrafficCounters()
    counters.add(Direction.SENT, "a", None, 1)
    before = counters.snapshot()
    counters.add(Direction.SENT, "a", None, 1)
    assert before["a"]["sent"]["legacy"] == Traffic(1, 1)


def test_peers_that_were_silent_for_longest_are_added_up() -> None:
    counters = TrafficCounters(max_peers=3)
    for index in range(10):
        counters.add(Direction.RECEIVED, f"peer {index}", MessageType.WEIGHTS, 1)
        counters.add(Direction.RECEIVED, "steady", MessageType.WEIGHTS, 1)
    assert len(counters.snapshot()) <= 4
    assert counters.total(Direction.RECEIVED) == Traffic(20, 20)
    assert counters.total(Direction.RECEIVED, peer_id="steady") == Traffic(10, 10)
    assert counters.total(Direction.RECEIVED, peer_id=OTHERS).num_messages >= 7
