"""One of a peer's several streams ends: what hangs on the peer stays, and what may be lost is said to be."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from neurogrid.errors import StreamBrokenError
from neurogrid.p2p import GPUInfo, MessageType, Protocol, TensorMessage
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.wire import PROTOCOL_V11, Hello, encode_message
from tests.unit.blocking_pair import DEADLINE, open_two

INFO = GPUInfo(2, 1, "gpu")
HELLO = Hello("peer", "test", (PROTOCOL_V11,), 2**20, 2**20)


def wire(msg_type: MessageType, request_id: int = 0, data: bytes = b"") -> bytes:
    return encode_message(TensorMessage(msg_type=msg_type, request_id=request_id, data=data))


class Scene:
    """A client and a server, and a second stream of the client's, which the server writes to."""

    def __init__(self, client: Protocol, server: Protocol, second: Stream) -> None:
        self.client, self.server, self.second = client, server, second
        self.lost: list[str] = []
        self.broken: list[str] = []
        server.on_peer_lost(lambda peer_id, reason: self.lost.append(peer_id))
        server.on_stream_broken(lambda peer_id, reason: self.broken.append(peer_id))

    async def noticed(self) -> None:
        """Wait until the server knows that the second stream has ended."""
        while len(self.server._running[self.client.host.peer_id]) > 1:
            await trio.lowlevel.checkpoint()


@pytest.fixture
@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    with trio.fail_after(DEADLINE):
        async with open_two() as (client_host, server_host):
            client, server = Protocol(client_host), Protocol(server_host)
            await client_host.connect(server_host.addresses[0])
            await client.open(server_host.peer_id)
            second = await client_host.open_stream(server_host.peer_id, [PROTOCOL_V11])
            await second.send_all(wire(MessageType.HELLO, data=HELLO.encode()))
            assert await second.receive_some()
            running = server._running[client_host.peer_id]
            while len(running) < 2 or running[-1].hello is None:  # then it is written to
                await trio.lowlevel.checkpoint()
            yield Scene(client, server, second)


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
async def test_a_request_is_answered_on_the_stream_that_stands(
    scene: Scene, is_reset: bool
) -> None:
    came, gate = trio.Event(), trio.Event()

    async def answer(from_peer: str) -> GPUInfo:
        came.set()
        await gate.wait()
        return INFO

    scene.server.on_gpu_info_request_received(answer)
    server_id = scene.server.host.peer_id
    with scene.client.expect(server_id, MessageType.GPU_INFO, request_id=7) as waiter:
        await scene.second.send_all(wire(MessageType.GPU_INFO_REQUEST, 7))
        await came.wait()
        await (scene.second.reset() if is_reset else scene.second.send_eof())
        await scene.noticed()
        gate.set()
        reply = await waiter.wait(timeout=DEADLINE)
    assert GPUInfo.decode(reply.data) == INFO
    assert scene.lost == []
    assert len(scene.broken) == is_reset
    # Both directions, as before.
    assert await scene.client.request_gpu_info(server_id, timeout=DEADLINE) == INFO


async def test_what_was_asked_on_a_stream_that_ends_in_order_is_still_awaited(scene: Scene) -> None:
    client_id = scene.client.host.peer_id

    async def ask() -> None:
        asked = TensorMessage(msg_type=MessageType.GPU_INFO_REQUEST, request_id=9)
        reply = await scene.server.request(client_id, asked, MessageType.GPU_INFO, timeout=DEADLINE)
        assert GPUInfo.decode(reply.data) == INFO

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        assert await scene.second.receive_some()  # the request came on this stream
        await scene.second.send_eof()
        await scene.noticed()
        answer = TensorMessage(msg_type=MessageType.GPU_INFO, request_id=9, data=INFO.encode())
        await scene.client.send(scene.server.host.peer_id, answer)


async def test_what_is_under_way_fails_when_a_stream_breaks(scene: Scene) -> None:
    async def ask() -> None:
        with pytest.raises(StreamBrokenError, match="lost the stream"):
            await scene.server.request_gpu_info(scene.client.host.peer_id, timeout=DEADLINE)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        assert await scene.second.receive_some()
        await scene.second.reset()
    assert scene.lost == []
    assert scene.broken == [scene.client.host.peer_id]


async def test_a_stream_that_never_said_hello_takes_nothing_with_it(scene: Scene) -> None:
    client_id = scene.client.host.peer_id
    third = await scene.client.host.open_stream(scene.server.host.peer_id, [PROTOCOL_V11])
    assert await third.receive_some()  # the server's Hello
    with scene.server.expect(client_id, MessageType.GPU_INFO, request_id=9) as waiter:
        await third.reset()
        while len(scene.server._running[client_id]) > 2:
            await trio.lowlevel.checkpoint()
        assert not waiter.is_done
    assert scene.lost == scene.broken == []


async def test_a_peer_is_lost_with_its_last_stream(scene: Scene) -> None:
    client_id = scene.client.host.peer_id
    await scene.second.reset()
    await scene.noticed()
    await scene.client._streams[scene.server.host.peer_id].close()
    while not scene.lost:
        await trio.lowlevel.checkpoint()
    assert scene.lost == [client_id]
    assert scene.broken == [client_id, client_id]
