"""The stream of found and lost peers, for one reader.

A reader that is slow finds one entry for each peer, the latest, however often it came and went meanwhile: so the
stream is bounded by the number of peers, and nothing is lost but repetitions. A peer that was found and lost
again before the reader looked, it never hears of.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import trio

from neurogrid.p2p.discovery.known import PeerChange, PeerFound, PeerLost
from neurogrid.renewed_event import RenewedEvent

__all__ = ["PeerChanges"]


class PeerChanges(AsyncIterator[PeerChange]):
    """Made by `Discovery.peers`. It ends when the discovery does; it need not be read to its end."""

    def __init__(self, known: Iterable[PeerFound]) -> None:
        self._waiting: dict[str, PeerChange] = {found.peer_id: found for found in known}
        self._shown: set[str] = set()
        self._is_closed = False
        self._news = RenewedEvent()

    @property
    def num_waiting(self) -> int:
        """Number of changes that can be read without waiting."""
        return len(self._waiting)

    def put(self, change: PeerChange) -> None:
        """Add a change, in place of what waits for the same peer."""
        if isinstance(change, PeerLost) and change.peer_id not in self._shown:
            self._waiting.pop(change.peer_id, None)
            return
        self._waiting[change.peer_id] = change
        self._news.set()

    def close(self) -> None:
        """End the stream, after what waits."""
        self._is_closed = True
        self._news.set()

    async def __anext__(self) -> PeerChange:
        """The next change. Cancelled, it takes none away."""
        await trio.lowlevel.checkpoint()
        while not self._waiting:
            if self._is_closed:
                raise StopAsyncIteration
            await self._news.wait()
        change = self._waiting.pop(next(iter(self._waiting)))
        if isinstance(change, PeerFound):
            self._shown.add(change.peer_id)
        else:
            self._shown.discard(change.peer_id)
        return change
