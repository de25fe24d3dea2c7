"""Every message of the named API arrives whole, with its sender, at sync and async handlers."""

from __future__ import annotations

import secrets

import pytest
import trio

from neurogrid.errors import LocalProtocolError
from neurogrid.p2p import Direction, MessageType, Protocol, TensorMessage, TraceContext
from neurogrid.p2p.wire import GPUInfo, ModelConfig, deserialize_config, serialize_config
from tests.conformance.networks import Network, until
from tests.conformance.protocols import PATIENCE, Calls, Pair, open_pair, serve_echo
from tests.conformance.streams import digest

MIB = 1024 * 1024
INFO = GPUInfo(
    total_bytes=24 << 30, used_bytes=3 << 30, name="NVIDIA RTX 4090 \N{GREEK SMALL LETTER MU}"
)
TRACE = TraceContext(trace_id=bytes(range(16)), span_id=bytes(range(8, 16)), flags=1)


async def test_a_host_has_one_protocol(pair: Pair) -> None:
    serve_echo(pair.server)
    with pytest.raises(LocalProtocolError):
        Protocol(pair.server.host)
    await pair.check()


async def test_each_side_knows_what_the_other_calls_its_machine_and_where_it_is(
    network: Network,
) -> None:
    async with network.open_host() as one, network.open_host() as other:
        client, server = Protocol(one, name="desk"), Protocol(other)
        await network.connect(one, other)
        await client.open(other.peer_id)
        await until(lambda: server.hello_of(one.peer_id) is not None)
        hello, answer = server.hello_of(one.peer_id), client.hello_of(other.peer_id)
        assert hello is not None
        assert answer is not None
        assert (hello.name, answer.name) == ("desk", "")
        addresses = {one.remote_ip(other.peer_id), other.remote_ip(one.peer_id)}
        assert addresses == ({"127.0.0.1"} if "/ip4/" in one.addresses[0] else {""})
        assert one.remote_ip("12D3KooWnobody") == ""


async def test_tensor(pair: Pair, kind: str) -> None:
    calls = Calls(kind)
    pair.server.on_tensor_received(calls.handler)
    await pair.client.send_tensor(pair.server_id, 12, 34, b"\x00\x01\xff")
    message = await calls.message()
    assert message.msg_type is None
    assert (message.layer_id, message.seq_id) == (12, 34)
    assert bytes(message.data) == b"\x00\x01\xff"
    assert message.from_peer == pair.client_id


def check_tensor(message: TensorMessage, data: bytes, *, from_peer: str, is_v11: bool) -> None:
    assert (message.layer_id, message.seq_id, message.request_id) == (12, 34, 56)
    assert digest(bytes(message.data)) == digest(data)
    assert message.from_peer == from_peer
    assert (message.envelope is not None) == is_v11
    if message.envelope is not None:
        assert (message.envelope.dtype, message.envelope.shape) == ("U8", (len(data),))


@pytest.mark.parametrize("num_bytes", [0, 1, MIB, 5 * MIB])
async def test_activation(pair: Pair, kind: str, num_bytes: int) -> None:
    calls = Calls(kind)
    pair.server.on_activation_received(calls.handler)
    data = secrets.token_bytes(num_bytes)
    await pair.client.send_activation(pair.server_id, 12, 34, 56, data)
    message = await calls.message()
    assert message.msg_type is MessageType.ACTIVATION
    assert message.trace_context is None
    check_tensor(message, data, from_peer=pair.client_id, is_v11=pair.is_v11)


async def test_response_that_nobody_waits_for(pair: Pair, kind: str) -> None:
    calls = Calls(kind)
    pair.client.on_response_received(calls.handler)
    await pair.server.send_response(pair.client_id, 12, 34, 56, b"abc")
    message = await calls.message()
    assert message.msg_type is MessageType.RESPONSE
    check_tensor(message, b"abc", from_peer=pair.server_id, is_v11=pair.is_v11)


