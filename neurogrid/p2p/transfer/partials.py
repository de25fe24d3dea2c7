"""The blobs that come in now, and what is kept of those that stopped coming, by content and not by sender.

Transfers of one blob into one store share what is there, so that it does not matter who offers it again. Idle
blobs are bounded by number, bytes and time, and the oldest go first.
"""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import trio

from neurogrid.p2p.transfer.chunks import BlobInfo
from neurogrid.p2p.transfer.limits import TransferLimits
from neurogrid.p2p.transfer.store import BlobStore, PartialBlob, StoredBlob
from neurogrid.p2p.wire import Data, chunk_digest

__all__ = ["Added", "PartialTable", "SharedBlob"]

logger = logging.getLogger(__name__)

R = TypeVar("R")

# The length is part of the key: it is not part of the id, and a liar's would spoil what an honest peer sends.
_Key = tuple[BlobStore, bytes, int]


class Added(enum.Enum):
    """The outcome of a chunk."""

    NEW = enum.auto()
    AGAIN = enum.auto()  # it was there, with the same bytes
    WRONG = enum.auto()  # not the bytes that were announced; they were not kept


class SharedBlob:
    """A blob that is open: what is there, and the transfers to tell when it is whole.

    Attributes:
        info: what it is to be.
        partial: what is there; None until its store has opened it.
        stored: the whole blob, once it is.
        lock: held while a chunk is verified and written.
        last_progress: when the last new chunk came, from any peer; trio's clock.
        on_stored: called, by the transfers that wait, when the blob is whole.
    """

    def __init__(self, key: _Key, info: BlobInfo) -> None:
        self.key = key
        self.info = info
        self.partial: PartialBlob | None = None
        self.stored: StoredBlob | None = None
        self.lock = trio.Lock()
        self.last_progress = -math.inf
        self.on_stored: dict[object, Callable[[], None]] = {}
        self.num_users = 0
        self.idle_since = math.inf

    @property
    def is_idle(self) -> bool:
        """Whether no transfer uses it."""
        return not self.num_users

    @property
    def num_received(self) -> int:
        """Chunks that are there."""
        return len(self.partial.chunks) if self.partial is not None else 0

    @property
    def kept_bytes(self) -> int:
        """Bytes that are there."""
        return self.partial.kept_bytes if self.partial is not None else 0


class PartialTable:
    """The blobs that are open or idle. `spawn(function)` starts a task: `Host.start_soon`."""

    def __init__(self, spawn: Callable[..., None], limits: TransferLimits) -> None:
        self._spawn = spawn
        self._limits = limits
        # Of their own: a slow disk must not take the threads that others wait for.
        self._threads = trio.CapacityLimiter(limits.hash_threads)
        self._blobs: dict[_Key, SharedBlob] = {}
        self._is_forgetting = False

    @property
    def idle(self) -> list[SharedBlob]:
        """Blobs that are kept in memory for a later offer, oldest first."""
        found = [blob for blob in self._blobs.values() if blob.is_idle]
        return sorted(found, key=lambda blob: blob.idle_since)

    @property
    def open_bytes(self) -> int:
        """Bytes that are there of the blobs that are coming."""
        return sum(blob.kept_bytes for blob in self._blobs.values() if not blob.is_idle)

    async def open(self, store: BlobStore, info: BlobInfo) -> SharedBlob:
        """The blob with what is there of it, for one more transfer; `close` it afterwards.

        Raises:
            RequestRefusedError: the store has no room.
        """
        key = (store, info.blob_id, info.num_bytes)
        shared = self._blobs.setdefault(key, SharedBlob(key, info))
        shared.num_users += 1
        try:
            async with shared.lock:
                if shared.partial is None:
                    shared.partial = await self._run(lambda: store.open(info))
                await self._finish_if_full(shared)
        except BaseException:  # also cancelled: else it would stay open
            self.close(shared)
            raise
        return shared

    async def add(self, shared: SharedBlob, chunks: Sequence[tuple[int, Data]]) -> list[Added]:
        """Verify chunks, by their numbers, and keep them; the caller holds the lock.

        Returns what became of each, up to the first that is wrong.

        Raises:
            RequestRefusedError: the store has no room; what came before is kept.

        A chunk that is being written is finished before this is cancelled.
        """
        partial = shared.partial
        assert partial is not None
        added: list[Added] = []

        def verify_and_write() -> None:
            for index, data in chunks:
                if chunk_digest(data) != shared.info.chunk_digest(index):
                    added.append(Added.WRONG)
                    return
                if index in partial.chunks:
                    added.append(Added.AGAIN)
                else:
                    partial.write(index, data)
                    added.append(Added.NEW)

        try:
            await self._run(verify_and_write)
        finally:
            for (index, _), became in zip(chunks, added, strict=False):
                if became is Added.NEW:
                    partial.chunks.add(index)
                    shared.last_progress = trio.current_time()
        await self._finish_if_full(shared)
        return added

    def close(self, shared: SharedBlob) -> None:
        """A transfer is over; without any other, what is there becomes idle."""
        shared.num_users -= 1
        if not shared.is_idle:
            return
        partial = shared.partial
        if partial is None or shared.stored is not None or not partial.chunks:
            if partial is not None and shared.stored is None:
                partial.discard()
            self._forget(shared)
        elif partial.is_durable:
            partial.suspend()
            self._forget(shared)
        else:
            shared.idle_since = trio.current_time()
            self._forget_excess()
            if not self._is_forgetting and self.idle:
                self._is_forgetting = True
                self._spawn(self._forget_late)

    async def _finish_if_full(self, shared: SharedBlob) -> None:
        assert shared.partial is not None
        if shared.stored is None and shared.partial.chunks.is_full:
            shared.stored = await self._run(shared.partial.finish)
            # From now on an offer of the same blob is another story.
            self._forget(shared)
            for tell in list(shared.on_stored.values()):
                tell()

    async def _run(self, function: Callable[[], R]) -> R:
        return await trio.to_thread.run_sync(function, limiter=self._threads)

    def _forget(self, shared: SharedBlob) -> None:
        if self._blobs.get(shared.key) is shared:
            del self._blobs[shared.key]

    def _forget_excess(self) -> None:
        idle = self.idle
        num_bytes = sum(blob.kept_bytes for blob in idle)
        now = trio.current_time()
        while idle and (
            len(idle) > self._limits.max_idle_blobs
            or num_bytes > self._limits.max_idle_bytes
            or now - idle[0].idle_since >= self._limits.idle_timeout
        ):
            oldest = idle.pop(0)
            num_bytes -= oldest.kept_bytes
            assert oldest.partial is not None
            logger.info(
                "dropped %d of %d chunks of blob %s, which nobody offered again",
                len(oldest.partial.chunks),
                oldest.info.num_chunks,
                oldest.info.short_id,
            )
            oldest.partial.discard()
            self._forget(oldest)

    async def _forget_late(self) -> None:
        """Runs while anything is idle."""
        try:
            while idle := self.idle:
                await trio.sleep_until(idle[0].idle_since + self._limits.idle_timeout)
                self._forget_excess()
        finally:
            self._is_forgetting = False
