"""Arrival of packets that go through slow lines. Pure: the time is handed in.

Each peer has a line of its own, in whose two directions bits go one after the other; between the lines lies the delay.
What waits for a line waits in a queue with bounds, as in a router: a packet that has no place there is lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

__all__ = ["Line", "Star"]

# What may wait for a line: in seconds, as routers have it, and at least some packets.
_QUEUE_SECONDS: Final = 0.25
_MIN_QUEUE_BYTES: Final = 64 * 1024
# Of all packets on their way: what senders without a rate may come to.
_MAX_BYTES: Final = 256 * 1024 * 1024


@dataclass
class Line:
    """One direction of a line.

    Attributes:
        rate: bits per second; None for a line that takes no time.
        free: when the last bit of what was taken is through.
    """

    rate: float | None
    free: float = 0.0

    def take(self, now: float, num_bytes: int) -> float | None:
        """Take a packet that comes now; return when it is through, or None if it is lost."""
        if self.rate is None:
            return now
        start = max(now, self.free)
        waiting = (start - now) * self.rate / 8
        if waiting + num_bytes > max(_QUEUE_SECONDS * self.rate / 8, _MIN_QUEUE_BYTES):
            return None
        self.free = start + num_bytes * 8 / self.rate
        return self.free


class Star:
    """Peers around a middle, through which all of their packets go.

    Args:
        rates: bits per second of each peer's line, in each direction; None for a line that takes no time.
        delay: seconds from one line to another.

    Attributes:
        num_lost: packets that found no place, or did not get over a cut.
    """

    def __init__(self, rates: tuple[float | None, ...], delay: float) -> None:
        self._up = [Line(rate) for rate in rates]
        self._down = [Line(rate) for rate in rates]
        self._delay = delay
        # When something is to be done with a packet, in order; and whether it has yet to go down.
        self._under_way: list[tuple[float, int, bool, int, bytes]] = []
        self._num_bytes = self._num_sent = 0
        self._sides: dict[int, int] = {}
        self.num_lost = 0

    @property
    def next_time(self) -> float | None:
        """The time at which `arrived` has something to do; None if nothing is under way."""
        return self._under_way[0][0] if self._under_way else None

    def cut(self, *sides: Collection[int]) -> None:
        """Let nothing get from one of these sides to another, in either direction, until the next cut.

        Args:
            sides: peers; those that are on none are one side more. None: all reach each other again.
        """
        self._sides = {peer: number for number, side in enumerate(sides, 1) for peer in side}

    def _is_cut(self, source: int, destination: int) -> bool:
        return self._sides.get(source, 0) != self._sides.get(destination, 0)

    def send(self, now: float, source: int, destination: int, packet: bytes) -> None:
        """Take a packet that a peer sends now to another."""
        through = None
        if not self._is_cut(source, destination) and self._num_bytes + len(packet) <= _MAX_BYTES:
            through = self._up[source].take(now, len(packet))
        if through is None:
            self.num_lost += 1
            return
        self._num_bytes += len(packet)
        self._push(through + self._delay, True, destination, packet)

    def arrived(self, now: float) -> list[tuple[int, bytes]]:
        """Packets that have arrived by now and were not told of before, with where, in order."""
        found = []
        while self._under_way and self._under_way[0][0] <= now:
            at, _, goes_down, destination, packet = heapq.heappop(self._under_way)
            if goes_down and (through := self._down[destination].take(at, len(packet))) is not None:
                self._push(through, False, destination, packet)
                continue
            self._num_bytes -= len(packet)
            if goes_down:
                self.num_lost += 1
            else:
                found.append((destination, packet))
        return found

    def _push(self, at: float, goes_down: bool, destination: int, packet: bytes) -> None:
        heapq.heappush(self._under_way, (at, self._num_sent, goes_down, destination, packet))
        self._num_sent += 1