async def test_traced_messages(pair: Pair, kind: str) -> None:
    asked, answered = Calls(kind), Calls(kind)
    pair.server.on_activation_received(asked.handler)
    pair.client.on_response_received(answered.handler)
    await pair.client.send_traced_activation(pair.server_id, 12, 34, 56, b"abc", TRACE)
    message = await asked.message()
    assert message.msg_type is MessageType.TRACED_ACTIVATION
    assert message.trace_context == TRACE
    check_tensor(message, b"abc", from_peer=pair.client_id, is_v11=pair.is_v11)
    await pair.server.send_traced_response(pair.client_id, 12, 34, 57, b"abc", TRACE)
    message = await answered.message()
    assert message.msg_type is MessageType.TRACED_RESPONSE
    assert message.trace_context == TRACE
    assert bytes(message.data) == b"abc"


async def test_weights_in_chunks(pair: Pair, kind: str) -> None:
    chunks: list[tuple[int, int, int, bytes, str]] = []

    def note(layer_id: int, index: int, total: int, data: memoryview, sender: str) -> bool:
        chunks.append((layer_id, index, total, bytes(data), sender))
        return len(chunks) == total

    def on_chunk(  # type: ignore[no-untyped-def]
        layer_id: int, chunk_index: int, total_chunks: int, data: memoryview, from_peer: str
    ):
        if note(layer_id, chunk_index, total_chunks, data, from_peer):
            return pair.server.send_weights_ack(from_peer, layer_id)
        return None

    async def on_chunk_later(
        layer_id: int, chunk_index: int, total_chunks: int, data: memoryview, from_peer: str
    ) -> None:
        if note(layer_id, chunk_index, total_chunks, data, from_peer):
            await pair.server.send_weights_ack(from_peer, layer_id)

    pair.server.on_weights_received(on_chunk if kind == "sync" else on_chunk_later)
    data = secrets.token_bytes(2 * MIB + 1000)
    await pair.client.send_weights(pair.server_id, 7, data)
    await pair.client.wait_for_weights_ack(pair.server_id, 7, timeout=PATIENCE)
    chunks.sort()
    assert [chunk[:3] for chunk in chunks] == [(7, 0, 3), (7, 1, 3), (7, 2, 3)]
    assert digest(b"".join(chunk[3] for chunk in chunks)) == digest(data)
    assert {chunk[4] for chunk in chunks} == {pair.client_id}


async def test_weights_handler_without_a_sender(pair: Pair) -> None:
    sizes: list[int] = []

    def on_chunk(layer_id: int, chunk_index: int, total_chunks: int, data: memoryview) -> None:
        sizes.append(len(data))

    pair.server.on_weights_received(on_chunk)
    await pair.client.send_weights(pair.server_id, 7, bytes(2 * MIB + 1))
    await until(lambda: len(sizes) == 3)
    assert sizes == [MIB, MIB, 1]


async def test_layer_status_that_nobody_asked_for(pair: Pair, kind: str) -> None:
    calls = Calls(kind)
    pair.client.on_layer_status_received(calls.handler)
    await pair.server.send_layer_status(pair.client_id, [3, 1, 2])
    ((layer_ids, sender),) = await calls.wait()
    assert (sorted(layer_ids), sender) == ([1, 2, 3], pair.server_id)


async def test_layer_request(pair: Pair, kind: str) -> None:
    calls = Calls(kind)
    pair.server.on_layer_request_received(calls.handler)
    await pair.client.send_layer_request(pair.server_id, [4, 5])
    assert await calls.wait() == [((4, 5), pair.client_id)]


async def test_model_config(pair: Pair, kind: str) -> None:
    calls = Calls(kind)
    pair.server.on_model_config_received(calls.handler)
    config = ModelConfig(
        hidden_size=64,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        intermediate_size=128,
        vocab_size=1000,
        model_name="test",
        head_dim=8,
        max_seq_len=2048,
        rms_norm_eps=1e-6,
    )
    await pair.client.send_model_config(pair.server_id, serialize_config(config))
    ((data, sender),) = await calls.wait()
    assert deserialize_config(data) == config
    assert sender == pair.client_id


