"""A peer that goes when all of its blob has come: the blob is here."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from random import Random
from typing import Any

import trio

from neurogrid.p2p.transfer import (
    BlobInfo,
    BlobStore,
    BytesSource,
    MemoryStore,
    StoredBlob,
    Transfers,
)
from neurogrid.p2p.transfer.store import PartialBlob
from neurogrid.p2p.wire import CHUNK_BYTES, Data
from tests.unit.transfer_peers import Taking, two_protocols

BLOB = Random(11).randbytes(CHUNK_BYTES + 9)
SOURCE = BytesSource(BLOB)
INFO = BlobInfo.of_digests(SOURCE.digests(), len(BLOB))


class Late(PartialBlob):
    """Another, before whose end something is awaited."""

    is_durable = False

    def __init__(self, other: PartialBlob, first: Callable[[], Coroutine[Any, Any, None]]) -> None:
        super().__init__(other.info, other.chunks)
        self._other, self._first = other, first

    def write(self, index: int, data: Data) -> None:
        self._other.write(index, data)

    def suspend(self) -> None:
        self._other.suspend()

    def discard(self) -> None:
        self._other.discard()

    def finish(self) -> StoredBlob:
        trio.from_thread.run(self._first)
        return self._other.finish()


class Before(BlobStore):
    """Memory; `first` is awaited when all chunks are there, before the blob is whole."""

    def __init__(self, first: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._first = first

    def open(self, info: BlobInfo) -> PartialBlob:
        return Late(MemoryStore().open(info), self._first)


async def test_a_blob_whose_sender_cannot_be_told_any_more_is_here() -> None:
    async with two_protocols() as (giver, taker):
        Transfers(giver, Taking({INFO.blob_id: SOURCE}))
        transfers = Transfers(taker)
        peer_id = giver.host.peer_id
        store = Before(partial(taker.host.disconnect, peer_id))
        with trio.fail_after(60):
            fetched = await transfers.fetch_blob(peer_id, INFO.blob_id, store=store)
        assert fetched.blob.data == BLOB
        assert not taker.host.is_connected(peer_id)
