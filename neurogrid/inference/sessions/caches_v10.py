"""The caches of 1.0.0, which has no sessions: one for each peer and layer, begun anew at position 0.

Source: protocol_spec/sessions.md, "1.0.0".

T = tokens, D = hidden size.
"""

from __future__ import annotations

import torch

from neurogrid.errors import RequestRefusedError
from neurogrid.inference.sessions.step_queue import WorkerSteps
from neurogrid.inference.sessions.table import Session
from neurogrid.model.files.tensors import tensor_from_bytes, tensor_to_bytes
from neurogrid.p2p.wire import ErrorCode, MessageType, TensorMessage
from neurogrid.worker.held_model import HeldModel
from neurogrid.worker.state import WorkerState, sender_of

__all__ = ["WorkerCachesV10"]


class WorkerCachesV10:
    """The caches of the peers that speak 1.0.0."""

    def __init__(self, state: WorkerState, steps: WorkerSteps) -> None:
        self._state = state
        self._steps = steps
        self._caches: dict[tuple[str, int], Session] = {}

    def __len__(self) -> int:
        return len(self._caches)

    def forget(self, peer_id: str) -> None:
        """Drop the caches of a peer."""
        for key in [key for key in self._caches if key[0] == peer_id]:
            del self._caches[key]

    def clear(self) -> None:
        """Drop all of them."""
        self._caches.clear()

    async def serve(self, message: TensorMessage) -> None:
        """The handler of activations of 1.0.0."""
        data = await self._compute(message)
        await self._state.answer(message, MessageType.RESPONSE, data)

    async def _compute(self, message: TensorMessage) -> bytes:
        """Compute the layer that the header names, and no other, for FP16 `[1, T, D]` at position SeqID.

        Raises:
            RequestRefusedError: it is not held, has no room for a cache, or could not compute.
        """
        model = self._state.require_coordinator_v10(sender_of(message))
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
