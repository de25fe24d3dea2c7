"""Several addresses of one peer: in which order they are dialled, and when the next is tried."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import trio
from trio.testing import MockClock

from neurogrid.errors import ConfigurationError, PeerUnreachableError
from neurogrid.p2p.hosts.dialing import (
    MAX_ADDRESSES,
    RELAYED_AFTER,
    STAGGER,
    connect_any,
    dial_order,
)

TCP = [f"/ip4/10.0.0.{n}/tcp/1/p2p/X" for n in range(4)]
QUIC = [f"/ip4/10.0.0.{n}/udp/1/quic-v1/p2p/X" for n in range(2)]
RELAYED = [f"/ip4/10.0.0.{n}/udp/1/quic-v1/p2p/R/p2p-circuit/p2p/X" for n in range(2)]


class Network:
    """Addresses that answer after a number of seconds, or fail after it (negative)."""

    def __init__(self, answers: Mapping[str, float]) -> None:
        self._answers = answers
        self.dialled: dict[str, float] = {}
        self.cancelled: list[str] = []

    async def connect(self, address: str) -> str:
        self.dialled[address] = trio.current_time()
        delay = self._answers[address]
        try:
            await trio.sleep(abs(delay))
        except trio.Cancelled:
            self.cancelled.append(address)
            raise
        if delay < 0:
            raise PeerUnreachableError(f"nobody at {address}")
        return address


def dial(answers: Mapping[str, float]) -> tuple[str, Network, float]:
    network = Network(answers)

    async def main() -> tuple[str, float]:
        start = trio.current_time()
        result = await connect_any(network.connect, list(answers))
        network.dialled = {key: when - start for key, when in network.dialled.items()}
        return result, trio.current_time() - start

    result, seconds = trio.run(main, clock=MockClock(autojump_threshold=0))
    return result, network, seconds


def test_the_order_has_tcp_first_and_each_address_once() -> None:
    assert dial_order([RELAYED[0], QUIC[0], TCP[0]]) == [TCP[0], QUIC[0], RELAYED[0]]
    assert dial_order([QUIC[0], TCP[0], QUIC[1], TCP[1], TCP[0]]) == [*TCP[:2], *QUIC]
    assert len(dial_order([f"/ip4/10.0.0.{n}/tcp/1" for n in range(100)])) == MAX_ADDRESSES


def test_one_that_answers_at_once_is_the_only_one_dialled() -> None:
    result, network, seconds = dial({TCP[0]: 0.01, TCP[1]: 0.01, QUIC[0]: 0.0})
    assert result == TCP[0]
    assert list(network.dialled) == [TCP[0]]
    assert seconds == pytest.approx(0.01)


def test_the_next_is_tried_beside_one_that_is_silent() -> None:
    result, network, seconds = dial({TCP[0]: 60, TCP[1]: 0.1, TCP[2]: 0.1})
    assert result == TCP[1]
    assert network.dialled[TCP[1]] == pytest.approx(STAGGER)
    assert network.cancelled == [TCP[0]]
    assert seconds == pytest.approx(STAGGER + 0.1)


def test_a_slow_one_may_still_win() -> None:
    result, network, _ = dial({TCP[0]: 2 * STAGGER, TCP[1]: 60})
    assert result == TCP[0]
    assert network.cancelled == [TCP[1]]


def test_the_next_is_tried_as_soon_as_one_fails() -> None:
    result, network, _ = dial({TCP[0]: -0.01, TCP[1]: 0.01})
    assert result == TCP[1]
    assert network.dialled[TCP[1]] == pytest.approx(0.01)


def test_quic_is_dialled_when_no_tcp_address_answers() -> None:
    result, network, _ = dial({QUIC[0]: 0.01, TCP[0]: -1.0, TCP[1]: -5.0})
    assert result == QUIC[0]
    assert network.dialled[QUIC[0]] == pytest.approx(STAGGER + 5.0)


def test_when_all_fail_each_is_named() -> None:
    with pytest.raises(PeerUnreachableError) as caught:
        dial({TCP[0]: -1.0, QUIC[0]: -1.0})
    assert TCP[0] in str(caught.value)
    assert QUIC[0] in str(caught.value)


def test_no_address_is_the_callers_mistake() -> None:
    with pytest.raises(ConfigurationError):
        dial({})


def test_a_relay_is_tried_beside_addresses_that_are_silent() -> None:
    result, network, seconds = dial({TCP[0]: 60, QUIC[0]: 60, RELAYED[0]: 0.1})
    assert result == RELAYED[0]
    assert network.cancelled == [TCP[0]]
    assert seconds == pytest.approx(RELAYED_AFTER + 0.1)


def test_a_relay_is_tried_at_once_when_all_others_failed_or_there_is_none() -> None:
    result, _, seconds = dial({TCP[0]: -0.1, QUIC[0]: -0.1, RELAYED[0]: -0.1, RELAYED[1]: 0.1})
    assert result == RELAYED[1]
    assert seconds == pytest.approx(0.4)
    assert dial({RELAYED[0]: 0.1})[2] == pytest.approx(0.1)


def test_a_direct_address_that_answers_in_time_is_used() -> None:
    result, network, _ = dial({TCP[0]: 0.9, RELAYED[0]: 0.1})
    assert result == TCP[0]
    assert list(network.dialled) == [TCP[0]]
