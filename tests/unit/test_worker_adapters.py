"""Sessions with adapters on a worker, in memory: what it fetches, shares, bounds and refuses; and one that knows of
none."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import torch
import transformers as tf
import trio
from stage_families import SMALL, Checkpoint

from neurogrid.assembly.worker import Worker
from neurogrid.errors import PeerRefusedError
from neurogrid.fleet.remote_worker import Timeouts
from neurogrid.inference.pipeline.remote_v11 import RemoteWorkerV11
from neurogrid.inference.pipeline.session_worker import Opened
from neurogrid.model.adapters.layer_adapter import Matrices, layer_adapter_blob
from neurogrid.model.files.blob import LayerBlob
from neurogrid.model.files.checkpoint import Checkpoint as CheckpointFiles
from neurogrid.model.files.config import model_config_message
from neurogrid.node.torch_thread import TorchThread
from neurogrid.p2p import Protocol, TensorMessage, new_request_id
from neurogrid.p2p.memory import open_memory_network
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.transfer import BlobSource, BytesSource, TransferPolicy, Transfers, send_blob
from neurogrid.p2p.wire import (
    MAX_LAYER_ADAPTERS,
    Assign,
    ControlPayload,
    ErrorCode,
    ImageSpan,
    MessageType,
    ModelConfig,
    SessionAck,
    SessionClose,
    SessionOpen,
    TensorEnvelope,
    blob_id,
    encode_image_spans,
    serialize_config,
)
from neurogrid.worker.settings import WorkerSettings
from neurogrid.worker.state import WorkerState

DEADLINE = 120.0
MAX_LENGTH = 64
HIDDEN = SMALL["hidden_size"]
PATH = "self_attn.q_proj"
NONE = bytes(32)

Model = tuple[ModelConfig, list[bytes]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The message of a config, and the bytes of its first two layers."""
    path = tmp_path_factory.mktemp("llama")
    checkpoint = Checkpoint(tf.LlamaConfig(**SMALL), path)
    files = CheckpointFiles.open(path)
    message = model_config_message(
        checkpoint.config, files.config, model_name="m", max_seq_len=64, dtype=torch.float32
    )
    return message, [b"".join(map(bytes, files.layer_blob(i).chunks())) for i in range(2)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def part(seed: int, *, rank: int = 2, path: str = PATH, inputs: int = HIDDEN) -> LayerBlob:
    """A part of an adapter, beside one linear layer."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, inputs, generator=generator)
    b = torch.randn(HIDDEN, rank, generator=generator)
    return layer_adapter_blob({path: Matrices(a, b, 0.5)})


class Giving(TransferPolicy):
    """Gives what it has, and counts."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, Any] = {}
        self.given: list[bytes] = []

    def authorize_request(self, peer_id: str) -> None:
        pass

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        self.given.append(blob_id)
        return self.blobs.get(blob_id)


class Coordinator:
    """A coordinator of the worker, by its messages."""

    def __init__(self, protocol: Protocol, worker_id: str) -> None:
        self.protocol = protocol
        self.worker_id = worker_id
        self.giving = Giving()
        Transfers(protocol, self.giving)

    def has(self, blob: LayerBlob) -> bytes:
        self.giving.blobs[blob.blob_id()] = blob
        return blob.blob_id()

    async def ask(
        self, msg_type: MessageType, payload: ControlPayload | bytes, answer: MessageType
    ) -> TensorMessage:
        data = payload if isinstance(payload, bytes) else payload.encode()
        message = TensorMessage(msg_type=msg_type, request_id=new_request_id(), data=data)
        return await self.protocol.request(self.worker_id, message, answer, timeout=DEADLINE)

    async def bring(self, model: Model, *, max_sessions: int = 128) -> None:
        message, blobs = model
        await self.ask(MessageType.MODEL_CONFIG, serialize_config(message), MessageType.CONFIG_ACK)
        assign = Assign(0, 2, MAX_LENGTH, max_sessions, "F32")
        await self.ask(MessageType.ASSIGN, assign, MessageType.ASSIGN_ACK)
        for layer_id, blob in enumerate(blobs):
            await send_blob(self.protocol, self.worker_id, blob, layer_id=layer_id)

    async def open(self, session_id: int, adapter: bytes = b"", **more: Any) -> SessionAck:
        opened = SessionOpen(session_id, 0, 2, MAX_LENGTH, adapter=adapter, **more)
        ack = await self.ask(MessageType.SESSION_OPEN, opened, MessageType.SESSION_ACK)
        return SessionAck.decode(ack.data)

    async def refused(self, session_id: int, adapter: bytes, **more: Any) -> PeerRefusedError:
        with pytest.raises(PeerRefusedError) as refused:
            await self.open(session_id, adapter, **more)
        return refused.value

    async def close(self, session_id: int) -> None:
        await self.ask(MessageType.SESSION_CLOSE, SessionClose(session_id), MessageType.SESSION_ACK)

    async def extend(
        self, session_id: int, position: int, num_tokens: int = 1, batch: tuple[int, ...] = ()
    ) -> torch.Tensor:
        given = torch.linspace(-1, 1, num_tokens * HIDDEN)
        message = TensorMessage(
            msg_type=MessageType.ACTIVATION,
            request_id=new_request_id(),
            envelope=TensorEnvelope(
                session_id=session_id,
                position=position,
                start_layer=0,
                stop_layer=2,
                dtype="F32",
                shape=(1, num_tokens, HIDDEN),
                data=given.numpy().tobytes(),
                batch=batch,
            ),
        )
        reply = await self.protocol.request(
            self.worker_id, message, MessageType.RESPONSE, timeout=DEADLINE
        )
        assert reply.envelope is not None
        return torch.frombuffer(bytearray(reply.envelope.data), dtype=torch.float32)


Scene = tuple[Coordinator, WorkerState]


@asynccontextmanager
async def scene(settings: WorkerSettings) -> AsyncIterator[Scene]:
    with trio.fail_after(DEADLINE), TorchThread() as torch_thread:
        async with AsyncExitStack() as stack:
            network = await stack.enter_async_context(open_memory_network())
            host = await stack.enter_async_context(network.open_host())
            protocol = Protocol(host, role="worker")
            state = WorkerState(settings, protocol, torch.device("cpu"), torch_thread)
            Worker(state, protocol, name="test", machine="test").start()
            other = await stack.enter_async_context(network.open_host())
            asking = Protocol(other, role="coordinator")
            await other.connect(host.addresses[0])
            yield Coordinator(asking, host.peer_id), state


async def test_a_part_is_fetched_once_and_shared(model: Model) -> None:
    async with scene(WorkerSettings(max_sessions=128)) as (coordinator, _):
        await coordinator.bring(model)
        one, other = (coordinator.has(part(seed)) for seed in (1, 2))
        assert (await coordinator.open(1)).adapter is False
        assert (await coordinator.open(2, one + other)).adapter is True
        assert (await coordinator.open(3, one + other)).adapter is True
        assert (await coordinator.open(4, one + NONE)).adapter is True
        assert sorted(coordinator.giving.given) == sorted([one, other])
        await coordinator.close(2)
        await coordinator.close(3)
        await coordinator.open(5, NONE + other)
        assert len(coordinator.giving.given) == 2


async def test_each_row_of_a_batch_has_its_own(model: Model) -> None:
    async with scene(WorkerSettings(max_sessions=128)) as (coordinator, _):
        await coordinator.bring(model)
        ids = [coordinator.has(part(seed)) for seed in range(3)]
        adapters = [b"", ids[0] + ids[1], ids[0] + NONE, ids[2] + ids[1], ids[0] + ids[1]]
        alone = []
        for number, adapter in enumerate(adapters, 1):
            await coordinator.open(number, adapter)
            await coordinator.extend(number, 0, 5)
            alone.append(await coordinator.extend(number, 5))
        results: dict[int, torch.Tensor] = {}
        for number, adapter in enumerate(adapters, 11):
            await coordinator.open(number, adapter)
            await coordinator.extend(number, 0, 5)

        async def extend(number: int) -> None:
            results[number] = await coordinator.extend(number, 5, batch=(77, len(adapters)))

        async with trio.open_nursery() as nursery:
            for number in range(11, 11 + len(adapters)):
                nursery.start_soon(extend, number)
        together = [results[number] for number in sorted(results)]
        for one, other in zip(alone, together, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)
        assert torch.allclose(together[1], together[4], rtol=1e-5, atol=1e-5)
        for one, other in itertools.combinations(together[:4], 2):
            assert not torch.allclose(one, other, rtol=1e-2, atol=1e-2)


async def test_nobody_begins_with_what_another_adapter_gave(model: Model) -> None:
    async with scene(WorkerSettings(max_sessions=128)) as (coordinator, _):
        await coordinator.bring(model)
        one, other = (coordinator.has(part(seed)) for seed in (1, 2))
        await coordinator.open(1, one + one)
        await coordinator.extend(1, 0, 12)
        prior: Mapping[str, Any] = {"prior": 1, "prior_length": 8, "keep_prior": True}
        for number, adapter in ((2, b""), (3, other + one), (4, one + NONE)):
            refused = await coordinator.refused(number, adapter, **prior)
            assert refused.code == ErrorCode.SESSION_UNKNOWN
            assert "with this adapter" in str(refused)
        ack = await coordinator.open(5, one + one, **prior)
        assert (ack.length, ack.adapter) == (8, True)


@pytest.mark.parametrize(
    ("blob", "code", "says"),
    [
        (None, ErrorCode.BLOB_UNKNOWN, "is not here"),
        (part(1, path="self_attn.w_proj"), ErrorCode.TRANSFER_INVALID, "no linear layer"),
        (part(1, inputs=8), ErrorCode.TRANSFER_INVALID, "another model"),
        (part(1, rank=1025), ErrorCode.TRANSFER_INVALID, "rank 1025"),
        (BytesSource(b"no safetensors" * 9), ErrorCode.TRANSFER_INVALID, "part in layer 1"),
        (BytesSource(bytes(8 * 1024 * 1024)), ErrorCode.LIMIT_EXCEEDED, "part in layer 1"),
    ],
    ids=["unknown", "no-linear", "other-model", "rank", "garbage", "too-large"],
)
async def test_what_is_none_is_refused(model: Model, blob: Any, code: ErrorCode, says: str) -> None:
    async with scene(WorkerSettings(max_sessions=128)) as (coordinator, _):
        await coordinator.bring(model)
        good = coordinator.has(part(3))
        bad = bytes(range(32))
        if isinstance(blob, BytesSource):
            bad = blob_id([blob.digests()])
        elif blob is not None:
            bad = blob.blob_id()
        if blob is not None:
            coordinator.giving.blobs[bad] = blob
        refused = await coordinator.refused(1, good + bad)
        assert (refused.code, says in str(refused)) == (code, True), refused
        # It costs nobody else anything.
        assert (await coordinator.open(2, good + good)).adapter
        await coordinator.extend(2, 0, 3)


async def test_so_many_are_open_at_once_and_idle_ones_give_way(model: Model) -> None:
    async with scene(WorkerSettings(max_sessions=256)) as (coordinator, _):
        await coordinator.bring(model, max_sessions=256)
        ids = [coordinator.has(part(seed)) for seed in range(MAX_LAYER_ADAPTERS + 1)]
        for number, each in enumerate(ids[:-1], 1):
            await coordinator.open(number, each + NONE)
        refused = await coordinator.refused(900, ids[-1] + NONE)
        assert refused.code == ErrorCode.SESSION_LIMIT
        assert refused.retry_after
        await coordinator.open(901, NONE + ids[-1])
        await coordinator.open(902, ids[5] + NONE)  # one of those that are open
        await coordinator.close(1)
        await coordinator.open(903, ids[-1] + NONE)
        num_given = len(coordinator.giving.given)
        await coordinator.close(2)
        await coordinator.open(904, ids[0] + NONE)  # the first had to go
        assert coordinator.giving.given[num_given:] == [ids[0]]


async def test_what_has_no_room_is_refused(model: Model) -> None:
    limit = 450_000
    async with scene(WorkerSettings(max_sessions=8, memory_limit=limit)) as (coordinator, state):
        await coordinator.bring(model, max_sessions=1)
        (held,) = state.models
        agreed = held.needed_bytes(0, 2, num_tokens=MAX_LENGTH, num_sessions=1)
        rank = (limit - agreed) // (8 * HIDDEN) + 1
        assert 0 < rank <= 1024
        large, small = (coordinator.has(part(1, rank=each)) for each in (rank, 4))
        refused = await coordinator.refused(1, large + NONE)
        assert refused.code == ErrorCode.OUT_OF_MEMORY
        assert "the adapter takes" in str(refused)
        assert (await coordinator.open(2, small + NONE)).adapter


async def test_a_worker_that_knows_of_none_is_never_taken_at_its_word() -> None:
    """One of an older revision acknowledges the session as it would any, and would answer as the base model."""
    with trio.fail_after(DEADLINE):
        async with open_memory_network() as network, network.open_host() as host:
            older = Protocol(host, role="worker")

            async def on_open(message: TensorMessage) -> None:
                opened = SessionOpen.decode(message.data)
                ack = TensorMessage(
                    msg_type=MessageType.SESSION_ACK,
                    request_id=message.request_id,
                    data=SessionAck(opened.session_id).encode(),
                )
                await older.send(sender_of(message), ack)

            older.on_message(MessageType.SESSION_OPEN, on_open)
            async with network.open_host() as other:
                asking = Protocol(other, role="coordinator")
                await other.connect(host.addresses[0])
                worker = RemoteWorkerV11(asking, host.peer_id, Timeouts())
                assert await worker.open_session(SessionOpen(1, 0, 1, 9, cuts=True)) == Opened()
                with pytest.raises(PeerRefusedError, match="does not know of adapters") as refused:
                    await worker.open_session(SessionOpen(2, 0, 1, 9, adapter=bytes([1] * 32)))
                assert refused.value.code == ErrorCode.NOT_SUPPORTED
                images = encode_image_spans([ImageSpan(2, 1, 4)])
                with pytest.raises(PeerRefusedError, match="does not know where images are"):
                    await worker.open_session(SessionOpen(3, 0, 1, 9, images=images))


async def test_another_model_that_comes_meanwhile_gets_nothing_of_it(model: Model) -> None:
    """What was read for the shapes of one model never stands beside those of another."""
    async with scene(WorkerSettings(max_sessions=128)) as (coordinator, _):
        await coordinator.bring(model)
        one = coordinator.has(part(1))
        is_asked, goes_on = trio.Event(), trio.Event()
        provide = coordinator.giving.provide

        async def slowly(peer_id: str, blob_id: bytes) -> BlobSource | None:
            is_asked.set()
            await goes_on.wait()
            return await provide(peer_id, blob_id)

        coordinator.giving.provide = slowly  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:

            async def open_session() -> None:
                refused = await coordinator.refused(1, one + NONE)
                assert refused.code == ErrorCode.LAYER_NOT_HELD
                assert "replaced" in str(refused)

            nursery.start_soon(open_session)
            await is_asked.wait()
            await coordinator.bring(model)
            goes_on.set()
        assert (await coordinator.open(2, one + NONE)).adapter
        assert len(coordinator.giving.given) == 2
