"""Peers that speak 1.0.0 alone, at a worker: a config, plain weights, and activations of one layer each.

1.0.0 names no content and offers nothing: the first chunk opens a transfer, and the end of the last chunk's stream says
that the layer is usable. Nor has it sessions: there is one cache for each peer and layer, begun anew at position 0. Nor
does it agree on what it takes of the memory: while such a peer is served, no other is.

Source: protocol_spec/sessions.md, "1.0.0".

T = tokens, D = hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import torch
import trio

from neurogrid.errors import RequestRefusedError
from neurogrid.inference.sessions.step_queue import WorkerSteps
from neurogrid.inference.sessions.table import Session
from neurogrid.model.files.tensors import tensor_from_bytes, tensor_to_bytes
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.tensor.versions import VersionedExchange
from neurogrid.p2p.transfer import PlainBlob
from neurogrid.p2p.wire import PROTOCOL_V10, ErrorCode, MessageType, TensorMessage, WeightsChunk
from neurogrid.worker.held_model import HeldModel
from neurogrid.worker.layers import LayerService
from neurogrid.worker.state import WeightSource, WorkerState
from neurogrid.worker.tenant import Tenant
from neurogrid.worker.transfers import MAX_TRANSFERS, TransferService, require_size

__all__ = ["WorkerV10"]

logger = logging.getLogger(__name__)

# How often transfers are looked over for ones that stopped. Seconds.
EXPIRY_INTERVAL = 1.0


class WorkerV10:
    """The handlers of 1.0.0. `register`, then keep `expire` running."""

    def __init__(
        self,
        state: WorkerState,
        protocol: VersionedExchange,
        layers: LayerService,
        transfers: TransferService,
        steps: WorkerSteps,
    ) -> None:
        self._state = state
        self._protocol = protocol
        self._layers = layers
        self._transfers = transfers
        self._steps = steps
        self._plain: dict[tuple[str, int], PlainBlob] = {}
        self._caches: dict[tuple[str, int], Session] = {}

    def register(self) -> None:
        """Serve the messages of this service, in the place of those that serve them over 1.1.0."""
        serve = self._protocol.on_message
        serve(MessageType.MODEL_CONFIG, self._on_config, version=PROTOCOL_V10)
        serve(
            MessageType.WEIGHTS,
            self._on_weights,
            when=lambda message: message.request_id == 0,
            version=PROTOCOL_V10,
        )
        serve(MessageType.ACTIVATION, self._on_activation, version=PROTOCOL_V10)

    def forget(self, peer_id: str) -> None:
        """Drop the caches and the unfinished transfers of a peer."""
        self._forget_transfers(peer_id)
        self.forget_caches(peer_id)

    def forget_caches(self, peer_id: str) -> None:
        """Drop the caches of a peer: their layers are being replaced."""
        for key in [key for key in self._caches if key[0] == peer_id]:
            del self._caches[key]

    async def expire(self, on_gave_up: Callable[[str], None]) -> None:
        """Give up transfers that have stopped; runs as long as the worker.

        `on_gave_up` is called with the id of a peer that stopped in the middle of a layer.
        """
        timeout = self._state.settings.transfer_timeout
        while True:
            await trio.sleep(EXPIRY_INTERVAL)
            now = trio.current_time()
            for (peer_id, layer_id), incoming in list(self._plain.items()):
                if now - incoming.last_progress <= timeout:
                    continue
                logger.warning(
                    "gave up layer %d: %d of %d chunks came, and then nothing for %g s (from %s)",
                    layer_id,
                    incoming.num_received,
                    incoming.total_chunks,
                    timeout,
                    peer_id,
                )
                self._plain.pop((peer_id, layer_id), None)
                on_gave_up(peer_id)

    def _require_tenant(self, peer_id: str) -> tuple[Tenant, HeldModel]:
        """The tenant of this peer id, and its model.

        Raises:
            RequestRefusedError: as `WorkerState.require_tenant`, or the peer speaks 1.1.0 too
                (PROTOCOL_VIOLATION): it has sessions, and its assignment has agreed on what it may hold, which 1.0.0
                would have once more.
        """
        tenant, model = self._state.require_tenant(peer_id)
        if not self._protocol.is_v10(peer_id):
            raise RequestRefusedError(
                "a message of 1.0.0 came from a peer that speaks 1.1.0: it has sessions and transfers",
                code=ErrorCode.PROTOCOL_VIOLATION,
            )
        return tenant, model

    # The model

    async def _on_config(self, message: TensorMessage) -> None:
        await self._layers.take_config(message, self._exchange, is_shared=False)

    async def _exchange(self, tenant: Tenant, model: HeldModel) -> None:
        """Layers that another coordinator sent may be those of another fine-tune: they go."""
        await self._layers.exchange(tenant, model)
        self._forget_transfers(tenant.owner)
        if tenant.model is not None and tenant.model is not model:
            await self._state.run_torch(tenant.model.drop_received)

    # Weights

    def _forget_transfers(self, peer_id: str) -> None:
        for key in [key for key in self._plain if key[0] == peer_id]:
            del self._plain[key]

    def _on_weights(self, message: TensorMessage) -> Awaitable[None] | None:
        """Keep one chunk, in the order in which they come.

        The last chunk's stream ends when the layer is usable, so its loading is awaited.
        """
        peer_id, layer_id = sender_of(message), message.layer_id
        WeightsChunk.require_numbers(message.data)
        tenant, model = self._require_tenant(peer_id)
        chunk = WeightsChunk.decode(message.data)
        incoming = self._plain.get((peer_id, layer_id))
        if incoming is None:
            incoming = self._begin(peer_id, model, layer_id, chunk.total_chunks)
        try:
            incoming.add(chunk, now=trio.current_time())
        except RequestRefusedError:
            self._plain.pop((peer_id, layer_id), None)
            raise
        if not incoming.is_complete:
            return None
        del self._plain[peer_id, layer_id]
        return self._finish(tenant, model, incoming, message)

    def _begin(self, peer_id: str, model: HeldModel, layer_id: int, total_chunks: int) -> PlainBlob:
        """Open a transfer by its first chunk."""
        if layer_id >= model.num_layers:
            raise RequestRefusedError(
                f"weights of layer {layer_id} came, and the model has {model.num_layers} layers",
                code=ErrorCode.TRANSFER_INVALID,
            )
        incoming = PlainBlob(layer_id=layer_id, total_chunks=total_chunks, now=trio.current_time())
        require_size(model, layer_id, incoming.min_bytes)
        if len(self._plain) >= MAX_TRANSFERS:
            raise RequestRefusedError(
                f"{MAX_TRANSFERS} layers are under way already; finish one before layer {layer_id}",
                code=ErrorCode.LIMIT_EXCEEDED,
            )
        self._plain[peer_id, layer_id] = incoming
        return incoming

    async def _finish(
        self, tenant: Tenant, model: HeldModel, incoming: PlainBlob, message: TensorMessage
    ) -> None:
        state, layer_id = self._state, incoming.layer_id
        async with tenant.lock:
            if state.tenants.get(tenant.owner) is not tenant or tenant.model is not model:
                return  # another config came meanwhile; nobody waits for this layer
            view, blob_id = await trio.to_thread.run_sync(incoming.finish)
            await self._transfers.load(tenant, model, layer_id, view, blob_id)
        state.note_received(WeightSource.COORDINATOR, len(view))
        await state.answer(message, MessageType.WEIGHTS_ACK, layer_id=layer_id)

    # Activations

    async def _on_activation(self, message: TensorMessage) -> None:
        data = await self._compute(message)
        await self._state.answer(message, MessageType.RESPONSE, data)

    async def _compute(self, message: TensorMessage) -> bytes:
        """Compute the layer that the header names, and no other, for FP16 `[1, T, D]` at position SeqID.

        Raises:
            RequestRefusedError: it is not held, has no room for a cache, or could not compute.
        """
        _, model = self._require_tenant(sender_of(message))
        layer_id, position = message.layer_id, message.seq_id
        if layer_id not in model.held:
            raise RequestRefusedError(
                f"layer {layer_id} was asked for, and is not held here",
                code=ErrorCode.LAYER_NOT_HELD,
            )
        num_tokens, rest = divmod(len(message.data), model.hidden_size * torch.float16.itemsize)
        if rest or not num_tokens:
            raise RequestRefusedError(
                f"an activation of {len(message.data)} B is no FP16 [1, tokens, {model.hidden_size}]",
                code=ErrorCode.SHAPE_MISMATCH,
            )
        key = (sender_of(message), layer_id)
        session = self._caches.get(key)
        if position == 0 or session is None or session.model is not model:
            self._require_room(model, key)
            max_length = self._state.settings.max_seq_len
            session = Session(
                session_id=0,
                owner=key[0],
                model=model,
                start=layer_id,
                stop=layer_id + 1,
                max_length=max_length,
                cache=model.stage.new_cache(max_length=max_length),
            )
            self._caches[key] = session
        hidden_BTD = tensor_from_bytes(
            message.data, torch.float16, (1, num_tokens, model.hidden_size)
        )
        done = await self._steps.extend(session, position, hidden_BTD)
        return bytes(tensor_to_bytes(done.hidden.to(torch.float16)))

    def _require_room(self, model: HeldModel, key: tuple[str, int]) -> None:
        """Check that one more layer's cache fits beside the weights and the other caches."""
        caches = {layer_id for peer_id, layer_id in self._caches if (peer_id, layer_id) != key}
        max_length = self._state.settings.max_seq_len
        needed = model.held_bytes + sum(
            model.cache_bytes(layer_id, layer_id + 1, max_length) for layer_id in (*caches, key[1])
        )
        available = self._state.memory().free_bytes
        if needed > available:
            raise RequestRefusedError(
                f"no room for a cache of {max_length} tokens for layer {key[1]}: {needed:,} B needed "
                f"in all, {available:,} B available",
                code=ErrorCode.OUT_OF_MEMORY,
            )
