"""Config and layers to a worker that speaks 1.0.0 alone: one message a stream, whose end confirms it.

Such a worker cannot say which bytes it holds, so its weights are always sent, unless the user says that they are there.

Source: wire facts in protocol_spec/messages.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from neurogrid.errors import ModelError, TransportError
from neurogrid.fleet.remote_worker import (
    Placement,
    RemoteWorker,
    TransferReports,
    without_coded_caches,
)
from neurogrid.model.files.blob import CHUNK_BYTES, LayerBlob
from neurogrid.p2p.wire import (
    PROTOCOL_V10,
    LayerIds,
    MessageType,
    ModelConfig,
    TensorMessage,
    WeightsChunk,
    serialize_config,
)

__all__ = ["DeliveryV10"]

logger = logging.getLogger(__name__)


class DeliveryV10(RemoteWorker):
    """See `RemoteWorker`."""

    @property
    def protocol_id(self) -> str:
        return PROTOCOL_V10

    def _request_id(self) -> int:
        return 0

    async def configure(self, config: ModelConfig) -> None:
        message = TensorMessage(msg_type=MessageType.MODEL_CONFIG, data=serialize_config(config))
        await self.protocol.send(self.peer_id, message)

    async def place(self, placement: Placement, reports: TransferReports) -> None:
        if placement.has_coded_caches:
            raise without_coded_caches(self.peer_id)
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
        expected = self.protocol.expect(self.peer_id, MessageType.WEIGHTS_ACK, request_id=layer_id)
        with blob.held(), expected as acked:
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


def _encode_chunk(blob: LayerBlob, index: int) -> bytes:
    return WeightsChunk(index, blob.num_chunks, blob.chunk(index)).encode()