async def test_gpu_info_that_nobody_asked_for(pair: Pair, kind: str) -> None:
    calls = Calls(kind)
    pair.client.on_gpu_info_received(calls.handler)
    await pair.server.send_gpu_info(pair.client_id, INFO)
    assert await calls.wait() == [(INFO, pair.server_id)]


async def test_gpu_info_request(pair: Pair, kind: str) -> None:
    asked, told = Calls(kind), Calls(kind)
    pair.server.on_gpu_info_request_received(asked.handler)
    pair.client.on_gpu_info_received(told.handler)
    await pair.client.send_gpu_info_request(pair.server_id)
    assert await asked.wait() == [(pair.client_id,)]
    await pair.server.send_gpu_info(pair.client_id, INFO)
    assert await told.wait() == [(INFO, pair.server_id)]


async def test_all_who_subscribed_are_called_in_order(pair: Pair) -> None:
    called: list[str] = []

    async def later(message: TensorMessage) -> None:
        called.append("third, later")

    pair.server.on_tensor_received(lambda message: called.append("first"))
    pair.server.on_tensor_received(lambda message: called.append("second"))
    pair.server.on_tensor_received(later)
    pair.server.on_message(None, lambda message: called.append("never"), when=lambda message: False)
    await pair.client.send_tensor(pair.server_id, 1, 2, b"abc")
    await until(lambda: len(called) == 3)
    assert called == ["first", "second", "third, later"]


@pytest.mark.parametrize("sizes", [(1,), (1, 200_000), (60_000, 70_000, 10)], ids=str)
async def test_messages_keep_their_order_at_sync_handlers(
    network: Network, sizes: tuple[int, ...]
) -> None:
    """Those that their sender writes itself, and those that the writer of the stream does."""
    async with open_pair(network, "v11") as pair:
        seen: list[tuple[int, int]] = []
        pair.server.on_activation_received(
            lambda message: seen.append((message.seq_id, len(message.data)))
        )
        sent = [(number, sizes[number % len(sizes)]) for number in range(200)]
        for number, size in sent:
            await pair.client.send_activation(pair.server_id, 1, number, 1000 + number, bytes(size))
        await until(lambda: len(seen) == 200)
        assert seen == sent


async def test_whoever_sends_without_end_lets_others_run(network: Network) -> None:
    async with open_pair(network, "v11") as pair, trio.open_nursery() as nursery:
        pair.server.on_response_received(lambda message: None)
        turns = 0

        @nursery.start_soon
        async def other() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        for number in range(1000):
            await pair.client.send_response(pair.server_id, 1, number, 0, b"x")
        assert turns >= 50
        nursery.cancel_scope.cancel()


async def test_both_sides_count_the_same(pair: Pair) -> None:
    serve_echo(pair.server)
    pair.server.on_gpu_info_request_received(lambda from_peer: INFO)
    for num_bytes in (0, 10, 100_000):
        await pair.client.request_activation(
            pair.server_id, 1, 2, bytes(num_bytes), timeout=PATIENCE
        )
    await pair.client.request_gpu_info(pair.server_id, timeout=PATIENCE)
    for sender, receiver in ((pair.client, pair.server), (pair.server, pair.client)):
        for msg_type in (
            MessageType.ACTIVATION,
            MessageType.RESPONSE,
            MessageType.GPU_INFO_REQUEST,
            MessageType.GPU_INFO,
        ):
            sent = sender.counters.total(
                Direction.SENT, peer_id=receiver.host.peer_id, msg_type=msg_type
            )
            received = receiver.counters.total(
                Direction.RECEIVED, peer_id=sender.host.peer_id, msg_type=msg_type
            )
            assert sent == received
    sent = pair.client.counters.total(Direction.SENT, msg_type=MessageType.ACTIVATION)
    assert sent.num_messages == 3
    assert 100_010 + 3 * 24 <= sent.num_bytes <= 100_010 + 3 * 400
    snapshot = pair.client.counters.snapshot()[pair.server_id]
    assert snapshot["received"]["gpu_info"].num_messages == 1
