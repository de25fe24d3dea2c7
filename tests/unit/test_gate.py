"""The gate before a host whose connections come and go between two steps of its tasks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from neurogrid.errors import PeerUnreachableError, StreamBrokenError
from neurogrid.p2p import Stream
from neurogrid.p2p.trust import AllowList, NotAdmittedError, Refusal
from neurogrid.p2p.trust.gate import Gate
from neurogrid.p2p.trust.limits import ADMISSION_TIMEOUT
from tests.unit.test_trust_formats import PEER


class Unsteady:
    """A host with a peer that answers no exchange, and is back once while it is disconnected.

    Attributes:
        is_dialler: whether this host dials when it is back.
        num_closed: how often it was disconnected.
    """

    def __init__(self, nursery: trio.Nursery, *, is_dialler: bool) -> None:
        self.gate = Gate(self, AllowList({}), lambda _: None)
        self.is_dialler = is_dialler
        self.num_closed = 0
        self._nursery = nursery

    def start_soon(self, function: Callable[..., Awaitable[object]], *args: object) -> None:
        self._nursery.start_soon(function, *args)

    async def open_stream(self, peer_id: str, protocol_ids: Sequence[str]) -> Stream:
        raise PeerUnreachableError("it does not answer")

    async def disconnect(self, peer_id: str) -> None:
        self.num_closed += 1
        if self.num_closed == 1:
            self.gate.connected(peer_id, is_dialler=self.is_dialler)


async def test_who_waits_for_a_peer_that_is_back_waits_for_its_next_exchange(
    autojump_clock: MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        host = Unsteady(nursery, is_dialler=True)
        host.gate.connected(PEER, is_dialler=True)
        with pytest.raises(NotAdmittedError):
            await host.gate.wait_admitted(PEER)
        assert host.num_closed >= 1
        nursery.cancel_scope.cancel()


async def test_a_peer_that_is_back_has_all_its_time_to_show_something(
    autojump_clock: MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        host = Unsteady(nursery, is_dialler=False)
        host.gate.connected(PEER, is_dialler=False)
        host.gate.connected(PEER, is_dialler=True)
        await trio.sleep(ADMISSION_TIMEOUT - 1)
        assert host.num_closed == 1
        await trio.sleep(ADMISSION_TIMEOUT)
        assert host.num_closed == 2
        with pytest.raises(NotAdmittedError) as caught:
            await host.gate.wait_admitted(PEER)
        assert caught.value.reason == Refusal.TIMED_OUT
        nursery.cancel_scope.cancel()


class Resetting:
    """A stream that its peer gives up at once."""

    peer_id = PEER

    async def receive_some(self, max_bytes: int = 0) -> bytes:
        await trio.sleep(1)
        raise StreamBrokenError("the peer reset the stream")

    async def reset(self) -> None: ...


async def test_who_waits_for_a_peer_that_the_host_has_not_told_of_is_not_forgotten(
    autojump_clock: MockClock,
) -> None:
    """The peer's stream has come, and gone, a moment before the host says that there is a connection."""
    async with trio.open_nursery() as nursery:
        host = Unsteady(nursery, is_dialler=False)
        host.gate = Gate(host, AllowList({PEER: "worker"}), lambda _: None)
        nursery.start_soon(host.gate.serve, cast(Stream, Resetting()))
        await trio.sleep(0.5)

        async def wait() -> None:
            await host.gate.wait_admitted(PEER)
            nursery.cancel_scope.cancel()

        nursery.start_soon(wait)
        await trio.sleep(1)
        host.gate.connected(PEER, is_dialler=False)
        await trio.sleep(10 * ADMISSION_TIMEOUT)
        raise AssertionError("who dialled waits for ever")
