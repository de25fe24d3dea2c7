"""Transfers of layers to a worker: those whose bytes it takes, how large they may be, and what becomes of them.

How blobs travel is the library's affair (`neurogrid.p2p.transfer`); this is its policy for a worker. A layer counts as
held only under the content id that was offered; it is acknowledged once it is loaded, and Ready follows when the last
layer of the assignment is usable. Config and assignment come before, in `layers`.

Source: protocol_spec/sessions.md, protocol_spec/transfers.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import trio

from neurogrid.errors import CheckpointError, RequestRefusedError
from neurogrid.model.unused_memory import give_back_memory
from neurogrid.node.roles import require_role
from neurogrid.p2p.streams.message_forms import sender_of
from neurogrid.p2p.transfer import (
    DEFAULT_TRANSFER_LIMITS,
    BlobSource,
    Held,
    MemoryStore,
    OfferedBlob,
    StoredBlob,
    TransferLimits,
    TransferPolicy,
    Transfers,
    Wanted,
)
from neurogrid.p2p.trust import COORDINATOR
from neurogrid.p2p.wire import (
    MAX_BLOB_BYTES,
    ErrorCode,
    MessageType,
    Ready,
    TensorMessage,
    WeightsChunk,
)
from neurogrid.worker.held_model import HeldModel
from neurogrid.worker.sources import BlobSources
from neurogrid.worker.state import MAX_TENANTS, WeightSource, WorkerState
from neurogrid.worker.tenant import Assignment, Tenant

__all__ = ["MAX_TRANSFERS", "TransferService", "require_size"]

logger = logging.getLogger(__name__)

# A layer's file may be wider than what it is computed in (float32 for bfloat16), and carries a header.
MAX_BLOB_RATIO = 4
BLOB_HEADROOM = 4 * 1024 * 1024
# Unfinished layers of one peer at once: a coordinator of ours has two under way.
MAX_TRANSFERS = 8
# Of the worker's memory, for layers that a lost coordinator left half done: the next plan needs the rest.
MAX_IDLE_SHARE = 1 / 8


class TransferService(TransferPolicy):
    """Takes weights in, once it is registered.

    Args:
        on_gave_up: called with the id of a peer that stopped in the middle of a layer.
    """

    def __init__(self, state: WorkerState, *, on_gave_up: Callable[[str], None]) -> None:
        self._state = state
        self._transfers: Transfers | None = None
        self._sources = BlobSources(state.protocol.host)
        self._on_gave_up = on_gave_up

    def register(self) -> None:
        """Serve the messages of this service on the worker's protocol."""
        state = self._state
        limits = TransferLimits(
            max_transfers_per_peer=MAX_TRANSFERS,
            max_transfers=MAX_TENANTS * MAX_TRANSFERS,
            # What a layer may have is known here, by the model's own config.
            max_bytes_per_peer=MAX_TRANSFERS * MAX_BLOB_BYTES,
            max_bytes=MAX_TENANTS * MAX_TRANSFERS * MAX_BLOB_BYTES,
            silence_timeout=state.settings.transfer_timeout,
            max_idle_bytes=min(
                DEFAULT_TRANSFER_LIMITS.max_idle_bytes,
                int(state.memory().total_bytes * MAX_IDLE_SHARE),
            ),
        )
        self._transfers = Transfers(state.protocol, self, limits=limits)
        state.protocol.on_message(
            MessageType.WEIGHTS, self._refuse_plain, when=lambda message: message.request_id == 0
        )

    def forget(self, peer_id: str, *, layer_id: int | None = None) -> None:
        """End the unfinished transfers of a peer, of one layer or of all.

        What came is kept for a while, for another offer of the same bytes.
        """
        if self._transfers is not None:
            self._transfers.forget(peer_id, layer_id=layer_id)

    async def fetch(
        self, peer_id: str, blob_id: bytes, *, max_bytes: int, timeout: float
    ) -> StoredBlob:
        """A blob that is no layer's, from a peer that has it.

        Raises:
            PeerRefusedError, RemoteProtocolError, TransportError, CapacityError: as `Transfers.fetch_blob`.
        """
        assert self._transfers is not None
        fetched = await self._transfers.fetch_blob(
            peer_id, blob_id, max_bytes=max_bytes, offer_timeout=timeout
        )
        return fetched.blob

    # What the library asks

    def authorize(self, peer_id: str) -> None:
        """Let only coordinators that are served send weights unasked."""
        host = self._state.protocol.host
        require_role(host, peer_id, [COORDINATOR], what="an offer that nobody asked for")
        self._state.require_tenant(peer_id)

    def authorize_request(self, peer_id: str) -> None:
        """Let any admitted peer that knows a blob's id have the blob: other workers fetch theirs here."""

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        """Return a blob that is here, for another worker. One that the coordinator sent here may come too late."""
        source = self._state.blobs.source(blob_id)
        if source is None:
            raise RequestRefusedError(
                f"blob {blob_id.hex()} is not here", code=ErrorCode.BLOB_UNKNOWN, is_expected=True
            )
        return source

    async def decide(self, offered: OfferedBlob) -> Held | Wanted:
        """Take a layer that is assigned here and not held under this very id."""
        state, layer_id = self._state, offered.layer_id
        tenant, _ = state.require_tenant(offered.peer_id)
        async with tenant.lock:
            model = state.require_still(tenant)
            assignment = tenant.assignment
            if assignment is None or layer_id not in assignment:
                raise RequestRefusedError(
                    f"layer {layer_id} was offered, and is not assigned to this worker",
                    code=ErrorCode.TRANSFER_INVALID,
                )
            if await self._holds(tenant, model, offered):
                self._confirm(tenant, assignment, layer_id)
                return Held()
            require_size(model, layer_id, offered.info.num_bytes)
            self.forget(offered.peer_id, layer_id=layer_id)
        place = _Place(tenant, model, assignment)
        info = offered.info
        stored = await state.blobs.load(info.blob_id, max_bytes=info.num_bytes)
        if stored is not None:
            await self._use(offered, place, stored)
            state.note_received(WeightSource.DISK, stored.num_bytes)
            return Held()
        store = MemoryStore()
        if offered.sources:
            assert self._transfers is not None
            stored = await self._sources.fetch(self._transfers, offered, store)
        if stored is None:
            source = WeightSource.COORDINATOR
            return Wanted(store, partial(self._take, source, offered, place))
        await self._take(WeightSource.WORKER, offered, place, stored)
        return Held()

    async def acknowledged(self, offered: OfferedBlob) -> None:
        """Say Ready after the last layer."""
        tenant = self._state.tenants.get(offered.peer_id)
        if tenant is not None and tenant.assignment is not None:
            await self._announce_ready(tenant, tenant.assignment)

    def gave_up(self, offered: OfferedBlob, reason: str) -> None:
        """A coordinator that stops in the middle of a layer is stuck: others may have its part of the worker."""
        logger.warning("%s (from %s)", reason, offered.peer_id)
        self._on_gave_up(offered.peer_id)

    async def _holds(self, tenant: Tenant, model: HeldModel, offered: OfferedBlob) -> bool:
        """Whether the offered bytes are here, in memory or on disk; loads them from disk if so."""
        layer_id, blob_id = offered.layer_id, offered.info.blob_id
        held = model.held.get(layer_id)
        if held is not None and held.blob_id == blob_id:
            return True
        try:
            return await self._state.load_own_layer(tenant.owner, model, layer_id, only=blob_id)
        except (CheckpointError, RequestRefusedError) as exc:
            logger.warning("cannot use layer %d of the own model: %s", layer_id, exc)
            return False

    async def _take(
        self, source: WeightSource, offered: OfferedBlob, place: _Place, stored: StoredBlob
    ) -> None:
        """Load a layer that came, and keep its bytes for the next start."""
        await self._use(offered, place, stored)
        self._state.note_received(source, stored.num_bytes)
        name = place.model.fingerprint.hex()
        await self._state.blobs.keep(stored, model=name, layer_id=offered.layer_id)

    async def _use(self, offered: OfferedBlob, place: _Place, stored: StoredBlob) -> None:
        """Load a layer that is here, for the assignment that it was offered for."""
        layer_id, (tenant, model, assignment) = offered.layer_id, place
        async with tenant.lock:
            is_there = self._state.tenants.get(tenant.owner) is tenant
            if not is_there or tenant.model is not model or tenant.assignment is not assignment:
                raise RequestRefusedError(
                    f"layer {layer_id} came for an assignment that is no more",
                    code=ErrorCode.TRANSFER_INVALID,
                )
            held = model.held.get(layer_id)
            if held is None or held.blob_id != offered.info.blob_id:
                await self.load(tenant, model, layer_id, stored.data, offered.info.blob_id)
            self._confirm(tenant, assignment, layer_id)

    def _confirm(self, tenant: Tenant, assignment: Assignment, layer_id: int) -> None:
        assignment.confirmed.add(layer_id)
        self._state.room.came(tenant.owner, trio.current_time())

    def _refuse_plain(self, message: TensorMessage) -> None:
        """Refuse a chunk of which nothing says what its bytes should be."""
        WeightsChunk.require_numbers(message.data)
        self._state.require_tenant(sender_of(message))
        raise RequestRefusedError(
            f"weights of layer {message.layer_id} came without an accepted offer",
            code=ErrorCode.TRANSFER_INVALID,
        )

    async def load(
        self, tenant: Tenant, model: HeldModel, layer_id: int, data: memoryview, blob_id: bytes
    ) -> None:
        """Put a layer's bytes in the place of what is held of it; the caller has the tenant's lock."""
        state = self._state
        if layer_id in model.held:
            # Caches that the old weights made are of no use with the new ones.
            state.on_layers_changed(tenant.owner)
            if tenant.assignment is not None:
                tenant.assignment.confirmed.discard(layer_id)
            await state.run_torch(model.drop, layer_id)
        await state.require_layer_room(tenant.owner, model, layer_id)
        await state.run_torch(model.load, layer_id, data, blob_id)
        state.note_held()

    async def _announce_ready(self, tenant: Tenant, assignment: Assignment) -> None:
        state = self._state
        if assignment.is_announced or not assignment.is_ready:
            return
        assignment.is_announced = True
        await state.run_torch(give_back_memory)
        if assignment is not tenant.assignment or tenant.model is None:
            return
        state.room.ready(tenant.owner, trio.current_time())
        ready = Ready(
            assignment.start,
            assignment.stop,
            tenant.model.has_same_bits(assignment.start, assignment.stop),
        )
        logger.log(
            state.settings.says_at,
            "layers %d to %d are ready",
            *(assignment.start, assignment.stop - 1),
        )
        await state.protocol.send(
            tenant.owner,
            TensorMessage(
                msg_type=MessageType.READY,
                request_id=assignment.request_id,
                data=ready.encode(),
            ),
        )


class _Place(NamedTuple):
    """Place of a layer that was offered; it is gone once the tenant has another model or assignment."""

    tenant: Tenant
    model: HeldModel
    assignment: Assignment


def require_size(model: HeldModel, layer_id: int, num_bytes: int) -> None:
    """Refuse a blob that is larger than the layer can be (LIMIT_EXCEEDED)."""
    limit = MAX_BLOB_RATIO * model.costs[layer_id].weight_bytes + BLOB_HEADROOM
    if num_bytes > limit:
        raise RequestRefusedError(
            f"layer {layer_id} was announced with {num_bytes:,} B or more; by its config it has at "
            f"most {limit:,} B",
            code=ErrorCode.LIMIT_EXCEEDED,
        )
