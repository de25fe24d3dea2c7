"""When a relayed connection becomes direct: all that goes on between two peers arrives, in order, and is answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from neurogrid.p2p.libp2p.libp2p_host import open_host
from neurogrid.p2p.reach.hole_punching import HolePuncher
from neurogrid.p2p.reach.reach import Reach, ReachOptions
from neurogrid.p2p.reach.relay_service import RelayLimits, RelayService
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.tensor.protocol import Protocol
from neurogrid.p2p.wire import MessageType, TensorMessage

DEADLINE = 180.0
# Bytes of the larger messages: several pieces each, and more than the credit of a stream.
LARGE = 300_000


class Talk:
    """Numbered messages one way, as fast as they go, and what came of those that go the other way."""

    def __init__(self, protocol: Protocol, peer_id: str) -> None:
        self.protocol, self.peer_id = protocol, peer_id
        self.sent: list[int] = []
        self.received: list[int] = []
        self.lost: list[Exception] = []
        self.is_over = False
        protocol.on_message(MessageType.WEIGHTS, self._take)
        protocol.on_peer_lost(lambda peer_id, reason: self.lost.append(reason))

    def _take(self, message: TensorMessage) -> None:
        self.received.append(message.request_id)

    async def run(self) -> None:
        number = 0
        while not self.is_over:
            number += 1
            size = LARGE if number % 10 == 0 else 100
            message = TensorMessage(
                MessageType.WEIGHTS, layer_id=1, request_id=number, data=bytes(size)
            )
            await self.protocol.send(self.peer_id, message)
            self.sent.append(number)

    @property
    def is_moved(self) -> bool:
        stream = self.protocol._streams.get(self.peer_id)
        return stream is not None and not stream.is_relayed


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await trio.sleep(0.02)


def slow_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay on a slow line: what goes directly would overtake what is on its way there."""
    pump = RelayService._pump

    async def pump_slowly(
        self: RelayService, source: Stream, target: Stream, scope: trio.CancelScope
    ) -> None:
        class Slow:
            peer_id = source.peer_id

            async def receive_some(self, max_bytes: int) -> bytes:
                await trio.sleep(0.02)
                return await source.receive_some(max_bytes)

        slow: Any = Slow()
        await pump(self, slow, target, scope)

    monkeypatch.setattr(RelayService, "_pump", pump_slowly)


def hold_back(monkeypatch: pytest.MonkeyPatch) -> trio.Event:
    """Let no holes be punched until this is set."""
    may_punch = trio.Event()
    upgrade = HolePuncher._upgrade

    async def upgrade_later(self: HolePuncher, peer_id: str) -> None:
        await may_punch.wait()
        await upgrade(self, peer_id)

    monkeypatch.setattr(HolePuncher, "_upgrade", upgrade_later)
    return may_punch


Scene = Callable[[Protocol, Protocol], Awaitable[None]]


def play(scene: Scene) -> None:
    """A client that has dialled a server through a relay."""

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_host() as relay, open_host() as server, open_host() as client:
                Reach(relay, ReachOptions(relay_service=RelayLimits()))
                Reach(server, ReachOptions(relays=[relay.addresses[0]]))
                Reach(client)
                await until(lambda: len(server.addresses) > 1)
                protocols = Protocol(client), Protocol(server)
                await client.connect(server.addresses[1])
                await scene(*protocols)

    trio.run(main)


def test_nothing_is_lost_and_nothing_overtakes(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch)
    may_punch = hold_back(monkeypatch)

    async def scene(client: Protocol, server: Protocol) -> None:
        talks = [Talk(client, server.host.peer_id), Talk(server, client.host.peer_id)]
        async with trio.open_nursery() as nursery:
            for talk in talks:
                nursery.start_soon(talk.run)
            await until(lambda: all(talk.sent for talk in talks))
            assert not any(talk.is_moved for talk in talks)
            may_punch.set()
            await until(lambda: all(talk.is_moved for talk in talks))
            marks = [len(talk.sent) + 100 for talk in talks]
            await until(lambda: all(len(t.sent) > m for t, m in zip(talks, marks, strict=True)))
            for talk in talks:
                talk.is_over = True
        for here, there in (talks, talks[::-1]):
            await until(lambda here=here, there=there: len(there.received) == len(here.sent))
            assert there.received == here.sent == list(range(1, len(here.sent) + 1))
        assert not any(talk.lost for talk in talks)

    play(scene)


def test_a_request_that_is_under_way_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(monkeypatch)
    may_punch = hold_back(monkeypatch)

    async def scene(client: Protocol, server: Protocol) -> None:
        arrived, may_answer = trio.Event(), trio.Event()

        async def answer(layer_ids: tuple[int, ...], from_peer: str) -> tuple[int, ...]:
            arrived.set()
            await may_answer.wait()
            return (7,)

        server.on_layer_request_received(answer)
        results: list[tuple[int, ...]] = []

        async def ask() -> None:
            results.append(await client.request_layer_status(server.host.peer_id, timeout=60))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await arrived.wait()
            streams = client._running[server.host.peer_id]
            assert [stream.is_relayed for stream in streams] == [True]
            may_punch.set()
            await until(lambda: [stream.is_relayed for stream in streams] == [False])
            may_answer.set()
        assert results == [(7,)]
        assert client.host.connected_peers >= {server.host.peer_id}

    play(scene)
