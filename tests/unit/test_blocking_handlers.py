"""Handlers of the blocking protocol: in threads, in order or side by side, never in the way of the loop."""

from __future__ import annotations

import threading

import pytest
import trio
from blocking_pair import DEADLINE, connected_pair, open_lonely_host
from trio.testing import wait_all_tasks_blocked

from neurogrid.errors import LocalProtocolError, PeerRefusedError, RequestRefusedError
from neurogrid.p2p import DEFAULT_BOUNDS, MessageType, TensorMessage
from neurogrid.p2p.blocking import MAX_HANDLER_THREADS, Protocol, fail_after
from neurogrid.p2p.blocking.handler_threads import HandlerThreads
from neurogrid.p2p.wire import CHUNK_BYTES, ErrorCode


def test_an_answer_comes_from_a_thread() -> None:
    threads = []

    def answer(message: TensorMessage) -> bytes:
        threads.append(threading.current_thread().name)
        return bytes(message.data)[::-1]

    with connected_pair() as pair:
        pair.server.on_activation_received(answer)
        reply = pair.client.request_activation(pair.peer_id, 3, 4, b"abc", timeout=DEADLINE)
        assert bytes(reply.data) == b"cba"
        assert (reply.layer_id, reply.seq_id, reply.from_peer) == (3, 4, pair.peer_id)
        [name] = threads
        assert name.startswith("neurogrid handler")
        assert "answer" in name


def test_requests_are_served_side_by_side() -> None:
    # Each handler waits until all three are there.
    barrier = threading.Barrier(3)
    ids: list[int] = []

    def answer(message: TensorMessage) -> None:
        barrier.wait(DEADLINE)
        assert message.from_peer is not None
        pair.server.send_response(message.from_peer, 0, 0, message.request_id, b"")

    with connected_pair() as pair:
        pair.server.on_activation_received(answer)
        for request_id in (1, 2, 3):
            pair.client.send_activation(pair.peer_id, 0, 0, request_id, b"")
        for request_id in (1, 2, 3):
            reply = pair.client.wait_for_response(pair.peer_id, request_id, timeout=DEADLINE)
            ids.append(reply.request_id)
    assert ids == [1, 2, 3]


def test_a_handler_may_ask_whoever_asked_it() -> None:
    """Each answer needs another one, down to the last: none waits for the row of another."""

    def count(protocol: Protocol, message: TensorMessage) -> bytes:
        if message.layer_id == 0:
            return b"."
        assert message.from_peer is not None
        below = protocol.request_activation(
            message.from_peer, message.layer_id - 1, 0, b"", timeout=DEADLINE
        )
        return bytes(below.data) + b"."

    with connected_pair() as pair:
        pair.server.on_activation_received(lambda message: count(pair.server, message))
        pair.client.on_activation_received(lambda message: count(pair.client, message))
        reply = pair.client.request_activation(pair.peer_id, 8, 0, b"", timeout=DEADLINE)
        assert bytes(reply.data) == b"." * 9


def test_chunks_come_in_order_and_one_at_a_time() -> None:
    lock = threading.Lock()
    come: list[tuple[int, int]] = []

    def take(layer_id: int, chunk_index: int, total_chunks: int, data: memoryview) -> None:
        assert lock.acquire(blocking=False), "two at once"
        come.append((layer_id, chunk_index))
        lock.release()
        if chunk_index == total_chunks - 1:
            pair.server.send_weights_ack(pair.client.host.peer_id, layer_id)

    with connected_pair() as pair:
        pair.server.on_weights_received(take)
        for layer_id in range(4):
            pair.client.send_weights(pair.peer_id, layer_id, bytes(20 * CHUNK_BYTES))
        for layer_id in range(4):
            pair.client.wait_for_weights_ack(pair.peer_id, layer_id, timeout=DEADLINE)
    assert come == [(layer_id, index) for layer_id in range(4) for index in range(20)]


def test_a_handler_of_weights_may_want_the_sender() -> None:
    senders = []
    has_come = threading.Event()

    def take(layer_id: int, index: int, total: int, data: memoryview, from_peer: str) -> None:
        senders.append(from_peer)
        has_come.set()

    with connected_pair() as pair:
        pair.server.on_weights_received(take)
        pair.client.send_weights(pair.peer_id, 0, b"")
        assert has_come.wait(DEADLINE)
        assert senders == [pair.client.host.peer_id]


def test_one_handler_in_order_does_not_hold_up_another() -> None:
    goes_on, has_come = threading.Event(), threading.Event()

    def wait(layer_ids: tuple[int, ...], from_peer: str) -> None:
        goes_on.wait(DEADLINE)

    with connected_pair() as pair:
        pair.server.on_layer_status_received(wait)
        pair.server.on_model_config_received(lambda config, peer: has_come.set())
        pair.client.send_layer_status(pair.peer_id, [1])
        pair.client.send_model_config(pair.peer_id, b"{}")
        assert has_come.wait(DEADLINE)
        goes_on.set()


def test_no_more_threads_than_the_bound() -> None:
    running, most = 0, 0
    lock = threading.Lock()
    three_run = threading.Barrier(3)

    def answer(message: TensorMessage) -> bytes:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three_run.wait(DEADLINE)
        with lock:
            running -= 1
        return b""

    with connected_pair(max_threads=3) as pair:
        pair.server.on_activation_received(answer)
        for request_id in range(1, 10):
            pair.client.send_activation(pair.peer_id, 0, 0, request_id, b"")
        for request_id in range(1, 10):
            pair.client.wait_for_response(pair.peer_id, request_id, timeout=DEADLINE)
    assert most == 3


