"""Requests and their answers: who answers, in which order, too late, not at all, with a refusal."""

from __future__ import annotations

import secrets

import pytest
import trio

from neurogrid.errors import (
    LocalProtocolError,
    PeerRefusedError,
    PeerUnreachableError,
    RequestRefusedError,
    ResponseTimeout,
    TransportError,
)
from neurogrid.p2p import Identity, MessageType, TensorMessage, TraceContext, new_request_id
from neurogrid.p2p.wire import ErrorCode, GPUInfo
from tests.conformance.networks import Network, until
from tests.conformance.protocols import PATIENCE, Calls, Pair, check_echo, open_pair, serve_echo
from tests.conformance.streams import digest

MIB = 1024 * 1024
INFO = GPUInfo(total_bytes=24 << 30, used_bytes=3 << 30, name="GPU")
TRACE = TraceContext(trace_id=bytes(range(16)), span_id=bytes(range(8, 16)), flags=1)


# Answers


@pytest.mark.parametrize("num_bytes", [0, 1, MIB, 8 * MIB])
async def test_what_a_handler_returns_is_the_answer(pair: Pair, kind: str, num_bytes: int) -> None:
    async def answer_later(message: TensorMessage) -> bytes:
        await trio.lowlevel.checkpoint()
        return bytes(message.data)[::-1]

    if kind == "async":
        pair.server.on_activation_received(answer_later)
    else:
        serve_echo(pair.server)
    data = secrets.token_bytes(num_bytes)
    answer = await pair.client.request_activation(pair.server_id, 12, 34, data, timeout=PATIENCE)
    assert answer.msg_type is MessageType.RESPONSE
    assert (answer.layer_id, answer.seq_id) == (12, 34)
    assert answer.from_peer == pair.server_id
    assert digest(bytes(answer.data)) == digest(data[::-1])


async def test_a_handler_may_answer_itself_and_later(pair: Pair) -> None:
    is_confirmed = trio.Event()

    async def answer(message: TensorMessage) -> None:
        assert message.from_peer is not None
        await trio.sleep(0.05)
        await pair.server.send_response(
            message.from_peer, message.layer_id, message.seq_id, message.request_id, b"x"
        )
        is_confirmed.set()

    async def serve(message: TensorMessage) -> None:
        pair.server.host.start_soon(answer, message)

    pair.server.on_activation_received(serve)
    reply = await pair.client.request_activation(pair.server_id, 1, 2, b"?", timeout=PATIENCE)
    assert bytes(reply.data) == b"x"
    # Over 1.0.0 the answer is here before its stream has ended, which confirms it.
    await is_confirmed.wait()


async def test_many_requests_at_once_get_their_own_answers(pair: Pair) -> None:
    async def answer(message: TensorMessage) -> bytes:
        await trio.sleep(0.001 * (50 - message.seq_id))  # the last one first
        return bytes(message.data)[::-1]

    pair.server.on_activation_received(answer)
    serve_echo(pair.client)

    async def ask(number: int) -> None:
        data = number.to_bytes(4, "big") * 1000
        reply = await pair.client.request_activation(
            pair.server_id, 1, number, data, timeout=PATIENCE
        )
        assert bytes(reply.data) == data[::-1]
        assert reply.seq_id == number

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(ask, number)
            nursery.start_soon(check_echo, pair.server, pair.client_id, bytes([number]))


