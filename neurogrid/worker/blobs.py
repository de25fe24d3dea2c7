"""The layers' bytes that a worker has: in memory as long as its model uses them, on disk for the next start.

A layer that has come is written to the cache while the next one comes; from either place it is served to any peer that
asks by its id. Which layer of which model is where on disk is noted, as a hint for the coordinator. Knows neither
peers nor torch.
"""

from __future__ import annotations

import json
import logging
import mmap
import weakref
from collections.abc import Iterable
from typing import Final

import trio

from neurogrid.node.cache_directory import CacheSettings, open_directory
from neurogrid.p2p.transfer import BlobCache, BlobInfo, BlobSource, StoredBlob
from neurogrid.p2p.wire import MAX_LAYERS
from neurogrid.renewed_event import RenewedEvent

__all__ = ["WorkerBlobs"]

logger = logging.getLogger(__name__)

# What may wait to be written to disk. On a CPU the model has the same memory anyway; on a GPU this much of the host's
# is taken, and then the sender is kept waiting.
MAX_WAITING_BYTES: Final = 4 * 1024**3


# The disk waits until nothing has come for so long, unless so much waits for it: writing takes a third of the time that
# receiving does, which the first token would wait for. What a worker that is killed loses by that is sent again.
QUIET: Final = 1.0  # seconds
MAX_PATIENT_BYTES: Final = 1024**3


