"""What a worker answers, and what it drops: a whole one in memory, with a real model, and peers of all kinds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
import torch
import trio
from worker_scene import DEADLINE, MAX_LENGTH, Model, Scene, make_model

from neurogrid.assembly.worker import Worker
from neurogrid.errors import PeerRefusedError, ResponseTimeout, StreamBrokenError
from neurogrid.node.torch_thread import TorchThread
from neurogrid.p2p import Protocol, TensorMessage, new_request_id
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.wire import (
    ErrorCode,
    Limits,
    MessageType,
    SessionAck,
    SessionClose,
    SessionOpen,
    SessionQuery,
    TensorEnvelope,
)
from neurogrid.worker.settings import WorkerSettings
from neurogrid.worker.state import WorkerState

LEAST = 64 * 1024  # the least that a Hello may say
LEAST_LIMITS = Limits(
    tensor=LEAST,
    weights=LEAST,
    layer_ids=LEAST,
    model_config=LEAST,
    transfer_offer=LEAST,
    control=LEAST,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    with trio.fail_after(DEADLINE), TorchThread() as torch_thread:
        async with AsyncExitStack() as stack:
            network = await stack.enter_async_context(open_memory_network())
            host = await stack.enter_async_context(network.open_host())
            protocol = Protocol(host, role="worker")
            state = WorkerState(WorkerSettings(), protocol, torch.device("cpu"), torch_thread)
            Worker(state, protocol, name="test", machine="test").start()
            yield Scene(network, protocol, stack)


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
async def test_the_end_of_a_second_stream_ends_no_session(
    scene: Scene, model: Model, is_reset: bool
) -> None:
    peer = await scene.peer()
    await peer.bring(model)
    await peer.open_session(7)
    await peer.extend(7, 3)
    stream = await peer.second_stream()
    if is_reset:
        await stream.reset()
    else:
        await stream.send_eof()
        assert not await stream.receive_some()  # the worker has ended its direction too
    with trio.fail_after(DEADLINE):
        while True:  # until the worker has noticed, it answers on the stream that was opened last
            with suppress(StreamBrokenError, ResponseTimeout):
                assert await peer.length_of(7) == 3
                break
    await peer.extend(7, 2, position=3)
    assert await peer.length_of(7) == 5


async def test_the_end_of_the_last_stream_ends_the_sessions(scene: Scene, model: Model) -> None:
    peer = await scene.peer()
    await peer.bring(model)
    await peer.open_session(7)
    lost = trio.Event()
    scene.worker.on_peer_lost(lambda peer_id, reason: lost.set())
    await peer.protocol._streams[peer.worker_id].close()
    await lost.wait()
    assert await peer.refused(MessageType.SESSION_QUERY, SessionQuery(7)) is (
        ErrorCode.SESSION_UNKNOWN
    )


async def test_an_answer_that_its_peer_does_not_accept_is_not_computed(
    scene: Scene, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    peer = await scene.peer(limits=LEAST_LIMITS)
    await peer.bring(model)
    await peer.open_session(7)
    with pytest.raises(PeerRefusedError, match="65536 B in one message") as refused:
        await peer.extend(7, 341)
    assert refused.value.code == ErrorCode.LIMIT_EXCEEDED
    assert await peer.length_of(7) == 0
    await peer.extend(7, 340)  # 65,280 bytes of tensor, and the head
    assert await peer.length_of(7) == 340
    assert not [record for record in caplog.records if record.exc_info]


async def test_session_0_is_none(scene: Scene, model: Model) -> None:
    peer = await scene.peer()
    await peer.bring(model)
    zero = SessionOpen(7, 0, 1, MAX_LENGTH).encode().replace(b"\xa3sid\x07", b"\xa3sid\x00")
    # A violation in Data of a request: the stream ends, and says why.
    with pytest.raises(PeerRefusedError, match="sid of SessionOpen") as refused:
        await peer.ask(MessageType.SESSION_OPEN, zero, MessageType.SESSION_ACK)
    assert refused.value.code == ErrorCode.PROTOCOL_VIOLATION


async def test_what_a_stranger_says_of_a_session(scene: Scene, model: Model) -> None:
    peer, stranger = await scene.peer(), await scene.peer()
    assert await stranger.refused(MessageType.SESSION_QUERY, SessionQuery(7)) is (
        ErrorCode.SESSION_UNKNOWN
    )
    await peer.bring(model)
    await peer.open_session(7)
    assert await stranger.refused(MessageType.SESSION_QUERY, SessionQuery(7)) is (
        ErrorCode.SESSION_UNKNOWN
    )
    closed = await stranger.ask(MessageType.SESSION_CLOSE, SessionClose(7), MessageType.SESSION_ACK)
    assert SessionAck.decode(closed.data) == SessionAck(7)
    await stranger.ask(MessageType.SESSION_CLOSE, SessionClose(8), MessageType.SESSION_ACK)
    assert await peer.length_of(7) == 0
    await peer.open_session(8)  # what a stranger closes may still be opened


async def test_data_is_judged_before_state(scene: Scene, model: Model) -> None:
    assert (
        await (await scene.peer()).refused(
            MessageType.SESSION_OPEN, SessionOpen(7, 0, 1, MAX_LENGTH)
        )
        is ErrorCode.CONFIG_REQUIRED
    )
    for msg_type in (MessageType.SESSION_OPEN, MessageType.ASSIGN):
        peer = await scene.peer()
        assert await peer.refused(msg_type, b"\x80") is ErrorCode.PROTOCOL_VIOLATION
    # Large ones are read of a coordinator that is served alone.
    first, second = await scene.peer(), await scene.peer()
    await first.bring(model)
    assert await second.refused(MessageType.TRANSFER_OFFER, b"\x80") is ErrorCode.CONFIG_REQUIRED


async def test_not_finite_leaves_the_session_as_it_was(scene: Scene, model: Model) -> None:
    peer = await scene.peer()
    await peer.bring(model)
    await peer.open_session(7)
    envelope = TensorEnvelope(7, 0, 0, 1, "F32", (1, 1, 48), b"\x00\x00\xc0\x7f" * 48)
    message = TensorMessage(
        msg_type=MessageType.ACTIVATION, request_id=new_request_id(), envelope=envelope
    )
    with pytest.raises(PeerRefusedError) as refused:
        await peer.protocol.request(peer.worker_id, message, MessageType.RESPONSE, timeout=DEADLINE)
    assert refused.value.code == ErrorCode.NOT_FINITE
    assert await peer.length_of(7) == 0


async def test_activations_may_begin_before_the_end_of_a_session_with_cuts(
    scene: Scene, model: Model
) -> None:
    """And what comes then is what comes without what was cut off."""

    async def give_the_same(one: int, other: int, num_tokens: int, position: int) -> bool:
        gave = []
        for session_id in (one, other):
            reply = await peer.extend(session_id, num_tokens, position=position)
            assert reply.envelope is not None
            gave.append(torch.frombuffer(bytearray(reply.envelope.data), dtype=torch.float32))
        return torch.allclose(gave[0], gave[1], rtol=1e-4, atol=1e-5)

    async def is_refused(session_id: int, position: int) -> bool:
        length = await peer.length_of(session_id)
        with pytest.raises(PeerRefusedError) as refused:
            await peer.extend(session_id, 1, position=position)
        assert await peer.length_of(session_id) == length
        return refused.value.code == ErrorCode.POSITION_MISMATCH

    peer = await scene.peer()
    await peer.bring(model)
    await peer.open_session(7)
    opened = SessionOpen(8, 0, 1, MAX_LENGTH, cuts=True)
    ack = await peer.ask(MessageType.SESSION_OPEN, opened, MessageType.SESSION_ACK)
    assert SessionAck.decode(ack.data) == SessionAck(8, cuts=True)
    for session_id in (7, 8):
        await peer.extend(session_id, 3)
        assert await is_refused(session_id, 2)  # the first had `pos` 0
    await peer.extend(8, 6, position=3)
    assert await is_refused(8, 3)
    assert await is_refused(8, 2)
    for position in (3, 4):
        await peer.extend(7, 1, position=position)
    assert await is_refused(7, 4)  # it takes none
    assert await give_the_same(8, 7, 2, 5)
    assert await peer.length_of(8) == 7
    query = await peer.ask(MessageType.SESSION_QUERY, SessionQuery(8), MessageType.SESSION_ACK)
    assert SessionAck.decode(query.data) == SessionAck(8, length=7, last_position=5)
    # A session that begins with what one is cut back to.
    await peer.extend(8, 4, position=7)
    opened = SessionOpen(9, 0, 1, MAX_LENGTH, prior=8, prior_length=9)
    await peer.ask(MessageType.SESSION_OPEN, opened, MessageType.SESSION_ACK)
    await peer.extend(7, 2, position=7)
    assert await give_the_same(9, 7, 1, 9)
