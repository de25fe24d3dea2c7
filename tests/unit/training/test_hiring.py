"""What a leader says to workers, and the leases that it keeps: what one does, or does not, costs no other anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from neurogrid.errors import (
    LocalProtocolError,
    NeuroGridError,
    PeerRefusedError,
    PeerUnreachableError,
    ResponseTimeout,
    TooLargeForPeerError,
)
from neurogrid.p2p.wire import ErrorCode, TensorMessage
from neurogrid.training.leading.hiring import Hiring
from neurogrid.training.runs.resources import LEASE_SECONDS
from neurogrid.training.wire.runs import Renew, Renewed, RunMessage

RUN = bytes(16)


class Exchange:
    """Between a leader and workers that are asked to renew their leases.

    Attributes:
        renewals: who was asked when, by trio's time.
        silent: who does not answer.
        refuse_after: seconds after which one refuses, by its name.
    """

    def __init__(self) -> None:
        self.renewals: list[tuple[str, int, float]] = []
        self.silent: set[str] = set()
        self.refuse_after: dict[str, float] = {}

    async def request(
        self, peer_id: str, message: TensorMessage, answer: Any, *, timeout: float
    ) -> TensorMessage:
        lease = Renew.decode(message.data).lease
        self.renewals.append((peer_id, lease, trio.current_time()))
        if peer_id in self.silent:
            await trio.sleep(timeout)
            raise ResponseTimeout("no answer")
        if (seconds := self.refuse_after.get(peer_id)) is not None:
            await trio.sleep(seconds)
            raise PeerRefusedError("refused", code=ErrorCode.UNAUTHORIZED, text="no such lease")
        return TensorMessage(answer, data=Renewed(LEASE_SECONDS).encode())


@pytest.fixture
def exchange() -> Exchange:
    return Exchange()


@pytest.fixture
def hiring(exchange: Exchange) -> Hiring:
    return Hiring(cast(Any, exchange), RUN)


async def test_a_member_that_is_silent_costs_no_other_its_lease(
    exchange: Exchange, hiring: Hiring, autojump_clock: MockClock
) -> None:
    lost: list[str] = []
    begin = trio.current_time()
    exchange.silent.add("silent")
    hiring.book.granted("silent", 1, LEASE_SECONDS, asked_at=begin)
    hiring.book.granted("other", 2, LEASE_SECONDS, asked_at=begin + 1)
    with trio.move_on_after(4 * LEASE_SECONDS):
        await hiring.renew(lost.append)
    assert lost == ["silent"]
    assert hiring.book.number("other", trio.current_time()) == 2
    # It is asked again until its lease is over: one question may be lost.
    asked = [at - begin for peer_id, _, at in exchange.renewals if peer_id == "silent"]
    assert len(asked) >= 3
    assert max(asked) < LEASE_SECONDS


async def test_a_refusal_of_a_lease_that_is_over_ends_no_other(
    exchange: Exchange, hiring: Hiring, autojump_clock: MockClock
) -> None:
    lost: list[str] = []
    begin = trio.current_time()
    exchange.refuse_after["slow"] = 5.0
    hiring.book.granted("slow", 1, LEASE_SECONDS, asked_at=begin)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(hiring.renew, lost.append)
        await trio.sleep(LEASE_SECONDS + 1)
        assert lost == ["slow"]
        hiring.book.granted("slow", 2, LEASE_SECONDS, asked_at=trio.current_time())
        await trio.sleep(5)
        assert lost == ["slow"]
        assert hiring.book.number("slow", trio.current_time()) == 2
        nursery.cancel_scope.cancel()


def _failing(error: NeuroGridError) -> Hiring:
    """One whose exchange fails to send anything."""

    async def send(peer_id: str, message: TensorMessage) -> None:
        raise error

    exchange: Any = SimpleNamespace(send=send)
    return Hiring(exchange, RUN)


@pytest.mark.parametrize(
    "error",
    [TooLargeForPeerError("99,999 B are more than the 65,536 B"), PeerUnreachableError("gone")],
)
async def test_what_a_worker_does_not_take_ends_nothing(error: NeuroGridError) -> None:
    """The most that it takes in one message a worker says itself: it may be less than an Epoch has."""
    await _failing(error).tell("worker", RunMessage.EPOCH, bytes(99_999))


async def test_what_nobody_could_be_sent_is_an_error() -> None:
    with pytest.raises(LocalProtocolError):
        await _failing(LocalProtocolError("no such field")).tell("worker", RunMessage.EPOCH, b"")