class WorkerBlobs:
    """The blobs of one worker. Keep `run` running.

    Args:
        cache: where they are kept on disk, and None for nowhere.

    Raises:
        ConfigurationError: the cache cannot be used, and must be.
    """

    def __init__(self, settings: CacheSettings | None) -> None:
        self._cache: BlobCache | None = None
        if settings is not None:
            blobs, models = (open_directory(settings, name) for name in ("blobs", "models"))
            if blobs is not None:
                self._cache = BlobCache(blobs, max_bytes=settings.max_bytes, notes=models)
        # As long as tensors lie in the pages of a blob, it can be served from there, at no cost.
        self._in_memory: dict[bytes, tuple[BlobInfo, weakref.ref[mmap.mmap]]] = {}
        self._on_disk: dict[bytes, BlobInfo] = {}
        self._used: set[bytes] = set()
        self._waiting: list[tuple[StoredBlob, str, int]] = []
        self._waiting_bytes = 0
        self._last_came = 0.0
        self._is_hurried = False
        self._changed = RenewedEvent()

    async def load(self, blob_id: bytes, *, max_bytes: int) -> StoredBlob | None:
        """The blob from the disk, verified, or one that waits to be written there; None if it is neither, or broken.

        Raises:
            RequestRefusedError: there is no memory for it.
        """
        for waiting, _, _ in self._waiting:
            if waiting.info.blob_id == blob_id and waiting.num_bytes <= max_bytes:
                return waiting
        cache = self._cache
        if cache is None or blob_id not in cache:
            return None
        stored = await trio.to_thread.run_sync(lambda: cache.load(blob_id, max_bytes=max_bytes))
        if stored is not None:
            self._on_disk[blob_id] = stored.info
            self._remember(stored)
        return stored

    async def keep(self, stored: StoredBlob, *, model: str = "", layer_id: int = 0) -> None:
        """A blob has come for a layer of a model, or for none: serve it from now on, and write it to disk soon.

        Waits while too much waits for the disk.
        """
        self._remember(stored)
        if self._cache is None:
            return
        while self._waiting and self._waiting_bytes + stored.num_bytes > MAX_WAITING_BYTES:
            await self._changed.wait()
        self._last_came = trio.current_time()
        self._waiting.append((stored, model, layer_id))
        self._waiting_bytes += stored.num_bytes
        self._note_change()

    async def run(self) -> None:
        """Write what has come, one blob at a time; runs as long as the worker. Afterwards nothing is in use."""
        cache = self._cache
        if cache is None:
            return
        try:
            while True:
                await self._wait_for_turn()
                stored, model, layer_id = self._waiting[0]
                if await trio.to_thread.run_sync(cache.store, stored):
                    self._on_disk[stored.info.blob_id] = stored.info
                    if model:
                        await trio.to_thread.run_sync(
                            self._note_layer, model, layer_id, stored.info.blob_id
                        )
                self._pin()
                self._forget_gone()  # to store one may drop others
                self._waiting_bytes -= stored.num_bytes
                del self._waiting[0], stored
                self._note_change()
        finally:
            cache.close()

    async def flush(self) -> None:
        """Return when all that has come is written to disk; from now on that is done at once."""
        self._is_hurried = True
        self._note_change()
        while self._waiting:
            await self._changed.wait()

    def use(self, blob_ids: Iterable[bytes]) -> None:
        """These are the blobs that the model is made of now: they stay on disk, others may go."""
        self._used = set(blob_ids)
        self._pin()
        self._forget_gone()

    def source(self, blob_id: bytes) -> BlobSource | None:
        """A blob that this worker was sent or has read from its disk; None if it is gone."""
        info, pages = self._in_memory.get(blob_id, (None, None))
        data = pages() if pages is not None else None
        if info is not None and data is not None:
            return StoredBlob(info, memoryview(data)[: info.num_bytes])
        if self._cache is not None and blob_id in self._on_disk:
            return self._cache.source(self._on_disk[blob_id])
        return None

    def disk_use(self) -> tuple[int, int] | tuple[None, None]:
        """Bytes that the cache takes, and may take; None where nothing is kept. Looks at every file."""
        return (
            (None, None) if self._cache is None else (self._cache.num_bytes, self._cache.max_bytes)
        )

    async def layers_on_disk(self, model: str) -> frozenset[int]:
        """The layers of a model that were written to disk once and are still there."""
        if self._cache is None:
            return frozenset()
        return await trio.to_thread.run_sync(self._layers_on_disk, model)

    def _forget_gone(self) -> None:
        """Forget blobs that are gone from memory, or from disk: a worker outlives many models and adapters."""
        cache = self._cache
        for blob_id, (_, pages) in list(self._in_memory.items()):
            if pages() is None:
                del self._in_memory[blob_id]
        for blob_id in list(self._on_disk):
            if cache is None or blob_id not in cache:
                del self._on_disk[blob_id]

    def _remember(self, stored: StoredBlob) -> None:
        self._forget_gone()
        if isinstance(stored.data.obj, mmap.mmap):
            pages = weakref.ref(stored.data.obj)
            self._in_memory[stored.info.blob_id] = (stored.info, pages)

    def _pin(self) -> None:
        assert self._cache is not None or not self._on_disk
        if self._cache is None:
            return
        for blob_id in self._cache.in_use - self._used:
            self._cache.release(blob_id)
        for blob_id in self._used:
            self._cache.use(blob_id)

    async def _wait_for_turn(self) -> None:
        """Wait until there is something to write, and the network is quiet or there is too much of it."""
        while not self._waiting:
            await self._changed.wait()
        while (
            not self._is_hurried
            and self._waiting_bytes < MAX_PATIENT_BYTES
            and trio.current_time() < self._last_came + QUIET
        ):
            with trio.move_on_at(self._last_came + QUIET):
                await self._changed.wait()

    def _note_change(self) -> None:
        self._changed.set()

    # Hints: in threads

    def _layers_on_disk(self, model: str) -> frozenset[int]:
        assert self._cache is not None
        return frozenset(
            layer_id for layer_id, blob_id in self._noted(model).items() if blob_id in self._cache
        )

    def _note_layer(self, model: str, layer_id: int, blob_id: bytes) -> None:
        assert self._cache is not None
        noted = {**self._noted(model), layer_id: blob_id}
        table = {str(layer): blob.hex() for layer, blob in noted.items()}
        self._cache.note(model, json.dumps(table).encode())

    def _noted(self, model: str) -> dict[int, bytes]:
        assert self._cache is not None
        try:
            table = json.loads(self._cache.noted(model) or b"{}")
            noted = {int(layer): bytes.fromhex(blob) for layer, blob in table.items()}
        except (ValueError, AttributeError, TypeError):
            return {}  # a hint that cannot be read is none
        return {layer: blob for layer, blob in noted.items() if 0 <= layer < MAX_LAYERS}
