"""The adapters that a tenant has beside its layers: fetched when a session is opened with one, kept for the next.

A part is known by the blob that it came as; sessions whose adapters have the same part share it. Parts that no session
has open stay, the longest unused going first, as long as there is room beside what the assignment agreed on.

Source: protocol_spec/sessions.md, "Adapters".
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Final
from weakref import WeakValueDictionary

import trio

from neurogrid.errors import (
    CapacityError,
    CheckpointError,
    PeerRefusedError,
    RemoteProtocolError,
    RequestRefusedError,
    TransportError,
    UnsupportedModelError,
)
from neurogrid.exception_groups import unwrap_errors
from neurogrid.model.adapters import Adapter, LayerAdapter, max_part_bytes
from neurogrid.p2p.transfer import StoredBlob
from neurogrid.p2p.wire import BLOB_ID_BYTES, MAX_LAYER_ADAPTERS, ErrorCode, SessionOpen
from neurogrid.worker.held_model import HeldModel
from neurogrid.worker.state import WeightSource, WorkerState
from neurogrid.worker.transfers import TransferService

__all__ = ["WorkerAdapters"]

logger = logging.getLogger(__name__)

# Parts that are fetched at once: a coordinator of ours serves one peer four blobs.
FETCHES: Final = 3
# Whoever opens a session waits about as long. Seconds.
FETCH_TIMEOUT: Final = 120.0
# A coordinator that gives blobs to many others is asked again after so long, unless it says. Seconds.
BUSY_DELAY: Final = 0.5
# What a coordinator is told to wait that wants one more than there may be. Seconds.
FULL_RETRY_AFTER: Final = 1.0

_Key = tuple[int, bytes]


class WorkerAdapters:
    """The parts of adapters that are here for one tenant.

    Args:
        owner: its peer id.
        in_use: the adapters of the sessions that are open.
    """

    def __init__(
        self,
        state: WorkerState,
        transfers: TransferService,
        owner: str,
        in_use: Callable[[], Iterable[Adapter]],
    ) -> None:
        self._state = state
        self._transfers = transfers
        self._owner = owner
        self._in_use = in_use
        self._lock = trio.Lock()
        # What was read for the layers of before is never put beside those of now: its shapes may be others.
        self._generation = 0
        # The longest unused first.
        self._parts: OrderedDict[_Key, LayerAdapter] = OrderedDict()
        self._adapters: WeakValueDictionary[tuple[int, bytes], Adapter] = WeakValueDictionary()

    def clear(self) -> None:
        """Forget all: the layers that they stand beside are being replaced, perhaps by those of another model."""
        self._generation += 1
        self._parts.clear()
        self._adapters.clear()
        self._note_bytes()

    async def take(self, model: HeldModel, opened: SessionOpen) -> Adapter:
        """The adapter that a session is to be opened with, fetched from its opener as far as it is not here.

        Raises:
            RequestRefusedError: it cannot be had, is none of this model's, or there is no room for it.
        """
        key = opened.start_layer, opened.adapter
        # Who has all of it waits for nobody's fetch.
        if (found := self._adapters.get(key)) is not None:
            return found
        async with self._lock:
            if (found := self._adapters.get(key)) is not None:
                return found
            tenant = self._state.tenants.get(self._owner)
            if tenant is None or tenant.model is not model:
                raise _replaced()
            generation, ids = self._generation, _ids(opened)
            self._require_places(ids)
            await self._bring(model, ids, generation)
            self._require_same(generation)
            adapter = Adapter(
                {layer_id: self._parts[layer_id, blob] for layer_id, blob in ids.items()}
            )
            try:
                await self._state.run_torch(model.stage.take_adapter, adapter)
            except ValueError as exc:
                raise _replaced() from exc
            self._require_same(generation)
            self._adapters[key] = adapter
            return adapter

    def _require_same(self, generation: int) -> None:
        if self._generation != generation:
            raise _replaced()

    async def _bring(self, model: HeldModel, ids: Mapping[int, bytes], generation: int) -> None:
        """Have the parts in the table, all of them or as many as came before one that failed."""
        missing = [each for each in ids.items() if each not in self._parts]
        for each in ids.items():
            if each in self._parts:
                self._parts.move_to_end(each)

        async def fetch() -> None:
            while missing:
                layer_id, blob_id = missing.pop(0)
                part = await self._read(model, layer_id, blob_id)
                self._require_same(generation)
                self._make_room(layer_id, part.num_bytes, keep=ids)
                self._parts[layer_id, blob_id] = part
                self._note_bytes()

        with unwrap_errors():
            async with trio.open_nursery() as nursery:
                for _ in range(FETCHES):
                    nursery.start_soon(fetch)

    async def _read(self, model: HeldModel, layer_id: int, blob_id: bytes) -> LayerAdapter:
        state, linears = self._state, model.stage.linear_layers(layer_id)
        most = max_part_bytes(linears)
        stored = await state.blobs.load(blob_id, max_bytes=most)
        source = WeightSource.DISK
        if stored is None:
            stored = await self._fetch(layer_id, blob_id, most)
            source = WeightSource.COORDINATOR

        def read() -> LayerAdapter:
            return LayerAdapter.read(stored.data, linears, device=state.device)

        try:
            part = await state.run_torch(read)
        except (CheckpointError, UnsupportedModelError) as exc:
            raise _refused(layer_id, exc, ErrorCode.TRANSFER_INVALID) from exc
        except MemoryError as exc:
            raise _refused(layer_id, exc, ErrorCode.OUT_OF_MEMORY) from exc
        if source is WeightSource.COORDINATOR:
            await state.blobs.keep(stored)
        state.note_received(source, stored.num_bytes)
        return part

    async def _fetch(self, layer_id: int, blob_id: bytes, max_bytes: int) -> StoredBlob:
        deadline = trio.current_time() + FETCH_TIMEOUT
        while True:
            try:
                return await self._transfers.fetch(
                    self._owner, blob_id, max_bytes=max_bytes, timeout=FETCH_TIMEOUT
                )
            except PeerRefusedError as exc:
                delay = exc.retry_after or BUSY_DELAY
                if exc.code != ErrorCode.BUSY or trio.current_time() + delay > deadline:
                    raise _refused(layer_id, exc, exc.code) from exc
                await trio.sleep(delay)
            except RemoteProtocolError as exc:
                raise _refused(layer_id, exc, exc.code) from exc
            except CapacityError as exc:
                is_too_large = exc.needed > max_bytes
                code = ErrorCode.LIMIT_EXCEEDED if is_too_large else ErrorCode.OUT_OF_MEMORY
                raise _refused(layer_id, exc, code) from exc
            except TransportError as exc:
                raise _refused(layer_id, exc, ErrorCode.DEADLINE_EXCEEDED) from exc

    def _used(self) -> set[int]:
        """The parts that open sessions have, by their identities."""
        return {id(part) for adapter in self._in_use() for part in adapter.layers.values()}

    def _require_places(self, ids: Mapping[int, bytes]) -> None:
        """Check that no layer comes to have more adapters open than there may be."""
        used = self._used()
        counts = Counter(
            layer_id for (layer_id, _), part in self._parts.items() if id(part) in used
        )
        for layer_id, blob_id in ids.items():
            mine = self._parts.get((layer_id, blob_id))
            if counts[layer_id] >= MAX_LAYER_ADAPTERS and (mine is None or id(mine) not in used):
                raise RequestRefusedError(
                    f"sessions with {MAX_LAYER_ADAPTERS} adapters are open in layer {layer_id}, and there are no more "
                    "at once",
                    code=ErrorCode.SESSION_LIMIT,
                    retry_after=FULL_RETRY_AFTER,
                )

    def _make_room(self, layer_id: int, num_bytes: int, *, keep: Mapping[int, bytes]) -> None:
        """Let unused parts go, until there is room for one more.

        Raises:
            RequestRefusedError: there is none even then (OUT_OF_MEMORY).
        """
        used = self._used()
        idle = [
            key
            for key, part in self._parts.items()
            if id(part) not in used and keep.get(key[0]) != key[1]
        ]
        while True:
            num_here = sum(layer == layer_id for layer, _ in self._parts)
            missing = num_bytes - self._room()
            if num_here < MAX_LAYER_ADAPTERS and missing <= 0:
                return
            here = [key for key in idle if key[0] == layer_id or missing > 0]
            if not here:
                raise RequestRefusedError(
                    f"the adapter takes {num_bytes:,} B in layer {layer_id}, and {max(missing, 0):,} B of them are "
                    "missing beside the layers and the sessions that were agreed",
                    code=ErrorCode.OUT_OF_MEMORY,
                )
            idle.remove(here[0])
            del self._parts[here[0]]
            self._note_bytes()

    def _room(self) -> int:
        """Bytes that are left beside layers, agreed sessions, the parts that are here, and what others have."""
        if self._owner not in self._state.room:
            return 0
        return self._state.unpromised_bytes(self._owner)

    @property
    def _num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts.values())

    def _note_bytes(self) -> None:
        """Have the room know what is beside the layers."""
        self._state.room.set_beside(self._owner, self._num_bytes)


def _ids(opened: SessionOpen) -> dict[int, bytes]:
    """The blob of each layer that has a part."""
    ids = {
        opened.start_layer + number: opened.adapter[start : start + BLOB_ID_BYTES]
        for number, start in enumerate(range(0, len(opened.adapter), BLOB_ID_BYTES))
    }
    return {layer_id: blob_id for layer_id, blob_id in ids.items() if any(blob_id)}


def _replaced() -> RequestRefusedError:
    return RequestRefusedError(
        "the layers were replaced while the adapter came", code=ErrorCode.LAYER_NOT_HELD
    )


def _refused(layer_id: int, exc: Exception, code: int) -> RequestRefusedError:
    return RequestRefusedError(f"the adapter's part in layer {layer_id}: {exc}", code=code)
