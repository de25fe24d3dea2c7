"""A peer that may say anything to a worker: the messages of a coordinator one by one, right or wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from blake3 import blake3

from neurogrid.errors import NeuroGridError, PeerRefusedError
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.files.config import build_config, model_config_message
from neurogrid.model.files.tensors import dtype_name, tensor_to_bytes
from neurogrid.p2p import PROTOCOL_V11, MessageType, Protocol, TensorMessage, open_host
from neurogrid.p2p.tensor.protocol import new_request_id
from neurogrid.p2p.wire import (
    Assign,
    Data,
    ErrorCode,
    ModelConfig,
    SessionOpen,
    TensorEnvelope,
    TransferAccept,
    TransferOffer,
    WeightsChunk,
    encode_envelope_parts,
    iter_weights_chunks,
    serialize_config,
)
from tests.e2e.support import DEADLINE

__all__ = ["BadPeer", "Model", "connect", "refused"]


@dataclass(frozen=True)
class Model:
    """A checkpoint on disk, as messages."""

    path: Path
    config: ModelConfig
    layers: tuple[bytes, ...]

    @classmethod
    def open(cls, path: Path, *, max_seq_len: int) -> Model:
        checkpoint = Checkpoint.open(path)
        config = model_config_message(
            build_config(checkpoint.config),
            checkpoint.config,
            model_name=path.name,
            max_seq_len=max_seq_len,
            dtype=torch.float32,
        )
        layers = (checkpoint.layer_blob(i) for i in range(checkpoint.num_layers))
        return cls(path, config, tuple(b"".join(layer.chunks()) for layer in layers))

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    def config_with(self, **changes: Any) -> bytes:
        """The config message with these changes to the checkpoint's own config."""
        own = {**(self.config.checkpoint_config or {}), **changes}
        return serialize_config(replace(self.config, checkpoint_config=own))