@pytest.mark.parametrize("is_awaited_before", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("is_traced", [False, True], ids=["plain", "traced"])
async def test_sending_and_waiting_apart(
    pair: Pair, is_awaited_before: bool, is_traced: bool
) -> None:
    client, server_id = pair.client, pair.server_id
    request_id = new_request_id()
    calls = Calls("sync")
    pair.server.on_activation_received(calls.handler)
    if is_traced:
        await client.send_traced_activation(server_id, 1, 2, request_id, b"?", TRACE)
    else:
        await client.send_activation(server_id, 1, 2, request_id, b"?")
    await calls.wait()
    answers: list[TensorMessage] = []

    async def wait() -> None:
        answers.append(await client.wait_for_response(server_id, request_id, timeout=PATIENCE))

    async with trio.open_nursery() as nursery:
        if is_awaited_before:
            nursery.start_soon(wait)
            await trio.sleep(0.02)
        if is_traced:
            await pair.server.send_traced_response(pair.client_id, 1, 2, request_id, b"!", TRACE)
        else:
            await pair.server.send_response(pair.client_id, 1, 2, request_id, b"!")
        if not is_awaited_before:
            await trio.sleep(0.02)
            nursery.start_soon(wait)
    assert bytes(answers[0].data) == b"!"
    assert answers[0].trace_context == (TRACE if is_traced else None)
    assert len(client._dispatcher.pending) == 0


async def test_asking_for_the_layers(pair: Pair, kind: str) -> None:
    asked: list[tuple[tuple[int, ...], str]] = []

    def status(layer_ids: tuple[int, ...], from_peer: str) -> list[int]:
        asked.append((layer_ids, from_peer))
        return [0, 1, 5]

    async def status_later(layer_ids: tuple[int, ...], from_peer: str) -> list[int]:
        await trio.lowlevel.checkpoint()
        return status(layer_ids, from_peer)

    pair.server.on_layer_request_received(status if kind == "sync" else status_later)
    for _ in range(2):
        held = await pair.client.request_layer_status(pair.server_id, timeout=PATIENCE)
        assert tuple(held) == (0, 1, 5)
    assert asked == [((), pair.client_id)] * 2


async def test_asking_for_the_gpu(pair: Pair, kind: str) -> None:
    async def info_later(from_peer: str) -> GPUInfo:
        await trio.lowlevel.checkpoint()
        assert from_peer == pair.client_id
        return INFO

    handler = info_later if kind == "async" else (lambda from_peer: INFO)
    pair.server.on_gpu_info_request_received(handler)
    assert await pair.client.request_gpu_info(pair.server_id, timeout=PATIENCE) == INFO


# No answer


async def ask_in_vain(pair: Pair, what: str, timeout: float) -> None:
    client, server_id = pair.client, pair.server_id
    if what == "activation":
        await client.request_activation(server_id, 1, 2, b"?", timeout=timeout)
    elif what == "response":
        await client.wait_for_response(server_id, 99, timeout=timeout)
    elif what == "weights":
        await client.wait_for_weights_ack(server_id, 3, timeout=timeout)
    elif what == "layers":
        await client.request_layer_status(server_id, timeout=timeout)
    else:
        await client.request_gpu_info(server_id, timeout=timeout)


WHAT = ["activation", "response", "weights", "layers", "gpu"]


async def never(*args: object) -> None:
    await trio.sleep_forever()


def serve_never(pair: Pair) -> None:
    pair.server.on_activation_received(never)
    pair.server.on_layer_request_received(never)
    pair.server.on_gpu_info_request_received(never)


@pytest.mark.parametrize("what", WHAT)
async def test_no_answer_in_time(pair: Pair, what: str) -> None:
    serve_never(pair)
    serve_echo(pair.client)
    with pytest.raises(ResponseTimeout):
        await ask_in_vain(pair, what, timeout=0.2)
    assert len(pair.client._dispatcher.pending) == 0
    await check_echo(pair.server, pair.client_id)  # nothing else has suffered


@pytest.mark.parametrize("what", WHAT)
async def test_a_lost_connection_ends_the_wait(pair: Pair, what: str) -> None:
    serve_never(pair)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def ask() -> None:
            with pytest.raises(TransportError) as caught:
                await ask_in_vain(pair, what, timeout=10 * PATIENCE)
            assert not isinstance(caught.value, ResponseTimeout)

        await until(lambda: len(pair.client._dispatcher.pending) == 1)
        await trio.sleep(0.02)
        pair.cut()
    await pair.wait_disconnected()
    assert len(pair.client._dispatcher.pending) == 0


@pytest.mark.parametrize("what", WHAT)
async def test_without_a_connection_nothing_is_awaited(pair: Pair, what: str) -> None:
    await pair.client.close_peer(pair.server_id)
    await pair.wait_disconnected()
    with pytest.raises(TransportError):
        await ask_in_vain(pair, what, timeout=10 * PATIENCE)
    with pytest.raises(PeerUnreachableError):
        await pair.client.send_tensor(Identity.generate().peer_id, 1, 2, b"x")
    assert len(pair.client._dispatcher.pending) == 0


# Refusals


@pytest.mark.parametrize("what", ["activation", "layers", "gpu"])
async def test_what_nobody_serves_is_refused(pair: Pair, what: str) -> None:
    with pytest.raises(PeerRefusedError) as caught:
        await ask_in_vain(pair, what, timeout=PATIENCE)
    if pair.is_v11:
        assert caught.value.code == ErrorCode.NOT_SUPPORTED
    serve_echo(pair.server)
    await pair.check()


async def test_a_handler_refuses(pair: Pair, kind: str) -> None:
    def refuse(message: TensorMessage) -> None:
        raise RequestRefusedError("not now", code=ErrorCode.BUSY, retry_after=1.5)

    async def refuse_later(message: TensorMessage) -> None:
        await trio.lowlevel.checkpoint()
        refuse(message)

    pair.server.on_activation_received(refuse if kind == "sync" else refuse_later)
    with pytest.raises(PeerRefusedError) as caught:
        await ask_in_vain(pair, "activation", timeout=PATIENCE)
    if pair.is_v11:
        assert (caught.value.code, caught.value.text) == (ErrorCode.BUSY, "not now")
        assert caught.value.retry_after == 1.5
    pair.server.on_gpu_info_request_received(lambda from_peer: INFO)
    assert await pair.client.request_gpu_info(pair.server_id, timeout=PATIENCE) == INFO


async def test_a_handler_that_fails_is_a_refusal(
    network: Network, version: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_pair(network, version) as pair:

        def fail(message: TensorMessage) -> None:
            raise ZeroDivisionError("on purpose")

        async def fail_later(message: TensorMessage) -> None:
            await trio.lowlevel.checkpoint()
            fail(message)

        pair.server.on_activation_received(fail if kind == "sync" else fail_later)
        with pytest.raises(PeerRefusedError) as caught:
            await ask_in_vain(pair, "activation", timeout=PATIENCE)
        assert "on purpose" not in str(caught.value)
        pair.server.on_gpu_info_request_received(lambda from_peer: INFO)
        assert await pair.client.request_gpu_info(pair.server_id, timeout=PATIENCE) == INFO
    assert any("on purpose" in str(record.exc_info) for record in caplog.records)


async def test_what_cannot_be_said_is_the_callers_mistake(pair: Pair) -> None:
    serve_echo(pair.server)
    with pytest.raises(LocalProtocolError):
        await pair.client.send_activation(pair.server_id, 1 << 32, 2, 3, b"x")
    with pytest.raises(LocalProtocolError):
        await pair.client.send_activation(pair.server_id, 1, 1 << 64, 3, b"x")
    with pytest.raises(LocalProtocolError):
        await pair.client.send_tensor(pair.server_id, 1 << 24, 2, b"x")
    assert len(pair.client._dispatcher.pending) == 0
    await check_echo(pair.client, pair.server_id)  # the connection knows nothing of it


# Oneself


async def test_a_host_serves_itself(pair: Pair, kind: str) -> None:
    host = pair.client
    calls = Calls(kind)
    serve_echo(host)
    host.on_tensor_received(calls.handler)
    host.on_gpu_info_request_received(lambda from_peer: INFO)
    await check_echo(host, pair.client_id, secrets.token_bytes(MIB))
    assert await host.request_gpu_info(pair.client_id, timeout=PATIENCE) == INFO
    await host.send_tensor(pair.client_id, 1, 2, b"x")
    assert (await calls.message()).from_peer == pair.client_id
    with pytest.raises(PeerRefusedError):
        await host.request_layer_status(pair.client_id, timeout=PATIENCE)
