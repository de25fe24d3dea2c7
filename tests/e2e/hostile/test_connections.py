"""Streams and connections by the thousand, and what a connection is asked for underneath."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
from libp2p.stream_muxer.exceptions import MuxedStreamError

from neurogrid.errors import ResponseTimeout, TransportError
from neurogrid.p2p import PROTOCOL_V10, MessageType, Protocol, Stream, open_host
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.streams.bounds import Bounds
from neurogrid.p2p.wire import LayerIds
from tests.e2e.hostile.raw_peer import RawPeer, activation, message
from tests.e2e.hostile.scene import DEADLINE, GATED_LAYER, VERSIONS, Scene, run, settled, until

NUM_OPENERS = 64
NUM_CONNECTIONS = 500


def negotiation(protocol_id: str) -> bytes:
    """What opens a stream in multistream-select, both lines at once."""
    lines = (f"{name}\n".encode() for name in ("/multistream/1.0.0", protocol_id))
    return b"".join(bytes([len(line)]) + line for line in lines)


@pytest.mark.parametrize("count", [1500, pytest.param(10_000, marks=pytest.mark.long)])
def test_streams_by_the_thousand(count: int) -> None:
    """As fast as they can be opened: of either version, none ended by the hostile peer, nothing said on them."""

    async def scenario(scene: Scene) -> None:
        (connection,) = scene.hostile.host.libp2p.get_network().get_connections()
        num_opened = 0

        async def open_some(version: str) -> None:
            nonlocal num_opened
            while num_opened < count:
                num_opened += 1
                with suppress(MuxedStreamError):
                    stream = await connection.muxed_conn.open_stream()
                    await stream.write(negotiation(version))

        async with trio.open_nursery() as nursery:
            for index in range(NUM_OPENERS):
                nursery.start_soon(open_some, VERSIONS[index % 2])
            await scene.check_honest()
        assert len(scene.victim._running[scene.hostile_id]) <= 4
        assert scene.victim._oneshot._num_streams[scene.hostile_id] <= 256
        await scene.check_honest()

    run(scenario, bounds=Bounds(hello_timeout=60.0, silence_timeout=60.0))


def test_streams_that_negotiate_nothing() -> None:
    async def scenario(scene: Scene) -> None:
        (connection,) = scene.hostile.host.libp2p.get_network().get_connections()
        for said in (b"", b"\x05junk\n", b"\xff" * 100, negotiation("/no/such/protocol")):
            for _ in range(50):
                stream = await connection.muxed_conn.open_stream()
                await stream.write(said)
        await scene.check_honest()

    run(scenario)


def test_connections_one_after_the_other() -> None:
    """In order and in the middle of a message; those that never become any in between."""

    async def scenario(scene: Scene) -> None:
        address = scene.victim.host.addresses[0]
        port = int(address.split("/")[4])
        request = message(MessageType.LAYER_REQUEST, LayerIds(()).encode(), request_id=1)
        for index in range(20):
            for said in (b"", b"\x00" * index, b"\x13/multistream/1.0.0\n"):
                tcp = await trio.open_tcp_stream("127.0.0.1", port)
                await tcp.send_all(said)
                await tcp.aclose()
            await scene.hostile.leave()
            await scene.hostile.host.connect(address)
            stream = await scene.hostile.open_v11()
            await stream.say(request, request[:index])
            await (await scene.hostile.open(PROTOCOL_V10)).say(request[:1])
        await scene.hostile.leave()
        honest_id = scene.honest.host.peer_id
        await until(lambda: scene.victim.host.connected_peers == {honest_id})
        await settled(scene.victim)

    run(scenario)


def test_five_hundred_connections() -> None:
    """Each by another peer. Over the network in memory: libp2p's handshakes would take a minute."""

    async def main() -> None:
        with trio.fail_after(DEADLINE):
            async with open_memory_network() as network, network.open_host() as victim_host:
                victim = Protocol(victim_host)
                victim.on_layer_request_received(lambda layer_ids, from_peer: (1,))
                request = message(MessageType.LAYER_REQUEST, LayerIds(()).encode(), request_id=1)
                for index in range(NUM_CONNECTIONS):
                    async with network.open_host() as host:
                        await host.connect(victim_host.addresses[0])
                        stranger = RawPeer(host, victim_host.peer_id)
                        stream = await stranger.open_v11()
                        await stream.say(request, request[: index % len(request)])
                        if index % 2:
                            await stream.receive(MessageType.LAYER_STATUS)
                            await (await stranger.open(PROTOCOL_V10)).say(request[:1])
                await until(lambda: not victim_host.connected_peers)
                await settled(victim)

    trio.run(main)


def test_a_peer_that_asks_and_is_gone_before_the_answer() -> None:
    async def scenario(scene: Scene) -> None:
        address = scene.victim.host.addresses[0]
        request = message(MessageType.LAYER_REQUEST, LayerIds(()).encode(), request_id=1)
        for _ in range(10):
            async with open_host() as host:
                await host.connect(address)
                stranger = RawPeer(host, scene.victim_id)
                stream = await stranger.open_v11()
                await stream.say(request * 20)
                await stranger.leave()
                await (await scene.hostile.open(PROTOCOL_V10)).say(request)
        await settled(scene.victim)

    run(scenario)


def test_a_peer_that_is_gone_when_its_answer_is_there() -> None:
    async def scenario(scene: Scene) -> None:
        stream = await scene.hostile.open_v11()
        await stream.say(activation(layer_id=GATED_LAYER))
        await until(lambda: len(scene.served) == 2)
        await scene.hostile.leave()
        await until(lambda: scene.hostile_id not in scene.victim.host.connected_peers)
        scene.gate.set()

    run(scenario)


def test_requests_to_a_peer_of_1_0_0_that_never_confirms() -> None:
    """What is given up leaves no task behind that waits for the end of its stream."""

    async def scenario(scene: Scene) -> None:
        async def never_end(stream: Stream) -> None:
            await trio.sleep_forever()

        scene.hostile.host.set_stream_handler(PROTOCOL_V10, never_end)
        with pytest.raises(ResponseTimeout):
            await scene.victim.request_layer_status(scene.hostile_id, timeout=0.1)
        nursery = scene.victim.host._nursery
        num_tasks = len(nursery.child_tasks)
        for _ in range(10):
            with pytest.raises(ResponseTimeout):
                await scene.victim.request_layer_status(scene.hostile_id, timeout=0.1)
        await until(lambda: len(nursery.child_tasks) <= num_tasks)

    run(scenario, bounds=Bounds(confirm_timeout=10_000.0))


def test_a_flood_of_pings() -> None:
    """Each wants an answer from the reader of the connection, and none is read for a while."""

    async def scenario(scene: Scene) -> None:
        (connection,) = scene.hostile.host.libp2p.get_network().get_connections()

        async def ping() -> None:
            with suppress(TransportError):
                for number in range(20_000):
                    connection.muxed_conn.core.ping(number)
                    connection.muxed_conn.kick()
                    if number % 100 == 0:
                        await trio.sleep(0)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ping)
            await scene.check_honest()
        with trio.fail_after(DEADLINE):
            await scene.check_honest()

    run(scenario)
