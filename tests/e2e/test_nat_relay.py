"""Circuit relay v2 between hosts on loopback: reservations, circuits, and the bounds of both."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import trio
from libp2p.connection_types import ConnectionType
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, Status, StopMessage

from neurogrid.errors import (
    ConfigurationError,
    PeerUnreachableError,
    StreamBrokenError,
    TransportError,
)
from neurogrid.p2p.libp2p.libp2p_host import Libp2pHost, open_host
from neurogrid.p2p.reach.circuit import circuit_address
from neurogrid.p2p.reach.protobuf_frames import receive_message, send_message
from neurogrid.p2p.reach.relay_client import RelayClient
from neurogrid.p2p.reach.relay_service import (
    HOP_PROTOCOL,
    STOP_PROTOCOL,
    RelayLimits,
    RelayService,
)
from neurogrid.p2p.streams.stream import Stream

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


async def exchange_until_it_breaks(scene: Scene) -> None:
    is_whole = True
    while is_whole:
        try:
            await exchange(scene, bytes(10_000))
        except* TransportError:
            is_whole = False


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


def test_without_a_reservation_nobody_is_reached() -> None:
    async def scene(scene: Scene) -> None:
        RelayService(scene.relay)
        with pytest.raises(PeerUnreachableError, match="the peer has no slot there"):
            await scene.client_side.connect(scene.address)
        # Also when the peer is connected to the relay: it has to have asked.
        await scene.server.connect(scene.relay.addresses[0])
        with pytest.raises(PeerUnreachableError, match="the peer has no slot there"):
            await scene.client_side.connect(scene.address)

    play(scene)


def test_a_peer_that_relays_nothing_is_no_relay() -> None:
    async def scene(scene: Scene) -> None:
        with pytest.raises(PeerUnreachableError, match="cannot open a stream"):
            await scene.client_side.connect(scene.address)

    play(scene)


def test_slots_are_bounded_and_free_again_when_their_peer_is_gone() -> None:
    async def scene(scene: Scene) -> None:
        service = RelayService(scene.relay, limits=RelayLimits(max_reservations=1))
        await scene.client.connect(scene.relay.addresses[0])
        other = scene.client_side
        await scene.reserve()
        other.use(scene.relay.addresses[0])
        await until(lambda: "no slot left" in other.states()[0].last_error)
        assert service.state.reservations == (scene.server.peer_id,)
        scene.server_side.leave(scene.relay.peer_id)
        await scene.server.disconnect(scene.relay.peer_id)
        await until(lambda: service.state.reservations == (scene.client.peer_id,))
        await until(lambda: not other.states()[0].last_error)  # the relay's answer is on its way

    play(scene)


def test_a_slot_is_won_again_when_the_relay_was_lost() -> None:
    async def scene(scene: Scene) -> None:
        service = RelayService(scene.relay)
        await scene.reserve()
        await scene.relay.disconnect(scene.server.peer_id)
        await until(lambda: not service.state.reservations)
        await until(lambda: service.state.reservations)
        await until(lambda: scene.server_side.addresses)
        assert await scene.client_side.connect(scene.address) == scene.server.peer_id

    play(scene)


def test_whom_the_relay_does_not_serve_is_told() -> None:
    async def scene(scene: Scene) -> None:
        allowed = {scene.server.peer_id}
        RelayService(scene.relay, may_use=allowed.__contains__)
        await scene.reserve()
        with pytest.raises(PeerUnreachableError, match="it does not serve this peer"):
            await scene.client_side.connect(scene.address)

    play(scene)


@pytest.mark.parametrize(
    "limits", [RelayLimits(circuit_bytes=100_000), RelayLimits(circuit_time=3)]
)
def test_a_circuit_ends_when_its_bytes_or_its_time_are_used_up(limits: RelayLimits) -> None:
    async def scene(scene: Scene) -> None:
        service = RelayService(scene.relay, limits=limits)
        await scene.reserve()
        await scene.client_side.connect(scene.address)
        await exchange_until_it_breaks(scene)
        await until(lambda: not service.state.circuits)
        assert service.state.relayed_bytes <= 2 * limits.circuit_bytes
        await until(lambda: scene.server.peer_id not in scene.client.connected_peers)
        # The relay itself stays connected, and serves again.
        await scene.client_side.connect(scene.address)
        assert await exchange(scene, b"again") == b"again"

    play(scene)


def test_circuits_of_one_peer_are_bounded() -> None:
    async def scene(scene: Scene) -> None:
        RelayService(scene.relay, limits=RelayLimits(max_circuits_per_peer=1))
        await scene.reserve()
        await scene.client_side.connect(scene.address)
        async with open_host() as third:
            with pytest.raises(PeerUnreachableError, match="too many connections through it"):
                await RelayClient(third).connect(scene.address)

    play(scene)


def test_circuits_that_are_being_asked_for_count() -> None:
    async def scene(scene: Scene) -> None:
        RelayService(scene.relay, limits=RelayLimits(max_circuits_per_peer=1))
        asked: list[Stream] = []

        async def hesitate(stream: Stream) -> None:
            await receive_message(stream, StopMessage)
            asked.append(stream)

        async with open_host() as third:
            third.set_stream_handler(STOP_PROTOCOL, hesitate)
            for host in (third, scene.client):
                await host.connect(scene.relay.addresses[0])
            reserving = await third.open_stream(scene.relay.peer_id, [HOP_PROTOCOL])
            await send_message(reserving, HopMessage(type=HopMessage.RESERVE))
            assert (await receive_message(reserving, HopMessage)).status == Status.OK

            async def ask() -> Stream:
                stream = await scene.client.open_stream(scene.relay.peer_id, [HOP_PROTOCOL])
                wanted = PeerId(id=ID.from_base58(third.peer_id).to_bytes())
                await send_message(stream, HopMessage(type=HopMessage.CONNECT, peer=wanted))
                return stream

            async def answer(stream: Stream) -> int:
                return (await receive_message(stream, HopMessage)).status

            first = await ask()
            await until(lambda: len(asked) == 1)
            assert await answer(await ask()) == Status.RESOURCE_LIMIT_EXCEEDED
            refusal = StopMessage(type=StopMessage.STATUS, status=Status.CONNECTION_FAILED)
            await send_message(asked[0], refusal)
            assert await answer(first) == Status.CONNECTION_FAILED
            # And the place is free again.
            second = await ask()
            await until(lambda: len(asked) == 2)
            await send_message(asked[1], StopMessage(type=StopMessage.STATUS, status=Status.OK))
            assert await answer(second) == Status.OK

    play(scene)


async def ask_relay(host: Libp2pHost, scene: Scene, request: HopMessage) -> tuple[Stream, int]:
    """The stream on which a host asked the relay, and the status that it was answered with."""
    stream = await host.open_stream(scene.relay.peer_id, [HOP_PROTOCOL])
    await send_message(stream, request)
    return stream, (await receive_message(stream, HopMessage)).status


def test_requests_that_one_peer_never_finishes_keep_nobody_away() -> None:
    async def scene(scene: Scene) -> None:
        RelayService(scene.relay)
        for host in (scene.client, scene.server):
            await host.connect(scene.relay.addresses[0])
        silent = [
            await scene.client.open_stream(scene.relay.peer_id, [HOP_PROTOCOL])
            for _ in range(RelayLimits().max_requests)
        ]
        _, status = await ask_relay(scene.server, scene, HopMessage(type=HopMessage.RESERVE))
        assert status == Status.OK
        for stream in silent:
            await stream.reset()

    play(scene)


def test_no_peer_takes_all_circuits_of_another() -> None:
    async def scene(scene: Scene) -> None:
        limits = RelayLimits(max_circuits_per_peer=2, max_circuits_per_pair=1)
        service = RelayService(scene.relay, limits=limits)
        await scene.reserve()
        await scene.client.connect(scene.relay.addresses[0])
        wanted = PeerId(id=ID.from_base58(scene.server.peer_id).to_bytes())
        request = HopMessage(type=HopMessage.CONNECT, peer=wanted)
        held, status = await ask_relay(scene.client, scene, request)
        assert status == Status.OK
        _, status = await ask_relay(scene.client, scene, request)
        assert status == Status.RESOURCE_LIMIT_EXCEEDED
        async with open_host() as third:
            assert await RelayClient(third).connect(scene.address) == scene.server.peer_id
        await held.reset()
        await until(lambda: not service.state.circuits)

    play(scene)


def test_one_address_does_not_get_all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(scene: Scene) -> None:
        service = RelayService(scene.relay, limits=RelayLimits(max_reservations=4))
        request = HopMessage(type=HopMessage.RESERVE)
        addresses = {scene.server.peer_id: "192.0.2.7"}
        monkeypatch.setattr(
            scene.relay, "remote_ip", lambda peer: addresses.get(peer, "2001:db8::1")
        )
        async with AsyncExitStack() as stack:
            many = [await stack.enter_async_context(open_host()) for _ in range(4)]
            for number, host in enumerate(many):
                addresses[host.peer_id] = f"2001:db8::{number}"
            for host in (*many, scene.server):
                await host.connect(scene.relay.addresses[0])
            told = [(await ask_relay(host, scene, request))[1] for host in many]
            assert told == [Status.OK] * 3 + [Status.RESERVATION_REFUSED]
            assert (await ask_relay(scene.server, scene, request))[1] == Status.OK
            # Who has a slot renews it, whatever others have.
            assert (await ask_relay(many[0], scene, request))[1] == Status.OK
            assert len(service.state.reservations) == 4

    play(scene)


def test_a_relay_that_was_not_asked_brings_nobody() -> None:
    async def scene(scene: Scene) -> None:
        await scene.relay.connect(scene.server.addresses[0])
        stream = await scene.relay.open_stream(scene.server.peer_id, [STOP_PROTOCOL])
        claimed = PeerId(id=ID.from_base58(scene.client.peer_id).to_bytes())
        await send_message(stream, StopMessage(type=StopMessage.CONNECT, peer=claimed))
        answer = await receive_message(stream, StopMessage)
        assert answer.status == Status.PERMISSION_DENIED
        assert await stream.receive_some() == b""
        assert not scene.arrived

    play(scene)


@pytest.mark.parametrize(
    "request_bytes",
    [b"\xff\xff\xff\xff\xff", b"\x81\x40" + bytes(8193), b"\x02\xff\xff", b"\x02\x08\x02", b""],
    ids=["endless length", "too long", "no protobuf", "no request", "nothing"],
)
def test_a_request_that_is_none_ends_its_stream_alone(request_bytes: bytes) -> None:
    async def scene(scene: Scene) -> None:
        service = RelayService(scene.relay)
        await scene.reserve()
        await scene.client.connect(scene.relay.addresses[0])
        stream = await scene.client.open_stream(scene.relay.peer_id, [HOP_PROTOCOL])
        await stream.send_all(request_bytes)
        await stream.send_eof()
        try:
            while await stream.receive_some():
                pass
        except StreamBrokenError:
            pass
        assert service.state.reservations == (scene.server.peer_id,)
        assert await scene.client_side.connect(scene.address) == scene.server.peer_id

    play(scene)


def test_an_address_that_is_none_is_refused() -> None:
    async def scene(scene: Scene) -> None:
        relay = scene.relay.addresses[0]
        for address in (
            f"{relay}/p2p-circuit",
            f"{relay}/p2p-circuit/p2p/nobody",
            circuit_address(relay, scene.relay.peer_id),
            circuit_address(relay, scene.client.peer_id),
            circuit_address(circuit_address(relay, scene.server.peer_id), scene.client.peer_id),
        ):
            with pytest.raises(ConfigurationError):
                await scene.client_side.connect(address)
        with pytest.raises(ConfigurationError, match="its own relay"):
            scene.client_side.use(scene.client.addresses[0])

    play(scene)


def test_who_gives_up_waiting_leaves_nothing_half_done() -> None:
    async def scene(scene: Scene) -> None:
        service = RelayService(scene.relay)
        await scene.reserve()
        with trio.move_on_after(0.001):
            await scene.client_side.connect(scene.address)
        # The dial goes on by itself; a second call takes part in it, or finds its connection.
        assert await scene.client_side.connect(scene.address) == scene.server.peer_id
        assert await exchange(scene, b"whole") == b"whole"
        assert len(service.state.circuits) == 1

    play(scene)
