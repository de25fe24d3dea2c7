"""Config and layers to a worker that speaks 1.1.0: an assignment, and offers by content id.

Source: protocol_spec/sessions.md, protocol_spec/transfers.md.
"""

from __future__ import annotations

from collections.abc import Set
from contextlib import nullcontext

import trio

from neurogrid.errors import ModelError, RemoteProtocolError
from neurogrid.exception_groups import unwrap_errors
from neurogrid.fleet.remote_worker import (
    Placement,
    RemoteWorker,
    TransferReports,
    without_coded_caches,
)
from neurogrid.fleet.spread import Choice
from neurogrid.model.files.tensors import dtype_name
from neurogrid.p2p.exchange.exchange import new_request_id
from neurogrid.p2p.transfer import send_blob
from neurogrid.p2p.wire import (
    PROTOCOL_V11,
    Assign,
    AssignAck,
    ConfigAck,
    MessageType,
    ModelConfig,
    Ready,
    TensorMessage,
    config_fingerprint,
    serialize_config,
)

__all__ = ["DeliveryV11"]

# Layers of one worker under way at once: the next is hashed and offered while one is loaded there.
LAYERS_IN_FLIGHT = 2
# Over the slowest useful link (8 Mbit/s), while a worker fetches a layer from another. Bytes a second.
SLOWEST_RATE = 1_000_000


class DeliveryV11(RemoteWorker):
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

    async def place(self, placement: Placement, reports: TransferReports) -> None:
        stage, spread = placement.stage, placement.spread
        layers = set(range(stage.start, stage.stop))
        self.same_bits = self.stores_prefixes = False
        assign = TensorMessage(
            msg_type=MessageType.ASSIGN,
            request_id=new_request_id(),
            data=Assign(
                start_layer=stage.start,
                stop_layer=stage.stop,
                max_length=placement.max_length,
                max_sessions=placement.max_sessions,
                dtype=dtype_name(placement.dtype),
                cache="I8" if placement.has_coded_caches else "",
            ).encode(),
        )
        with self.protocol.expect(
            self.peer_id, MessageType.READY, request_id=assign.request_id
        ) as ready:
            reply = await self.protocol.request(
                self.peer_id, assign, MessageType.ASSIGN_ACK, timeout=self.timeouts.describe
            )
            ack = AssignAck.decode(reply.data)
            if placement.has_coded_caches and not ack.has_cache:
                raise without_coded_caches(self.peer_id)
            self.stores_prefixes = ack.stores_prefixes
            held = layers.intersection(ack.held)
            # Where nothing is sent, any worker that has a layer is asked for it, and none waits.
            spread.said_held(self.peer_id, layers if placement.skip_weight_transfer else held)
            try:
                with unwrap_errors():
                    async with trio.open_nursery() as nursery:
                        for _ in range(LAYERS_IN_FLIGHT):
                            nursery.start_soon(self._bring, layers, held, placement, reports)
            except BaseException:  # also where another worker failed, and this is cancelled
                spread.lost(self.peer_id)
                raise
            answer = await ready.wait(timeout=self.timeouts.layer)
            self.same_bits = Ready.decode(answer.data).same_bits

    async def _bring(
        self, wanted: set[int], held: Set[int], placement: Placement, reports: TransferReports
    ) -> None:
        """Bring one layer after the other, until none is left of those that are wanted."""
        spread = placement.spread
        while choice := await spread.next(self.peer_id, wanted):
            wanted.remove(choice.layer_id)
            with spread.giving(self.peer_id, choice):
                await self._transfer(choice, choice.layer_id in held, placement, reports)

    async def _transfer(
        self, choice: Choice, is_held: bool, placement: Placement, reports: TransferReports
    ) -> None:
        """Bring one layer to the worker: what it lacks of those very bytes, and cannot get from others."""
        layer_id = choice.layer_id
        blob = placement.blobs[layer_id]
        sources = () if is_held else placement.spread.sources(choice)

        def on_accept(missing_bytes: int) -> None:
            if missing_bytes and placement.skip_weight_transfer:
                raise ModelError(
                    f"{self.peer_id} does not hold layer {layer_id} of this model; start it with "
                    "--model, or leave --skip-weight-transfer out"
                )
            if missing_bytes < blob.num_bytes:
                tell = reports.passed_on if sources else reports.held
                tell(blob.num_bytes - missing_bytes)

        async with placement.making if blob.is_made else nullcontext():
            reports.begun()
            with blob.held():
                await send_blob(
                    self.protocol,
                    self.peer_id,
                    blob,
                    layer_id=layer_id,
                    sources=sources,
                    accept_timeout=self.timeouts.layer
                    + bool(sources) * blob.num_bytes / SLOWEST_RATE,
                    stall_timeout=self.timeouts.stall,
                    ack_timeout=self.timeouts.layer,
                    on_accept=on_accept,
                    on_sent=reports.sent,
                )

    async def _request(
        self, msg_type: MessageType, data: bytes, answer: MessageType, *, timeout: float
    ) -> TensorMessage:
        message = TensorMessage(msg_type=msg_type, request_id=new_request_id(), data=data)
        return await self.protocol.request(self.peer_id, message, answer, timeout=timeout)
