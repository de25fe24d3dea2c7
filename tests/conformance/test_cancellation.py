"""Cancellation of every call of the protocol, at each of its awaits.

Afterwards nothing waits that nobody waits for, no task is left over, no lock is held, and the connection is
usable, or clearly closed and can be made again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import pytest
import trio

from neurogrid.errors import TransportError
from neurogrid.p2p import MessageType, TensorMessage, TraceContext
from neurogrid.p2p.wire import GPUInfo
from tests.conformance.cancellation import attempts, num_tasks, settled_tasks
from tests.conformance.networks import Network, until
from tests.conformance.protocols import PATIENCE, Pair, check_echo, open_pair, serve_echo

KIB = 1024
MIB = 1024 * KIB
INFO = GPUInfo(total_bytes=1, used_bytes=0, name="GPU")
TRACE = TraceContext(trace_id=bytes(range(16)), span_id=bytes(range(8, 16)), flags=1)

Call = Callable[[Pair], Awaitable[object]]

CALLS: dict[str, Call] = {
    "open": lambda pair: pair.client.open(pair.server_id),
    "send_tensor": lambda pair: pair.client.send_tensor(pair.server_id, 1, 2, b"x"),
    "send_activation": lambda pair: pair.client.send_activation(pair.server_id, 1, 2, 3, b"x"),
    "send_activation of 3 MiB": lambda pair: pair.client.send_activation(
        pair.server_id, 1, 2, 3, bytes(3 * MIB)
    ),
    "send_traced_activation": lambda pair: pair.client.send_traced_activation(
        pair.server_id, 1, 2, 3, b"x", TRACE
    ),
    "send_response": lambda pair: pair.client.send_response(pair.server_id, 1, 2, 3, b"x"),
    "send_traced_response": lambda pair: pair.client.send_traced_response(
        pair.server_id, 1, 2, 3, b"x", TRACE
    ),
    "send_weights": lambda pair: pair.client.send_weights(pair.server_id, 1, bytes(2 * MIB + 1)),
    "send_weights_ack": lambda pair: pair.client.send_weights_ack(pair.server_id, 1),
    "send_layer_status": lambda pair: pair.client.send_layer_status(pair.server_id, [1]),
    "send_layer_request": lambda pair: pair.client.send_layer_request(pair.server_id, []),
    "send_model_config": lambda pair: pair.client.send_model_config(pair.server_id, b"{}"),
    "send_gpu_info": lambda pair: pair.client.send_gpu_info(pair.server_id, INFO),
    "send_gpu_info_request": lambda pair: pair.client.send_gpu_info_request(pair.server_id),
    "request_activation": lambda pair: pair.client.request_activation(
        pair.server_id, 1, 2, b"x", timeout=PATIENCE
    ),
    "request_activation of 3 MiB": lambda pair: pair.client.request_activation(
        pair.server_id, 1, 2, bytes(3 * MIB), timeout=PATIENCE
    ),
    "request_layer_status": lambda pair: pair.client.request_layer_status(
        pair.server_id, timeout=PATIENCE
    ),
    "request_gpu_info": lambda pair: pair.client.request_gpu_info(pair.server_id, timeout=PATIENCE),
    "request of itself": lambda pair: pair.client.request_gpu_info(
        pair.client_id, timeout=PATIENCE
    ),
}


def serve_all(pair: Pair) -> None:
    for protocol in (pair.server, pair.client):
        serve_echo(protocol)
        protocol.on_tensor_received(lambda message: None)
        protocol.on_response_received(lambda message: None)
        protocol.on_weights_received(lambda layer_id, chunk_index, total_chunks, data: None)
        protocol.on_layer_status_received(lambda layer_ids, from_peer: None)
        protocol.on_layer_request_received(lambda layer_ids, from_peer: [1, 2])
        protocol.on_model_config_received(lambda config, from_peer: None)
        protocol.on_gpu_info_received(lambda info, from_peer: None)
        protocol.on_gpu_info_request_received(lambda from_peer: INFO)


class Scene:
    """A pair that serves everything, and what must hold of it after each cancelled call."""

    def __init__(self, pair: Pair, baseline: int) -> None:
        self.pair = pair
        self._baseline = baseline

    async def check(self) -> None:
        pair = self.pair
        assert len(pair.client._dispatcher.pending) == 0
        await pair.check()
        await check_echo(pair.server, pair.client_id)  # and the other way
        await until(lambda: num_tasks() <= self._baseline)
        for protocol in (pair.client, pair.server):
            assert not any(lock.locked() for lock in protocol._opening.values())
            assert protocol._budget.held_bytes == 0
            assert len(protocol._dispatcher.pending) == 0


@pytest.fixture
@asynccontextmanager
async def scene(pair: AbstractAsyncContextManager[Pair]) -> AsyncIterator[Scene]:
    async with pair as opened:
        serve_all(opened)
        await opened.check()
        await check_echo(opened.server, opened.client_id)
        yield Scene(opened, await settled_tasks())


@pytest.mark.parametrize("name", CALLS)
async def test_a_call(scene: Scene, name: str) -> None:
    for attempt in attempts(at_least=0):
        await attempt.run(CALLS[name], scene.pair)
        await scene.check()


@pytest.mark.parametrize(
    "name", ["open", "send_activation", "send_activation of 3 MiB", "request_gpu_info"]
)
async def test_a_call_on_a_new_connection(scene: Scene, name: str) -> None:
    """The first call finds out the version, and brings up the stream of 1.1.0."""
    pair = scene.pair
    for attempt in attempts():
        await pair.client.close_peer(pair.server_id)
        await pair.wait_disconnected()
        await pair.network.connect(pair.client.host, pair.server.host)
        await attempt.run(CALLS[name], pair)
        await scene.check()


async def test_close_peer(scene: Scene) -> None:
    pair = scene.pair
    for attempt in attempts():
        await attempt.run(pair.client.close_peer, pair.server_id)
        if attempt.is_through:
            await pair.wait_disconnected()
            await pair.connect()
        await scene.check()


@pytest.mark.parametrize("what", ["response", "weights"])
async def test_waiting(scene: Scene, what: str) -> None:
    """A wait that is cancelled leaves nothing behind; the next one gets the answer."""
    client, server_id = scene.pair.client, scene.pair.server_id
    for _ in range(5):
        with trio.move_on_after(0.01) as scope:
            if what == "response":
                await client.wait_for_response(server_id, 99, timeout=PATIENCE)
            else:
                await client.wait_for_weights_ack(server_id, 3, timeout=PATIENCE)
        assert scope.cancelled_caught
        assert len(client._dispatcher.pending) == 0
    async with trio.open_nursery() as nursery:
        if what == "response":
            nursery.start_soon(_wait_for_response, scene.pair)
        else:
            nursery.start_soon(_wait_for_ack, scene.pair)
        await until(lambda: len(client._dispatcher.pending) == 1)
        if what == "response":
            await scene.pair.server.send_response(scene.pair.client_id, 1, 2, 99, b"x")
        else:
            await scene.pair.server.send_weights_ack(scene.pair.client_id, 3)
    await scene.check()


async def _wait_for_response(pair: Pair) -> None:
    answer = await pair.client.wait_for_response(pair.server_id, 99, timeout=PATIENCE)
    assert bytes(answer.data) == b"x"


async def _wait_for_ack(pair: Pair) -> None:
    await pair.client.wait_for_weights_ack(pair.server_id, 3, timeout=PATIENCE)


async def test_a_message_is_sent_whole_or_not_at_all(pair: Pair) -> None:
    received: list[tuple[int, bytes]] = []

    def note(message: TensorMessage) -> None:
        received.append((message.seq_id, bytes(message.data)))

    pair.server.on_message(MessageType.ACTIVATION, note)
    sent: dict[int, bool] = {}
    for step, attempt in enumerate(attempts()):
        data = step.to_bytes(4, "big") * (MIB // 2)
        await attempt.run(pair.client.send_activation, pair.server_id, 1, step, 1000 + step, data)
        sent[step] = attempt.is_through
    await pair.client.send_activation(pair.server_id, 1, 1 << 32, 1, b"the last")
    await until(lambda: (1 << 32, b"the last") in received)
    whole = {step: data for step, data in received if step != 1 << 32}
    assert {step for step, is_through in sent.items() if is_through} <= whole.keys()
    for step, data in whole.items():
        assert data == step.to_bytes(4, "big") * (MIB // 2)
    assert len(received) == len(whole) + 1  # none twice


async def _ask_for_ever(pair: Pair, is_enough: trio.Event, enough: int) -> None:
    num_answers = 0
    with suppress(TransportError):
        while True:
            if num_answers == enough:
                is_enough.set()
            await check_echo(pair.client, pair.server_id, bytes(300 * KIB))
            num_answers += 1


async def test_hosts_that_end_in_the_middle(network: Network, version: str) -> None:
    """Whatever is under way when a host's block is left ends, on both sides."""
    async with network.open_host() as other:  # keeps the network busy
        before = await settled_tasks()
        for enough in (0, 1, 5):
            async with open_pair(network, version) as pair:
                serve_all(pair)

                is_enough = trio.Event()
                for _ in range(5):
                    pair.client.host.start_soon(_ask_for_ever, pair, is_enough, enough)
                await is_enough.wait()
            await until(lambda: num_tasks() <= before)
        assert other.connected_peers == frozenset()
