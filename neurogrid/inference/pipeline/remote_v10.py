"""A worker that speaks 1.0.0 alone: one message a stream, one round trip a layer, FP16, no sessions.

It cannot say which bytes it holds, so its weights are always sent, unless the user says that they are there.
Its confirmation of a message is that it ends the message's stream.

Source: wire facts in protocol_spec/messages.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import trio

from neurogrid.errors import ModelError, RemoteProtocolError, TransportError
from neurogrid.fleet.remote_worker import Placement, Prior, RemoteWorker, TransferReports
from neurogrid.inference.pipeline.chain import AskedAlone
from neurogrid.model.files.blob import CHUNK_BYTES, LayerBlob
from neurogrid.model.files.tensors import tensor_from_bytes, tensor_to_bytes
from neurogrid.p2p.exchange.exchange import new_request_id
from neurogrid.p2p.wire import (
    PROTOCOL_V10,
    ErrorCode,
    LayerIds,
    MessageType,
    ModelConfig,
    TensorMessage,
    WeightsChunk,
    serialize_config,
)

__all__ = ["RemoteWorkerV10"]

logger = logging.getLogger(__name__)


class RemoteWorkerV10(RemoteWorker, AskedAlone):
    """See `RemoteWorker`. A 1.0.0 peer has one cache a layer, so one session at a time."""

    @property
    def protocol_id(self) -> str:
        return PROTOCOL_V10

    def _request_id(self) -> int:
        return 0

    async def configure(self, config: ModelConfig) -> None:
        message = TensorMessage(msg_type=MessageType.MODEL_CONFIG, data=serialize_config(config))
        await self.protocol.send(self.peer_id, message)

    async def place(self, placement: Placement, reports: TransferReports) -> None:
        stage = placement.stage
        layers = tuple(range(stage.start, stage.stop))
        if placement.skip_weight_transfer:
            await self._require_loaded(layers)
            reports.held(sum(placement.blobs[layer_id].num_bytes for layer_id in layers))
            return
        reports.begun()
        for layer_id in layers:
            await self._transfer(layer_id, placement.blobs[layer_id], reports.sent)

    async def _require_loaded(self, layers: tuple[int, ...]) -> None:
        """Ask the worker to load its own copy; 1.0.0 has no way to tell whose weights those are."""
        reply = await self.protocol.request(
            self.peer_id,
            TensorMessage(msg_type=MessageType.LAYER_REQUEST, data=LayerIds(layers).encode()),
            MessageType.LAYER_STATUS,
            timeout=self.timeouts.layer,
        )
        missing = sorted(set(layers) - set(LayerIds.decode(reply.data).ids))
        if missing:
            raise ModelError(
                f"{self.peer_id} does not hold layers {missing}; start it with --model, or leave "
                "--skip-weight-transfer out"
            )
        logger.warning(
            "%s speaks 1.0.0: that its weights are this model's is not checked", self.peer_id
        )

    async def _transfer(
        self, layer_id: int, blob: LayerBlob, on_sent: Callable[[int], None]
    ) -> None:
        # The last chunk's stream may end only when the layer is loaded.
        stall = self.timeouts.stall + self.timeouts.layer
        with self.protocol.expect(
            self.peer_id, MessageType.WEIGHTS_ACK, request_id=layer_id
        ) as acked:
            for index in range(blob.num_chunks):
                # Here the bytes are read: they may lie on a disk.
                data = await trio.to_thread.run_sync(_encode_chunk, blob, index)
                message = TensorMessage(msg_type=MessageType.WEIGHTS, layer_id=layer_id, data=data)
                with trio.move_on_after(stall) as scope:
                    await self.protocol.send(self.peer_id, message)
                if scope.cancelled_caught:
                    raise TransportError(f"the transfer stopped: no chunk went out for {stall:g} s")
                on_sent(min(CHUNK_BYTES, blob.num_bytes - index * CHUNK_BYTES))
            await acked.wait(timeout=self.timeouts.layer)

    async def open_session(
        self,
        session_id: int,
        *,
        start: int,
        stop: int,
        max_length: int,
        route: bytes = b"",
        wire: str = "",
        prior: Prior | None = None,
    ) -> int:
        """Nothing to do: position 0 begins the layer's cache anew."""
        return 0

    async def session_length(self, session_id: int) -> int:
        await self.held_layers(timeout=self.timeouts.describe)  # it is there, at least
        return 0

    async def close_session(self, session_id: int) -> None:
        """Nothing to do: 1.0.0 has no sessions to close."""

    async def forward(
        self,
        session_id: int,
        hidden_BTD: torch.Tensor,
        *,
        start: int,
        stop: int,
        position: int,
        batch: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, int | None]:
        dtype, shape = hidden_BTD.dtype, tuple(hidden_BTD.shape)
        data = bytes(tensor_to_bytes(hidden_BTD.to(torch.float16)))
        for layer_id in range(start, stop):
            reply = await self.protocol.request(
                self.peer_id,
                TensorMessage(
                    msg_type=MessageType.ACTIVATION,
                    layer_id=layer_id,
                    seq_id=position,
                    request_id=new_request_id(),
                    data=data,
                ),
                MessageType.RESPONSE,
                timeout=self.timeouts.step,
            )
            if reply.layer_id != layer_id or len(reply.data) != len(data):
                raise RemoteProtocolError(
                    f"{self.peer_id} answered layer {layer_id} with another activation",
                    code=ErrorCode.SHAPE_MISMATCH,
                )
            data = bytes(reply.data)
        return tensor_from_bytes(data, torch.float16, shape).to(dtype), None


def _encode_chunk(blob: LayerBlob, index: int) -> bytes:
    return WeightsChunk(index, blob.num_chunks, blob.chunk(index)).encode()
