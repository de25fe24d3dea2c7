"""Layers that a worker is to hold: the model's config, the assignment, and what the worker says it holds.

ModelConfig -> ConfigAck, Assign -> AssignAck; then their bytes come (`transfers`).

Source: protocol_spec/sessions.md.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio

from neurogrid.errors import CheckpointError, RemoteProtocolError, RequestRefusedError
from neurogrid.model.files.tensors import dtype_name
from neurogrid.model.proof.proof import OWN_SECONDS, PEER_SECONDS
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import (
    Assign,
    AssignAck,
    ConfigAck,
    ErrorCode,
    LayerIds,
    MessageType,
    ModelConfig,
    TensorMessage,
    config_fingerprint,
    deserialize_config,
)
from neurogrid.planner import name_range
from neurogrid.worker.held_model import HeldModel
from neurogrid.worker.state import WorkerState, name_layers
from neurogrid.worker.tenant import Assignment, Tenant
from neurogrid.worker.transfers import TransferService

__all__ = ["LayerService"]

logger = logging.getLogger(__name__)


class LayerService:
    """The handlers of config, assignment and status."""

    def __init__(self, state: WorkerState, transfers: TransferService) -> None:
        self._state = state
        self._transfers = transfers
        # Of peers whose config is being tried.
        self._trials: set[tuple[str, trio.CancelScope]] = set()

    def register(self) -> None:
        """Serve the messages of this service on the worker's protocol."""
        protocol = self._state.protocol
        protocol.on_message(MessageType.MODEL_CONFIG, self._on_config)
        protocol.on_message(MessageType.ASSIGN, self._on_assign)
        protocol.on_message(MessageType.LAYER_REQUEST, self._on_layer_request)

    async def load_own_layers(self, config: ModelConfig) -> None:
        """Load all layers of the worker's own checkpoint (a stateful worker without a coordinator).

        Those that find no room stay on disk.

        Raises:
            ModelError: a file is broken.
            RequestRefusedError: the model cannot be served, or a layer does not fit its config.
        """
        state = self._state
        assert state.checkpoint is not None
        async with state.own_lock:
            model = await state.build_model(config, seconds=OWN_SECONDS)
            state.kept.append(model)
            present = sorted(state.checkpoint.present_layers)
            for layer_id in present:
                try:
                    await state.require_layer_room("", model, layer_id)
                except RequestRefusedError as exc:
                    logger.warning(
                        "layers %d to %d of the own model stay on disk: %s",
                        layer_id,
                        present[-1],
                        exc,
                    )
                    break
                await state.load_own_layer("", model, layer_id)

    def forget(self, peer_id: str) -> None:
        """Give up trying the config of a peer that is gone."""
        for sender, trial in self._trials:
            if sender == peer_id:
                trial.cancel()

    @contextmanager
    def _trial(self, peer_id: str) -> Iterator[trio.CancelScope]:
        """Give a scope that is cancelled when the peer is gone."""
        with trio.CancelScope() as scope:
            self._trials.add((peer_id, scope))
            try:
                yield scope
            finally:
                self._trials.discard((peer_id, scope))

    async def _on_config(self, message: TensorMessage) -> None:
        if await self.take_config(message, self.exchange):
            ack = ConfigAck(fingerprint=config_fingerprint(message.data))
            await self._state.answer(message, MessageType.CONFIG_ACK, ack.encode())

    async def take_config(
        self,
        message: TensorMessage,
        exchange: Callable[[Tenant, HeldModel], Awaitable[None]],
        *,
        is_shared: bool = True,
    ) -> bool:
        """Prove the model of a config, and `exchange` what is held for it; False if its sender is gone meanwhile.

        Args:
            is_shared: whether the worker may serve others than the sender.
        """
        peer_id = sender_of(message)
        state = self._state
        tenant, is_new = state.admit(peer_id, is_shared=is_shared)
        try:
            config = deserialize_config(message.data)
            with self._trial(peer_id) as trial:
                async with tenant.lock:
                    async with state.proof_lock:
                        model = await state.build_model(config, seconds=PEER_SECONDS)
                    await exchange(tenant, model)
            if trial.cancelled_caught:
                logger.info("%s is gone: its config is tried no longer", peer_id)
                return False
        except (RemoteProtocolError, RequestRefusedError) as exc:
            # A peer that sent nothing usable must not keep others away.
            if is_new and state.tenants.get(peer_id) is tenant:
                state.release(peer_id)
            raise RequestRefusedError(f"model config: {exc}", code=exc.code) from exc
        logger.log(
            state.settings.says_at,
            "%s serves %s: %d layers",
            *(peer_id, config.model_name, model.num_layers),
        )
        return True

    async def exchange(self, tenant: Tenant, model: HeldModel) -> None:
        """Put `model` in the place of what a tenant had, unless that is the same model."""
        async with self._state.own_lock:
            self._state.use_model(tenant, model)
        self._transfers.forget(tenant.owner)

    async def _on_assign(self, message: TensorMessage) -> None:
        state = self._state
        assign = Assign.decode(message.data)
        tenant, _ = state.require_tenant(message.from_peer)
        async with tenant.lock:
            model = state.require_still(tenant)
            self._check_assignment(model, assign)
            before = tenant.assignment
            has_grown = before is not None and _contains(assign, before)
            await self._promise(tenant, model, assign, has_grown=has_grown)
            if not has_grown:
                state.on_layers_changed(tenant.owner)
            model.use_caches(coded=bool(assign.cache), max_length=assign.max_length)
            await state.run_torch(model.keep_only, assign.start_layer, assign.stop_layer)
            tenant.assignment = Assignment(
                start=assign.start_layer,
                stop=assign.stop_layer,
                max_length=assign.max_length,
                max_sessions=assign.max_sessions,
                request_id=message.request_id,
                has_coded_caches=bool(assign.cache),
                confirmed=set(before.confirmed) if before is not None and has_grown else set(),
            )
            tenant.has_given_way = False
            self._transfers.forget(sender_of(message))
        state.note_held()
        on_disk = await state.blobs.layers_on_disk(model.fingerprint.hex())
        if state.checkpoint:
            on_disk |= state.checkpoint.present_layers
        held = (set(model.held) | on_disk) & set(range(assign.start_layer, assign.stop_layer))
        ack = AssignAck(
            held=tuple(sorted(held)),
            has_cache=bool(assign.cache),
            stores_prefixes=state.prefixes.is_kept and model.stage.new_cache().can_go_back,
        )
        await state.answer(message, MessageType.ASSIGN_ACK, ack.encode())

    async def _promise(
        self, tenant: Tenant, model: HeldModel, assign: Assign, *, has_grown: bool
    ) -> None:
        """Have the memory that an assignment takes kept for it.

        Raises:
            RequestRefusedError: there is not enough (OUT_OF_MEMORY).
        """
        start, stop = assign.start_layer, assign.stop_layer
        sessions = f"{assign.max_sessions} session{'s' if assign.max_sessions != 1 else ''}"
        await self._state.promise(
            tenant,
            model.needed_bytes(
                start,
                stop,
                num_tokens=assign.max_length,
                num_sessions=assign.max_sessions,
                coded=bool(assign.cache),
            ),
            keeps_beside=has_grown,
            purpose=f"for {name_range(range(start, stop))} with {sessions} of {assign.max_length} tokens",
        )

    def _check_assignment(self, model: HeldModel, assign: Assign) -> None:
        """Refuse what this worker cannot do.

        Raises:
            RequestRefusedError: says what was asked for and what there is.
        """
        settings = self._state.settings
        if assign.stop_layer > model.num_layers:
            raise RequestRefusedError(
                f"{name_range(range(assign.start_layer, assign.stop_layer))} assigned, and the model "
                f"has {model.num_layers}",
                code=ErrorCode.LAYER_NOT_HELD,
            )
        if assign.max_length > settings.max_seq_len:
            raise RequestRefusedError(
                f"sessions of {assign.max_length} tokens were asked for, and this worker takes "
                f"{settings.max_seq_len}: start it with a larger --max-seq-len",
                code=ErrorCode.LIMIT_EXCEEDED,
            )
        if assign.dtype != dtype_name(model.dtype):
            raise RequestRefusedError(
                f"the config says {dtype_name(model.dtype)} and the assignment {assign.dtype}",
                code=ErrorCode.CONFIG_INVALID,
            )
        if assign.max_sessions > settings.max_sessions:
            raise RequestRefusedError(
                f"{assign.max_sessions} sessions at once were asked for, and this worker takes "
                f"{settings.max_sessions}",
                code=ErrorCode.SESSION_LIMIT,
            )

    async def _on_layer_request(self, message: TensorMessage) -> None:
        state, sender = self._state, sender_of(message)
        wanted = LayerIds.decode(message.data).ids
        if wanted:
            tenant, _ = state.require_tenant(sender)
            async with tenant.lock:
                await self._load_requested(tenant, state.require_still(tenant), wanted)
        own = state.tenants.get(sender)
        models = state.kept if own is None or own.model is None else [own.model]
        held = sorted({layer_id for model in models for layer_id in model.held})
        await state.answer(message, MessageType.LAYER_STATUS, LayerIds(tuple(held)).encode())

    async def _load_requested(
        self, tenant: Tenant, model: HeldModel, wanted: tuple[int, ...]
    ) -> None:
        """A non-empty LayerRequest: load those layers from the worker's own model."""
        state, assignment = self._state, tenant.assignment
        if assignment is not None:
            surplus = [layer_id for layer_id in wanted if layer_id not in assignment]
            if surplus:
                # The memory beside what was assigned is its sessions'.
                raise RequestRefusedError(
                    f"{name_layers(surplus)}: not assigned to this worker",
                    code=ErrorCode.LAYER_NOT_HELD,
                )
        try:
            for layer_id in sorted(set(wanted) - set(model.held)):
                if layer_id < model.num_layers:
                    await state.load_own_layer(tenant.owner, model, layer_id)
        except CheckpointError as exc:
            raise RequestRefusedError(str(exc), code=ErrorCode.LAYER_NOT_HELD) from exc
        missing = set(wanted) - set(model.held)
        if missing:
            raise RequestRefusedError(
                f"{name_layers(missing)} cannot be had: neither in memory nor on disk here",
                code=ErrorCode.LAYER_NOT_HELD,
            )


def _contains(assign: Assign, before: Assignment) -> bool:
    """Whether what was assigned before is a part of this: then its sessions can go on."""
    return (
        assign.start_layer <= before.start
        and before.stop <= assign.stop_layer
        and (assign.max_length, assign.max_sessions) == (before.max_length, before.max_sessions)
        and bool(assign.cache) is before.has_coded_caches
    )
