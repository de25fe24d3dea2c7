"""How a layer's bytes come into a worker: offers, chunks, their check, and the acknowledgement.

Over 1.1.0: TransferOffer -> TransferAccept, Weights..., WeightsAck for each layer; Ready when the last layer
of the assignment is usable. A layer counts as held only under the content id that was offered. Over 1.0.0:
Weights..., WeightsAck. Config and assignment come before, in `worker_layers`.

Source: protocol_spec/sessions.md.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from neurogrid.errors import CheckpointError, RequestRefusedError, TransportError
from neurogrid.inference.incoming import IncomingBlob
from neurogrid.inference.served_model import ServedModel
from neurogrid.inference.worker_state import Assignment, WorkerState, sender_of
from neurogrid.p2p.wire import (
    ErrorCode,
    MessageType,
    Ready,
    TensorMessage,
    TransferAccept,
    TransferOffer,
    WeightsChunk,
    num_chunks,
)

__all__ = ["TransferService"]

logger = logging.getLogger(__name__)

# A layer's file may be wider than what it is computed in (float32 for bfloat16), and carries a header.
MAX_BLOB_RATIO = 4
BLOB_HEADROOM = 4 * 1024 * 1024
# Unfinished transfers at once: a coordinator of ours has two under way.
MAX_TRANSFERS = 8
# How often transfers are looked over for ones that stopped. Seconds.
EXPIRY_INTERVAL = 1.0


class TransferService:
    """The handlers that take weights in. `register`, then keep `expire` running."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._transfers: dict[tuple[str, int], IncomingBlob] = {}

    def register(self) -> None:
        """Serve the messages of this service on the worker's protocol."""
        protocol = self._state.protocol
        protocol.on_message(MessageType.TRANSFER_OFFER, self._on_offer)
        protocol.on_message(MessageType.WEIGHTS, self._on_weights)

    def forget(self, peer_id: str) -> None:
        """Drop the unfinished transfers of a peer."""
        for key in [key for key in self._transfers if key[0] == peer_id]:
            del self._transfers[key]

    async def expire(self, on_gave_up: Callable[[str], None]) -> None:
        """Give up transfers that have stopped; runs as long as the worker.

        A coordinator that stops in the middle of a layer is stuck: it is told, `on_gave_up` is called
        with its peer id, and another may have the worker.
        """
        timeout = self._state.settings.transfer_timeout
        while True:
            await trio.sleep(EXPIRY_INTERVAL)
            now = trio.current_time()
            for (peer_id, layer_id), incoming in list(self._transfers.items()):
                if now - incoming.last_progress <= timeout:
                    continue
                reason = (
                    f"gave up layer {layer_id}: {incoming.num_received} of {incoming.total_chunks} "
                    f"chunks came, and then nothing for {timeout:g} s"
                )
                logger.warning("%s (from %s)", reason, peer_id)
                self._transfers.pop((peer_id, layer_id), None)
                if incoming.request_id:
                    self._state.protocol.host.start_soon(
                        self._tell_expired, peer_id, incoming, reason
                    )
                on_gave_up(peer_id)

    async def _tell_expired(self, peer_id: str, incoming: IncomingBlob, reason: str) -> None:
        asked = TensorMessage(
            msg_type=MessageType.TRANSFER_OFFER,
            layer_id=incoming.layer_id,
            request_id=incoming.request_id,
            from_peer=peer_id,
        )
        error = RequestRefusedError(reason, code=ErrorCode.DEADLINE_EXCEEDED)
        try:
            await self._state.protocol.refuse(asked, error)
        except TransportError as exc:
            logger.debug("%s cannot be told: %s", peer_id, exc)

    async def _on_offer(self, message: TensorMessage) -> None:
        state = self._state
        offer = TransferOffer.decode(message.data)
        async with state.model_lock:
            model = state.require_coordinator(message.from_peer)
            assignment = state.assignment
            if assignment is None or offer.layer_id not in assignment:
                raise RequestRefusedError(
                    f"layer {offer.layer_id} was offered, and is not assigned to this worker",
                    code=ErrorCode.TRANSFER_INVALID,
                )
            needed = not await self._holds(model, offer)
            if needed:
                self._begin(
                    sender_of(message),
                    model,
                    IncomingBlob(
                        layer_id=offer.layer_id,
                        total_chunks=num_chunks(offer.num_bytes),
                        num_bytes=offer.num_bytes,
                        blob_id=offer.blob_id,
                        request_id=message.request_id,
                        now=trio.current_time(),
                    ),
                )
            else:
                assignment.confirmed.add(offer.layer_id)
        accept = TransferAccept(layer_id=offer.layer_id, needed=needed)
        await state.answer(message, MessageType.TRANSFER_ACCEPT, accept.encode())
        if not needed:
            await self._announce_ready(assignment)

    async def _holds(self, model: ServedModel, offer: TransferOffer) -> bool:
        """Whether the offered bytes are here, in memory or on disk; loads them from disk if so."""
        held = model.held.get(offer.layer_id)
        if held is not None and held.blob_id == offer.blob_id:
            return True
        try:
            return await self._state.load_own_layer(model, offer.layer_id, only=offer.blob_id)
        except (CheckpointError, RequestRefusedError) as exc:
            logger.warning("cannot use layer %d of the own model: %s", offer.layer_id, exc)
            return False

    def _begin(self, peer_id: str, model: ServedModel, incoming: IncomingBlob) -> None:
        """Open a transfer, in place of an older one of the same layer.

        Raises:
            RequestRefusedError: it is larger than the layer can be, or too many are open (LIMIT_EXCEEDED).
        """
        layer_id = incoming.layer_id
        limit = MAX_BLOB_RATIO * model.costs[layer_id].weight_bytes + BLOB_HEADROOM
        if incoming.min_bytes > limit:
            raise RequestRefusedError(
                f"layer {layer_id} was announced with {incoming.min_bytes:,} B or more; by its "
                f"config it has at most {limit:,} B",
                code=ErrorCode.LIMIT_EXCEEDED,
            )
        self._transfers.pop((peer_id, layer_id), None)
        if len(self._transfers) >= MAX_TRANSFERS:
            raise RequestRefusedError(
                f"{MAX_TRANSFERS} layers are under way already; finish one before layer {layer_id}",
                code=ErrorCode.LIMIT_EXCEEDED,
            )
        self._transfers[peer_id, layer_id] = incoming

    def _on_weights(self, message: TensorMessage) -> Awaitable[None] | None:
        """Keep one chunk. Sync, so that chunks of one stream are taken in the order they came.

        Over 1.0.0 the last chunk's stream ends when the layer is usable, so its loading is awaited.
        """
        state = self._state
        peer_id = sender_of(message)
        model = state.require_coordinator(peer_id)
        chunk = WeightsChunk.decode(message.data)
        key = (peer_id, message.layer_id)
        incoming = self._transfers.get(key)
        if incoming is None:
            if not state.protocol.is_v10(peer_id):
                raise RequestRefusedError(
                    f"weights of layer {message.layer_id} came without an accepted offer",
                    code=ErrorCode.TRANSFER_INVALID,
                )
            incoming = self._begin_v10(peer_id, model, message.layer_id, chunk)
        try:
            incoming.add(chunk, now=trio.current_time())
        except RequestRefusedError:
            self._transfers.pop(key, None)
            raise
        if not incoming.is_complete:
            return None
        del self._transfers[key]
        if not incoming.request_id:
            return self._finish(model, incoming, message)
        state.protocol.host.start_soon(self._finish_or_refuse, model, incoming, message)
        return None

    def _begin_v10(
        self, peer_id: str, model: ServedModel, layer_id: int, chunk: WeightsChunk
    ) -> IncomingBlob:
        """1.0.0 offers nothing: the first chunk opens the transfer."""
        if layer_id >= model.num_layers:
            raise RequestRefusedError(
                f"weights of layer {layer_id} came, and the model has {model.num_layers} layers",
                code=ErrorCode.TRANSFER_INVALID,
            )
        incoming = IncomingBlob(
            layer_id=layer_id,
            total_chunks=chunk.total_chunks,
            num_bytes=None,
            blob_id=None,
            request_id=0,
            now=trio.current_time(),
        )
        self._begin(peer_id, model, incoming)
        return incoming

    async def _finish(
        self, model: ServedModel, incoming: IncomingBlob, message: TensorMessage
    ) -> None:
        """Verify a complete blob, load it, and acknowledge the layer."""
        state = self._state
        layer_id = incoming.layer_id
        async with state.model_lock:
            if state.model is not model:
                return  # another config came meanwhile; nobody waits for this layer
            view, blob_id = await trio.to_thread.run_sync(incoming.verified)
            assignment = state.assignment
            if layer_id in model.held:
                # Caches that the old weights made are of no use with the new ones.
                state.on_layers_changed()
                if assignment is not None:
                    assignment.confirmed.discard(layer_id)
                await state.run_torch(model.drop, layer_id)
            state.require_layer_room(model, layer_id)
            await state.run_torch(model.load, layer_id, view, blob_id)
            if assignment is not None and layer_id in assignment:
                assignment.confirmed.add(layer_id)
        await state.answer(message, MessageType.WEIGHTS_ACK, layer_id=layer_id)
        if assignment is not None:
            await self._announce_ready(assignment)

    async def _finish_or_refuse(
        self, model: ServedModel, incoming: IncomingBlob, message: TensorMessage
    ) -> None:
        """`_finish` in a task of its own: what goes wrong is told to the peer."""
        try:
            try:
                await self._finish(model, incoming, message)
            except RequestRefusedError as exc:
                logger.warning("layer %d of %s: %s", incoming.layer_id, message.from_peer, exc)
                await self._state.protocol.refuse(message, exc)
        except TransportError as exc:
            logger.info("%s went away: %s", message.from_peer, exc)

    async def _announce_ready(self, assignment: Assignment) -> None:
        state = self._state
        if assignment is not state.assignment or not assignment.is_ready:
            return
        if assignment.is_announced:
            return
        assignment.is_announced = True
        assert state.coordinator is not None
        logger.info("layers %d to %d are ready", assignment.start, assignment.stop - 1)
        await state.protocol.send(
            state.coordinator,
            TensorMessage(
                msg_type=MessageType.READY,
                request_id=assignment.request_id,
                data=Ready(assignment.start, assignment.stop).encode(),
            ),
        )
