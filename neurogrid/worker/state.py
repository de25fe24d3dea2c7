"""State that the parts of a worker share: its settings, its tenants and their models, its memory, its torch thread.

No handlers here, and no messages: `layers` brings layers in, `inference.sessions` computes with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import StrEnum
from typing import ParamSpec, TypeVar

import torch
import trio

from neurogrid.errors import CapacityError, RequestRefusedError
from neurogrid.model.files.checkpoint import Checkpoint
from neurogrid.model.stages.device import DeviceMemory, device_memory
from neurogrid.model.unused_memory import give_back_memory
from neurogrid.node.torch_thread import TorchThread
from neurogrid.p2p.exchange.exchange import Exchange
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.wire import ErrorCode, MessageType, ModelConfig, TensorMessage
from neurogrid.worker.blobs import WorkerBlobs
from neurogrid.worker.claim import Claim
from neurogrid.worker.held_model import HeldModel, proving, refusing_config
from neurogrid.worker.prefixes import WorkerPrefixes
from neurogrid.worker.proofs import result_of
from neurogrid.worker.room import Room
from neurogrid.worker.settings import WorkerSettings
from neurogrid.worker.tenant import Tenant

__all__ = [
    "MAX_TENANTS",
    "WeightSource",
    "WorkerState",
    "name_layers",
]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# What a coordinator is told to wait for that others leave no room; a generation takes seconds to minutes. Seconds.
BUSY_RETRY_AFTER = 10.0
# Coordinators that are served at once: each has a skeleton, and what stands outside its layers.
MAX_TENANTS = 8
MAX_LAYERS_NAMED = 8


class WeightSource(StrEnum):
    """Source from which a layer's weights came."""

    COORDINATOR = "coordinator"
    WORKER = "worker"
    DISK = "disk"
    """The cache of an earlier start."""
    OWN = "own"
    """The worker's own model."""