def test_one_peer_cannot_take_all_threads() -> None:
    assert DEFAULT_BOUNDS.max_running_per_peer < MAX_HANDLER_THREADS


def test_what_a_handler_raises_means_what_it_does_elsewhere() -> None:
    def refuse(message: TensorMessage) -> None:
        raise RequestRefusedError("not now", code=ErrorCode.BUSY, retry_after=2.0)

    def fail(layer_ids: tuple[int, ...], from_peer: str) -> None:
        raise ZeroDivisionError

    with connected_pair() as pair:
        pair.server.on_activation_received(refuse)
        pair.server.on_layer_request_received(fail)
        with pytest.raises(PeerRefusedError, match="not now") as caught:
            pair.client.request_activation(pair.peer_id, 0, 0, b"", timeout=DEADLINE)
        assert (caught.value.code, caught.value.retry_after) == (ErrorCode.BUSY, 2.0)
        with pytest.raises(PeerRefusedError, match="internal error"):
            pair.client.request_layer_status(pair.peer_id, timeout=DEADLINE)


def test_a_handler_that_fails_leaves_its_row_in_order() -> None:
    come: list[bytes] = []
    all_came = threading.Event()

    def take(config: bytes, from_peer: str) -> None:
        come.append(config)
        if len(come) == 3:
            all_came.set()
        if config == b"1":
            raise ZeroDivisionError

    with connected_pair() as pair:
        pair.server.on_model_config_received(take)
        for config in (b"0", b"1", b"2"):
            pair.client.send_model_config(pair.peer_id, config)
        assert all_came.wait(DEADLINE)
    assert come == [b"0", b"1", b"2"]


def test_any_type_can_be_served() -> None:
    acks: list[tuple[int, bool]] = []
    has_come = threading.Event()

    def take(message: TensorMessage) -> None:
        acks.append((message.layer_id, threading.current_thread() is threading.main_thread()))
        has_come.set()

    with connected_pair() as pair:
        pair.server.on_message(
            MessageType.WEIGHTS_ACK, take, when=lambda message: message.layer_id == 7
        )
        for layer_id in (6, 7):
            pair.client.send_weights_ack(pair.peer_id, layer_id)
        assert has_come.wait(DEADLINE)
    assert acks == [(7, False)]


def test_async_handlers_are_refused() -> None:
    async def answer(message: TensorMessage) -> None:
        pytest.fail("was called")

    class Answerer:
        async def __call__(self, message: TensorMessage) -> None:
            pytest.fail("was called")

    with open_lonely_host() as lonely:
        protocol = Protocol(lonely)
        for handler in (answer, Answerer()):
            with pytest.raises(LocalProtocolError, match="plain functions"):
                protocol.on_activation_received(handler)
            with pytest.raises(LocalProtocolError, match="plain functions"):
                protocol.on_response_received(handler)  # type: ignore[arg-type]


def test_two_protocols_on_a_host_are_an_error() -> None:
    with open_lonely_host() as lonely:
        Protocol(lonely)
        with pytest.raises(LocalProtocolError, match="handler"):
            Protocol(lonely)


def test_a_deadline_of_the_caller_is_not_that_of_the_handler() -> None:
    """A message to ourselves is served in the context of the call that sent it."""
    errors: list[Exception] = []
    has_ended = threading.Event()

    def answer(message: TensorMessage) -> None:
        try:
            lonely.connected_peers  # noqa: B018
        except Exception as exc:
            errors.append(exc)
            raise
        finally:
            has_ended.set()

    with open_lonely_host() as lonely:
        protocol = Protocol(lonely)
        protocol.on_activation_received(answer)
        with fail_after(DEADLINE):
            protocol.send_activation(lonely.peer_id, 0, 0, 1, b"")
        assert has_ended.wait(DEADLINE)
    assert errors == []


@pytest.mark.parametrize("msg_type", [MessageType.ACTIVATION, MessageType.TRACED_ACTIVATION])
def test_activations_are_served_side_by_side_under_either_name(msg_type: MessageType) -> None:
    barrier = threading.Barrier(2)
    have_met = threading.Semaphore(0)

    def meet(message: TensorMessage) -> None:
        barrier.wait(DEADLINE)
        have_met.release()

    with connected_pair() as pair:
        pair.server.on_message(msg_type, meet)
        for request_id in (1, 2):
            pair.client.send_activation(pair.peer_id, 0, 0, request_id, b"")
        assert all(have_met.acquire(timeout=DEADLINE) for _ in range(2))


async def test_a_turn_that_is_dropped_lets_the_next_one_go() -> None:
    come: list[int] = []
    serve = HandlerThreads().in_order(come.append)
    first, second, third = (serve(number) for number in range(3))
    second.close()  # from the middle of the row: the third still waits for the first

    async def wait_for_the_third() -> None:
        await third

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_for_the_third)
        await wait_all_tasks_blocked()
        assert come == []
        await first

    fourth, fifth = serve(3), serve(4)
    fourth.close()  # from the head of the row
    await fifth
    assert come == [0, 2, 4]


async def test_a_turn_that_is_cancelled_lets_the_next_one_go() -> None:
    come: list[int] = []
    serve = HandlerThreads().in_order(come.append)
    first, second, third = (serve(number) for number in range(3))
    with trio.CancelScope() as scope:
        scope.cancel()
        await second
    assert scope.cancelled_caught
    await first
    await third
    assert come == [0, 2]
