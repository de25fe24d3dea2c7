"""Requests of 1.1.0: they have an id, a role is looked at before Data, and no answer is larger than its peer takes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio

from neurogrid.errors import (
    ConfigurationError,
    LocalProtocolError,
    PeerRefusedError,
    RequestRefusedError,
    StreamBrokenError,
)
from neurogrid.p2p import MessageType, Protocol, TensorMessage, new_request_id
from neurogrid.p2p.wire import DEFAULT_LIMITS, ErrorCode, Limits, encode_message
from tests.unit.blocking_pair import DEADLINE, open_two

REQUEST_TYPES = [code for code in MessageType if code.traits.is_request]
LEAST = 64 * 1024
LEAST_LIMITS = Limits(LEAST, LEAST, 0, LEAST, LEAST, 0, 0, LEAST, LEAST, LEAST, 8, LEAST)

Scenario = Callable[[Protocol, Protocol], Awaitable[None]]


@asynccontextmanager
async def protocols(*, limits: Limits = DEFAULT_LIMITS) -> AsyncIterator[tuple[Protocol, Protocol]]:
    with trio.fail_after(DEADLINE):
        async with open_two() as (client, server):
            both = Protocol(client, limits=limits), Protocol(server)
            await client.connect(server.addresses[0])
            yield both


@pytest.mark.parametrize("msg_type", REQUEST_TYPES)
async def test_a_request_without_an_id_is_not_sent(msg_type: MessageType) -> None:
    async with protocols() as (client, server):
        await client.open(server.host.peer_id)
        for _ in range(2):  # before anything is under way, and after
            with pytest.raises(LocalProtocolError, match="needs a request id"):
                await client.send(server.host.peer_id, TensorMessage(msg_type=msg_type))


async def test_answers_announcements_and_weights_need_none() -> None:
    async with protocols() as (client, server):
        for msg_type in set(MessageType) - {*REQUEST_TYPES, MessageType.HELLO}:
            if msg_type not in (MessageType.ERROR, MessageType.CREDIT):
                await client.send(server.host.peer_id, TensorMessage(msg_type=msg_type))


async def test_a_role_is_judged_before_an_envelope() -> None:
    async with protocols() as (client, server):

        def refuse(message: TensorMessage) -> None:
            raise RequestRefusedError("not you", code=ErrorCode.UNAUTHORIZED)

        server.authorise_by(refuse)
        await client.open(server.host.peer_id)
        stream = client._streams[server.host.peer_id]
        message = TensorMessage(msg_type=MessageType.ACTIVATION, request_id=7, data=b"no envelope")
        with client.expect(server.host.peer_id, MessageType.RESPONSE, request_id=7) as waiter:
            await stream._stream.send_all(encode_message(message))
            with pytest.raises(PeerRefusedError, match="not you"):
                await waiter.wait(timeout=DEADLINE)


async def test_an_answer_that_is_too_large_is_refused_by_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with protocols(limits=LEAST_LIMITS) as (client, server):
        server.on_activation_received(lambda message: bytes(2 * LEAST))
        server.on_layer_request_received(lambda layer_ids, from_peer: range(20_000))
        with pytest.raises(PeerRefusedError, match="the answer is too large") as refused:
            await client.request_activation(server.host.peer_id, 1, 0, b"?", timeout=DEADLINE)
        assert refused.value.code == ErrorCode.LIMIT_EXCEEDED
        request = TensorMessage(
            msg_type=MessageType.LAYER_REQUEST, request_id=new_request_id(), data=bytes(4)
        )
        with pytest.raises(PeerRefusedError, match="the answer is too large") as refused:
            await client.request(
                server.host.peer_id, request, MessageType.LAYER_STATUS, timeout=DEADLINE
            )
        assert refused.value.code == ErrorCode.LIMIT_EXCEEDED
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigurationError("there is no such file"), "internal error"),
        (StreamBrokenError("lost the connection to another"), "another peer did not do its part"),
    ],
)
async def test_what_a_sync_handler_raises_leaves_the_stream_whole(
    error: Exception, said: str
) -> None:
    async with protocols() as (client, server):

        def fail(message: TensorMessage) -> None:
            raise error

        server.on_activation_received(fail)
        await client.open(server.host.peer_id)
        stream = client._streams[server.host.peer_id]
        with pytest.raises(PeerRefusedError, match=said) as refused:
            await client.request_activation(server.host.peer_id, 1, 0, b"?", timeout=DEADLINE)
        assert refused.value.code == ErrorCode.COMPUTE_FAILED
        assert client._streams[server.host.peer_id] is stream
        assert stream.is_open