class WorkerState:
    """The mutable state of one worker.

    Attributes:
        checkpoint: the worker's own model directory, if it has one.
        blobs: the bytes of layers that came, in memory and on disk.
        prefixes: what sessions had, on disk.
        tenants: the coordinators that are served, by peer id.
        kept: models that no tenant has now, with the layers that stayed; the longest unused first.
        room: what each tenant was promised of the memory.
        num_given_way: tenants that gave their memory to another, since the start.
        received_bytes: weights of the layers that were loaded, by where they came from.
        torch_thread: where the device is used.
        proof_lock: held while the config of a peer is proven: that takes a core, and memory.
        own_lock: held while the worker's own model is loaded, and while a model that was kept is taken over.
        on_layers_changed: called with a tenant's peer id when a config or an assignment replaces the layers under its
            open sessions.
        on_gave_way: called with a tenant's peer id when another one got its memory.
        caches_in_use: gives the bytes of the caches of a tenant's sessions that hold tokens.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        protocol: Exchange,
        device: torch.device,
        torch_thread: TorchThread,
    ) -> None:
        self.settings = settings
        self.protocol = protocol
        self.device = device
        self.checkpoint: Checkpoint | None = None
        self.blobs = WorkerBlobs(settings.cache)
        self.prefixes = WorkerPrefixes(settings.cache, settings.prefix_cache_bytes)
        self.tenants: dict[str, Tenant] = {}
        self.kept: list[HeldModel] = []
        self.room = Room(settings.idle_after)
        self.num_given_way = 0
        self.received_bytes = dict.fromkeys(WeightSource, 0)
        self.on_layers_changed: Callable[[str], None] = lambda owner: None
        self.on_gave_way: Callable[[str], None] = lambda owner: None
        self.caches_in_use: Callable[[str], int] = lambda owner: 0
        self.torch_thread = torch_thread
        self.proof_lock = trio.Lock()
        self.own_lock = trio.Lock()

    async def run_torch(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `function` in the torch thread, after those that wait already.

        Cancellation waits for the call to end: torch cannot be interrupted.
        """
        return await self.torch_thread.run(lambda: function(*args, **kwargs))

    # Memory

    @property
    def models(self) -> list[HeldModel]:
        """All models of which layers may be held."""
        had = [tenant.model for tenant in self.tenants.values() if tenant.model is not None]
        return [*self.kept, *had]

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights that are held, whoever has them."""
        return sum(model.held_bytes for model in self.models)

    def memory(self) -> DeviceMemory:
        """Memory of the device, or the limit; what layers held here take counts as free.

        They make room for the next assignment, or are part of it. So `free_bytes` is what all assignments
        may take together.
        """
        return self._memory(beside="")

    def _memory(self, *, beside: str) -> DeviceMemory:
        """As `memory`, where caches of all tenants but one count as free, too: they are a part of what was promised."""
        actual = device_memory(self.device)
        free = actual.free_bytes + self.held_bytes
        if beside:
            free += sum(self.caches_in_use(owner) for owner in self.tenants if owner != beside)
        total = actual.total_bytes
        if self.settings.memory_limit is not None:
            total = self.settings.memory_limit
        return DeviceMemory(total_bytes=total, used_bytes=max(total - free, 0))

    def memory_for(self, owner: str) -> DeviceMemory:
        """Memory as a peer is told of it: what others were promised is used, but for what they would give way with."""
        whole = self._memory(beside=owner)
        free = self.room.free(owner, whole.free_bytes, trio.current_time())
        return replace(whole, used_bytes=whole.total_bytes - free)

    def unpromised_bytes(self, owner: str) -> int:
        """Bytes that were promised to nobody, as `owner` may take them."""
        return self._memory(beside=owner).free_bytes - self.room.promised_bytes

    async def promise(
        self, tenant: Tenant, num_bytes: int, *, keeps_beside: bool, purpose: str
    ) -> None:
        """Keep so much memory for a tenant's assignment; others that are idle may give way.

        Args:
            keeps_beside: its adapters stay.
            purpose: what it is for, for the error.

        Raises:
            RequestRefusedError: others have it (OUT_OF_MEMORY).
        """
        capacity = self._memory(beside=tenant.owner).free_bytes
        try:
            going = self.room.ask(
                tenant.owner,
                num_bytes,
                capacity,
                trio.current_time(),
                keeps_beside=keeps_beside,
                purpose=purpose,
            )
        except CapacityError as exc:
            is_alone = exc.available == capacity
            raise RequestRefusedError(
                str(exc),
                code=ErrorCode.OUT_OF_MEMORY,
                retry_after=None if is_alone else BUSY_RETRY_AFTER,
            ) from exc
        for owner in going:
            self._gives_way(self.tenants[owner], tenant)
        await self._reclaim(tenant.owner)

    def _gives_way(self, tenant: Tenant, other: Tenant) -> None:
        logger.log(
            self.settings.says_at,
            "the coordinator %s has had nothing to compute for a while: its memory goes to %s",
            tenant.owner,
            other.owner,
        )
        tenant.assignment = None
        tenant.has_given_way = True
        self.num_given_way += 1
        self.on_layers_changed(tenant.owner)
        self.on_gave_way(tenant.owner)

    async def _reclaim(self, owner: str, extra_bytes: int = 0) -> None:
        """Drop layers that nobody was promised, until what was promised and `extra_bytes` more for `owner` fit."""
        missing = self.room.promised_bytes + extra_bytes - self._memory(beside=owner).free_bytes
        unpromised = [
            tenant
            for tenant in self.tenants.values()
            if tenant.model is not None and tenant.owner not in self.room
        ]
        missing += sum(tenant.model.held_bytes for tenant in unpromised if tenant.model)
        missing += sum(model.held_bytes for model in self.kept)
        going: list[HeldModel] = []
        for model in (*self.kept, *(t.model for t in unpromised if t.owner != owner)):
            if missing > 0 and model is not None and model.held:
                going.append(model)
                missing -= model.held_bytes
        self.kept = [model for model in self.kept if model not in going]
        for model in going:
            # While the one before went, the tenant of this one may have got another promise.
            if not any(t.model is model and t.owner in self.room for t in self.tenants.values()):
                await self.run_torch(model.keep_only, 0, 0)
        if going:
            await self.run_torch(give_back_memory)
            self.note_held()

    # Tenants

    def admit(self, peer_id: str, *, is_shared: bool = True) -> tuple[Tenant, bool]:
        """Serve a coordinator, beside those that are served; returns it, and whether it is a new one.

        Args:
            is_shared: whether others may be served meanwhile.

        Raises:
            RequestRefusedError: others do not share the worker, or there are too many (BUSY).
        """
        claim, now = Claim(peer_id, is_shared=is_shared), trio.current_time()
        for other in tuple(self.tenants.values()):
            is_connected = self.protocol.host.is_connected(other.owner)
            if not other.claim.allows(claim, now, is_connected=is_connected):
                raise self._busy(other.claim)
            if other.owner != peer_id and not other.claim.holds(now, is_connected=is_connected):
                self.release(other.owner)
        tenant = self.tenants.get(peer_id)
        if tenant is not None:
            tenant.claim = claim
            return tenant, False
        if len(self.tenants) >= MAX_TENANTS:
            raise RequestRefusedError(
                f"busy: this worker serves {MAX_TENANTS} coordinators already; try again when one of them has ended, "
                "or start another worker",
                code=ErrorCode.BUSY,
                retry_after=BUSY_RETRY_AFTER,
            )
        self.tenants[peer_id] = tenant = Tenant(claim)
        return tenant, True

    def release(self, owner: str) -> None:
        """Serve a coordinator no longer; its layers stay for the next one that wants the same bytes."""
        tenant = self.tenants.pop(owner, None)
        self.room.leave(owner)
        if tenant is not None and tenant.model is not None and tenant.model.held:
            self.kept.append(tenant.model)

    def require_tenant(self, peer_id: str | None) -> tuple[Tenant, HeldModel]:
        """The tenant of this peer id, and the model of its config.

        Raises:
            RequestRefusedError: no config of it was taken (CONFIG_REQUIRED), or another one does not share the
                worker (BUSY).
        """
        tenant = self.tenants.get(peer_id or "")
        if tenant is not None and tenant.model is not None:
            return tenant, tenant.model
        for other in self.tenants.values():
            if other is not tenant and not other.claim.is_shared:
                raise self._busy(other.claim)
        raise RequestRefusedError(
            "no model config was received: send ModelConfig first",
            code=ErrorCode.CONFIG_REQUIRED,
        )

    def require_still(self, tenant: Tenant) -> HeldModel:
        """The model of a tenant whose lock was waited for.

        Raises:
            RequestRefusedError: its connection has ended meanwhile (CONFIG_REQUIRED): if its peer is here again, it is
                another tenant, which has not asked for this.
        """
        if self.tenants.get(tenant.owner) is not tenant:
            raise RequestRefusedError(
                "the connection that this came by has ended, and what was agreed by it is over: send ModelConfig first",
                code=ErrorCode.CONFIG_REQUIRED,
                is_expected=True,
            )
        return self.require_tenant(tenant.owner)[1]

    def use_model(self, tenant: Tenant, model: HeldModel) -> None:
        """Give a tenant a model, or the same one with layers: its own of before, or one that was kept."""
        if tenant.model is None or not tenant.model.is_same(model):
            found = next((kept for kept in self.kept if kept.is_same(model)), None)
            if found is not None:
                self.kept.remove(found)
            if not tenant.claim.is_shared or (found is None and len(self.tenants) == 1):
                self.kept.clear()  # what else was here is nobody's any more
            tenant.model = found or model
        assert tenant.model is not None
        tenant.model.use_caches(coded=False)
        tenant.assignment = None
        tenant.has_given_way = False
        self.room.leave(tenant.owner)
        self.on_layers_changed(tenant.owner)

    async def require_layer_room(self, owner: str, model: HeldModel, layer_id: int) -> None:
        """Check that one more layer's weights fit beside those that are held, and what others were promised.

        Args:
            owner: of the model; empty for nobody yet.

        Raises:
            RequestRefusedError: they do not (OUT_OF_MEMORY).
        """
        try:
            model.require_room(
                layer_id,
                layer_id + 1,
                num_tokens=0,
                num_sessions=0,
                limit_bytes=(self.room.promised(owner) or self.unpromised_bytes(owner))
                - model.held_bytes,
            )
        except CapacityError as exc:
            raise RequestRefusedError(str(exc), code=ErrorCode.OUT_OF_MEMORY) from exc
        if owner not in self.room:
            await self._reclaim(owner, model.costs[layer_id].weight_bytes)

    def note_received(self, source: WeightSource, num_bytes: int) -> None:
        """A layer of so many bytes came from there, and is loaded."""
        self.received_bytes[source] += num_bytes

    def note_held(self) -> None:
        """Tell the cache which blobs the models are made of: they are not to go."""
        self.blobs.use(layer.blob_id for model in self.models for layer in model.held.values())

    async def build_model(self, config: ModelConfig, *, seconds: float) -> HeldModel:
        """The model of a config, built here once a child process has proven it within so many seconds.

        Cancellation ends the child.

        Raises:
            RequestRefusedError: CONFIG_INVALID, MODEL_UNSUPPORTED or LIMIT_EXCEEDED, with the reason.
        """
        with refusing_config():
            proof = await result_of(proving(config), seconds=seconds)
        return await self.run_torch(HeldModel, config, proof, device=self.device)

    async def load_own_layer(
        self, owner: str, model: HeldModel, layer_id: int, *, only: bytes | None = None
    ) -> bool:
        """Load one layer from the worker's own checkpoint; False if it is not there.

        Args:
            owner: of the model; empty for nobody yet.
            only: the content id that it must have; None for whatever it has.

        Raises:
            CheckpointError: its file is broken.
            RequestRefusedError: it does not fit the model or the memory.
        """
        checkpoint = self.checkpoint
        if checkpoint is None or layer_id not in checkpoint.present_layers:
            return False
        if not checkpoint.has_form(model.quantization):
            return False
        blob = checkpoint.layer_blob(layer_id, model.quantization)
        blob_id = await trio.to_thread.run_sync(blob.blob_id)
        if only is not None and blob_id != only:
            return False

        def load() -> None:
            data = bytearray(blob.num_bytes)
            filled = 0
            with blob.held():
                for chunk in blob.chunks():
                    data[filled : filled + len(chunk)] = chunk
                    filled += len(chunk)
            model.load(layer_id, memoryview(data), blob_id, is_own=True)

        if layer_id in model.held:
            self.on_layers_changed(owner)
        else:
            await self.require_layer_room(owner, model, layer_id)
        await self.run_torch(load)
        self.note_received(WeightSource.OWN, blob.num_bytes)
        return True

    async def answer(
        self,
        message: TensorMessage,
        msg_type: MessageType,
        data: bytes = b"",
        *,
        layer_id: int | None = None,
    ) -> None:
        """Answer a message: to its sender, under its ids."""
        reply = replace(
            message,
            msg_type=msg_type,
            layer_id=message.layer_id if layer_id is None else layer_id,
            data=data,
            from_peer=None,
        )
        await self.protocol.send(sender_of(message), reply)

    def _busy(self, claim: Claim) -> RequestRefusedError:
        return RequestRefusedError(
            f"busy: this worker serves the coordinator {claim.owner}, and one of the two does not share it; try again "
            "when that has ended, or start another worker",
            code=ErrorCode.BUSY,
            retry_after=BUSY_RETRY_AFTER,
        )


def name_layers(layer_ids: Iterable[int]) -> str:
    """Layers for an error's text, which must stay short: `layers 1, 2, 3 and 9 more`."""
    ids = sorted(layer_ids)
    shown = ", ".join(map(str, ids[:MAX_LAYERS_NAMED]))
    more = f" and {len(ids) - MAX_LAYERS_NAMED} more" if len(ids) > MAX_LAYERS_NAMED else ""
    return f"layer{'s' if len(ids) > 1 else ''} {shown}{more}"
