"""Two protocols on hosts in memory that are connected, and a policy that takes every blob."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from neurogrid.p2p import Protocol
from neurogrid.p2p.transfer import (
    BlobSource,
    MemoryStore,
    OfferedBlob,
    StoredBlob,
    TransferPolicy,
    Wanted,
)
from tests.unit.blocking_pair import open_two

__all__ = ["Taking", "two_protocols"]


@asynccontextmanager
async def two_protocols() -> AsyncIterator[tuple[Protocol, Protocol]]:
    """The first has dialled the second."""
    async with open_two() as (one, other):
        await one.connect(other.addresses[0])
        yield Protocol(one), Protocol(other)


class Taking(TransferPolicy):
    """Takes all that is offered, and gives the blobs of `given`, by id.

    Attributes:
        taken: what came, in order.
    """

    def __init__(self, given: dict[bytes, BlobSource] | None = None) -> None:
        self.given = given or {}
        self.taken: list[StoredBlob] = []

    async def decide(self, offered: OfferedBlob) -> Wanted:
        return Wanted(MemoryStore(), self._use)

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        return self.given.get(blob_id)

    async def _use(self, stored: StoredBlob) -> None:
        self.taken.append(stored)