class BadPeer:
    """One connection to one worker."""

    def __init__(self, protocol: Protocol, worker_id: str) -> None:
        self.protocol = protocol
        self.worker_id = worker_id

    async def send(self, msg_type: MessageType, data: Data, **header: int) -> None:
        await self.protocol.send(
            self.worker_id, TensorMessage(msg_type=msg_type, data=data, **header)
        )

    async def ask(
        self, msg_type: MessageType, data: Data, answer: MessageType, **header: int
    ) -> TensorMessage:
        header.setdefault("request_id", new_request_id())
        message = TensorMessage(msg_type=msg_type, data=data, **header)
        stream = self.protocol._streams.get(self.worker_id)
        if stream is None:
            return await self.protocol.request(self.worker_id, message, answer, timeout=DEADLINE)
        # Past the protocol, which would put Data of an activation into an envelope.
        with self.protocol.expect(self.worker_id, answer, request_id=message.request_id) as waiter:
            await stream.send(message)
            return await waiter.wait(timeout=DEADLINE)

    async def configure(self, data: bytes) -> None:
        await self.ask(MessageType.MODEL_CONFIG, data, MessageType.CONFIG_ACK)

    async def assign(self, start: int, stop: int, **changes: Any) -> None:
        fields: dict[str, Any] = {"max_length": 64, "max_sessions": 2, "dtype": "F32", **changes}
        data = Assign(start_layer=start, stop_layer=stop, **fields).encode()
        await self.ask(MessageType.ASSIGN, data, MessageType.ASSIGN_ACK)

    async def offer(self, layer_id: int, blob: bytes, **changes: Any) -> int:
        """Offer a blob that the worker must want; the request id of the transfer."""
        request_id, needed = await self._offer(layer_id, blob, **changes)
        assert needed
        return request_id

    async def _offer(self, layer_id: int, blob: bytes, **changes: Any) -> tuple[int, bool]:
        fields: dict[str, Any] = {"num_bytes": len(blob), "digests": _digests(blob), **changes}
        fields["blob_id"] = blake3(fields["digests"]).digest()
        data = TransferOffer(layer_id=layer_id, **fields).encode()
        request_id = new_request_id()
        reply = await self.ask(
            MessageType.TRANSFER_OFFER, data, MessageType.TRANSFER_ACCEPT, request_id=request_id
        )
        return request_id, TransferAccept.decode(reply.data).needed

    async def send_chunk(
        self, layer_id: int, chunk: WeightsChunk | bytes, request_id: int = 0
    ) -> None:
        data = chunk if isinstance(chunk, bytes) else chunk.encode()
        await self.send(MessageType.WEIGHTS, data, layer_id=layer_id, request_id=request_id)

    async def acknowledged(
        self, layer_id: int, chunks: Sequence[WeightsChunk | bytes], request_id: int = 0
    ) -> None:
        """Send chunks, and wait until the worker has loaded the layer or refused."""
        with self.protocol.expect(
            self.worker_id, MessageType.WEIGHTS_ACK, request_id=request_id or layer_id
        ) as acked:
            for chunk in chunks:
                if not acked.is_done:
                    await self.send_chunk(layer_id, chunk, request_id)
            await acked.wait(timeout=DEADLINE)

    async def transfer(self, layer_id: int, blob: bytes) -> None:
        """Offer a blob and send it if it is wanted; returns when it is loaded."""
        request_id, needed = await self._offer(layer_id, blob)
        if needed:
            await self.acknowledged(layer_id, list(iter_weights_chunks(blob)), request_id)

    async def place(self, model: Model) -> None:
        """Config, assignment and weights of all layers, as a good coordinator does."""
        await self.configure(serialize_config(model.config))
        await self.assign(0, len(model.layers))
        for layer_id, blob in enumerate(model.layers):
            await self.transfer(layer_id, blob)

    async def open_session(
        self, session_id: int, start: int, stop: int, *, max_length: int = 32, route: bytes = b""
    ) -> None:
        data = SessionOpen(session_id, start, stop, max_length, route).encode()
        await self.ask(MessageType.SESSION_OPEN, data, MessageType.SESSION_ACK)

    async def activate(self, hidden: torch.Tensor, **changes: Any) -> TensorMessage:
        """Extend session 1 over layers 0 and 1 at position 0, or as `changes` say."""
        data = self.activation(hidden, **changes)
        return await self.ask(MessageType.ACTIVATION, data, MessageType.RESPONSE)

    def activation(self, hidden: torch.Tensor, **changes: Any) -> bytes:
        """The Data of what `activate` sends."""
        fields: dict[str, Any] = {
            "session_id": 1,
            "position": 0,
            "start_layer": 0,
            "stop_layer": 2,
            "dtype": dtype_name(hidden.dtype),
            "shape": tuple(hidden.shape),
            "data": tensor_to_bytes(hidden),
        }
        return b"".join(encode_envelope_parts(TensorEnvelope(**{**fields, **changes})))


def _digests(blob: bytes) -> bytes:
    return b"".join(blake3(chunk.data).digest() for chunk in iter_weights_chunks(blob))


@asynccontextmanager
async def connect(
    address: str, version: str = PROTOCOL_V11, *, role: str = "coordinator"
) -> AsyncIterator[BadPeer]:
    """Connect to the worker at `address` and speak `version` alone."""
    with trio.fail_after(DEADLINE):
        async with open_host() as host:
            protocol = Protocol(host, role=role, versions=(version,))
            worker_id = await host.connect(address)
            assert await protocol.open(worker_id) == version
            yield BadPeer(protocol, worker_id)


@contextmanager
def refused(code: ErrorCode, says: str) -> Iterator[None]:
    """The worker answers with this error; over 1.0.0, which has none, with a reset."""
    with pytest.raises(NeuroGridError) as caught:
        yield
    error = caught.value
    assert isinstance(error, PeerRefusedError), repr(error)
    if error.text == "stream reset":
        return
    assert ErrorCode(error.code) is code, error
    assert says in error.text, error.text
