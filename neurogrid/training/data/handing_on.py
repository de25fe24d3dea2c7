"""Handing on to other peers: slices that a member has, to a few at a time, and files of its own to any that asks.

A member is there to train. So that slices take neither its line nor its processor, two of them go out at a time. A
peer that comes then waits a moment, and is told that the member is busy: it asks another one.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, Protocol

import trio

from neurogrid.errors import RequestRefusedError
from neurogrid.p2p.transfer import BlobSource
from neurogrid.p2p.wire import ErrorCode
from neurogrid.training.data.blobs import Provider, Providers

__all__ = ["MAX_HANDED_ON", "HandingOn", "SliceProvider"]

MAX_HANDED_ON: Final = 2
"""Slices that a member sends at a time."""

# Seconds that a peer waits for its turn: fewer than it waits for an answer.
_TURN: Final = 5.0
# Seconds after which it may ask again.
_RETRY_AFTER: Final = 10.0


class SliceProvider(Provider, Protocol):
    """Provider of some slices."""

    def holds(self, blob_id: bytes) -> bool:
        """Whether there is a file for a slice."""


class HandingOn(Providers):
    """A policy that takes nothing, and gives slices, a few at a time, and what its providers have besides.

    Args:
        providers: have other blobs.
        max_at_once: slices that go out at a time.

    Attributes:
        slices: have slices, and are asked in this order; more may be added at any time.
    """

    def __init__(self, *providers: Provider, max_at_once: int = MAX_HANDED_ON) -> None:
        super().__init__(*providers)
        self.slices: list[SliceProvider] = []
        self._max_at_once, self._turns = max_at_once, trio.Semaphore(max_at_once)
        self._under_way: Counter[tuple[str, bytes]] = Counter()

    async def provide(self, peer_id: str, blob_id: bytes) -> BlobSource | None:
        """See `TransferPolicy.provide`.

        Raises:
            RequestRefusedError: as many slices as may go out do already (BUSY).
        """
        if (source := await super().provide(peer_id, blob_id)) is not None:
            return source
        holders = [each for each in self.slices if each.holds(blob_id)]
        if not holders:
            return None
        await self._wait_turn()
        found: BlobSource | None = None
        try:
            for holder in holders:
                if (found := await holder.provide(peer_id, blob_id)) is not None:
                    break
        finally:
            if found is None:
                self._turns.release()
        if found is not None:
            self._under_way[peer_id, blob_id] += 1
        return found

    def served(self, peer_id: str, blob_id: bytes) -> None:
        """See `TransferPolicy.served`."""
        key = peer_id, blob_id
        if not self._under_way[key]:  # no slice
            del self._under_way[key]
            return
        self._under_way[key] -= 1
        if not self._under_way[key]:
            del self._under_way[key]
        self._turns.release()

    async def _wait_turn(self) -> None:
        with trio.move_on_after(_TURN):
            await self._turns.acquire()
            return
        raise RequestRefusedError(
            f"{self._max_at_once} slices are being sent already",
            code=ErrorCode.BUSY,
            retry_after=_RETRY_AFTER,
        )
