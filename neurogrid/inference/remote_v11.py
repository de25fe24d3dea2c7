"""A worker that speaks 1.1.0: one round trip a stage, sessions, offers by content id.

Source: protocol_spec/sessions.md.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import trio

from neurogrid.errors import ModelError, RemoteProtocolError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.inference.remote_worker import Placement, RemoteWorker, send_chunks
from neurogrid.model.blob import LayerBlob
from neurogrid.model.tensors import WIRE_DTYPES, dtype_name, tensor_from_bytes, tensor_to_bytes
from neurogrid.p2p.protocol import new_request_id
from neurogrid.p2p.wire import (
    PROTOCOL_V11,
    Assign,
    ConfigAck,
    ErrorCode,
    MessageType,
    ModelConfig,
    SessionClose,
    SessionOpen,
    TensorEnvelope,
    TensorMessage,
    TransferAccept,
    TransferOffer,
    WeightsChunk,
    config_fingerprint,
    decode_envelope,
    encode_envelope_parts,
    serialize_config,
)

__all__ = ["RemoteWorkerV11"]

# Layers of one worker under way at once: the next is hashed and offered while one is loaded there.
LAYERS_IN_FLIGHT = 2


class RemoteWorkerV11(RemoteWorker):
    """See `RemoteWorker`."""

    @property
    def protocol_id(self) -> str:
        return PROTOCOL_V11

    def _request_id(self) -> int:
        return new_request_id()

    async def configure(self, config: ModelConfig) -> None:
        data = serialize_config(config)
        reply = await self._request(
            MessageType.MODEL_CONFIG,
            data,
            MessageType.CONFIG_ACK,
            timeout=self.timeouts.configure,
        )
        if ConfigAck.decode(reply.data).fingerprint != config_fingerprint(data):
            raise RemoteProtocolError(f"{self.peer_id} acknowledged another config")

    async def place(
        self,
        placement: Placement,
        *,
        on_sent: Callable[[int], None],
        on_held: Callable[[int], None],
    ) -> None:
        stage = placement.stage
        assign = TensorMessage(
            msg_type=MessageType.ASSIGN,
            request_id=new_request_id(),
            data=Assign(
                start_layer=stage.start,
                stop_layer=stage.stop,
                max_length=placement.max_length,
                max_sessions=placement.max_sessions,
                dtype=dtype_name(placement.dtype),
            ).encode(),
        )
        with self.protocol.expect(
            self.peer_id, MessageType.READY, request_id=assign.request_id
        ) as ready:
            await self.protocol.request(
                self.peer_id, assign, MessageType.ASSIGN_ACK, timeout=self.timeouts.describe
            )
            limiter = trio.CapacityLimiter(LAYERS_IN_FLIGHT)

            async def transfer(layer_id: int) -> None:
                async with limiter:
                    await self._transfer(layer_id, placement, on_sent, on_held)

            with unwrap_errors():
                async with trio.open_nursery() as nursery:
                    for layer_id in range(stage.start, stage.stop):
                        nursery.start_soon(transfer, layer_id)
            await ready.wait(timeout=self.timeouts.layer)

    async def _transfer(
        self,
        layer_id: int,
        placement: Placement,
        on_sent: Callable[[int], None],
        on_held: Callable[[int], None],
    ) -> None:
        """Offer one layer by its content id, and send it if the worker does not hold those bytes."""
        blob = placement.blobs[layer_id]
        blob_id = await trio.to_thread.run_sync(blob.blob_id)
        offer = TensorMessage(
            msg_type=MessageType.TRANSFER_OFFER,
            layer_id=layer_id,
            request_id=new_request_id(),
            data=TransferOffer(
                layer_id=layer_id, num_bytes=blob.num_bytes, blob_id=blob_id
            ).encode(),
        )
        with self.protocol.expect(
            self.peer_id, MessageType.WEIGHTS_ACK, request_id=offer.request_id
        ) as acked:
            reply = await self.protocol.request(
                self.peer_id, offer, MessageType.TRANSFER_ACCEPT, timeout=self.timeouts.layer
            )
            if not TransferAccept.decode(reply.data).needed:
                on_held(blob.num_bytes)
                return
            if placement.skip_weight_transfer:
                raise ModelError(
                    f"{self.peer_id} does not hold layer {layer_id} of this model; start it with "
                    "--model, or leave --skip-weight-transfer out"
                )
            await self._send_blob(layer_id, blob, offer.request_id, on_sent, lambda: acked.is_done)
            await acked.wait(timeout=self.timeouts.layer)

    async def _send_blob(
        self,
        layer_id: int,
        blob: LayerBlob,
        request_id: int,
        on_sent: Callable[[int], None],
        is_answered: Callable[[], bool],
    ) -> None:
        async def send(index: int, total: int, data: bytes | memoryview) -> None:
            if is_answered():
                return  # refused in the middle; the waiter has the reason
            await self.protocol.send(
                self.peer_id,
                TensorMessage(
                    msg_type=MessageType.WEIGHTS,
                    layer_id=layer_id,
                    request_id=request_id,
                    data=WeightsChunk(index, total, data).encode(),
                ),
            )
            on_sent(len(data))

        await send_chunks(blob, send, stall=self.timeouts.stall)

    async def open_session(
        self, session_id: int, *, start: int, stop: int, max_length: int
    ) -> None:
        opened = SessionOpen(
            session_id=session_id, start_layer=start, stop_layer=stop, max_length=max_length
        )
        await self._request(
            MessageType.SESSION_OPEN,
            opened.encode(),
            MessageType.SESSION_ACK,
            timeout=self.timeouts.describe,
        )

    async def close_session(self, session_id: int) -> None:
        await self._request(
            MessageType.SESSION_CLOSE,
            SessionClose(session_id=session_id).encode(),
            MessageType.SESSION_ACK,
            timeout=self.timeouts.describe,
        )

    async def forward(
        self, session_id: int, hidden_BTD: torch.Tensor, *, start: int, stop: int, position: int
    ) -> torch.Tensor:
        prefix, data = encode_envelope_parts(
            TensorEnvelope(
                session_id=session_id,
                position=position,
                start_layer=start,
                stop_layer=stop,
                dtype=dtype_name(hidden_BTD.dtype),
                shape=tuple(hidden_BTD.shape),
                data=tensor_to_bytes(hidden_BTD),
            )
        )
        reply = await self._request(
            MessageType.ACTIVATION,
            b"".join((prefix, data)),
            MessageType.RESPONSE,
            timeout=self.timeouts.step,
        )
        envelope = decode_envelope(reply.data)
        asked = (session_id, position, start, stop, tuple(hidden_BTD.shape))
        answered = (
            envelope.session_id,
            envelope.position,
            envelope.start_layer,
            envelope.stop_layer,
            envelope.shape,
        )
        if asked != answered or envelope.dtype != dtype_name(hidden_BTD.dtype):
            raise RemoteProtocolError(
                f"{self.peer_id} answered with another activation than was asked for",
                code=ErrorCode.SHAPE_MISMATCH,
            )
        return tensor_from_bytes(envelope.data, WIRE_DTYPES[envelope.dtype], envelope.shape)

    async def _request(
        self, msg_type: MessageType, data: bytes, answer: MessageType, *, timeout: float
    ) -> TensorMessage:
        message = TensorMessage(msg_type=msg_type, request_id=new_request_id(), data=data)
        return await self.protocol.request(self.peer_id, message, answer, timeout=timeout)
