"""A `Transport` to a peer and one to ourselves: the same calls, the same handlers, the same outcomes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
import trio

from neurogrid.errors import (
    ConfigRequiredError,
    LocalProtocolError,
    PeerRefusedError,
    RequestRefusedError,
    ResponseTimeout,
)
from neurogrid.p2p import Protocol, TensorMessage, new_request_id
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.transport import LocalTransport, P2PTransport, Transport
from neurogrid.p2p.wire import ErrorCode, GPUInfo
from tests.unit.transfer_peers import two_protocols

pytestmark = pytest.mark.usefixtures("autojump_clock")


@asynccontextmanager
async def remote() -> AsyncIterator[tuple[Protocol, Transport]]:
    async with two_protocols() as (client, server):
        yield server, P2PTransport(client, server.host.peer_id)


@asynccontextmanager
async def local() -> AsyncIterator[tuple[Protocol, Transport]]:
    async with open_memory_network() as network, network.open_host() as host:
        protocol = Protocol(host)
        yield protocol, LocalTransport(protocol)


Sides = tuple[Protocol, Transport]


@pytest.fixture(params=[remote, local], ids=["p2p", "local"])
@asynccontextmanager
async def sides(request: pytest.FixtureRequest) -> AsyncIterator[Sides]:
    with trio.fail_after(3600):
        async with request.param() as both:
            yield both


async def test_an_activation_is_answered_by_what_the_handler_returns(sides: Sides) -> None:
    server, transport = sides

    def double(message: TensorMessage) -> np.ndarray:
        assert message.envelope is not None
        assert (message.layer_id, message.seq_id) == (5, 100)
        array = np.frombuffer(message.data, np.float32).reshape(message.envelope.shape)
        return array * 2

    server.on_activation_received(double)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    answer = await transport.request_activation(5, 100, array, timeout=10)
    assert answer.envelope is not None
    assert (answer.envelope.dtype, answer.envelope.shape) == ("F32", (2, 3))
    assert answer.from_peer == transport.peer_id
    assert np.frombuffer(answer.data, np.float32).tolist() == (array * 2).ravel().tolist()


async def test_data_that_was_received_may_be_written_to(sides: Sides) -> None:
    server, transport = sides

    async def clear(message: TensorMessage) -> bytes:
        view = memoryview(message.data)
        view[:] = bytes(len(view))
        return bytes(view)

    server.on_activation_received(clear)
    array = np.ones(4, np.uint8)
    answer = await transport.request_activation(0, 0, array, timeout=10)
    assert bytes(answer.data) == bytes(4)
    assert array.tolist() == [1, 1, 1, 1]


async def test_a_response_may_come_before_it_is_waited_for(sides: Sides) -> None:
    server, transport = sides
    server.on_activation_received(lambda message: bytes(message.data)[::-1])
    request_id = new_request_id()
    await transport.send_activation(1, 2, request_id, b"abc")
    await trio.sleep(5)
    answer = await transport.wait_for_response(request_id, timeout=10)
    assert bytes(answer.data) == b"cba"


async def test_no_response_is_a_timeout(sides: Sides) -> None:
    server, transport = sides
    server.on_activation_received(lambda message: None)
    with pytest.raises(ResponseTimeout):
        await transport.request_activation(1, 2, b"abc", timeout=3)
    with pytest.raises(ResponseTimeout):
        await transport.wait_for_response(12345, timeout=3)


async def test_weights_and_their_ack(sides: Sides) -> None:
    server, transport = sides
    blob = bytes(range(256)) * 4096 * 3
    chunks: list[tuple[int, int, int]] = []
    received = bytearray(len(blob))

    async def keep(
        layer_id: int, chunk_index: int, total_chunks: int, data: memoryview, *, from_peer: str
    ) -> None:
        chunks.append((layer_id, chunk_index, total_chunks))
        start = chunk_index << 20
        received[start : start + len(data)] = data
        if len(chunks) == total_chunks:
            await server.send_weights_ack(from_peer, layer_id)

    server.on_weights_received(keep)
    await transport.send_weights(7, blob)
    await transport.wait_for_weights_ack(7, timeout=10)
    assert sorted(chunks) == [(7, 0, 3), (7, 1, 3), (7, 2, 3)]
    assert received == blob


async def test_questions_about_the_peer(sides: Sides) -> None:
    server, transport = sides
    asked: list[tuple[int, ...]] = []

    def status(layer_ids: tuple[int, ...], from_peer: str) -> list[int]:
        asked.append(layer_ids)
        return [1, 2, 11]

    async def info(from_peer: str) -> GPUInfo:
        return GPUInfo(8 << 30, 1 << 30, "RTX")

    server.on_layer_request_received(status)
    server.on_gpu_info_request_received(info)
    assert await transport.request_layer_status(timeout=10) == (1, 2, 11)
    assert asked == [()]
    assert await transport.request_gpu_info(timeout=10) == GPUInfo(8 << 30, 1 << 30, "RTX")


async def test_a_config_comes_with_its_sender(sides: Sides) -> None:
    server, transport = sides
    configs: list[tuple[bytes, str]] = []
    arrived = trio.Event()

    def on_config(config: bytes, from_peer: str) -> None:
        configs.append((config, from_peer))
        arrived.set()

    server.on_model_config_received(on_config)
    await transport.send_model_config(b"{}")
    await arrived.wait()
    ((config, sender),) = configs
    assert config == b"{}"
    assert (sender == transport.peer_id) == isinstance(transport, LocalTransport)


@pytest.mark.parametrize(
    ("raised", "expected", "code"),
    [
        (
            RequestRefusedError("no config", code=ErrorCode.CONFIG_REQUIRED),
            ConfigRequiredError,
            ErrorCode.CONFIG_REQUIRED,
        ),
        (
            RequestRefusedError("busy", code=ErrorCode.BUSY, retry_after=1.0),
            PeerRefusedError,
            ErrorCode.BUSY,
        ),
        (ZeroDivisionError("a bug"), PeerRefusedError, ErrorCode.COMPUTE_FAILED),
    ],
)
@pytest.mark.parametrize("is_async", [True, False])
async def test_a_refusal_is_an_error_here(
    sides: Sides,
    raised: Exception,
    expected: type[PeerRefusedError],
    code: ErrorCode,
    is_async: bool,
) -> None:
    server, transport = sides

    def refuse(message: TensorMessage) -> None:
        raise raised

    async def refuse_later(message: TensorMessage) -> None:
        await trio.sleep(1)
        raise raised

    server.on_activation_received(refuse_later if is_async else refuse)
    with pytest.raises(PeerRefusedError) as refused:
        await transport.request_activation(1, 2, b"abc", timeout=10)
    assert type(refused.value) is expected
    assert refused.value.code == code


async def test_what_nobody_serves_is_refused(sides: Sides) -> None:
    _, transport = sides
    with pytest.raises(PeerRefusedError) as refused:
        await transport.request_gpu_info(timeout=10)
    assert refused.value.code == ErrorCode.NOT_SUPPORTED


async def test_what_cannot_be_said_is_our_error(sides: Sides) -> None:
    server, transport = sides
    server.on_activation_received(lambda message: b"")
    with pytest.raises(LocalProtocolError):
        await transport.request_activation(1 << 20, 2, b"abc", timeout=10)
    assert (await transport.request_activation(1, 2, b"abc", timeout=10)).data == b""
