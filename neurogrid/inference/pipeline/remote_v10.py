"""A worker that speaks 1.0.0 alone: one round trip a layer, FP16, no sessions.

Source: protocol_spec/sessions.md, "1.0.0".

T = tokens, D = hidden size.
"""

from __future__ import annotations

import torch

from neurogrid.errors import RemoteProtocolError
from neurogrid.fleet.placing.delivery_v10 import DeliveryV10
from neurogrid.inference.pipeline.chain import AskedAlone
from neurogrid.inference.pipeline.session_worker import (
    Opened,
    Reached,
    SessionWorker,
    without_adapters,
    without_images,
)
from neurogrid.model.files.tensors import tensor_from_bytes, tensor_to_bytes
from neurogrid.p2p.exchange.exchange import new_request_id
from neurogrid.p2p.wire import ErrorCode, MessageType, SessionOpen, TensorMessage

__all__ = ["RemoteWorkerV10"]


class RemoteWorkerV10(DeliveryV10, SessionWorker, AskedAlone):
    """See `SessionWorker`. A 1.0.0 peer has one cache a layer, so one session at a time."""

    async def open_session(self, wanted: SessionOpen) -> Opened:
        """Nothing to do: position 0 begins the layer's cache anew."""
        if wanted.adapter:
            raise without_adapters(self.peer_id)
        if wanted.images:
            raise without_images(self.peer_id)
        return Opened()

    async def session_reached(self, session_id: int) -> Reached:
        await self.held_layers(timeout=self.timeouts.describe)  # it is there, at least
        return Reached()

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
