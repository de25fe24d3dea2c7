"""A relay that gives a slot and closes the connection: it is asked again, after a growing pause."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

import trio
import trio.testing

from neurogrid.p2p.hosts.identity import Identity
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost
from neurogrid.p2p.reach.relay_client import RelayClient, RelayState

RELAY = Identity.generate().peer_id


class LosingHost:
    """A host as far as slots need it, whose connection to a relay lasts `lasts` seconds."""

    peer_id = Identity.generate().peer_id

    def __init__(self, nursery: trio.Nursery, lasts: float) -> None:
        self.start_soon = nursery.start_soon
        self._lasts = lasts

    def set_stream_handler(self, protocol_id: str, handler: object) -> None: ...

    def on_disconnected(self, handler: Callable[[str], None]) -> None: ...

    async def wait_disconnected(self, peer_id: str) -> None:
        await trio.sleep(self._lasts)


class Counting(RelayClient):
    """Gets each slot that it asks for."""

    num_asked = 0

    async def _reserve(self, state: RelayState, relay_id: str) -> float:
        self.num_asked += 1
        assert self.num_asked < 1000, "the relay is asked in a tight loop"
        await trio.lowlevel.checkpoint()
        return 3600.0


async def asked_in(seconds: float, *, lasts: float) -> int:
    async with trio.open_nursery() as nursery:
        client = Counting(cast(Libp2pHost, LosingHost(nursery, lasts)))
        client.use(f"/ip4/203.0.113.7/tcp/4001/p2p/{RELAY}")
        await trio.sleep(seconds)
        nursery.cancel_scope.cancel()
    return client.num_asked


def run(call: Callable[[], Awaitable[int]]) -> int:
    return trio.run(call, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_relay_that_closes_at_once_is_asked_ever_less() -> None:
    assert run(lambda: asked_in(120.0, lasts=0.0)) < 20


def test_a_relay_that_is_lost_after_a_while_is_asked_at_once() -> None:
    assert run(lambda: asked_in(120.0, lasts=19.0)) == 7
