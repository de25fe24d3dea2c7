"""A budget of bytes, for each peer and in total: what arrives has to find room before it is read.

A peer may not hold more than what is left to others: a peer that holds nothing finds room, be there one greedy
peer or several, for each halves at most what the ones before it have left. A reservation larger than that is granted
when nobody holds anything, and one larger than the budget of a peer when that peer does not, so that no message is too
large to be ever received. Knows neither messages nor streams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import trio

__all__ = ["ByteBudget"]


class ByteBudget:
    """Counts bytes by peer. `wait_room` waits; `hold` only counts, for what is there already."""

    def __init__(self, *, per_peer: int, total: int) -> None:
        self._per_peer = per_peer
        self._total = total
        self._held: Counter[str] = Counter()
        self._parking_lot = trio.lowlevel.ParkingLot()

    @property
    def held_bytes(self) -> int:
        """Bytes that are held now, of all peers."""
        return self._held.total()

    def try_add(self, peer_id: str, num_bytes: int) -> bool:
        """Count bytes as held until `remove` if they fit now; False, and nothing is counted, if they do not."""
        if not self._fits(peer_id, num_bytes):
            return False
        self.add(peer_id, num_bytes)
        return True

    async def wait_room(self, peer_id: str, num_bytes: int, *, timeout: float) -> bool:
        """Wait until `num_bytes` more would fit; False when they did not for `timeout` seconds."""
        with trio.move_on_after(timeout) as scope:
            while not self._fits(peer_id, num_bytes):
                await self._parking_lot.park()
        return not scope.cancelled_caught

    @contextmanager
    def hold(self, peer_id: str, num_bytes: int) -> Iterator[None]:
        """Count `num_bytes` as held for the length of the block."""
        self.add(peer_id, num_bytes)
        try:
            yield
        finally:
            self.remove(peer_id, num_bytes)

    def add(self, peer_id: str, num_bytes: int) -> None:
        """Count bytes as held until `remove`."""
        self._held[peer_id] += num_bytes

    def remove(self, peer_id: str, num_bytes: int) -> None:
        """Give bytes back, and let the tasks that wait look again."""
        self._held[peer_id] -= num_bytes
        if not self._held[peer_id]:
            del self._held[peer_id]
        self._parking_lot.unpark_all()

    def _fits(self, peer_id: str, num_bytes: int) -> bool:
        # Dynamic thresholds, as switches share the memory of their queues (Choudhury and Hahne, 1998).
        mine, all_peers = self._held[peer_id], self._held.total()
        return (not mine or mine + num_bytes <= self._per_peer) and (
            not all_peers or mine + num_bytes <= self._total - all_peers - num_bytes
        )
