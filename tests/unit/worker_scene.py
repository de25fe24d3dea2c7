"""A peer of a worker in memory, and what it brings: a real model of one family, and a layer of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
import transformers as tf
from stage_families import SMALL, Checkpoint

from neurogrid.errors import PeerRefusedError
from neurogrid.model.files.checkpoint import Checkpoint as CheckpointFiles
from neurogrid.model.files.config import model_config_message
from neurogrid.p2p import PROTOCOL_V10, PROTOCOL_V11, Protocol, TensorMessage, new_request_id
from neurogrid.p2p.memory import MemoryNetwork
from neurogrid.p2p.streams.stream import Stream
from neurogrid.p2p.transfer import send_blob
from neurogrid.p2p.wire import (
    DEFAULT_LIMITS,
    Assign,
    ControlPayload,
    ErrorCode,
    Hello,
    Limits,
    MessageType,
    ModelConfig,
    SessionAck,
    SessionOpen,
    SessionQuery,
    TensorEnvelope,
    encode_message,
    serialize_config,
)

__all__ = ["DEADLINE", "MAX_LENGTH", "Model", "Peer", "Scene", "make_model"]

DEADLINE = 120.0
MAX_LENGTH = 512
VERSIONS = (PROTOCOL_V11, PROTOCOL_V10)

Model = tuple[ModelConfig, bytes]


def make_model(path: Path) -> Model:
    """The message of a config, and the bytes of layer 0."""
    config = tf.LlamaConfig(**{**SMALL, "max_position_embeddings": 2 * MAX_LENGTH})
    checkpoint = Checkpoint(config, path)
    files = CheckpointFiles.open(path)
    message = model_config_message(
        checkpoint.config,
        files.config,
        model_name="m",
        max_seq_len=MAX_LENGTH,
        dtype=torch.float32,
    )
    return message, b"".join(bytes(chunk) for chunk in files.layer_blob(0).chunks())


class Peer:
    """A peer of the worker: a protocol, and streams of its own making."""

    def __init__(self, protocol: Protocol, worker_id: str) -> None:
        self.protocol = protocol
        self.worker_id = worker_id

    async def ask(
        self, msg_type: MessageType, payload: ControlPayload | bytes, answer: MessageType
    ) -> TensorMessage:
        data = payload if isinstance(payload, bytes) else payload.encode()
        message = TensorMessage(msg_type=msg_type, request_id=new_request_id(), data=data)
        return await self.protocol.request(self.worker_id, message, answer, timeout=DEADLINE)

    async def refused(self, msg_type: MessageType, payload: ControlPayload | bytes) -> ErrorCode:
        with pytest.raises(PeerRefusedError) as refused:
            await self.ask(msg_type, payload, MessageType.SESSION_ACK)
        return ErrorCode(refused.value.code)

    async def bring(self, model: Model) -> None:
        """The model and one layer of it."""
        message, blob = model
        await self.ask(MessageType.MODEL_CONFIG, serialize_config(message), MessageType.CONFIG_ACK)
        assign = Assign(0, 1, MAX_LENGTH, 4, "F32")
        await self.ask(MessageType.ASSIGN, assign, MessageType.ASSIGN_ACK)
        await send_blob(self.protocol, self.worker_id, blob, layer_id=0)

    async def open_session(self, session_id: int) -> None:
        opened = SessionOpen(session_id, 0, 1, MAX_LENGTH)
        await self.ask(MessageType.SESSION_OPEN, opened, MessageType.SESSION_ACK)

    async def length_of(self, session_id: int) -> int | None:
        ack = await self.ask(
            MessageType.SESSION_QUERY, SessionQuery(session_id), MessageType.SESSION_ACK
        )
        return SessionAck.decode(ack.data).length

    async def extend(self, session_id: int, num_tokens: int, *, position: int = 0) -> TensorMessage:
        hidden_size = SMALL["hidden_size"]
        message = TensorMessage(
            msg_type=MessageType.ACTIVATION,
            request_id=new_request_id(),
            envelope=TensorEnvelope(
                session_id=session_id,
                position=position,
                start_layer=0,
                stop_layer=1,
                dtype="F32",
                shape=(1, num_tokens, hidden_size),
                data=torch.ones(num_tokens * hidden_size).numpy().tobytes(),
            ),
        )
        return await self.protocol.request(
            self.worker_id, message, MessageType.RESPONSE, timeout=DEADLINE
        )

    async def second_stream(self) -> Stream:
        """One more stream, with both Hellos said."""
        stream = await self.protocol.host.open_stream(self.worker_id, [PROTOCOL_V11])
        hello = Hello("coordinator", "test", (PROTOCOL_V11,), DEFAULT_LIMITS.max_data, 2**30)
        message = TensorMessage(msg_type=MessageType.HELLO, data=hello.encode())
        await stream.send_all(encode_message(message))
        assert await stream.receive_some()
        return stream


class Scene:
    """A worker, and hosts that are connected to it."""

    def __init__(self, network: MemoryNetwork, worker: Protocol, stack: AsyncExitStack) -> None:
        self.worker = worker
        self._network = network
        self._stack = stack

    async def peer(
        self, *, limits: Limits = DEFAULT_LIMITS, versions: Sequence[str] = VERSIONS
    ) -> Peer:
        host = await self._stack.enter_async_context(self._network.open_host())
        protocol = Protocol(host, role="coordinator", limits=limits, versions=versions)
        await host.connect(self.worker.host.addresses[0])
        return Peer(protocol, self.worker.host.peer_id)
