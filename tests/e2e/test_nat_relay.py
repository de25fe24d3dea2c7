"""Circuit relay v2 between hosts on loopback: reservations, circuits, and the bounds of both."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID

from neurogrid.p2p.libp2p_host import Libp2pHost, open_host
from neurogrid.p2p.reach.circuit import circuit_address
from neurogrid.p2p.reach.relay_client import RelayClient
from neurogrid.p2p.reach.relay_service import RelayService
from neurogrid.p2p.stream import Stream

DEADLINE = 120.0
ECHO = "/test/echo/1"


async def echo(stream: Stream) -> None:
    while data := await stream.receive_some():
        await stream.send_all(data)
    await stream.aclose()


class Scene:
    """A relay, a server that is reached through it, and a client."""

    def __init__(self, relay: Libp2pHost, server: Libp2pHost, client: Libp2pHost) -> None:
        self.relay, self.server, self.client = relay, server, client
        self.arrived: list[str] = []
        self.server_side = RelayClient(server, on_relayed=self.arrived.append)
        self.client_side = RelayClient(client)
        server.set_stream_handler(ECHO, echo)

    @property
    def address(self) -> str:
        return circuit_address(self.relay.addresses[0], self.server.peer_id)

    async def reserve(self) -> None:
        self.server_side.use(self.relay.addresses[0])
        await until(lambda: self.server_side.addresses)

    def connection_types(self) -> set[ConnectionType]:
        network: Any = self.client.libp2p.get_network()
        return {
            connection.get_connection_type()
            for connection in network.get_connections(ID.from_base58(self.server.peer_id))
        }


@asynccontextmanager
async def open_scene() -> AsyncIterator[Scene]:
    async with open_host() as relay, open_host() as server, open_host() as client:
        yield Scene(relay, server, client)


def play(scene: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_scene() as opened:
                await scene(opened)

    trio.run(main)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await trio.sleep(0.02)


async def exchange(scene: Scene, data: bytes) -> bytes:
    stream = await scene.client.open_stream(scene.server.peer_id, [ECHO])

    async def send() -> None:
        await stream.send_all(data)
        await stream.send_eof()

    received = bytearray()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        while part := await stream.receive_some():
            received += part
    await stream.aclose()
    return bytes(received)


def test_a_peer_is_reached_through_a_relay() -> None:
    async def scene(scene: Scene) -> None:
        service = RelayService(scene.relay)
        await scene.reserve()
        assert scene.address in scene.server_side.addresses
        assert service.state.reservations == (scene.server.peer_id,)
        assert await scene.client_side.connect(scene.address) == scene.server.peer_id
        assert scene.connection_types() == {ConnectionType.RELAYED}
        await until(lambda: scene.arrived == [scene.client.peer_id])
        data = os.urandom(3 * 2**20 + 17)
        assert await exchange(scene, data) == data
        assert service.state.circuits == ((scene.client.peer_id, scene.server.peer_id),)
        assert service.state.relayed_bytes > 2 * len(data)
        # The end of the connection ends the circuit.
        await scene.client.disconnect(scene.server.peer_id)
        await until(lambda: not service.state.circuits)
        await until(lambda: scene.client.peer_id not in scene.server.connected_peers)
        # And it can be made again.
        assert await scene.client_side.connect(scene.address) == scene.server.peer_id
        assert await exchange(scene, b"again") == b"again"

    play(scene)
