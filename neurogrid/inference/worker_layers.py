"""How layers come into a worker: config, assignment, offers, weights, and the acknowledgements of each.

Over 1.1.0: ModelConfig -> ConfigAck, Assign -> AssignAck, then for each layer TransferOffer ->
TransferAccept, Weights..., WeightsAck; Ready when the last layer of the assignment is usable. A layer counts
as held only under the content id that was offered. Over 1.0.0: ModelConfig, Weights..., WeightsAck.

Source: protocol_spec/sessions.md.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable

import trio

from neurogrid.errors import (
    CapacityError,
    CheckpointError,
    NeuroGridError,
    RequestRefusedError,
    TransportError,
)
from neurogrid.inference.incoming import IncomingBlob
from neurogrid.inference.served_model import ServedModel
from neurogrid.inference.worker_state import Assignment, WorkerState
from neurogrid.model.tensors import dtype_name
from neurogrid.p2p.wire import (
    CHUNK_BYTES,
    Assign,
    AssignAck,
    ConfigAck,
    ErrorCode,
    LayerIds,
    MessageType,
    ModelConfig,
    Ready,
    TensorMessage,
    TransferAccept,
    TransferOffer,
    WeightsChunk,
    config_fingerprint,
    deserialize_config,
    num_chunks,
)

__all__ = ["LayerService"]

logger = logging.getLogger(__name__)

# A layer's file may be wider than what it is computed in (float32 for bfloat16), and carries a header.
MAX_BLOB_RATIO = 4
BLOB_HEADROOM = 4 * 1024 * 1024
# How often transfers are looked over for ones that stopped. Seconds.
EXPIRY_INTERVAL = 1.0


class LayerService:
    """The handlers that bring layers in. `register`, then keep `expire_transfers` running."""

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._transfers: dict[tuple[str, int], IncomingBlob] = {}

    def register(self) -> None:
        """Serve the messages of this service on the worker's protocol."""
        protocol = self._state.protocol
        protocol.on_message(MessageType.MODEL_CONFIG, self._on_config)
        protocol.on_message(MessageType.ASSIGN, self._on_assign)
        protocol.on_message(MessageType.TRANSFER_OFFER, self._on_offer)
        protocol.on_message(MessageType.WEIGHTS, self._on_weights)
        protocol.on_message(MessageType.LAYER_REQUEST, self._on_layer_request)

    def forget(self, peer_id: str) -> None:
        """Drop the unfinished transfers of a peer."""
        for key in [key for key in self._transfers if key[0] == peer_id]:
            del self._transfers[key]

    async def expire_transfers(self) -> None:
        """Give up transfers that have stopped; runs as long as the worker."""
        timeout = self._state.settings.transfer_timeout
        while True:
            await trio.sleep(EXPIRY_INTERVAL)
            now = trio.current_time()
            for (peer_id, layer_id), incoming in list(self._transfers.items()):
                if now - incoming.last_progress > timeout:
                    del self._transfers[peer_id, layer_id]
                    logger.warning(
                        "gave up layer %d from %s: %d of %d chunks after %g s of silence",
                        layer_id,
                        peer_id,
                        incoming.num_received,
                        incoming.total_chunks,
                        timeout,
                    )

    async def load_own_layers(self, config: ModelConfig) -> None:
        """Load all layers of the worker's own checkpoint (a stateful worker without a coordinator)."""
        state = self._state
        assert state.checkpoint is not None
        async with state.model_lock:
            state.model = await state.run_torch(ServedModel, config, device=state.device)
            present = sorted(state.checkpoint.present_layers)
            for layer_id in present:
                needed = sum(
                    state.model.costs[i].weight_bytes for i in (*state.model.held, layer_id)
                )
                if needed > state.memory().free_bytes:
                    logger.warning(
                        "layers %d to %d of the own model stay on disk: no room",
                        layer_id,
                        present[-1],
                    )
                    break
                await state.run_torch(self._load_own, state.model, layer_id)

    # Config and assignment

    async def _on_config(self, message: TensorMessage) -> None:
        peer_id = _sender(message)
        state = self._state
        state.claim(peer_id)
        try:
            config = deserialize_config(message.data)
        except NeuroGridError as exc:
            raise RequestRefusedError(
                f"model config: {exc}", code=ErrorCode.CONFIG_INVALID
            ) from exc
        async with state.model_lock:
            model = await state.run_torch(ServedModel, config, device=state.device)
            held = state.model
            if held is None or (held.fingerprint, held.dtype) != (model.fingerprint, model.dtype):
                state.model = model
            state.assignment = None
            state.on_layers_changed()
            self.forget(peer_id)
        logger.info("%s serves %s: %d layers", peer_id, config.model_name, model.num_layers)
        if not state.protocol.is_v10(peer_id):
            ack = ConfigAck(fingerprint=config_fingerprint(message.data))
            await self._answer(message, MessageType.CONFIG_ACK, ack.encode())

    async def _on_assign(self, message: TensorMessage) -> None:
        state = self._state
        model = state.require_coordinator(message.from_peer)
        assign = Assign.decode(message.data)
        if assign.stop_layer > model.num_layers:
            raise RequestRefusedError(
                f"layers {assign.start_layer} to {assign.stop_layer - 1} were assigned, and the "
                f"model has {model.num_layers}",
                code=ErrorCode.LAYER_NOT_HELD,
            )
        if assign.max_length > state.settings.max_seq_len:
            raise RequestRefusedError(
                f"sessions of {assign.max_length} tokens were asked for, and this worker takes "
                f"{state.settings.max_seq_len}: start it with a larger --max-seq-len",
                code=ErrorCode.LIMIT_EXCEEDED,
            )
        if assign.dtype != dtype_name(model.dtype):
            raise RequestRefusedError(
                f"the config says {dtype_name(model.dtype)} and the assignment {assign.dtype}",
                code=ErrorCode.CONFIG_INVALID,
            )
        if assign.max_sessions > state.settings.max_sessions:
            raise RequestRefusedError(
                f"{assign.max_sessions} sessions at once were asked for, and this worker takes "
                f"{state.settings.max_sessions}",
                code=ErrorCode.SESSION_LIMIT,
            )
        try:
            model.require_room(
                assign.start_layer,
                assign.stop_layer,
                num_tokens=assign.max_length,
                num_sessions=assign.max_sessions,
                limit_bytes=state.memory().free_bytes,
            )
        except CapacityError as exc:
            raise RequestRefusedError(str(exc), code=ErrorCode.OUT_OF_MEMORY) from exc
        async with state.model_lock:
            state.on_layers_changed()
            await state.run_torch(model.keep_only, assign.start_layer, assign.stop_layer)
            state.assignment = Assignment(
                start=assign.start_layer,
                stop=assign.stop_layer,
                max_length=assign.max_length,
                max_sessions=assign.max_sessions,
                request_id=message.request_id,
            )
            self.forget(_sender(message))
        on_disk = state.checkpoint.present_layers if state.checkpoint else frozenset()
        held = (set(model.held) | on_disk) & set(range(assign.start_layer, assign.stop_layer))
        ack = AssignAck(held=tuple(sorted(held)))
        await self._answer(message, MessageType.ASSIGN_ACK, ack.encode())

    # Transfers

    async def _on_offer(self, message: TensorMessage) -> None:
        state = self._state
        model = state.require_coordinator(message.from_peer)
        offer = TransferOffer.decode(message.data)
        assignment = state.assignment
        if assignment is None or offer.layer_id not in assignment:
            raise RequestRefusedError(
                f"layer {offer.layer_id} was offered, and is not assigned to this worker",
                code=ErrorCode.TRANSFER_INVALID,
            )
        limit = MAX_BLOB_RATIO * model.costs[offer.layer_id].weight_bytes + BLOB_HEADROOM
        if offer.num_bytes > limit:
            raise RequestRefusedError(
                f"layer {offer.layer_id} was offered with {offer.num_bytes:,} B; by its config it "
                f"has at most {limit:,} B",
                code=ErrorCode.LIMIT_EXCEEDED,
            )
        async with state.model_lock:
            needed = not await self._holds(model, offer)
            if needed:
                self._transfers[_sender(message), offer.layer_id] = IncomingBlob(
                    layer_id=offer.layer_id,
                    total_chunks=num_chunks(offer.num_bytes),
                    num_bytes=offer.num_bytes,
                    blob_id=offer.blob_id,
                    request_id=message.request_id,
                    now=trio.current_time(),
                )
            else:
                assignment.confirmed.add(offer.layer_id)
        accept = TransferAccept(layer_id=offer.layer_id, needed=needed)
        await self._answer(message, MessageType.TRANSFER_ACCEPT, accept.encode())
        if not needed:
            await self._announce_ready(assignment)

    async def _holds(self, model: ServedModel, offer: TransferOffer) -> bool:
        """Whether the offered bytes are here, in memory or on disk; loads them from disk if so."""
        held = model.held.get(offer.layer_id)
        if held is not None and held.blob_id == offer.blob_id:
            return True
        checkpoint = self._state.checkpoint
        if checkpoint is None or offer.layer_id not in checkpoint.present_layers:
            return False
        own = checkpoint.layer_blob(offer.layer_id)
        try:
            if await trio.to_thread.run_sync(own.blob_id) != offer.blob_id:
                return False
            await self._state.run_torch(self._load_own, model, offer.layer_id)
        except CheckpointError as exc:
            logger.warning("cannot use layer %d of the own model: %s", offer.layer_id, exc)
            return False
        return True

    def _load_own(self, model: ServedModel, layer_id: int) -> None:
        """Load one layer from the worker's own checkpoint. In the torch thread."""
        assert self._state.checkpoint is not None
        blob = self._state.checkpoint.layer_blob(layer_id)
        data = bytearray(blob.num_bytes)
        filled = 0
        for chunk in blob.chunks():
            data[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        model.load(layer_id, memoryview(data), blob.blob_id())

    def _on_weights(self, message: TensorMessage) -> Awaitable[None] | None:
        """Keep one chunk. Sync, so that chunks of one stream are taken in the order they came.

        Over 1.0.0 the last chunk's stream ends when the layer is usable, so its loading is awaited.
        """
        state = self._state
        peer_id = _sender(message)
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
            incoming = self._accept_v10(model, message.layer_id, chunk)
            self._transfers[key] = incoming
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

    def _accept_v10(self, model: ServedModel, layer_id: int, chunk: WeightsChunk) -> IncomingBlob:
        """1.0.0 offers nothing: the first chunk opens the transfer."""
        if layer_id >= model.num_layers:
            raise RequestRefusedError(
                f"weights of layer {layer_id} came, and the model has {model.num_layers} layers",
                code=ErrorCode.TRANSFER_INVALID,
            )
        limit = MAX_BLOB_RATIO * model.costs[layer_id].weight_bytes + BLOB_HEADROOM
        if chunk.total_chunks * CHUNK_BYTES > limit + CHUNK_BYTES:
            raise RequestRefusedError(
                f"layer {layer_id} is announced with {chunk.total_chunks} chunks; by its config it "
                f"has at most {limit:,} B",
                code=ErrorCode.LIMIT_EXCEEDED,
            )
        return IncomingBlob(
            layer_id=layer_id,
            total_chunks=chunk.total_chunks,
            num_bytes=None,
            blob_id=None,
            request_id=0,
            now=trio.current_time(),
        )

    async def _finish(
        self, model: ServedModel, incoming: IncomingBlob, message: TensorMessage
    ) -> None:
        """Verify a complete blob, load it, and acknowledge the layer."""
        state = self._state
        async with state.model_lock:
            if state.model is not model:
                return  # another config came meanwhile; nobody waits for this layer
            view, blob_id = await trio.to_thread.run_sync(incoming.verified)
            try:
                model.require_room(
                    incoming.layer_id,
                    incoming.layer_id + 1,
                    num_tokens=0,
                    num_sessions=0,
                    limit_bytes=state.memory().free_bytes - model.held_bytes,
                )
            except CapacityError as exc:
                raise RequestRefusedError(str(exc), code=ErrorCode.OUT_OF_MEMORY) from exc
            await state.run_torch(model.load, incoming.layer_id, view, blob_id)
            assignment = state.assignment
            if assignment is not None and incoming.layer_id in assignment:
                assignment.confirmed.add(incoming.layer_id)
        await self._answer(message, MessageType.WEIGHTS_ACK, layer_id=incoming.layer_id)
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

    # Status

    async def _on_layer_request(self, message: TensorMessage) -> None:
        state = self._state
        wanted = LayerIds.decode(message.data).ids
        if wanted:
            await self._load_requested(message, wanted)
        held = sorted(state.model.held) if state.model else []
        await self._answer(message, MessageType.LAYER_STATUS, LayerIds(tuple(held)).encode())

    async def _load_requested(self, message: TensorMessage, wanted: tuple[int, ...]) -> None:
        """A non-empty LayerRequest: load those layers from the worker's own model."""
        state = self._state
        model = state.require_coordinator(message.from_peer)
        present = state.checkpoint.present_layers if state.checkpoint else frozenset[int]()
        missing = sorted(set(wanted) - present - set(model.held))
        if missing:
            raise RequestRefusedError(
                f"layers {missing} were asked for, and this worker has them neither in memory nor "
                "on disk",
                code=ErrorCode.LAYER_NOT_HELD,
            )
        async with state.model_lock:
            for layer_id in sorted(set(wanted) - set(model.held)):
                await state.run_torch(self._load_own, model, layer_id)

    async def _answer(
        self,
        message: TensorMessage,
        msg_type: MessageType,
        data: bytes = b"",
        *,
        layer_id: int | None = None,
    ) -> None:
        reply = TensorMessage(
            msg_type=msg_type,
            layer_id=message.layer_id if layer_id is None else layer_id,
            request_id=message.request_id,
            data=data,
        )
        await self._state.protocol.send(_sender(message), reply)


def _sender(message: TensorMessage) -> str:
    assert message.from_peer is not None  # set by Protocol for all that is received
    return message.from_peer
